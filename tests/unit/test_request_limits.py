"""What a speech request may say, and that it is refused before it is made anything."""

import pytest

from vllm_tts_cache.entrypoints.http import limits
from vllm_tts_cache.errors import SpeakerRequestError

FINE = {
    "input": limits.MAX_INPUT_CHARS * "a",
    "voice": f"  {128 * 'n'}  ",
    "ref_audio": "data:audio/wav;base64," + 10_000_000 * "A",
    "ref_audio_2": ["https://example.org/a.wav"],
    "ref_text": 16_000 * "a",
    "references": [
        {"audio_path": "data:audio/wav;base64," + 90_000 * "A", "text": "a"}
    ],
    "speaker_embedding": 4096 * [0.5],
    "extra_params": {"clone_mode": "in_context", "nested": {"top_k": [1, {"a": None}]}},
    "seed": 7,
    "stream": True,
    "language": None,
}

TOO_MUCH = {
    "input": limits.MAX_INPUT_CHARS * "a" + "b",
    "voice": 1_025 * "n",
    "speaker": 1_025 * "n",
    "model": 500 * "/a/",
    "language": 1_025 * "l",
    "ref_audio": "http://h/" + 8_192 * "é",
    "ref_audio_2": ["data:x", "file:///" + 8_192 * "a"],
    "ref_text": "a" + 16_384 * " ",
    "references": [{"audio_path": "data:x", "text": 16_385 * "a"}],
    "ambient_sound": 16_385 * "a",
    "speaker_embedding": (limits.MAX_VALUES + 1) * [{}],
    "extra_params": {"a": {"b": [16_385 * "c"]}},
    "of_nobody": [[[[[[[[[1]]]]]]]]],
    "lists": 100 * [100 * [0]],
    "keys": {16_385 * "k": 1},
}


def test_what_clients_say_is_fine():
    limits.check_speech(FINE)
    limits.check_batch({"items": limits.MAX_ITEMS * [{"input": "Hi."}], **FINE})
    for given in (None, [], "text", 3, {}, {"items": "none"}, {"items": [None, 3]}):
        limits.check_speech(given)
        limits.check_batch(given)


@pytest.mark.parametrize("field", TOO_MUCH)
def test_what_is_too_much_is_refused_with_the_name_of_its_field(field):
    given = {"input": "Hi.", field: TOO_MUCH[field]}
    audios = ("ref_audio", "ref_audio_2")
    names = "8,192 characters" if field in audios else f"Invalid {field}: "
    for check, body in (
        (limits.check_speech, given),
        (limits.check_batch, given),
        (limits.check_batch, {"items": [{"input": "Hi."}, given]}),
    ):
        with pytest.raises(SpeakerRequestError, match=names) as caught:
            check(body)
        assert len(str(caught.value)) < 200


def test_a_reference_by_another_name_has_the_same_limits():
    url = "https://h/" + 8_192 * "a"
    with pytest.raises(SpeakerRequestError, match="8,192 characters"):
        limits.check_speech({"references": [{"audio_path": url}]})


def test_more_fields_and_more_items_than_any_request_has_are_refused():
    with pytest.raises(SpeakerRequestError, match="256 fields"):
        limits.check_speech({f"field {number}": 0 for number in range(300)})
    with pytest.raises(SpeakerRequestError, match=r"Invalid items: .* 1,024"):
        limits.check_batch({"items": (limits.MAX_ITEMS + 1) * [0]})
