"""A small client of the speech and voices routes, as the demo and the tests use it."""

import base64
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from vllm_tts_cache.testing.server import MODEL_NAME

TIMEOUT_SECONDS = 300.0
HEADER = "X-Speaker-Cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """One answer of the speech route.

    Attributes:
        status: HTTP status.
        audio: The body: samples, or an error as JSON.
        cache: ``hit``, ``miss`` or ``none``; None with an error.
        ttfa_seconds: Time to the first byte of audio.
    """

    status: int
    audio: bytes
    cache: str | None
    ttfa_seconds: float


class SpeechClient:
    """Talks to one server."""

    def __init__(self, url: str, *, timeout_seconds: float = TIMEOUT_SECONDS):
        self.http = httpx.Client(base_url=url, timeout=timeout_seconds)

    def register(
        self, name: str, sample: Path | bytes, **fields: str
    ) -> httpx.Response:
        """Register a voice by a clip; not precomputed unless asked for."""
        data = sample.read_bytes() if isinstance(sample, Path) else sample
        form = {"name": name, "consent": "consent-1", "precompute": "false", **fields}
        return self.http.post(
            "/v1/audio/voices", data=form, files={"audio_sample": ("clip", data)}
        )

    def precompute(self, name: str, *, force: bool = False) -> httpx.Response:
        """Make the voice's encodings exist, and wait."""
        query = {"force": "true"} if force else {}
        return self.http.post(f"/v1/audio/voices/{name}/cache", params=query)

    def speak(self, text: str = "Hello world.", **fields: Any) -> Speech:
        """Speak as a raw PCM stream; a fixed seed unless one is given."""
        body = {
            "model": MODEL_NAME,
            "input": text,
            "seed": 7,
            "response_format": "pcm",
            "stream": True,
            "stream_format": "audio",
            **fields,
        }
        began = time.perf_counter()
        first, audio = None, bytearray()
        with self.http.stream("POST", "/v1/audio/speech", json=body) as response:
            for chunk in response.iter_raw():
                if first is None:
                    first = time.perf_counter() - began
                audio += chunk
        return Speech(
            status=response.status_code,
            audio=bytes(audio),
            cache=response.headers.get(HEADER),
            ttfa_seconds=time.perf_counter() - began if first is None else first,
        )

    def stats(self) -> dict[str, Any]:
        """Counters of the registry and of each worker."""
        return self.http.get("/v1/audio/speaker_cache").raise_for_status().json()

    def encodes(self) -> dict[str, int]:
        """Encodes since the workers' start, by encoder, over all workers."""
        total: dict[str, int] = {}
        for worker in self.stats()["workers"]:
            for name, count in worker["encodes"].items():
                total[name] = total.get(name, 0) + count
        return total

    def close(self) -> None:
        """Close the connections."""
        self.http.close()


def data_url(sample: Path | bytes) -> str:
    """The clip as an inline ``ref_audio``."""
    data = sample.read_bytes() if isinstance(sample, Path) else sample
    return f"data:audio/wav;base64,{base64.b64encode(data).decode()}"
