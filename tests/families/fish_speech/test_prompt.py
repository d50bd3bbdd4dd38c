"""Prompts of Fish Speech clones: the host's ids, a salt per voice, small messages."""

import re
import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_omni.model_executor.models.fish_speech.prompt_utils import (
    build_fish_voice_clone_prompt_ids,
)

from tests.encoding_samples import make_key
from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.families.fish_speech.prompt import PromptBuilder, checked_text
from vllm_tts_cache.families.networks.prompts import ReferenceRows
from vllm_tts_cache.speaker.reference import SpeakerRef

REF = SpeakerRef(audio_sha256="a" * 64, segment=Segment.REGISTERED)
KEY, OTHER_KEYS = make_key(), (make_key(audio=1), make_key(encoder=1))


@pytest.fixture(scope="module")
def builder(own_checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(own_checkpoint)
    return PromptBuilder(tokenizer=tokenizer, first_semantic_id=151_678)


def codes(num_frames, seed=0):
    rng = np.random.default_rng(seed)
    semantic = rng.integers(0, 4_096, (num_frames, 1))
    residual = rng.integers(0, 1_024, (num_frames, 9))
    return np.concatenate([semantic, residual], axis=1).astype(np.int16)


# Also what tokenizers treat apart: white space, marks, tags, several scripts.
TEXTS = st.text(max_size=80) | st.text(" \n\tab.,<|>:0é漢😀\u0301", max_size=40)
TAGGED = st.builds(
    "{}<speaker:{}>{}<|phoneme_start|>{}<|phoneme_end|>".format,
    TEXTS,
    st.integers(0, 9),
    TEXTS,
    TEXTS,
)


def has_no_control_token(text):
    try:
        checked_text("input", text)
    except InvalidSpeakerError:
        return False
    return True


@settings(max_examples=300)
@given(
    text=(TEXTS | TAGGED).filter(has_no_control_token),
    ref_text=(TEXTS | TAGGED).filter(has_no_control_token),
    num_frames=st.integers(0, 40),
)
def test_the_ids_are_the_hosts(builder, text, ref_text, num_frames):
    given_codes = codes(num_frames)
    semantic = [151_678 + int(code) for code in given_codes[:, 0]]
    hosts, _, _ = build_fish_voice_clone_prompt_ids(
        builder.tokenizer, text, ref_text, semantic
    )
    voice = builder.voice(ref_text, KEY, given_codes)
    for _ in range(2):  # the part of the voice can be used again
        prompt = builder.speak(voice, text, REF)
        assert prompt["prompt_token_ids"] == hosts
        assert prompt["cache_salt"] == voice.salt


TAG = re.compile(r"<\|speaker:\d+\|>")


def official_ids(tokenizer, text, clips, first_semantic_id):
    """The prompt of fish-speech, of transcripts and codes of several references.

    Source: ``generate_long`` of fishaudio/fish-speech,
    ``fish_speech/models/text2semantic/inference.py``.
    """
    tagged = [
        said if TAG.search(said) else f"<|speaker:{index}|>{said}"
        for index, (said, _) in enumerate(clips)
    ]
    all_codes = np.concatenate([codes for _, codes in clips], axis=0)
    parts = [
        "<|im_start|>system\n",
        "convert the provided text to speech reference to the following:\n\nText:\n",
        "\n".join(tagged),
        "\n\nSpeech:\n<|audio_start|>",
        [first_semantic_id + int(code) for code in all_codes[:, 0]],
        "<|audio_end|><|im_end|>\n",
        f"<|im_start|>user\n{text}<|im_end|>\n",
        "<|im_start|>assistant\n<|voice|>",
    ]
    ids = []
    for part in parts:
        is_ids = isinstance(part, list)
        ids += part if is_ids else tokenizer.encode(part, add_special_tokens=False)
    return ids


@pytest.mark.parametrize(
    "said",
    (
        ("One.", "Two."),
        ("One.", "<|speaker:5|>Two.", "Three."),
        ("你好。", "Zwei,", "trois !", "4"),
    ),
)
def test_the_ids_of_several_clips_are_the_official_ones(builder, said):
    clips = [(text, codes(20 + n, seed=n)) for n, text in enumerate(said)]
    given_codes = np.concatenate([each for _, each in clips])
    voice = builder.voice("\n".join(said), KEY, given_codes, num_clips=len(said))
    prompt = builder.speak(voice, "Hello.", REF)
    official = official_ids(builder.tokenizer, "Hello.", clips, 151_678)
    assert prompt["prompt_token_ids"] == official
    where = ReferenceRows.from_info(prompt["additional_information"])
    assert where.num_rows == len(given_codes)
    other = builder.voice("\n".join(reversed(said)), KEY, given_codes, len(said))
    assert prompt["cache_salt"] == voice.salt != other.salt


@pytest.mark.parametrize(("num_frames", "num_chars"), [(22, 20), (646, 500)])
def test_the_memory_of_kept_voices_is_what_they_say(builder, num_frames, num_chars):
    kept, num_parts = OrderedDict(), 100
    tracemalloc.start()
    try:
        for n in range(num_parts):
            key = make_key(n)
            part = builder.voice(f"{n:0{num_chars}}", key, codes(num_frames))
            kept[key, n.to_bytes(32, "big")] = part
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.7 * taken <= sum(part.num_bytes for part in kept.values()) <= 1.5 * taken


def test_all_that_decides_a_voice_has_another_salt_but_its_spelling_does_not(builder):
    def salt(ref_text, key=KEY):
        return builder.voice(ref_text, key, codes(9)).salt

    others = [salt("spoken words", key) for key in OTHER_KEYS]
    assert len({*others, salt("spoken words"), salt("other words")}) == 4
    # Both spellings of a speaker tag; and the tag that is added to a text without.
    assert salt("<speaker:0>words") == salt("<|speaker:0|>words") == salt("words")
