"""Tiny checkpoints of the family."""

from vllm_tts_cache.families.voxcpm2.family import FAMILY
from vllm_tts_cache.families.voxcpm2.tiny import TINY
from vllm_tts_cache.testing.tiny_checkpoint import TinyCheckpoint


def write_voxcpm2_checkpoint(out, options=None, **more):
    wanted = TinyCheckpoint(family=FAMILY, options=options or TINY.options)
    return wanted.write(out, **more)
