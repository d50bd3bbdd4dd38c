"""The models that are measured: all that differs between them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm_tts_cache.speaker.family import Family, families
from vllm_tts_cache.testing.tiny_checkpoint import TinyCheckpoint, serve_arguments

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
        family: What is served.
        options: Of its checkpoint, beside the default ones.
        scenarios: Names of those that it is measured in.
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
        stage_0: What both deploy files say otherwise of the stage that speaks.
        stage_1: The same of the stage that decodes.
        times_decoder: Whether one of them says what the codec decoder's steps take.
        shares_kv: Whether a voice's later requests find its prefix in the KV, so that
            its first one is the slower for that too.
        is_named_only: Whether it is measured only where ``--model`` names it.
    """

    name: str
    family: Family
    scenarios: frozenset[str]
    modes: Mapping[str, Mapping[str, str]]
    inline: Mapping[str, Any]
    limit: Callable[[Path], dict[str, Any]]
    message_max_bytes: int
    speaker_cpu_max_ms: float
    cold_seconds: float
    first_max_ratio: float
    options: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    server_plugins: tuple[str, ...] = ()
    stage_0: Mapping[str, Any] = field(default_factory=dict)
    stage_1: Mapping[str, Any] = field(default_factory=dict)
    times_decoder: bool = False
    stock: StockSide = StockSide()
    shares_kv: bool = False
    is_named_only: bool = False

    @property
    def cheapest_mode(self) -> str:
        return next(iter(self.modes))

    @property
    def encoder_sizes(self) -> str:
        """What its reference encoders are, for whoever reads the results."""
        is_real = self.options.get("encoders") == "real"
        return "released sizes" if is_real else "small, of the released structure"

    @property
    def arguments(self) -> tuple[str, ...]:
        """What ``vllm serve`` is given beside the checkpoint."""
        return serve_arguments(self.family)

    def checkpoint(self, work: Path) -> Path:
        """The checkpoint's directory, written unless an equal one is there."""
        wanted = TinyCheckpoint(self.family, **self.options)
        return wanted.ensure(work / f"checkpoint-{self.name}")


@cache
def models() -> tuple[Model, ...]:
    """Return those of all families that are measured, the default family's first.

    Each family has a module in this package; whatever is in the list is measured.
    """
    found: list[Model] = []
    for family in families():
        if family.tiny_part:
            module = import_module(f"{__name__}.{family.name}")
            found += module.MODELS
    return tuple(found)


def model_called(name: str) -> Model:
    """Return the one of this name."""
    return next(model for model in models() if model.name == name)


def default_models() -> list[Model]:
    """Return those that a run measures which names none."""
    return [model for model in models() if not model.is_named_only]
