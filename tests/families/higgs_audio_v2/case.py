"""Higgs Audio v2 in the shared tests."""

from tests.families.cases import Case, codes, read_by, talker
from tests.families.higgs_audio_v2.tiny_checkpoint import (
    write_higgs_audio_v2_checkpoint,
)
from vllm_tts_cache.families.higgs_audio_v2.family import CODEC, FAMILY, IN_CONTEXT
from vllm_tts_cache.families.networks.higgs_tokenizer.frames import num_clip_frames


def write(checkpoint, _tiny):
    write_higgs_audio_v2_checkpoint(checkpoint)


def without_tokenizer(checkpoint, _tiny):
    write_higgs_audio_v2_checkpoint(checkpoint, tokenizer=False)


CLONE = {"voice": "Ann", "ref_text": "words"}

CASE = Case(
    family=FAMILY,
    stage=talker("higgs_audio_v2", "HiggsAudioV2ForConditionalGeneration"),
    hf_config=read_by("transformers:AutoConfig"),
    mode_of=lambda _info: IN_CONTEXT,
    write=write,
    loading={"async_chunk": False},
    arrays={CODEC: codes(num_clip_frames, 8)},
    message_max_bytes=8192,
    message_bytes_per_second=5 * 25.1,
    control_tokens=("<|AUDIO_OUT|>", "[SPEAKER1]"),
    refused=(
        (CLONE | {"language": "en"}, "language"),
        (CLONE | {"instructions": "Whisper."}, "instructions"),
        (CLONE | {"speed": 2.0}, "speed"),
    ),
    refusing={"without the audio tokenizer": without_tokenizer},
)
