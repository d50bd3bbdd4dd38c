"""A real browser on the page: used as people use it, and watched."""

import json
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

PATIENCE_SECONDS = 180
DESKTOP, PHONE = (1180, 780), (390, 844)

_OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # it runs as root in containers, and on pages of our own
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--hide-scrollbars",
    "--lang=en-US",
    "--mute-audio",  # sound goes on as if there were a loudspeaker
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",  # the microphone is allowed without asking
)


class Browser:
    """Chromium on one page, with its requests and complaints; closes in the end."""

    def __init__(self, url, *, size=DESKTOP, is_dark=False, microphone=None):
        if not (which("chromium") and which("chromedriver")):
            raise RuntimeError("These tests need Chromium: run `make browser`.")
        options = webdriver.ChromeOptions()
        options.binary_location = which("chromium") or ""
        for option in _OPTIONS:
            options.add_argument(option)
        if microphone is not None:
            options.add_argument(f"--use-file-for-fake-audio-capture={microphone}")
        options.set_capability(
            "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
        )
        # Named, so that none is looked for on the network.
        service = Service(which("chromedriver"))
        self.url = url
        self.driver = webdriver.Chrome(options=options, service=service)
        self._emulate(size, is_dark)
        self.open()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.driver.quit()

    def _emulate(self, size, is_dark):
        width, height = size
        screen = {"width": width, "height": height, "deviceScaleFactor": 1}
        screen["mobile"] = size == PHONE
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        shade = "dark" if is_dark else "light"
        scheme = {"name": "prefers-color-scheme", "value": shade}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [scheme, still]}
        )

    def open(self, view=""):
        """Open the page, or another view of it."""
        self.driver.get(f"{self.url}/voices{view and f'#/{view}'}")

    def run(self, script, *given):
        """Run JavaScript; returns what it returns, or what its promise comes to."""
        code = f"const done = arguments[arguments.length - 1]; {script}"
        return self.driver.execute_async_script(code, *given)

    def all(self, css):
        """Elements that can be seen."""
        found = self.driver.find_elements(By.CSS_SELECTOR, css)
        return [element for element in found if element.is_displayed()]

    def until(self, what, *, reason) -> Any:
        """Wait until `what()` holds; returns what it said."""
        # The page may draw anew what is being looked at.
        gone = (StaleElementReferenceException,)
        wait = WebDriverWait(self.driver, PATIENCE_SECONDS, 0.1, gone)
        return wait.until(lambda _: what(), reason)

    def see(self, css, text="") -> Any:
        """Wait until an element can be seen, and holds this text."""

        def found():
            seen = (each for each in self.all(css) if text in each.text)
            return next(seen, None)

        return self.until(found, reason=f"{css} {text!r} is not there")

    def click(self, css):
        """Click what can be seen."""

        def click():
            element = self.see(css)
            # Into the middle: not under what stays at the top of the window.
            middle = "arguments[0].scrollIntoView({block: 'center'})"
            self.driver.execute_script(middle, element)
            element.click()
            return True

        self.until(click, reason=f"no click on {css}")

    def fill(self, css, text):
        """Replace what a field holds."""
        field = self.see(css)
        field.clear()
        field.send_keys(text)

    def choose_file(self, css, path):
        """Give a file to a field, which may be one that people do not see."""
        self.driver.find_element(By.CSS_SELECTOR, css).send_keys(str(path))

    def press(self, *keys):
        """Press keys, one after another, wherever the focus is."""
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def heard(self):
        """Samples that were sent to the loudspeaker, and those that it has played."""
        (results,) = self.driver.find_elements(By.ID, "try-results")
        given = (
            results.get_attribute(f"data-{name}") for name in ("samples", "played")
        )
        return tuple(int(count or 0) for count in given)

    def is_too_wide(self):
        """Tell whether people would have to scroll sideways."""
        return self.driver.execute_script(
            "return document.documentElement.scrollWidth > innerWidth"
        )

    def problems(self):
        """What axe finds that keeps people from using what is shown."""
        self.driver.execute_script(_axe())
        found = self.run("axe.run(document).then(({ violations }) => done(violations))")
        return [
            (each["id"], node["html"], node["failureSummary"])
            for each in found
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]

    def requested(self):
        """Addresses that the page has asked for since this was called last."""
        entries = self.driver.get_log("performance")
        events = (json.loads(entry["message"])["message"] for entry in entries)
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self):
        """What the browser's console says since this was called last."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def save(self, path):
        """Write what can be seen as a PNG file."""
        assert self.driver.save_screenshot(str(path))


def _axe():
    package = find_spec("axe_playwright_python")
    assert package is not None and package.origin is not None
    return (Path(package.origin).parent / "axe.min.js").read_text()
