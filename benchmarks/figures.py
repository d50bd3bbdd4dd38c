"""Write the figures of README and documentation from the committed results.

    python -m benchmarks.figures

No figure is typed: a block between two marks is made from the rows of `RESULTS`, and a
test compares them. The first file that has a row is its source, so a new whole run goes
to the front and the files that it replaces go away.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness import IN_CONTEXT, INLINE
from benchmarks.scenarios.parity import NUM_CLIENTS

ROOT = Path(__file__).parents[1]
RESULTS = (
    "2026-12-01-8fca054584-warm-hit.json",
    "2026-12-01-8fca054584-kv-prefix.json",
    "2026-12-01-8fca054584-start-stop.json",
    "2026-11-30-8fca054584-registration.json",
    "2026-11-30-8fca054584-qwen3-tts.json",
    "2026-12-01-8fca054584-others-1.json",
    "2026-12-01-8fca054584-others-2.json",
    "2026-12-01-8fca054584-field.json",
)
QWEN, DECODER, LONG = "qwen3-tts", "qwen3-tts-decoder", "qwen3-tts-long"
BULK = "qwen3-tts-tiny"
# A difference below this says nothing on these machines.
NOISE = 1.1
_TIMES = {"s", "ms", "us"}
_NO_STATE = (
    "the request comes before the engine was idle, so it makes the decoder's state "
    "itself"
)
# Why a target was missed, by scenario, model (any, if empty) and how the row begins.
WHY = {
    ("warm_hit", "", "CPU time above"): "look-ups, tens of microseconds each",
    ("warm_hit", "", "message to the engine"): "placeholders that vLLM-Omni sends as "
    "numbers",
    ("first_request", QWEN, "after upload"): _NO_STATE,
    ("first_request", QWEN, "after restart"): _NO_STATE,
    ("first_request", "fish-speech", "after"): "the request comes before the engine "
    "was idle, so it prefills the voice itself",
    ("cold_bystander", "cosyvoice3", ""): "its speech tokenizer is one network run",
    ("cold_bystander", "", "the cold request, beside"): "the streams leave too little",
    ("ttfa", "", "warm, 1 at once, ours in"): "each prompt has the reference's codes",
    ("ttfa", "", "warm, 4 at once, ours in"): "each prompt has the reference's codes",
    ("inline_flood", "", "p99 gap"): "the client itself runs on the two cores",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a table.

    Attributes:
        label: What a reader sees.
        what: The row's own name in the results.
        model: Whose row it is; empty where nothing was served.
    """

    label: str
    scenario: str
    what: str
    model: str = QWEN

    @property
    def key(self) -> "Key":
        return self.scenario, self.model, self.what


@dataclass(frozen=True, slots=True)
class Figure:
    """A table, at most one picture, and the command that measures it.

    Attributes:
        note: One paragraph on how to read it.
    """

    title: str
    lines: Sequence[Line]
    command: str
    picture: str = ""
    alternative: str = ""
    note: str = ""


FIGURES = (
    Figure(
        "A voice's first request",
        (
            Line("after an upload, 10 s clip, in context", "first_request",
                 "after upload, in-context, 10 s reference"),
            Line("after a restart", "first_request",
                 "after restart, in-context, 10 s reference"),
            Line("after an upload, Fish Speech", "first_request",
                 "after upload, in-context, 10 s reference", "fish-speech"),
            Line("after an upload, OmniVoice, whose answers come whole",
                 "first_request", "after upload, in-context, 10 s reference",
                 "omnivoice"),
        ),
        "--only first_request",
        note="Time to first audio. Stock encodes in it; the plugin has encoded.",
    ),
    Figure(
        "First audio of a known voice",
        (
            Line("in context, 30 s clip, one request", "ttfa",
                 "warm, 1 at once, in-context, 30 s reference", DECODER),
            Line("the same, 4 at once", "ttfa",
                 "warm, 4 at once, in-context, 30 s reference", DECODER),
            Line("x-vector, 3 s clip, one request", "ttfa",
                 "warm, 1 at once, x-vector, 3 s reference", DECODER),
            Line("prefill of a voice's next text, 30 s clip, Fish Speech", "kv_prefix",
                 "prefill of a voice's second text, 30 s reference", "fish-speech"),
        ),
        "--only ttfa --only kv_prefix",
        note="With a codec decoder of the released size. The prefill on Fish Speech is "
        "of the text alone: the KV of the reference is found.",
    ),
    Figure(
        "Many clients",
        (
            *(Line(f"{what}, {clients} clients, {way}", "field",
                   f"{what}, {clients} at once, {way}", DECODER)
              for what in ("requests a second", "first audio, p50", "first audio, p99")
              for clients in (16, 64) for way in (IN_CONTEXT, INLINE)),
        ),
        "--only field",
        "clients.png",
        "Requests a second and first audio over the number of clients",
        note="By vLLM-Omni's own harness (`vllm bench serve --omni`), with the same "
        "decoder. No clip is sent twice. Each answer has 32 codec frames.",
    ),
    Figure(
        "A voice in context beside the same as x-vector",
        tuple(
            Line(f"requests a second, of those as x-vector, {clients} at once",
                 "parity", "requests a second in context, of those as x-vector, "
                 f"{clients} at once", LONG)
            for clients in NUM_CLIENTS
        ),
        "--only parity",
        note="The same harness and decoder, on one server. Each answer has 128 codec "
        "frames, some ten seconds.",
    ),
    Figure(
        "Streams while new voices arrive",
        (
            Line("p99 gap between chunks of 3 streams, quiet", "cold_bystander",
                 "gap between chunks, quiet, p99"),
            Line("while new 25 s clips arrive", "cold_bystander",
                 "gap between chunks, while cold references arrive, p99"),
            Line("such a request, alone", "cold_bystander",
                 "the cold request, alone"),
            Line("such a request, beside the streams", "cold_bystander",
                 "the cold request, beside 3 streams"),
        ),
        "--only cold_bystander --model qwen3-tts",
        "gaps.png",
        "How long a listener waits for the next chunk, quiet and while clips arrive",
    ),
    Figure(
        "A thousand registrations beside 3 streams",
        (
            Line("all are answered", "bulk_registration",
                 "1,000 voices at once: all registrations answered", BULK),
            Line("all are encoded", "bulk_registration",
                 "1,000 voices at once: all are encoded", BULK),
            Line("p99 gap of the streams, quiet", "bulk_registration",
                 "gap between chunks, quiet, p99", BULK),
            Line("meanwhile", "bulk_registration",
                 "gap between chunks, while voices are registered, p99", BULK),
        ),
        "--only bulk_registration",
        note="An upload is decoded, checked, stored and safe on disk before it is "
        "answered; stock encodes a voice in its first request.",
    ),
    Figure(
        "What a warm request costs the API process",
        (
            Line("CPU time, 3 s clip", "warm_hit",
                 "CPU time before the engine is called, 3 s reference"),
            Line("CPU time, 30 s clip", "warm_hit",
                 "CPU time before the engine is called, 30 s reference"),
            Line("message to the engine, 30 s clip", "warm_hit",
                 "message to the engine, 30 s reference"),
            Line("CPU time, 30 s clip, Fish Speech", "warm_hit",
                 "CPU time before the engine is called, 30 s reference",
                 "fish-speech"),
        ),
        "--only warm_hit",
        "cost.png",
        "CPU time of the API process over the length of the reference",
    ),
    Figure(
        "A catalogue of 100,000 voices",
        (
            Line("look-up of one, p99", "many_voices",
                 "look-up of a voice, p99, 100,000 voices", ""),
            Line("start of the speaker side", "many_voices",
                 "start of the speaker side, 100,000 voices", ""),
            Line("a page of 100 over HTTP", "many_voices",
                 "a page of 100 over HTTP, 100,000 voices", ""),
        ),
        "--only many_voices",
        "scale.png",
        "What a start and a look-up take over the number of encoded voices",
    ),
    Figure(
        "A start, and a stop under load",
        (
            Line("a start, 20 voices encoded", "start_stop",
                 "a start, 20 voices encoded", ""),
            Line("the first request after it, to its end", "start_stop",
                 "the first request after it, to its end", ""),
            Line("SIGTERM beside 3 streams until all has ended", "start_stop",
                 "SIGTERM beside 3 streams until all has ended", ""),
            Line("streams of them that broke off", "start_stop",
                 "streams of them that broke off", ""),
        ),
        "--only start_stop",
    ),
    Figure(
        "What an encoded voice takes",
        (
            *(Line(f"{title}, {seconds} s clip, {where}", "voice_cost",
                   f"{name}: encodings of a {seconds} s clip, {where}", "")
              for name, title in (
                  ("qwen3_tts", "Qwen3-TTS"), ("fish_speech", "Fish Speech"),
                  ("voxcpm2", "VoxCPM2"), ("omnivoice", "OmniVoice"),
                  ("cosyvoice3", "CosyVoice3"), ("higgs_audio_v3", "Higgs Audio v3"),
              )
              for seconds, where in ((10, "in memory"), (30, "on disk"))),
            Line("Qwen3-TTS, any clip, the decoder's state on the card", "voice_cost",
                 "qwen3_tts: the decoder's state of a clip of any length, on the card",
                 ""),
            Line("Fish Speech, 10 s clip, its KV on the card", "voice_cost",
                 "fish_speech: KV of a 10 s clip, on the card", ""),
        ),
        "--only voice_cost",
        note="Beside the clip itself. Stock keeps no file. Sizes are those of the "
        "released checkpoints, on a card in bfloat16; KV without its transcript, and "
        "only while the prefix cache has room for it. Higgs Audio v3 keeps KV as well, "
        "and its talker's released size is not known here; other families keep nothing "
        "on the card.",
    ),
)  # fmt: skip
README = (
    Line("first audio of the first request after an upload, 10 s clip",
         "first_request", "after upload, in-context, 10 s reference"),
    Line("first audio of a known voice, 30 s clip, 4 at once, decoder of the released "
         "size", "ttfa", "warm, 4 at once, in-context, 30 s reference", DECODER),
    Line("p99 gap between chunks of three streams while new 25 s clips arrive",
         "cold_bystander", "gap between chunks, while cold references arrive, p99"),
    Line("CPU time of the API process per request, 30 s clip", "warm_hit",
         "CPU time before the engine is called, 30 s reference"),
)  # fmt: skip

Key = tuple[str, str, str]


@cache
def _run(name: str) -> Mapping[str, Any]:
    path = ROOT / "benchmarks" / "results" / name
    found: Mapping[str, Any] = json.loads(path.read_text("utf-8"))
    return found


@cache
def _rows() -> Mapping[Key, tuple[Mapping[str, Any], str]]:
    """Return each row with the file that it is of, by scenario, model and name."""
    rows: dict[Key, tuple[Mapping[str, Any], str]] = {}
    for name in RESULTS:
        for row in _run(name)["rows"]:
            key = row["scenario"], row["model"], row["what"]
            rows.setdefault(key, (row, name))
    return rows


def shown(value: float, unit: str) -> str:
    """Return a figure as people read it: two digits, in seconds from one on."""
    if unit == "bytes":
        for size, name in ((1e6, "MB"), (1e3, "kB")):
            if value >= size:
                return f"{_two_digits(value / size)} {name}"
    if unit == "ms" and value >= 1e3:
        value, unit = value / 1e3, "s"
    return f"{_two_digits(value)} {unit}".strip()


def _two_digits(value: float) -> str:
    if abs(value) >= 10 or not value:
        return f"{value:,.0f}"
    return f"{float(f'{value:.2g}'):g}"


def _table(lines: Sequence[Line]) -> Iterator[str]:
    yield "| | stock | plugin | ratio |"
    yield "| --- | ---: | ---: | ---: |"
    for line in lines:
        row, _ = _rows()[line.key]
        yield f"| {line.label} | {_cells(row)} |"


def _cells(row: Mapping[str, Any]) -> str:
    stock = row["reference"] if row["versus"] in (None, "stock") else None
    cells = "" if stock is None else shown(stock["median"], row["unit"])
    ratio = "" if stock is None or row["ratio"] is None else f"{row['ratio']:.2g}"
    return f"{cells} | {shown(row['ours']['median'], row['unit'])} | {ratio}"


def _sources(keys: Sequence[Key]) -> str:
    found = dict.fromkeys(_machine(_rows()[key][1]) for key in keys)
    return f"Measured: {'; '.join(found)}."


def _machine(name: str) -> str:
    run = _run(name)
    cpu = re.sub(r"\((R|TM)\)|Processor| +$", "", run["machine"]["cpu"]).strip()
    dirty = " (dirty)" if run["dirty"] else ""
    return f"{run['began'][:10]}, revision {run['revision'][:7]}{dirty}, {cpu}"


def _figure(number: int, figure: Figure) -> Iterator[str]:
    yield f"### {number}. {figure.title}"
    if figure.note:
        yield from _wrapped(figure.note)
    yield ""
    yield from _table(figure.lines)
    yield ""
    if figure.picture:
        yield f"![{figure.alternative}](plots/{figure.picture})"
        yield ""
    keys = [line.key for line in figure.lines]
    yield from _wrapped(f"`python -m benchmarks {figure.command}`. {_sources(keys)}")
    yield ""


def _wrapped(text: str, width: int = 110) -> Iterator[str]:
    line = ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = word
        else:
            line = f"{line} {word}".strip()
    yield line


def _missed() -> Iterator[str]:
    yield "| scenario | what | target | plugin | why |"
    yield "| --- | --- | ---: | ---: | --- |"
    for (scenario, model, what), (row, _) in _rows().items():
        if row["met"] is not False:
            continue
        is_ratio = row["target"].endswith("x")
        value = f"{row['ratio']:.2f}x" if is_ratio else _in_unit(row)
        if row["target"].startswith("<= +"):
            more = row["ours"]["median"] - row["reference"]["median"]
            value = f"+{_two_digits(more)} {row['unit']}"
        reasons = (
            why
            for (its, of_model, start), why in WHY.items()
            if its == scenario and of_model in ("", model) and what.startswith(start)
        )
        why = next(reasons, "")
        target = row["target"] if is_ratio else f"{row['target']} {row['unit']}"
        name = f"{scenario}, {model}".strip(", ")
        yield f"| {name} | {what} | {target.strip()} | {value} | {why} |"


def _in_unit(row: Mapping[str, Any]) -> str:
    return f"{_two_digits(row['ours']['median'])} {row['unit']}".strip()


def _slower() -> Iterator[str]:
    yield "| scenario | what | stock | plugin | ratio |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for (scenario, model, what), (row, _) in _rows().items():
        is_time = row["unit"] in _TIMES and row["versus"] == "stock"
        if not is_time or not row["ratio"] or row["ratio"] < NOISE:
            continue
        difference = row["ours"]["median"] - row["reference"]["median"]
        spread = max(row["ours"]["iqr"], row["reference"]["iqr"])
        if difference <= spread:
            continue
        name = f"{scenario}, {model}".strip(", ")
        yield f"| {name} | {what} | {_cells(row)} |"


def _measured() -> Iterator[Figure]:
    """Return the figures without the lines that no result has yet."""
    for figure in FIGURES:
        if lines := [line for line in figure.lines if line.key in _rows()]:
            yield replace(figure, lines=lines)


def blocks() -> dict[str, str]:
    """Return the text of each block, by its name."""
    figures = [
        line
        for number, figure in enumerate(_measured(), start=1)
        for line in _figure(number, figure)
    ]
    return {
        "readme": "\n".join(_table(README)),
        "figures": "\n".join(figures).rstrip(),
        "slower": "\n".join(_slower()),
        "missed": "\n".join(_missed()),
    }


PAGES = {
    "README.md": ("readme",),
    "docs/performance.md": ("figures", "slower", "missed"),
}


def filled(text: str, names: Sequence[str]) -> str:
    """Return a page with its blocks as the results say.

    Raises: ValueError: The page lacks a block's marks.
    """
    made = blocks()
    for name in names:
        begin, end = f"<!-- figures: {name} -->\n", "<!-- end of figures -->"
        if begin not in text:
            raise ValueError(f"no mark {begin!r}")
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = f"{head}{begin}{made[name]}\n{end}{tail}"
    return text


def main() -> int:
    """Write the blocks into their pages."""
    for page, names in PAGES.items():
        path = ROOT / page
        path.write_text(filled(path.read_text("utf-8"), names), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
