import pytest
from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest

from vllm_tts_cache.entrypoints.request_speaker import (
    as_clone,
    clone_mode,
    drop_what_is_ignored,
    names_speaker,
    refuse_embedding,
    single_url,
)
from vllm_tts_cache.errors import InvalidAudioError, InvalidSpeakerError
from vllm_tts_cache.families import fish_speech, qwen3_tts
from vllm_tts_cache.speaker.family import CloneMode

QWEN, FISH = qwen3_tts.FAMILY, fish_speech.FAMILY
X_VECTOR, IN_CONTEXT = CloneMode.X_VECTOR, CloneMode.IN_CONTEXT
NOBODY = frozenset()


def asked(**fields):
    return OpenAICreateSpeechRequest(input="Hi.", **fields)


def mode(family, stored=None, *, inline=False, **fields):
    request = asked(**fields)
    return clone_mode(family, request, stored_ref_text=stored, inline=inline)


@pytest.mark.parametrize("family", [QWEN, FISH], ids=lambda f: f.name)
@pytest.mark.parametrize("inline", [False, True])
def test_a_transcript_asks_for_an_in_context_clone(family, inline):
    assert mode(family, inline=inline, ref_text="words") is IN_CONTEXT
    assert mode(family, stored="words", inline=inline) is IN_CONTEXT
    assert mode(family, stored="words", inline=inline, ref_text=" ") is IN_CONTEXT


def test_without_a_transcript_a_registered_voice_is_an_x_vector_clone():
    assert mode(QWEN) is X_VECTOR
    assert mode(QWEN, stored="words", x_vector_only_mode=True) is X_VECTOR
    assert mode(QWEN, inline=True, x_vector_only_mode=True) is X_VECTOR


@pytest.mark.parametrize("fields", [{"inline": True}, {"x_vector_only_mode": False}])
def test_without_a_transcript_nothing_else_is_an_x_vector_clone(fields):
    with pytest.raises(InvalidSpeakerError, match="Give ref_text"):
        mode(QWEN, **fields)


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("ref_text", [None, "", " \n"])
def test_a_family_that_clones_in_context_only_needs_the_transcript(inline, ref_text):
    with pytest.raises(InvalidSpeakerError, match="requires 'ref_text'") as raised:
        mode(FISH, inline=inline, ref_text=ref_text)
    assert raised.value.field == "ref_text"


def test_a_family_without_x_vectors_refuses_them_and_embeddings():
    with pytest.raises(InvalidSpeakerError, match="in context only"):
        mode(FISH, stored="words", x_vector_only_mode=True)
    with pytest.raises(InvalidSpeakerError, match="not from an embedding"):
        refuse_embedding(FISH, "voice")
    refuse_embedding(QWEN, "voice")


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
    drop_what_is_ignored(request, NOBODY)
    assert (request.voice, request.ref_audio) == (None, None)
    assert not names_speaker(request, NOBODY)


@pytest.mark.parametrize("spelling", ["default", " Default "])
def test_the_placeholder_of_openai_clients_is_nobody(spelling):
    request = asked(voice=spelling)
    drop_what_is_ignored(request, NOBODY)
    assert request.voice is None
    request = asked(voice=spelling)
    drop_what_is_ignored(request, frozenset({"default"}))
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
    assert QWEN.precomputed(has_transcript=False) == ("speaker",)
    assert QWEN.precomputed(has_transcript=True) == ("speaker", "codec")
    assert FISH.precomputed(has_transcript=False) == ("codec",)
    assert FISH.precomputed(has_transcript=True) == ("codec",)
