"""Tiny checkpoints of the family."""

from vllm_tts_cache.families.higgs_audio_v3.family import FAMILY
from vllm_tts_cache.families.higgs_audio_v3.tiny import TINY
from vllm_tts_cache.testing.tiny_checkpoint import TinyCheckpoint


def write_higgs_audio_v3_checkpoint(out, options=None, **more):
    wanted = TinyCheckpoint(family=FAMILY, options=options or TINY.options)
    return wanted.write(out, **more)
