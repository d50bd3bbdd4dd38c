from typing import Any

import pytest
from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest

from vllm_tts_cache.entrypoints.serving.request_speaker import (
    as_clone,
    clone_facts,
    names_speaker,
    single_url,
    unset_what_is_ignored,
)
from vllm_tts_cache.errors import InvalidAudioError, InvalidSpeakerError
from vllm_tts_cache.speaker.family import Family, Mode, Transcript

X_VECTOR = Mode(
    name="x_vector",
    encoders=("speaker",),
    transcript=Transcript.UNUSED,
    takes_embedding=True,
    stand_in={"task_type": "Base", "x_vector_only_mode": True},
)
IN_CONTEXT = Mode(
    name="in_context",
    encoders=("speaker", "codec"),
    transcript=Transcript.REQUIRED,
    stand_in={"task_type": "Base", "x_vector_only_mode": False},
)
CONTINUATION = Mode(
    name="continuation", encoders=("codec",), transcript=Transcript.REQUIRED
)
REFERENCE = Mode(name="reference", encoders=("latents",), transcript=Transcript.UNUSED)


def family_of(name, *modes, **rules):
    return Family(
        name=name,
        short_name=name,
        title=name.title(),
        modes=modes,
        recognises=lambda _model_dir: False,
        adapter="",
        sample_rate_hz=24_000,
        **rules,
    )


# With x-vectors; that always needs a transcript; that takes one from the request only.
BOTH = family_of("both", X_VECTOR, IN_CONTEXT, asks_inline_transcript=True)
STRICT = family_of("strict", CONTINUATION)
FREE = family_of("free", REFERENCE, CONTINUATION, stored_transcript_selects=False)
NOBODY = frozenset()


def asked(**fields):
    return OpenAICreateSpeechRequest(input="Hi.", **fields)


def mode(family, stored=None, *, inline=False, **fields):
    request = asked(**fields)
    return family.mode(clone_facts(request, stored_ref_text=stored, is_inline=inline))


def named(name) -> Any:
    return {"extra_params": {"clone_mode": name, "other": 1}}


def test_a_request_names_its_mode_and_the_stored_transcript_serves_it():
    assert mode(FREE, stored="words", **named("continuation")) is CONTINUATION
    assert mode(FREE, ref_text="words", **named("reference")) is REFERENCE
    assert mode(BOTH, stored="words", **named("x_vector")) is X_VECTOR
    with pytest.raises(InvalidSpeakerError, match="Give ref_text") as raised:
        mode(FREE, **named("continuation"))
    assert raised.value.field == "ref_text"
    request = asked(**named("reference"))
    seen = as_clone(request, REFERENCE, stored_ref_text=None)
    assert seen.extra_params == {"other": 1}


@pytest.mark.parametrize("name", ["x_vector", "", 3, ["reference"], {}, "r" * 10_000])
def test_a_mode_that_the_family_does_not_have_is_refused_with_those_it_has(name):
    with pytest.raises(InvalidSpeakerError, match="reference, continuation") as raised:
        mode(FREE, **named(name))
    assert raised.value.field == "extra_params.clone_mode"
    assert len(str(raised.value)) < 300


def test_the_host_sees_no_voice_and_no_audio():
    request = asked(voice="Ann", ref_text="  ", ref_audio="data:audio/wav;base64,AAAA")
    seen = as_clone(request, IN_CONTEXT, stored_ref_text="stored words")
    assert (seen.voice, seen.ref_audio, seen.task_type) == (None, None, "Base")
    assert (seen.ref_text, seen.x_vector_only_mode) == ("stored words", False)
    seen = as_clone(request, X_VECTOR, stored_ref_text="stored words")
    assert (seen.ref_text, seen.x_vector_only_mode) == (None, True)
    assert request.voice == "Ann"


def test_an_embedding_is_the_speaker_whatever_else_is_named():
    request = asked(voice="Ann", speaker_embedding=[0.5])
    unset_what_is_ignored(request, NOBODY)
    assert (request.voice, request.ref_audio) == (None, None)
    assert not names_speaker(request, NOBODY)


@pytest.mark.parametrize("spelling", ["default", " Default "])
def test_the_placeholder_of_openai_clients_is_nobody(spelling):
    request = asked(voice=spelling)
    unset_what_is_ignored(request, NOBODY)
    assert request.voice is None
    request = asked(voice=spelling)
    unset_what_is_ignored(request, frozenset({"default"}))
    assert request.voice == spelling
    assert not names_speaker(request, frozenset({"default"}))


def test_a_preset_is_the_hosts_and_any_other_name_is_a_registered_voice():
    assert not names_speaker(asked(voice=" Vivian "), frozenset({"vivian"}))
    assert names_speaker(asked(voice="Ann"), frozenset({"vivian"}))
    assert names_speaker(asked(ref_audio="data:x"), NOBODY)
    assert not names_speaker(asked(), NOBODY)


@pytest.mark.parametrize("given", ["data:x", ["data:x"]])
def test_one_url_is_one_url(given):
    assert single_url(given) == "data:x"


@pytest.mark.parametrize("given", [[], ["a", "b"], [1], [["a"]], None, 3])
def test_no_or_several_urls_are_refused(given):
    with pytest.raises(InvalidAudioError, match="one URL"):
        single_url(given)


def test_what_is_precomputed_depends_on_the_modes_that_a_family_has():
    assert BOTH.precomputed(has_transcript=False) == ("speaker",)
    assert BOTH.precomputed(has_transcript=True) == ("speaker", "codec")
    assert STRICT.precomputed(has_transcript=False) == ("codec",)
    assert STRICT.precomputed(has_transcript=True) == ("codec",)
    assert FREE.precomputed(has_transcript=False) == ("latents",)
    assert FREE.precomputed(has_transcript=True) == ("latents", "codec")
