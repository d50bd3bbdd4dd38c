"""``voices try``: speak, and see whether the voice was ready."""

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from vllm_tts_cache.entrypoints.cli import style
from vllm_tts_cache.entrypoints.cli.style import examples
from vllm_tts_cache.entrypoints.cli.voices.source import (
    DEFAULT_URL,
    ApiKey,
    Url,
    client_of,
)
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.files import storage_errors

if TYPE_CHECKING:
    from vllm_tts_cache.client import VoicesClient

_STANDARD = Path("-")
DEFAULT_TEXT = "The quick brown fox jumps over the lazy dog."

_SIZE_AT_END = 8  # of the header's "RIFF", its size, and "WAVE"


def try_(
    name: Annotated[str, typer.Argument(help="or id")],
    text: Annotated[str, typer.Argument(help="what to say")] = DEFAULT_TEXT,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE.wav",
            help="where to; - is the standard output",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="(default: the one that is served)")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="for the same audio again")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: style.Json = False,
) -> None:
    """Speak with a voice, and say how long the first audio took.

    The cache says hit (nothing had to be encoded), miss (this request waited for an
    encode) or none.

    JSON: {"voice", "cache", "bytes", "seconds_to_first_audio", "seconds", "file"}.
    """
    is_audio_out = out == _STANDARD
    if is_audio_out and as_json:
        raise ConfigError("--json: the standard output is the audio's")
    with client_of(url, api_key) as client:
        body = {
            "model": model or client.model(),
            "input": text,
            "voice": name,
            "response_format": "wav",
            "stream": True,
            "stream_format": "audio",
            **({} if seed is None else {"seed": seed}),
        }
        if out is None or is_audio_out:
            found = _speak(client, body, sys.stdout.buffer if is_audio_out else None)
        else:
            found = _speak_to_file(client, body, out)
    found["voice"] = name
    if as_json:
        style.print_json(found)
        return
    tell = style.note if is_audio_out else style.say
    tell(
        f"{name}: first audio after {1000 * found['seconds_to_first_audio']:.0f} ms, "
        f"all ({found['bytes']} bytes) after {found['seconds']:.2f} s; cache: "
        f"{found['cache'] or 'nothing said'}"
    )


def _speak_to_file(
    client: "VoicesClient", body: dict[str, Any], out: Path
) -> dict[str, Any]:
    with storage_errors(out), out.open("w+b") as file:
        found = _speak(client, body, file)
        _complete_header(file, found["bytes"])
    return {**found, "file": str(out)}


def _speak(
    client: "VoicesClient", body: dict[str, Any], file: BinaryIO | None
) -> dict[str, Any]:
    began = time.monotonic()
    first, num_bytes = None, 0
    with client.speech(body) as (cache, chunks):
        for chunk in chunks:
            first = time.monotonic() - began if first is None else first
            num_bytes += len(chunk)
            if file is not None:
                file.write(chunk)
    seconds = time.monotonic() - began
    return {
        "cache": cache,
        "bytes": num_bytes,
        "seconds_to_first_audio": round(seconds if first is None else first, 4),
        "seconds": round(seconds, 4),
    }


def _complete_header(file: BinaryIO, num_bytes: int) -> None:
    """Write the length, which nobody knew when the stream began, into a WAV file."""
    file.seek(0)
    head = file.read(4096)
    data = head.find(b"data")
    if not head.startswith(b"RIFF") or data < 0:
        return
    with suppress(OverflowError):  # beyond 4 GiB players go by the file's end
        size = (num_bytes - _SIZE_AT_END).to_bytes(4, "little")
        data_size = (num_bytes - data - _SIZE_AT_END).to_bytes(4, "little")
        file.seek(4)
        file.write(size)
        file.seek(data + 4)
        file.write(data_size)


COMMANDS = {
    "try": (
        try_,
        examples(
            "vllm-tts-cache voices try keeper 'Hello there.' --out hello.wav",
            "vllm-tts-cache voices try keeper --out - | aplay",
            "vllm-tts-cache voices try keeper --json | jq .cache",
        ),
    ),
}
