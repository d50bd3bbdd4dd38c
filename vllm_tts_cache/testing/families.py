"""The families that the trial commands, tests and benchmarks can serve on a CPU."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tts_cache import stage_configs
from vllm_tts_cache.families import fish_speech, qwen3_tts
from vllm_tts_cache.speaker.family import Family
from vllm_tts_cache.testing.directories import MARKER
from vllm_tts_cache.testing.fish_speech.options import (
    CheckpointOptions as FishSpeechOptions,
)
from vllm_tts_cache.testing.qwen3_tts.options import (
    CheckpointOptions as Qwen3TTSOptions,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFamily:
    """A family with a tiny checkpoint of random weights.

    Attributes:
        name: As commands spell it.
        family: What the plugin knows of it.
        deploy_file: Its stages on a CPU.
        encoders: All its reference encoders, in the order they are shown.
        sample_rate_hz: Of what it speaks.
        options: Of its tiny checkpoint.
    """

    name: str
    family: Family
    deploy_file: Path
    encoders: tuple[str, ...]
    sample_rate_hz: int
    options: Qwen3TTSOptions | FishSpeechOptions

    @property
    def arguments(self) -> tuple[str, ...]:
        """What ``vllm serve`` is given beside the checkpoint."""
        return ("--omni", "--deploy-config", str(self.deploy_file))

    @property
    def marker(self) -> dict[str, Any]:
        """What a checkpoint with these options says of itself."""
        return {"family": self.name, **dataclasses.asdict(self.options)}

    def ensure_checkpoint(
        self, path: Path, report: Callable[[str], None] = lambda _step: None
    ) -> Path:
        """Write the tiny checkpoint unless an equal one is there.

        Raises: ConfigError, StorageError.
        """
        if _written_options(path) != self.marker:
            self.write_checkpoint(path, report)
        return path

    def write_checkpoint(
        self,
        out: Path,
        report: Callable[[str], None] = lambda _step: None,
        *,
        force: bool = True,
    ) -> Path:
        """Write the tiny checkpoint.

        Args:
            out: A directory that is absent or empty.
            report: Called with what is being written.
            force: Replace a checkpoint that was written there before.

        Raises: ConfigError, StorageError.
        """
        # Only here: both import torch.
        match self.options:
            case Qwen3TTSOptions() as options:
                from vllm_tts_cache.testing.qwen3_tts.write import (
                    write_qwen3_tts_checkpoint,
                )

                return write_qwen3_tts_checkpoint(
                    out, options, force=force, report=report
                )
            case FishSpeechOptions() as options:
                from vllm_tts_cache.testing.fish_speech.write import (
                    write_fish_speech_checkpoint,
                )

                return write_fish_speech_checkpoint(
                    out, options, force=force, report=report
                )


def _written_options(path: Path) -> object:
    try:
        return json.loads((path / MARKER).read_text())
    except (OSError, ValueError):
        return None


_DEPLOY_FILES = Path(stage_configs.__file__).parent

QWEN3_TTS = ServedFamily(
    name="qwen3-tts",
    family=qwen3_tts.FAMILY,
    deploy_file=_DEPLOY_FILES / "qwen3_tts_cpu.yaml",
    encoders=(qwen3_tts.SPEAKER, qwen3_tts.CODEC),
    sample_rate_hz=24_000,
    options=Qwen3TTSOptions(),
)
FISH_SPEECH = ServedFamily(
    name="fish-speech",
    family=fish_speech.FAMILY,
    deploy_file=_DEPLOY_FILES / "fish_speech_cpu.yaml",
    encoders=(fish_speech.CODEC,),
    sample_rate_hz=44_100,
    options=FishSpeechOptions(),
)

# With the short names of the make targets: `make demo MODEL=fish`.
FAMILIES = {
    "qwen3": QWEN3_TTS,
    QWEN3_TTS.name: QWEN3_TTS,
    "fish": FISH_SPEECH,
    FISH_SPEECH.name: FISH_SPEECH,
}
