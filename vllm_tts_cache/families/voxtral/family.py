"""What the generic parts need to know of Voxtral TTS: when it cannot clone, and why."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.speaker.checkpoint_dir import read_json
from vllm_tts_cache.speaker.family import Family

MODEL_TYPE = "voxtral_tts"
ARCHITECTURE = "VoxtralTTSForConditionalGeneration"
# Mistral's layout, which has no config.json.
PARAMS = "params.json"
# The first weight with such a name switches the host's encoder on.
ENCODER_PREFIXES = ("audio_tokenizer.input_proj.", "audio_tokenizer.encoder_blocks.")

_HERE = "vllm_tts_cache.families.voxtral"


def is_voxtral(model_dir: Path) -> bool:
    """Tell whether the host would serve a checkpoint directory as Voxtral TTS."""
    try:
        params = read_json(model_dir / PARAMS)
    except CheckpointError:
        return False
    if params.get("model_type") == MODEL_TYPE:
        return True
    architectures = params.get("architectures")
    return isinstance(architectures, list) and ARCHITECTURE in architectures


def why_it_clones_nothing(model_dir: Path) -> str | None:
    """Say why a checkpoint clones no voices; None if it has the reference encoder.

    None as well if its weights are not in the directory (a server on another machine
    loads them, say): then the host decides, as without this plugin.

    Raises: CheckpointError.
    """
    # The files that the host loads weights from: Mistral's before others.
    files = [*model_dir.glob("consolidated*.safetensors")]
    files = sorted(files or model_dir.glob("*.safetensors"))
    names = (name for path in files for name in _tensor_names(path))
    if not files or any(name.startswith(ENCODER_PREFIXES) for name in names):
        return None
    reason = "This Voxtral checkpoint has no reference encoder, so it cannot clone"
    if presets := preset_voices(model_dir):
        voices = ", ".join(presets)
        return f"{reason}: it has the preset voices {voices}. Name one in `voice`."
    return f"{reason}, and it has no preset voices either."


def preset_voices(model_dir: Path) -> list[str]:
    """Return the names of the preset voices as requests spell them, in order.

    Raises: CheckpointError.
    """
    part: Mapping[str, Any] = read_json(model_dir / PARAMS)
    for name in ("multimodal", "audio_tokenizer_args", "voice"):
        found = part.get(name)
        part = found if isinstance(found, Mapping) else {}
    return sorted(str(name).lower() for name in part)


def _tensor_names(path: Path) -> Iterator[str]:
    """Read the names in a file's header; no tensor is loaded."""
    try:
        # safetensors calls any failure to open a missing file; open() tells them apart.
        path.open("rb").close()
        with safe_open(path, framework="numpy") as file:
            yield from file.keys()
    except OSError as exc:
        raise CheckpointError(str(path), exc.strerror or str(exc)) from exc
    except SafetensorError as exc:
        raise CheckpointError(str(path), str(exc)) from exc


FAMILY = Family(
    name="voxtral",
    short_name="voxtral",
    title="Voxtral",
    # No modes yet: there is no official code with which the encodings of a checkpoint
    # that has the encoder could be compared.
    modes=(),
    recognises=is_voxtral,
    clones=why_it_clones_nothing,
    adapter=f"{_HERE}.adapter:CachedVoxtralAdapter",
    sample_rate_hz=24_000,
    never_run="a checkpoint with the reference encoder, a GPU",
)
