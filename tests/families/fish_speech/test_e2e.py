"""Fish Speech: a salt keeps the KV of voices apart whose token ids are the same."""

from contextlib import closing

import pytest

from tests.crowds import prefix_tokens
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.opening import open_existing

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.does("codes_in_prompt")]

SPOKEN = "These are the words of the reference."
TEXT = "Hello there."


def registered(client, name, clip, ref_text=SPOKEN):
    assert client.register(name, clip, ref_text=ref_text).status_code == 200
    assert client.precompute(name).json()["cache_status"] == "ready"
    return client.http.get(f"/v1/audio/voices/{name}").json()["voice"]["audio_sha256"]


def test_voices_that_differ_in_residual_codes_only_share_no_block(
    client, shared_server, make_clip
):
    """Their token ids are the same: only the salt can keep them apart."""
    directory = shared_server.options.samples_dir
    sha = registered(client, "crafted a", make_clip(10.0))
    found = (directory / "store" / sha[:2] / sha).glob("*.safetensors")
    (file,) = (path for path in found if path.stem != "audio")
    shas = [sha]
    client.register("crafted b", make_clip(10.0), ref_text=SPOKEN)
    shown = client.http.get("/v1/audio/voices/crafted b").json()
    shas.append(shown["voice"]["audio_sha256"])
    store_crafted(directory, shas[0], shas[1], fingerprint=file.stem)

    heard = []
    for name in ("crafted a", "crafted b"):
        before = client.encodes()
        spoken, _, found = prefix_tokens(
            client, lambda name=name: client.speak(TEXT, voice=name)
        )
        assert (spoken.cache, found) == ("hit", 0)
        assert client.encodes() == before  # it spoke with the crafted codes
        heard.append(spoken.audio)
    assert heard[0] != heard[1]
    again = client.speak(TEXT, voice="crafted a")
    assert again.audio == heard[0]


def store_crafted(directory, of_sha, for_sha, *, fingerprint):
    """Give ``for_sha`` the codes of ``of_sha``, but other residual ones."""
    settings = load_settings({"SPEAKER_SAMPLES_DIR": str(directory)})
    keys = [
        EncodingKey(audio_sha256=sha, encoder_fingerprint=fingerprint)
        for sha in (of_sha, for_sha)
    ]
    with closing(open_existing(settings)) as store:
        found = store.read(keys[0])
        assert found is not None
        codes = found["codes"].copy()
        codes[:, 1:] = (codes[:, 1:] + 511) % 1_024
        assert store.writer.publish(keys[1], Encoding({"codes": codes}))
