"""Switched off, the host is as it was; switched on, it says the same with less."""

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_switched_off_is_stock_and_agrees_given_the_same_embedding(
    servers, client, make_clip
):
    values = [0.02 * (i % 5 - 2) for i in range(128)]
    request = {"speaker_embedding": values, "task_type": "Base"}
    ours = [
        client.speak("Hello there.", non_streaming_mode=mode, **request)
        for mode in (False, True)
    ]
    server, stock = servers.start(SPEAKER_CACHE_ENABLED=0)
    theirs = [
        stock.speak("Hello there.", non_streaming_mode=mode, **request)
        for mode in (False, True)
    ]
    assert [s.status for s in (*ours, *theirs)] == [200] * 4
    assert [s.audio for s in ours] == [s.audio for s in theirs]
    assert theirs[0].cache is None
    assert stock.http.get("/v1/audio/speaker_cache").status_code == 404
    stock.register("stock voice", make_clip(), ref_text="Hello there.")
    assert stock.speak(voice="stock voice").status == 200
    assert not (server.options.samples_dir / "catalogue.sqlite3").exists()

    _, imported = servers.start()
    shown = imported.http.get("/v1/audio/voices/stock voice").json()
    assert shown["voice"]["ref_text"] == "Hello there."
    assert imported.speak(voice="stock voice").status == 200
    stock_files = list(servers.samples_dir.glob("*.safetensors"))
    assert stock_files
    assert imported.http.delete("/v1/audio/voices/stock voice").status_code == 200
    assert list(servers.samples_dir.glob("*.safetensors")) == []
    assert servers.problems() == []
