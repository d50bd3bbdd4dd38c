"""The models that are measured: all that differs between them."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.server_plugins import DECODER_PROBE, FLOAT32_ENCODERS, SMALL_CODEC
from vllm_tts_cache.testing import families
from vllm_tts_cache.testing.families import ServedFamily

TRANSCRIPT = "The keeper counts the ships at dusk, and writes each name into a book."


@dataclass(frozen=True, slots=True, kw_only=True)
class StockSide:
    """What stock is changed by, beside the one setting, to run here and be right.

    Attributes:
        server_plugins: Further ones that only its processes call.
        stage_0: What its deploy file says otherwise of the stage that prefills.
        note: The changes in a few words, for the table; empty without any.
    """

    server_plugins: tuple[str, ...] = ()
    stage_0: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A family as it is measured, and its requests.

    Attributes:
        name: As the command line and the table spell it.
        family: Writes the checkpoint and says how it is served.
        modes: Clone mode -> what a registration adds to the clip, cheapest first.
        inline: What a request adds to ``ref_audio``.
        limit: Fields of a request that costs the speaker side nothing, from the
            checkpoint's directory.
        message_max_bytes: Target of a warm request's message to the engine.
        speaker_cpu_max_ms: Target of its CPU time above the limit's.
        cold_seconds: Length of the references that arrive beside streams.
        first_max_ratio: Target of a voice's first request against its second.
        environ: What both servers are set beside the settings of every server.
        server_plugins: What every process of a server calls, see `server_plugins`.
        stock: How stock's server differs, beside the one setting.
        shares_kv: Whether a voice's later requests find its prefix in the KV, so that
            its first one is the slower for that too.
    """

    name: str
    family: ServedFamily
    modes: Mapping[str, Mapping[str, str]]
    inline: Mapping[str, Any]
    limit: Callable[[Path], dict[str, Any]]
    message_max_bytes: int
    speaker_cpu_max_ms: float
    cold_seconds: float
    first_max_ratio: float
    environ: Mapping[str, str] = field(default_factory=dict)
    server_plugins: tuple[str, ...] = ()
    stock: StockSide = StockSide()
    shares_kv: bool = False

    @property
    def cheapest_mode(self) -> str:
        return next(iter(self.modes))

    @property
    def encoder_sizes(self) -> str:
        """What its reference encoders are, for whoever reads the results."""
        is_real = self.family.options.encoders == "real"
        return "released sizes" if is_real else "small, of the released structure"

    @property
    def times_decoder(self) -> bool:
        """Whether a plugin says what the codec decoder's steps take."""
        return DECODER_PROBE in self.server_plugins

    def checkpoint(self, work: Path) -> Path:
        """The checkpoint's directory, written unless an equal one is there."""
        return self.family.ensure_checkpoint(work / f"checkpoint-{self.name}")


def _real_encoders(family: ServedFamily) -> ServedFamily:
    options = dataclasses.replace(family.options, encoders="real")
    return dataclasses.replace(family, options=options)


def _raw_embedding(checkpoint: Path) -> dict[str, Any]:
    config = json.loads((checkpoint / "config.json").read_text())
    size = config["speaker_encoder_config"]["enc_dim"]
    values = [0.02 * (i % 5 - 2) for i in range(size)]
    return {"speaker_embedding": values, "task_type": "Base"}


QWEN3_TTS = Model(
    name="qwen3-tts",
    family=_real_encoders(families.QWEN3_TTS),
    modes={"x-vector": {}, "in-context": {"ref_text": TRANSCRIPT}},
    inline={"ref_text": TRANSCRIPT, "task_type": "Base"},
    limit=_raw_embedding,
    message_max_bytes=1024,
    speaker_cpu_max_ms=0.2,
    cold_seconds=25,
    first_max_ratio=1.05,
    server_plugins=(FLOAT32_ENCODERS, DECODER_PROBE),
)

# With small reference encoders, for what is about numbers of voices and not about
# what one of them costs.
QWEN3_TTS_TINY = dataclasses.replace(
    QWEN3_TTS,
    name="qwen3-tts-tiny",
    family=families.QWEN3_TTS,
    environ={"SPEAKER_MAX_UPLOADED": "1000000"},
    server_plugins=(FLOAT32_ENCODERS,),
)

# With a small codec: the released one takes a core 52 s for a reference of 30 s, and
# seconds for each chunk it decodes. So no row of it says what a cold reference costs.
FISH_SPEECH = Model(
    name="fish-speech",
    family=families.FISH_SPEECH,
    modes={"in-context": {"ref_text": TRANSCRIPT}},
    inline={"ref_text": TRANSCRIPT},
    limit=lambda _checkpoint: {},  # text without a voice
    message_max_bytes=8192,
    speaker_cpu_max_ms=2.0,
    cold_seconds=25,
    first_max_ratio=1.1,
    stock=StockSide(
        server_plugins=(SMALL_CODEC,),
        # As the host ships it: its prompts are placeholders, and with prefix caching
        # on it takes the wrong rows of them.
        stage_0={"enable_prefix_caching": False},
        note="stock with the small codec, unpinned",
    ),
    shares_kv=True,
)

MODELS = (QWEN3_TTS, QWEN3_TTS_TINY, FISH_SPEECH)
