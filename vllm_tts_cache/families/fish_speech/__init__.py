"""Fish Speech S2 Pro: what it makes of reference audio.

``codec``
    The DAC's codes: ``codes``, ``(num_frames, 10)`` int16, which holds any index of
    its codebooks exactly: the semantic one of 4096 entries first, then nine residual
    ones of 1024. 44,100 / 2048, about 21.5, frames a second.

There is one way to clone, in context: it needs the codes and the reference text. What
the codes are is defined by the host's own encoder on the CPU in float32:
``tests/contract`` runs both.
"""

from types import MappingProxyType

from vllm_tts_cache.speaker.family import CloneMode, Family

CODEC = "codec"

FAMILY = Family(
    name="fish_speech",
    encoders=MappingProxyType({CloneMode.IN_CONTEXT: (CODEC,)}),
)
