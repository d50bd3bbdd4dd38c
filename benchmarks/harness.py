"""Measure servers by the host's own harness, in the units that the field publishes.

    python -m benchmarks.harness --model Qwen/Qwen3-TTS-12Hz-1.7B-Base \\
        --server ours=http://127.0.0.1:8091 --server stock=http://127.0.0.1:8092

Each server is asked by ``vllm bench serve --omni``, in turns: with a clip in each
request, with a registered voice in context and, of the plugin, with it as an x-vector.
Name only servers that run. One table is printed beside what others have published, and
JSON written with the revision.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.bench import clip
from benchmarks.measure import OURS, STOCK, AtLeast, Point, Row, Summary
from vllm_tts_cache.testing.server import SpeechClient, data_url

NUM_CLIENTS = (1, 4, 16, 64)
CLIP_SECONDS = 6.0
REF_TEXT = "The lantern by the harbour burned until the tide had turned."
_TEXT = "Number {:05d}."  # a second or two
VOICE = "harness"
TIMEOUT_SECONDS = 3_600.0
_ROOT = Path(__file__).parents[1]

INLINE, IN_CONTEXT, X_VECTOR = "clip in each request", "voice", "voice as x-vector"
# Way -> the harness's dataset, and what each request's body has beside its text.
WAYS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    INLINE: ("seed-tts", {}),
    IN_CONTEXT: ("seed-tts-text", {"voice": VOICE, "task_type": "Base"}),
    X_VECTOR: (
        "seed-tts-text",
        {"voice": VOICE, "task_type": "Base", "x_vector_only_mode": True},
    ),
}

# Those in the picture of a run.
_DRAWN = {"requests a second": "per_second", "first audio, p99": "first_ms"}
# Figure -> (the harness's key, unit).
FIGURES = {
    "first audio, p50": ("median_audio_ttfp_ms", "ms"),
    "first audio, p99": ("p99_audio_ttfp_ms", "ms"),
    "real-time factor, p50": ("median_audio_rtf", ""),
    "requests a second": ("request_throughput", "1/s"),
    "seconds of audio a second": ("audio_throughput", ""),
}

# What others have published, each with another card and texts of its own.
ANCHORS = (
    ("Qwen3-TTS 1.7B, 1x H200, vLLM-Omni", "64 clients: p50 724 ms, 97 s/s"),
    ("Qwen3-TTS 1.7B, 2x H20, vLLM-Omni", "1, 8, 64 clients: 71, 269, 1128 ms (mean)"),
    ("Fish S2 Pro, RTX 5090, cached reference", "1 client: 360 ms, RTF 0.48"),
    ("Fish S2 Pro, 1x H20, vLLM-Omni", "64 clients: 900 ms (mean), 5.95 requests/s"),
    ("VoxCPM2, RTX 4090, nano-vllm", "1, 16, 64 clients: 67, 86, 189 ms; RTF 0.1-0.6"),
    ("VoxCPM2 clone, vLLM-Omni's CI", "1, 8 clients: 138, 475 ms; RTF 0.05, 0.12"),
    ("CosyVoice3, 1x H200, SGLang-Omni", "16 clients: 6.24 requests/s, RTF 0.57"),
    ("Higgs Audio v3, 1x H100, SGLang-Omni", "16 clients: 14.7 requests/s, RTF 0.26"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server to ask.

    Attributes:
        url: Without a path.
        tokenizer: Counts the prompts' tokens: a checkpoint's name or directory.
        model: As the server calls it.
        sample_rate_hz: Of its PCM, by which the harness counts seconds of audio.
        max_new_tokens: Of each answer, in each way; the harness's own default.
    """

    url: str
    tokenizer: str
    model: str
    sample_rate_hz: int = 24_000
    max_new_tokens: int = 2_048

    def register(self) -> None:
        """Register the voice, and warm the server up. Raises: httpx.HTTPError."""
        client = SpeechClient(self.url, timeout_seconds=TIMEOUT_SECONDS)
        try:
            client.http.delete(f"/v1/audio/voices/{VOICE}")
            fields = {"ref_text": REF_TEXT, "consent": "bench"}
            client.register(VOICE, clip(CLIP_SECONDS, 0), **fields).raise_for_status()
            client.precompute(VOICE)  # stock has no such route
            new = data_url(clip(CLIP_SECONDS, 1))
            asked = {"model": self.model, "max_new_tokens": self.max_new_tokens}
            for way in ({"ref_audio": new, "ref_text": REF_TEXT}, WAYS[IN_CONTEXT][1]):
                client.speak(_TEXT.format(0), **asked, **way)
        finally:
            client.close()

    def load(
        self, way: str, num_clients: int, num_requests: int, dataset: Path
    ) -> dict[str, float]:
        """Return the harness's figures, by the names of `FIGURES`.

        Raises: RuntimeError: The harness failed, or a request did.
        """
        kind, body = WAYS[way]
        with tempfile.TemporaryDirectory() as directory:
            answer = Path(directory) / "answer.json"
            command = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
            command += ["bench", "serve", "--omni", "--backend", "openai-audio-speech"]
            command += ["--endpoint", "/v1/audio/speech", "--base-url", self.url]
            command += ["--model", self.model, "--tokenizer", self.tokenizer]
            command += ["--dataset-name", kind, "--dataset-path", str(dataset)]
            # A warm-up would send the first clip, and so would the look for readiness.
            command += ["--num-prompts", str(num_requests), "--num-warmups", "0"]
            command += ["--ready-check-timeout-sec", "0"]
            command += ["--omni-request-timeout-s", str(TIMEOUT_SECONDS)]
            command += ["--max-concurrency", str(num_clients)]
            command += ["--percentile-metrics", "audio_ttfp,audio_rtf,e2el"]
            command += ["--metric-percentiles", "50,99", "--save-result"]
            command += ["--result-dir", directory, "--result-filename", answer.name]
            command += ["--output-len", str(self.max_new_tokens)]  # with a clip
            asked = {**body, "max_new_tokens": self.max_new_tokens}
            command += ["--extra-body", json.dumps(asked)]
            rate = {"VLLM_OMNI_BENCH_AUDIO_SAMPLE_RATE": str(self.sample_rate_hz)}
            done = subprocess.run(
                command,
                env={**os.environ, **rate},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
            if done.returncode or not answer.exists():
                raise RuntimeError(f"{way}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
            found = json.loads(answer.read_text())
        if found["completed"] != num_requests:
            errors = sorted({each for each in found.get("errors", ()) if each})
            raise RuntimeError(f"{way}: {found['completed']} answered; {errors[:3]}")
        return {name: float(found[key]) for name, (key, _) in FIGURES.items()}


class Clips:
    """Texts with clips as the harness reads them; no clip is given out twice.

    What a server has heard once it may have cached.

    Args:
        directory: Gets what is given out.
        source: A copy of seed-tts-eval; None for generated clips.
    """

    def __init__(self, directory: Path, source: Path | None = None):
        self._directory = directory
        self._num_taken = 0
        self._lines: Iterator[str] = (
            self._generated() if source is None else _with_clips_of_their_own(source)
        )

    def take(self, number: int) -> Path:
        """Return a directory with so many. Raises: RuntimeError if there are none."""
        lines = list(islice(self._lines, number))
        if len(lines) < number:
            raise RuntimeError(
                f"the dataset has {self._num_taken + len(lines)} different clips, and "
                "more are asked for; give fewer --rounds or --requests-per-client"
            )
        self._num_taken += number
        taken = self._directory / f"to-{self._num_taken}"
        (taken / "en").mkdir(parents=True)
        (taken / "en" / "meta.lst").write_text("\n".join(lines) + "\n")
        return taken

    def _generated(self) -> Iterator[str]:
        for number in count(1):
            path = self._directory / f"{number}.wav"
            path.write_bytes(clip(CLIP_SECONDS, number + 1))
            yield f"{number}|{REF_TEXT}|{path}|{_TEXT.format(number)}"


def _with_clips_of_their_own(source: Path) -> Iterator[str]:
    seen = set()
    for line in (source / "en" / "meta.lst").read_text().splitlines():
        name, said, path, text = line.split("|")[:4]
        if path not in seen:
            seen.add(path)
            yield f"{name}|{said}|{(source / 'en' / path).absolute()}|{text}"


def rows(
    targets: Mapping[str, Target],
    *,
    clips: Clips,
    num_clients: int,
    num_requests: int,
    num_rounds: int,
    ways: Sequence[str] = tuple(WAYS),
) -> list[Row]:
    """Ask the targets in turns, and return the rows of one number of clients.

    Args:
        targets: By name: `OURS`, and `STOCK` beside it or not.
        clips: Each round takes new ones.
        num_clients: How many ask at once.
        num_requests: In all, of each turn.
        num_rounds: Turns of each target.
        ways: Of `WAYS`.
    """
    found: dict[tuple[str, str, str], list[float]] = {}
    for number in range(num_rounds):
        dataset = clips.take(num_requests)
        for name in list(targets)[:: 1 if number % 2 == 0 else -1]:
            for way in ways:
                if name == STOCK and way == X_VECTOR:
                    continue
                seen = targets[name].load(way, num_clients, num_requests, dataset)
                for figure, value in seen.items():
                    found.setdefault((name, way, figure), []).append(value)
    return list(_rows(found, num_clients, ways))


def _rows(
    found: Mapping[tuple[str, str, str], list[float]], clients: int, ways: Sequence[str]
) -> Iterator[Row]:
    for way in ways:
        for figure, (_, unit) in FIGURES.items():
            stock, drawn = found.get((STOCK, way, figure)), _DRAWN.get(figure)
            yield Row(
                f"{figure}, {clients} at once, {way}",
                unit,
                Summary.of(found[OURS, way, figure]),
                None if stock is None else Summary.of(stock),
                no_stock="not asked" if stock is None else "",
                point=Point("clients", f"{way} {drawn}", clients) if drawn else None,
            )
    whole, plain = (
        found.get((OURS, way, "requests a second")) for way in (IN_CONTEXT, X_VECTOR)
    )
    if whole and plain:
        ratios = [a / b for a, b in zip(whole, plain, strict=True)]
        yield Row(
            f"requests a second in context, of those as x-vector, {clients} at once",
            "x",
            Summary.of(ratios),
            target=AtLeast(0.95),
            no_stock="on the same server",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the servers that are named; 0 unless one fails."""
    parser = _parser()
    given = parser.parse_args(arguments)
    targets = {
        name: Target(
            url=url,
            tokenizer=given.tokenizer or given.model,
            model=given.model,
            sample_rate_hz=given.sample_rate,
            max_new_tokens=given.max_new_tokens,
        )
        for name, _, url in (each.partition("=") for each in given.server)
    }
    if OURS not in targets or not targets.keys() <= {OURS, STOCK}:
        parser.error(f"give --server {OURS}=URL, and --server {STOCK}=URL beside it")
    begun = report.Begun.now()
    with tempfile.TemporaryDirectory() as directory:
        clips = Clips(Path(directory), given.dataset)
        for target in targets.values():
            target.register()
        made = [
            row
            for each in given.clients
            for row in rows(
                targets,
                clips=clips,
                num_clients=each,
                num_requests=max(8, each * given.requests_per_client),
                num_rounds=given.rounds,
                ways=given.way or tuple(WAYS),
            )
        ]
    settings = {"model": given.model, "card": given.card, "rounds": given.rounds}
    path = report.save(begun.ended(settings, made), given.out)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(report.rich_table(made))
    console.print("Published by others, for other texts and on other cards:")
    for what, figures in ANCHORS:
        console.print(f"  {what}: {figures}")
    console.print(str(path))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.harness", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--server", action="append", required=True, metavar="ours|stock=URL")
    add("--model", required=True, help="as the servers call it")
    add("--tokenizer", help="a checkpoint whose tokenizer counts tokens (the model)")
    add("--card", default="", help="the accelerator, to be written with the figures")
    add("--sample-rate", type=int, default=24_000, help="of the model's PCM, in Hz")
    add("--max-new-tokens", type=int, default=2_048, help="of each answer")
    add("--dataset", type=Path, help="a copy of seed-tts-eval (generated clips)")
    add("--clients", type=int, nargs="+", default=list(NUM_CLIENTS))
    add("--requests-per-client", type=int, default=4)
    add("--rounds", type=int, default=3)
    add("--way", action="append", choices=list(WAYS), help="may be repeated (all)")
    add("--out", type=Path, default=_ROOT / "benchmarks" / "results", help="for JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
