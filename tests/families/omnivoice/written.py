"""Tiny checkpoints of the family."""

from vllm_tts_cache.families.omnivoice.family import FAMILY
from vllm_tts_cache.families.omnivoice.tiny import TINY
from vllm_tts_cache.testing.tiny_checkpoint import TinyCheckpoint


def write_omnivoice_checkpoint(out, options=None, **more):
    wanted = TinyCheckpoint(family=FAMILY, options=options or TINY.options)
    return wanted.write(out, **more)
