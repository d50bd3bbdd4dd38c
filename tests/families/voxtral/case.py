"""Voxtral in the shared tests."""

from tests.families.cases import Case, talker
from tests.families.voxtral.tiny_checkpoint import host_config, write_voxtral_checkpoint
from vllm_tts_cache.families.voxtral.family import FAMILY


def as_released(directory, _tiny):
    directory.mkdir()
    write_voxtral_checkpoint(directory)


def mode_of(info):
    raise AssertionError(f"it has no modes, and was asked for one of {info}")


CASE = Case(
    family=FAMILY,
    stage=talker("audio_generation", "VoxtralTTSForConditionalGeneration"),
    hf_config=host_config,
    mode_of=mode_of,
    refusing={"as released": as_released},
)
