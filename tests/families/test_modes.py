"""How a request is cloned, of which checkpoint and clip: what differs by family."""

import json

import pytest

from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.speaker.family import CloneFacts, families

FAMILIES = {family.name: family for family in families()}
GIVEN, STORED = {"given_transcript": True}, {"stored_transcript": True}
INLINE = {"is_inline": True}

CHOSEN = [
    # A transcript makes it in context, but where the host's field says otherwise.
    ("qwen3_tts", {}, "x_vector"),
    ("qwen3_tts", STORED, "in_context"),
    ("qwen3_tts", GIVEN | INLINE, "in_context"),
    ("qwen3_tts", STORED | {"x_vector_only": True}, "x_vector"),
    ("qwen3_tts", INLINE | {"x_vector_only": True}, "x_vector"),
    # A transcript makes it zero-shot, wherever it is from; a voice without one is
    # cloned across languages, and inline audio only if the request says that it means
    # it, as by stock.
    ("cosyvoice3", {}, "cross_lingual"),
    ("cosyvoice3", GIVEN, "zero_shot"),
    ("cosyvoice3", STORED, "zero_shot"),
    ("cosyvoice3", GIVEN | INLINE, "zero_shot"),
    ("cosyvoice3", INLINE | {"named": "cross_lingual"}, "cross_lingual"),
    # The official package has Whisper write one, which is not served here.
    ("omnivoice", GIVEN, "in_context"),
    ("omnivoice", GIVEN | INLINE, "in_context"),
    ("omnivoice", STORED, "in_context"),
    # One in the request continues and a stored one does not, as by the host: a voice
    # sounds as it did before it had a transcript.
    ("voxcpm2", {}, "reference"),
    ("voxcpm2", INLINE, "reference"),
    ("voxcpm2", STORED, "reference"),
    ("voxcpm2", GIVEN, "continuation"),
    ("voxcpm2", GIVEN | STORED, "continuation"),
    ("voxcpm2", STORED | {"named": "continuation"}, "continuation"),
    ("voxcpm2", GIVEN | {"named": "reference"}, "reference"),
]
REFUSED = [
    ("qwen3_tts", INLINE, "Give ref_text"),
    ("qwen3_tts", {"x_vector_only": False}, "Give ref_text"),
    ("fish_speech", {}, "Give ref_text"),
    ("cosyvoice3", INLINE, "'cross_lingual' needs none"),
    ("cosyvoice3", {"named": "zero_shot"}, "ref_text"),
    ("omnivoice", {}, "Give ref_text"),
    ("omnivoice", INLINE, "Give ref_text"),
    ("voxcpm2", {"named": "continuation"}, "'reference' needs none"),
]


@pytest.mark.parametrize(("name", "facts", "mode"), CHOSEN)
def test_facts_choose_the_mode(name, facts, mode):
    assert FAMILIES[name].mode(CloneFacts(**facts)).name == mode


@pytest.mark.parametrize(("name", "facts", "says"), REFUSED)
def test_a_mode_without_its_transcript_is_refused(name, facts, says):
    with pytest.raises(InvalidSpeakerError, match=says) as refused:
        FAMILIES[name].mode(CloneFacts(**facts))
    assert refused.value.field == "ref_text"


@pytest.mark.parametrize(
    ("num_samples", "rate_hz", "says"),
    [
        (30 * 16_000, 16_000, None),
        (30 * 48_000, 48_000, None),
        (30 * 16_000 + 1, 16_000, "30 s at most"),
        (16_000, 15_999, "16000 Hz or more"),
    ],
)
def test_clips_that_the_official_cosyvoice3_refuses_are(num_samples, rate_hz, says):
    problem = FAMILIES["cosyvoice3"].limits.problem(num_samples, rate_hz)
    assert (problem is None) is (says is None)
    assert says is None or (problem and says in problem)


CONFIG = "config.json"
FILES = [
    ("cosyvoice3", {CONFIG: {}, "cosyvoice3.yaml": {}}, True),
    ("cosyvoice3", {CONFIG: {}, "speech_tokenizer_v3.onnx": {}}, True),
    ("cosyvoice3", {CONFIG: {"model_type": "cosyvoice3"}}, True),
    ("cosyvoice3", {CONFIG: {}}, False),
    ("cosyvoice3", {CONFIG: {}, "speech_tokenizer_v2.onnx": {}}, False),
    ("cosyvoice3", {CONFIG: {}, "cosyvoice2.yaml": {}}, False),
    ("cosyvoice3", {CONFIG: {"model_type": "qwen3_tts"}}, False),
    ("cosyvoice3", {}, False),
    ("omnivoice", {CONFIG: {"model_type": "omnivoice"}}, True),
    ("omnivoice", {CONFIG: {"model_type": "qwen3"}}, False),
    ("omnivoice", {CONFIG: {}}, False),
    ("omnivoice", {CONFIG: []}, False),
    ("voxcpm2", {CONFIG: {"architecture": "voxcpm2"}}, True),
    ("voxcpm2", {CONFIG: {"architecture": "voxcpm"}}, False),
    ("voxcpm2", {CONFIG: {"model_type": "qwen3_tts"}}, False),
    ("voxcpm2", {CONFIG: []}, False),
]


@pytest.mark.parametrize(("name", "files", "is_of_it"), FILES)
def test_a_checkpoint_is_known_by_its_own_files(tmp_path, name, files, is_of_it):
    for file, content in files.items():
        (tmp_path / file).write_text(json.dumps(content))
    assert FAMILIES[name].recognises(tmp_path) is is_of_it
