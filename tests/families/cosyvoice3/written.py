"""Tiny checkpoints of the family."""

from vllm_tts_cache.families.cosyvoice3.family import FAMILY
from vllm_tts_cache.families.cosyvoice3.tiny import TINY
from vllm_tts_cache.testing.tiny_checkpoint import TinyCheckpoint


def write_cosyvoice3_checkpoint(out, options=None, **more):
    wanted = TinyCheckpoint(family=FAMILY, options=options or TINY.options)
    return wanted.write(out, **more)
