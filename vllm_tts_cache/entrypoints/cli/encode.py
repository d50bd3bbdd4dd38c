"""``vllm-tts-cache encode``: the server's reference encoders, without a server.

For precomputing encodings offline, and as a check of them that anyone can run.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.progress import track

from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.entrypoints.cli.common import (
    Json,
    examples,
    new_app,
    print_json,
)
from vllm_tts_cache.errors import (
    CheckpointError,
    ConfigError,
    EncodeError,
    InvalidAudioError,
)
from vllm_tts_cache.files import publish
from vllm_tts_cache.speaker.family import family_of_checkpoint
from vllm_tts_cache.speaker.reference import ReferenceEncoder

_console = Console(stderr=True)


encode_app = new_app()


@encode_app.command(
    epilog=examples(
        "vllm-tts-cache encode --model Qwen/Qwen3-TTS-12Hz-0.6B-Base \\",
        "  --out voices.safetensors ann.wav bob.flac",
    )
)
def encode(
    clips: Annotated[list[Path], typer.Argument(metavar="CLIP")],
    model: Annotated[
        str,
        typer.Option(
            help="a checkpoint that clones voices: a directory, or a Hugging Face id "
            "that has been downloaded; see `vllm-tts-cache families`"
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.safetensors")],
    revision: Annotated[
        str | None,
        typer.Option(help="of a Hugging Face id: a branch, a tag or a commit"),
    ] = None,
    device: Annotated[str, typer.Option(help="a torch device")] = "cpu",
    as_json: Json = False,
) -> None:
    """Encode clips into a safetensors file, as the server would, without one.

    The file holds tensors named <clip stem>/<encoder>/<tensor>; its metadata holds each
    encoder's fingerprint, each clip's audio_sha256, and what computed them. Nothing is
    written if one clip fails.
    """
    by_stem = _by_stem(clips)
    encoders = _load(model, revision, device)
    tensors: dict[str, npt.NDArray[np.generic]] = {}
    metadata = {f"fingerprint/{name}": e.fingerprint for name, e in encoders.items()}
    metadata |= _origin(device)
    for stem, clip in track(by_stem.items(), "encoding", console=_console):
        audio_sha256, arrays = _encode(clip, encoders.values())
        metadata[f"audio_sha256/{stem}"] = audio_sha256
        tensors |= {f"{stem}/{name}": array for name, array in arrays.items()}
    _write(out, tensors, metadata)
    if as_json:
        print_json({"file": str(out), "tensors": sorted(tensors), "metadata": metadata})
        return
    _console.print(f"{len(by_stem)} clips, {len(tensors)} tensors: {out}")


def _by_stem(clips: Sequence[Path]) -> dict[str, Path]:
    by_stem: dict[str, Path] = {}
    for clip in clips:
        if (other := by_stem.setdefault(clip.stem, clip)) is not clip:
            raise ConfigError(
                f"{other} and {clip} would both be called {clip.stem!r} in the file; "
                "rename one, or write two files"
            )
    return by_stem


def _load(
    model: str, revision: str | None, device: str
) -> Mapping[str, ReferenceEncoder]:
    from vllm_tts_cache.speaker.checkpoint_dir import checkpoint_dir

    model_dir = checkpoint_dir(model, revision)
    family = family_of_checkpoint(model_dir)
    if (refusal := family.clones(model_dir)) is not None:
        raise CheckpointError(model, refusal)
    if not family.encoders_part:
        raise CheckpointError(model, f"{family.title} is not encoded by this plugin")
    model_dir = checkpoint_dir(model, revision, side_files=family.side_files)
    # Importing the host's modules logs a screenful otherwise.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch

    try:
        encoders: Mapping[str, ReferenceEncoder]
        encoders = family.part("encoders_part")(model_dir, torch.device(device))
        return encoders
    except RuntimeError as exc:
        raise ConfigError(f"--device {device}: {exc}") from exc


def _origin(device: str) -> dict[str, str]:
    import torch

    from vllm_tts_cache.speaker.precision import computed_on

    return asdict(computed_on(torch.device(device)))


def _encode(
    clip: Path, encoders: Iterable[ReferenceEncoder]
) -> tuple[str, dict[str, npt.NDArray[np.generic]]]:
    """The clip's address, and its arrays as ``<encoder>/<tensor>``."""
    try:
        decoded = decode_path(clip)
        arrays = {
            f"{encoder.name}/{name}": array
            for encoder in encoders
            for name, array in encoder.encode(decoded.audio).arrays.items()
        }
    except InvalidAudioError as exc:
        named = str(clip) in exc.reason
        raise InvalidAudioError(
            exc.reason if named else f"{clip}: {exc.reason}"
        ) from exc
    except EncodeError as exc:
        raise EncodeError(f"{clip}: {exc}") from exc
    for warning in decoded.warnings:
        _console.print(f"{clip}: {warning.message}", style="yellow")
    return decoded.audio.audio_sha256, arrays


def _write(
    out: Path,
    tensors: Mapping[str, npt.NDArray[np.generic]],
    metadata: Mapping[str, str],
) -> None:
    from safetensors.numpy import save

    publish(out, save(dict(tensors), metadata=dict(metadata)))
