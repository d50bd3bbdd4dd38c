"""Where the time of a request goes, in every process of a server: ours and stock's.

``python -m benchmarks.profiles`` starts one server after the other, records each with
py-spy while it answers warm and then cold requests, and prints milliseconds of running
time per request. A sample counts for the innermost function that is ours, vLLM-Omni's
or vLLM's; what that calls in a library is in its time. py-spy has to be installed
(``pip install py-spy``) and allowed to read other processes (root, or ptrace_scope 0).
"""

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from benchmarks.bench import Bench, clip
from benchmarks.models import Model, model_called, models
from benchmarks.sides import Side, open_sides
from vllm_tts_cache.testing.client import data_url

SAMPLES_PER_SECOND = 250
NUM_WARM, NUM_COLD, NUM_WARM_UPS = 20, 3, 2
WARM_SECONDS, COLD_SECONDS = 29.99, 10
VOICE = "profiled"
_OWNERS = {"vllm_tts_cache/": "ours", "vllm_omni/": "vLLM-Omni", "vllm/": "vLLM"}
_FRAME = re.compile(r"(?P<function>.+) \((?P<path>[^:()]+)(:\d+)?\)$")
_PROCESS = re.compile(r"process \d+:")
_ROOT = Path(__file__).parents[1]

# process -> (owner, function) -> samples
Profile = dict[str, Counter[tuple[str, str]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile both sides and print a table of each."""
    given = _parser().parse_args(arguments)
    if (py_spy := shutil.which(given.py_spy)) is None:
        print("py-spy is not installed: pip install py-spy", file=sys.stderr)
        return 2
    model = model_called(given.model)
    work = given.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    for side in open_sides(model, work):  # one at a time
        print(f"{side.name}: starting", file=sys.stderr)
        side.start()
        try:
            _measure(side, model, py_spy, given.top)
        finally:
            side.stop()
    return 0


def _measure(side: Side, model: Model, py_spy: str, top: int) -> None:
    bench = Bench(num_rounds=1, is_quick=False, work=Path(), step=print, model=model)
    fields = model.modes[bench.fullest_mode]
    side.register(VOICE, clip(WARM_SECONDS, bench.number()), **fields)
    side.precompute(VOICE)

    def warm() -> None:
        side.speak(bench.short_text(), voice=VOICE)

    def cold() -> None:
        reference = data_url(clip(COLD_SECONDS, bench.number()))
        side.speak(bench.short_text(), ref_audio=reference, **model.inline)

    for what, act, count in (("warm", warm, NUM_WARM), ("cold", cold, NUM_COLD)):
        for _ in range(NUM_WARM_UPS):
            act()
        print(f"{side.name}: {count} {what} requests", file=sys.stderr)
        profile = read(_recorded(py_spy, side.pid, act, count), model.talker)
        _show(f"{side.name}, {what}", profile, count, top)


def _recorded(py_spy: str, pid: int, act: Callable[[], None], count: int) -> str:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "stacks"
        with _recording(py_spy, pid, path):
            for _ in range(count):
                act()
        return path.read_text()


@contextmanager
def _recording(py_spy: str, pid: int, path: Path) -> Iterator[None]:
    command = [py_spy, "record", "--subprocesses", "--nonblocking", "--format", "raw"]
    command += ["--rate", str(SAMPLES_PER_SECOND), "--duration", "unlimited"]
    command += ["--pid", str(pid), "--output", str(path)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    time.sleep(3)  # it reads the symbols of every process first
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def read(stacks: str, talker: str) -> Profile:
    """Add up the samples of py-spy's raw format, outermost frame first.

    ``talker`` names the module of the host that no other process runs.

    A process of its own stands before the frames, behind those that started it.
    """
    found: Profile = defaultdict(Counter)
    roles: dict[str, str] = {}
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        processes = list(takewhile(_PROCESS.match, frames))
        process = ";".join(processes)
        if len(processes) < 2:
            roles[process] = "API"
        elif talker in stack:
            roles[process] = "talker"
        found[process][_owner(frames)] += int(count)
    named: Profile = defaultdict(Counter)
    for process, counts in found.items():
        named[roles.get(process, "other stages")] += counts
    return named


def _owner(frames: Sequence[str]) -> tuple[str, str]:
    for frame in reversed(frames):
        if (match := _FRAME.match(frame)) is None:
            continue
        for prefix, owner in _OWNERS.items():
            if (path := match["path"]).startswith(prefix):
                return owner, f"{match['function']} ({path.removeprefix(prefix)})"
    return "libraries", "event loop, HTTP, threads of libraries"


def _show(title: str, profile: Profile, num_requests: int, top: int) -> None:
    print(f"\n### {title}: ms of running time per request\n")
    print("| process | whose | function | ms |\n| --- | --- | --- | ---: |")
    for process, counts in sorted(profile.items()):
        ms = 1e3 / SAMPLES_PER_SECOND / num_requests
        print(f"| {process} | all | | {ms * counts.total():.1f} |")
        for (owner, function), count in counts.most_common(top):
            print(f"| | {owner} | `{function}` | {ms * count:.1f} |")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profiles", description=__doc__
    )
    names = [model.name for model in models()]
    add = parser.add_argument
    add("--model", choices=names, default=names[0], help="(%(default)s)")
    add("--top", type=int, default=10, help="functions of each process (%(default)s)")
    add("--py-spy", default="py-spy", metavar="PATH", help="(%(default)s)")
    add("--work", type=Path, default=_ROOT / ".work" / "bench")
    return parser


if __name__ == "__main__":
    sys.exit(main())
