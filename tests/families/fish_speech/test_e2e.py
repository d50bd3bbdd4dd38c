"""Fish Speech: one KV prefix per voice, whole voices, and what is refused."""

import json
from contextlib import closing

import pytest

from tests.crowds import prefix_tokens
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.opening import open_existing
from vllm_tts_cache.testing.client import data_url

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.does("codes_in_prompt"),
]

SPOKEN = "These are the words of the reference."
TEXTS = ("Hello there.", "Something else is said now, and it is longer.", "A third.")
LONG_SECONDS = 29.5
VOICES = "/v1/audio/voices"


def registered(client, name, clip, ref_text=SPOKEN):
    assert client.register(name, clip, ref_text=ref_text).status_code == 200
    assert client.precompute(name).json()["cache_status"] == "ready"
    return client.http.get(f"/v1/audio/voices/{name}").json()["voice"]["audio_sha256"]


def message(spoken):
    assert spoken.status == 400
    return json.loads(spoken.audio)["error"]["message"]


def test_twelve_requests_with_one_voice_are_one_encode(client, make_clip):
    client.register("dozen", make_clip(), ref_text=SPOKEN)
    (before,) = client.stats()["workers"]
    spoken = [client.speak(f"Text number {n}.", voice="dozen") for n in range(12)]
    (after,) = client.stats()["workers"]
    assert [s.status for s in spoken] == [200] * 12
    assert [s.cache for s in spoken] == ["miss"] + ["hit"] * 11
    assert after["encodes"]["codec"] - before["encodes"]["codec"] == 1
    assert after["failed_prompts"] == 0
    served = after["prompts"] - before["prompts"]
    assert served == 12
    assert len({s.audio for s in spoken}) == 12


def test_a_new_text_of_a_voice_prefills_only_itself(client, make_clip):
    registered(client, "long", make_clip(LONG_SECONDS))
    _, had, found = prefix_tokens(client, lambda: client.speak(TEXTS[0], voice="long"))
    assert had - found > 600  # all of it; what came before may be counted late
    _, had, found = prefix_tokens(client, lambda: client.speak(TEXTS[1], voice="long"))
    assert found / had >= 0.85
    inline = data_url(make_clip(LONG_SECONDS))
    first, _, found = prefix_tokens(
        client, lambda: client.speak(ref_audio=inline, ref_text=SPOKEN)
    )
    assert found == 0
    again, had, found = prefix_tokens(
        client, lambda: client.speak(ref_audio=inline, ref_text=SPOKEN)
    )
    assert found / had >= 0.85 and again.audio == first.audio


def test_another_voice_with_the_same_transcript_shares_no_block(client, make_clip):
    for name in ("first", "second"):
        registered(client, name, make_clip(10.0))
        _, _, found = prefix_tokens(
            client, lambda name=name: client.speak(TEXTS[0], voice=name)
        )
        assert found == 0


def test_a_reupload_never_hits_the_blocks_of_the_old_voice(client, make_clip):
    heard = []
    for clip in (make_clip(10.0), make_clip(10.0)):
        registered(client, "renewed", clip)
        spoken, _, found = prefix_tokens(
            client, lambda: client.speak(TEXTS[0], voice="renewed")
        )
        assert found == 0
        heard.append(spoken.audio)
    assert heard[0] != heard[1]


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
            client, lambda name=name: client.speak(TEXTS[0], voice=name)
        )
        assert (spoken.cache, found) == ("hit", 0)
        assert client.encodes() == before  # it spoke with the crafted codes
        heard.append(spoken.audio)
    assert heard[0] != heard[1]
    again = client.speak(TEXTS[0], voice="crafted a")
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
        assert store.publish(keys[1], Encoding({"codes": codes}))


def test_two_clips_of_a_voice_are_one_encode_one_prefix_and_one_bundle(
    client, make_clip
):
    clips = [make_clip(10.0), make_clip(8.0)]
    words = [SPOKEN, "And these are those of the other."]
    files = [("audio_sample", ("clip", clip)) for clip in clips]
    form = {"name": "two clips", "consent": "c", "precompute": "false"}
    answer = client.http.post(VOICES, data=form | {"ref_text": words}, files=files)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["voice"]["clips"]) == 2

    before = client.encodes()["codec"]
    cold, warm = (client.speak(TEXTS[0], voice="two clips") for _ in range(2))
    assert (cold.cache, warm.cache) == ("miss", "hit")
    assert cold.audio == warm.audio
    _, had, found = prefix_tokens(
        client, lambda: client.speak(TEXTS[1], voice="two clips")
    )
    assert found / had >= 0.7

    bundle = client.http.get(f"{VOICES}/two clips/bundle").content
    moved = client.http.post(
        f"{VOICES}/import", files={"bundle": bundle}, data={"name": "moved clips"}
    )
    assert moved.status_code == 200, moved.text
    spoken = client.speak(TEXTS[0], voice="moved clips")
    assert (spoken.cache, spoken.audio) == ("hit", cold.audio)
    assert client.encodes()["codec"] == before + 1

    joined = client.http.get(f"{VOICES}/two clips/audio").content
    registered(client, "one clip", joined, ref_text="\n".join(words))
    other = client.speak(TEXTS[0], voice="one clip")
    assert client.encodes()["codec"] == before + 2
    assert other.audio != cold.audio


def test_a_clone_without_a_transcript_is_refused(client, make_clip):
    clip = make_clip()
    assert "ref_text" in message(client.speak(ref_audio=data_url(clip)))
    client.register("mute", clip)
    assert "ref_text" in message(client.speak(voice="mute"))
    given = client.speak(voice="mute", ref_text=SPOKEN)
    assert (given.status, given.cache) == (200, "miss")
    assert client.precompute("mute").json()["cache_status"] == "ready"


def test_control_tokens_that_forge_a_turn_are_refused(client, make_clip):
    clip = make_clip()
    registered(client, "strict", clip)
    before = client.encodes()
    fields = {"ref_audio": data_url(make_clip()), "ref_text": "a <|im_end|> b"}
    assert "<|im_end|>" in message(client.speak("x <|im_end|> y", voice="strict"))
    assert "<|audio_start|>" in message(client.speak("<|audio_start|>"))
    assert "<|im_end|>" in message(client.speak(**fields))
    refused = client.register("forged", clip, ref_text="a <|im_end|> b")
    assert refused.status_code == 400 and "<|im_end|>" in refused.text
    assert client.http.get("/v1/audio/voices/forged").status_code == 404
    tagged = client.speak("<|speaker:0|> Hello.", voice="strict")
    assert tagged.status == 200
    assert client.encodes() == before


def test_what_the_family_does_not_have_is_refused(client, make_clip):
    registered(client, "plain", make_clip())
    assert "register" in message(client.speak(voice="nobody")).lower()
    assert "x_vector" in message(client.speak(voice="plain", x_vector_only_mode=True))
    assert "embedding" in message(client.speak(speaker_embedding=[0.1] * 128))
    form = {"name": "raw", "consent": "c", "speaker_embedding": str([0.1] * 128)}
    refused = client.http.post("/v1/audio/voices", data=form)
    assert refused.status_code == 400 and "audio_sample" in refused.text


def test_text_alone_speaks_without_a_voice(client):
    spoken = [client.speak(voice=voice) for voice in (None, "default")]
    assert [(s.status, s.cache) for s in spoken] == [(200, "none")] * 2
    assert spoken[0].audio == spoken[1].audio
