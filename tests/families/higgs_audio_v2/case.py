"""Higgs Audio v2 in the shared tests."""

from tests.families.cases import Case
from tests.families.higgs_audio_v2.tiny_checkpoint import (
    write_higgs_audio_v2_checkpoint,
)
from vllm_tts_cache.families.higgs_audio_v2.family import FAMILY, IN_CONTEXT


def hf_config(checkpoint):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(checkpoint)


def without_tokenizer(checkpoint, _tiny):
    write_higgs_audio_v2_checkpoint(checkpoint, tokenizer=False)


CASE = Case(
    family=FAMILY,
    stage={
        "model_stage": "higgs_audio_v2",
        "model_arch": "HiggsAudioV2ForConditionalGeneration",
        "worker_type": "ar",
    },
    hf_config=hf_config,
    mode_of=lambda _info: IN_CONTEXT,
    refusing={"without the audio tokenizer": without_tokenizer},
)
