"""VoxCPM2 as it is measured."""

from benchmarks.models import Model, StockSide
from vllm_tts_cache.families.voxcpm2.family import FAMILY

# A voice with a transcript is encoded for both modes; requests here are of the
# reference mode, the one that stock remembers anything of. Stock's engine ends where a
# voice is asked for in both modes, or beside inline audio: it is asked for neither.
VOXCPM2 = Model(
    name="voxcpm2",
    family=FAMILY,
    scenarios=frozenset({"warm_hit", "first_request"}),
    modes={"reference": {}},
    inline={},
    limit=lambda _checkpoint: {},  # text without a voice
    message_max_bytes=4096,
    speaker_cpu_max_ms=0.5,
    cold_seconds=25,
    first_max_ratio=1.05,
    stock=StockSide(note="stock encodes by another resampler"),
)

MODELS = (VOXCPM2,)
