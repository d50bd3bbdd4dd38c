"""What is documented, alerted on and drawn is what the server shows."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from tests.speaking import data_url, wav
from vllm_tts_cache.entrypoints.metrics import PREFIX, Metrics

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "monitoring.md"
ALERTS = DOCS / "monitoring" / "alerts.yml"
DASHBOARD = DOCS / "monitoring" / "dashboard.json"

SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
}
# A selector, or what a query groups by.
SERIES = re.compile(PREFIX + r"(?P<name>\w+)(?:\{(?P<labels>[^}]*)\})?")
GROUPED = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")
# Prometheus gives these to whatever it scrapes, and histograms have the last.
OF_PROMETHEUS = {"instance", "job", "le"}


def families():
    """Each of ours, with its labels' names."""
    registry = CollectorRegistry()
    ours = vars(Metrics(registry)).values()
    return [(each._labelnames, *each.describe()) for each in ours]


def labels_by_series():
    """Exported series without the prefix -> their labels."""
    return {
        metric.name.removeprefix(PREFIX) + suffix: set(labels)
        for labels, metric in families()
        for suffix in SUFFIXES[metric.type]
    }


def queries():
    """What the rules and the dashboard ask, and where."""
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    found = [(rule["alert"], rule["expr"]) for rule in rules]
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        found += [(panel["title"], t["expr"]) for t in panel.get("targets", ())]
    return found


def table():
    """The page's table, as the code has it."""
    lines = ["| series | kind | labels | meaning |", "|---|---|---|---|"]
    for names, metric in families():
        name = metric.name.removeprefix(PREFIX)
        name += "_total" if metric.type == "counter" else ""
        labels = ", ".join(f"`{label}`" for label in names)
        meaning = metric.documentation
        lines.append(f"| `{name}` | {metric.type} | {labels} | {meaning} |")
    return "\n".join(lines)


def test_the_page_names_every_series_with_its_meaning():
    shown = (
        PAGE.read_text().split("<!-- series -->\n")[1].split("\n<!-- /series -->")[0]
    )
    assert shown == table(), f"put this in the place of it:\n{table()}"


@pytest.mark.parametrize(("where", "query"), queries())
def test_what_is_asked_for_is_there(where, query):
    exported = labels_by_series()
    asked = list(SERIES.finditer(query))
    assert asked, f"{where} asks for none of ours"
    known = set(OF_PROMETHEUS)
    for match in asked:
        assert match["name"] in exported, f"{where} asks for {match['name']}"
        known |= exported[match["name"]]
        used = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", match["labels"] or ""))
        assert used <= exported[match["name"]] | OF_PROMETHEUS, where
    for group in GROUPED.findall(query):
        assert {label.strip() for label in group.split(",")} <= known, where


@pytest.fixture
def server(server):
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router

    attach_router(server.app)  # the host's own
    return server


async def scraped(server):
    """Ours of the host's /metrics: (name, labels as text) -> value."""
    text = (await server.client.get("/metrics")).text
    found = re.findall(rf"^{PREFIX}(\w+)(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    return {(name, labels): float(value) for name, labels, value in found}


async def grown(server, act):
    before = await scraped(server)
    await act()
    after = await scraped(server)
    return {
        key: value - before.get(key, 0.0)
        for key, value in after.items()
        if value != before.get(key, 0.0) and not key[0].endswith("_created")
    }


async def test_the_hosts_route_shows_what_is_done(server):
    family = server.handler.served_family.name
    named = f'family="{family}",outcome='

    async def act():
        assert (await server.register("Ann", wav())).status_code == 200
        assert (await server.register("Ann", b"no audio")).status_code == 400
        for _ in range(3):
            assert (await server.speak(voice="Ann")).status_code == 200
        inline = data_url(seconds=2.0)
        assert (await server.speak(ref_audio=inline, ref_text="Hi.")).status_code == 200
        assert (await server.speak(voice="Nobody")).status_code == 400
        gone = "http://127.0.0.1:1/clip.wav"
        assert (await server.speak(ref_audio=gone, ref_text="Hi.")).status_code == 400
        await server.service.metrics.refresh()

    found = await grown(server, act)
    assert found["uploads_total", ""] == 2
    refused = 'fault="client",reason="InvalidAudioError"'
    assert found["uploads_refused_total", refused] == 1
    assert found["requests_total", f'{named}"miss"'] == 2
    assert found["requests_total", f'{named}"hit"'] == 2
    assert found["requests_total", f'{named}"failed"'] == 2
    unfetched = 'fault="client",reason="NotFetchedError"'
    assert found["requests_failed_total", unfetched] == 1
    unknown = 'fault="client",reason="SpeakerNotFoundError"'
    assert found["requests_failed_total", unknown] == 1
    assert found["fetches_total", 'outcome="failed"'] == 1
    encodes = [n for (name, _), n in found.items() if name == "encodes_total"]
    assert sum(encodes) == sum(server.encodes.values())


async def test_a_registration_that_never_reaches_our_code_is_counted_too(server):
    async def act():
        url = "/v1/audio/voices"
        assert (await server.client.post(url, data={})).status_code == 400
        assert (await server.client.post(url, json={})).status_code == 400
        assert (await server.client.post(f"{url}/import")).status_code == 400
        length = {"content-length": str(10**12)}
        assert (await server.client.post(url, headers=length)).status_code == 413
        assert (await server.client.get(url)).status_code == 200

    found = await grown(server, act)
    assert found["uploads_total", ""] == 4
    refused = {k[1]: n for k, n in found.items() if k[0] == "uploads_refused_total"}
    assert refused == {
        'fault="client",reason="InvalidRequestError"': 3,
        'fault="client",reason="RequestTooLargeError"': 1,
    }


async def test_no_label_is_a_clients(server):
    canary = "Canaria Canary"
    await server.register(canary, wav(), ref_text="Some canary words.")
    await server.speak(voice=canary)
    await server.speak(voice=f"not {canary}")
    await server.client.delete(f"/v1/audio/voices/{canary}")
    await server.service.metrics.refresh()
    shown = await scraped(server)
    assert not [key for key in shown if "canar" in key[1].lower()]
    labels = {label for key in shown for label in re.findall(r'(\w+)="', key[1])}
    assert labels == {
        *("outcome", "family", "reason", "fault", "tier", "segment", "lane"),
        *("encoder", "content", "le"),
    }
