"""A real Prometheus scrapes a real server, and all panels of the dashboard show it."""

import time

import pytest
import yaml

from tests.contract.test_monitoring import ALERTS, queries
from tests.prometheus import SCRAPE_SECONDS, Prometheus
from vllm_tts_cache.testing.server import HOST, SpeechClient, data_url

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

# Rates are of a minute; each needs two scrapes, and what is refreshed every 5 s.
PATIENCE_SECONDS = 90.0


def filled_in(query):
    """A panel's query with Grafana's variables filled in."""
    return query.replace("$__rate_interval", "1m").replace("$instance", ".*")


def speak_and_fail(client, make_clip, number):
    """Something of everything that a panel shows."""
    name = f"seen-{number}"
    client.register(name, make_clip(), ref_text="Hello there.")
    for _ in range(2):
        assert client.speak(voice=name).status == 200
    client.speak(ref_audio=data_url(make_clip()), ref_text="Hello there.")
    client.speak(voice="nobody")
    client.speak(ref_audio=f"http://{HOST}:1/clip.wav")
    client.register("refused", b"no audio")
    client.http.delete(f"/v1/audio/voices/{name}")


def test_every_query_of_the_dashboard_has_data(shared_server, make_clip, tmp_path):
    client = SpeechClient(shared_server.url)
    target = shared_server.url.removeprefix("http://")
    with Prometheus(tmp_path, target, [ALERTS]) as prometheus:
        until = time.monotonic() + PATIENCE_SECONDS
        # The alerts come first: they have no data on a healthy server.
        rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
        panels = queries()[len(rules) :]
        empty, number = panels, 0
        while empty:
            assert time.monotonic() < until, f"no data: {empty}"
            speak_and_fail(client, make_clip, number)
            number += 1
            time.sleep(SCRAPE_SECONDS)
            empty = [
                (title, query)
                for title, query in empty
                if not prometheus.ask(filled_in(query))
            ]
        evaluated = prometheus.alerts()
        assert set(evaluated) == {rule["alert"] for rule in rules}
        assert {health for health, _ in evaluated.values()} == {"ok"}
        firing = [name for name, (_, state) in evaluated.items() if state == "firing"]
        assert firing == [], "a healthy server rings no bell"
    client.close()
