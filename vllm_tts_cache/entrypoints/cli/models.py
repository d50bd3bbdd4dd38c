"""``vllm-tts-cache families``, ``encode`` and ``stage-config``: models that clone.

They list the families, run reference encoders without a server, and print the path of
a deploy file.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.progress import track

from vllm_tts_cache.audio.decode import decode_path, naming
from vllm_tts_cache.entrypoints.cli import common
from vllm_tts_cache.entrypoints.cli.voices.bundles import EXPORT_PREFIX, export_folder
from vllm_tts_cache.errors import CheckpointError, ConfigError, EncodeError
from vllm_tts_cache.files import publish
from vllm_tts_cache.speaker.family import (
    ClipLimits,
    Family,
    Mode,
    families,
    family_of_checkpoint,
)
from vllm_tts_cache.speaker.reference import ReferenceEncoder
from vllm_tts_cache.stage_configs import FOLDER

_console = Console(stderr=True)

_HEADINGS = (
    *("model", "commands", "modes", "encodings", "clips", "equal to"),
    *("one KV prefix per voice", "on a CPU", "never run"),
)

families_app = common.new_app()
encode_app = common.new_app()
stage_config_app = common.new_app()


@families_app.command(
    "families",
    epilog=common.examples("vllm-tts-cache families", "vllm-tts-cache families --json"),
)
def list_families(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="as a table")] = False,
    as_json: common.Json = False,
) -> None:
    """List the model families and the ways they clone.

    Those that are installed, third parties' included: the modes in which each clones
    and what its encodings are equal to. A request names a mode in
    extra_params.clone_mode; without, the transcript decides.
    """
    rows = [_row(family) for family in families()]
    if as_json:
        named = [dict(zip(_HEADINGS, row, strict=True)) for row in rows]
        common.print_json({"families": named})
        return
    if as_markdown:
        for line in (_HEADINGS, ["---"] * len(_HEADINGS), *rows):
            sys.stdout.write(f"| {' | '.join(line)} |\n")
        return
    for title, *facts in rows:
        common.say(title)
        for heading, fact in zip(_HEADINGS[1:], facts, strict=True):
            if fact:
                common.say(f"  {heading}: {fact}")


def _row(family: Family) -> tuple[str, ...]:
    return (
        family.title,
        ", ".join(family.command_names) if family.tiny_part else "",
        "; ".join(map(_mode, family.modes)) or "none",
        ", ".join(family.encoders),
        _clips(family.limits) if family.modes else "",
        family.official,
        ("yes" if family.shares_kv else "no") if family.modes else "",
        "yes" if family.deploy_file is not None else "no",
        family.never_run,
    )


def _mode(mode: Mode) -> str:
    needs = f"{mode.name} (transcript {mode.transcript.value}"
    return f"{needs}, or an embedding)" if mode.takes_embedding else f"{needs})"


def _clips(limits: ClipLimits) -> str:
    parts = []
    if limits.min_sample_rate_hz:
        parts.append(f"from {limits.min_sample_rate_hz} Hz")
    if limits.max_seconds != float("inf"):
        parts.append(f"up to {limits.max_seconds:g} s")
    return ", ".join(parts) or "any"


def _names() -> list[str]:
    return sorted(path.stem.replace("_", "-") for path in FOLDER.glob("*.yaml"))


def _known(name: str) -> str:
    if name not in _names():
        raise typer.BadParameter(f"{name!r} is none of {', '.join(_names())}")
    return name


@stage_config_app.command(
    epilog=common.examples(
        "# one KV prefix per voice: a second text of a voice prefills only that text",
        "vllm serve fishaudio/s2-pro --omni \\",
        '  --deploy-config "$(vllm-tts-cache stage-config fish-speech)"',
    )
)
def stage_config(
    name: Annotated[
        str,
        typer.Argument(
            callback=_known, autocompletion=_names, help=", ".join(_names())
        ),
    ],
    as_json: common.Json = False,
) -> None:
    """Print the path of a deploy file of ours, for `vllm serve --deploy-config`.

    What each one changes against the host's, and why, is written in it.
    """
    path = FOLDER / f"{name.replace('-', '_')}.yaml"
    if as_json:
        common.print_json({"path": str(path)})
    else:
        # The path alone, so that a shell can use it.
        typer.echo(path)


@encode_app.command(
    epilog=common.examples(
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
    as_json: common.Json = False,
) -> None:
    """Encode clips into a safetensors file, as the server would, without one.

    The file holds tensors named <clip stem>/<encoder>/<tensor>; its metadata holds each
    encoder's fingerprint, each clip's audio_sha256, and what computed them. Nothing is
    written if one clip fails.
    """
    from safetensors.numpy import save

    by_stem = _by_stem(clips)
    encoders, computed_on = _load(model, revision, device)
    tensors: dict[str, npt.NDArray[np.generic]] = {}
    metadata = {f"fingerprint/{name}": e.fingerprint for name, e in encoders.items()}
    metadata |= computed_on
    for stem, clip in track(by_stem.items(), "encoding", console=_console):
        audio_sha256, arrays = _encode(clip, encoders.values())
        metadata[f"audio_sha256/{stem}"] = audio_sha256
        tensors |= {f"{stem}/{name}": array for name, array in arrays.items()}
    with export_folder(out.parent):
        publish(out, save(tensors, metadata=metadata), prefix=EXPORT_PREFIX)
    if as_json:
        found = {"file": str(out), "tensors": sorted(tensors), "metadata": metadata}
        common.print_json(found)
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
) -> tuple[Mapping[str, ReferenceEncoder], dict[str, str]]:
    """Return a checkpoint's encoders, and the versions and device they compute on.

    Raises: CheckpointError, ConfigError.
    """
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

    from vllm_tts_cache.speaker.precision import computed_on

    try:
        place = torch.device(device)
        encoders = family.part("encoders_part")(model_dir, place)
        return encoders, asdict(computed_on(place))
    except RuntimeError as exc:
        raise ConfigError(f"--device {device}: {exc}") from exc


def _encode(
    clip: Path, encoders: Iterable[ReferenceEncoder]
) -> tuple[str, dict[str, npt.NDArray[np.generic]]]:
    """Return the clip's address, and its arrays as ``<encoder>/<tensor>``."""
    decoded = decode_path(clip)
    try:
        with naming(str(clip)):
            arrays = {
                f"{encoder.name}/{name}": array
                for encoder in encoders
                for name, array in encoder.encode(decoded.audio).arrays.items()
            }
    except EncodeError as exc:
        raise EncodeError(f"{clip}: {exc}") from exc
    for warning in decoded.warnings:
        _console.print(f"{clip}: {warning.message}", style="yellow")
    return decoded.audio.audio_sha256, arrays
