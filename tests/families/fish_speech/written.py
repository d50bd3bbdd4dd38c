"""Tiny checkpoints of the family."""

from vllm_tts_cache.families.fish_speech.family import FAMILY
from vllm_tts_cache.families.fish_speech.tiny import TINY
from vllm_tts_cache.testing.tiny_checkpoint import TinyCheckpoint


def write_fish_speech_checkpoint(out, options=None, **more):
    wanted = TinyCheckpoint(family=FAMILY, options=options or TINY.options)
    return wanted.write(out, **more)
