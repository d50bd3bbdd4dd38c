"""On the CPU, all but CUDA's own: streams, graphs, its allocator's figures."""

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import checks, determinism, precision, replay
from benchmarks.gpu_check.clips import noise
from benchmarks.gpu_check.findings import Finding, Verdict
from benchmarks.gpu_check.memory import MIB, Need, TensorBytes, measure_need
from tests.torch_threads import on_threads
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.families.networks.slices import CausalPass, in_slices
from vllm_tts_cache.speaker.family import default_family, trial_families
from vllm_tts_cache.speaker.precision import exact_float32
from vllm_tts_cache.speaker.reference import MemoryNeed
from vllm_tts_cache.store.encoding import Encoding

CPU = torch.device("cpu")


class Envelope:
    """An encoder: one convolution, in slices of a second."""

    name = "envelope"
    fingerprint = "f" * 64
    need = MemoryNeed(bytes_per_second=2 * MIB)

    def __init__(self):
        self.conv = torch.nn.Conv1d(1, 1, 4, stride=2, bias=False)
        torch.nn.init.constant_(self.conv.weight, 0.25)
        self.num_encodes = 0

    def encode(self, audio):
        self.num_encodes += 1
        samples = torch.tensor(audio.samples).view(1, 1, -1)
        with exact_float32(CPU):
            found = in_slices(self.layers, samples, num_samples=44_100)
        return Encoding({"x": found[0].numpy()})

    def layers(self, x, causal: CausalPass):
        return causal.convolve(self.conv, x)


class WithHistory(Envelope):
    """Rounds otherwise from its second encode on, as a script that a GPU fuses."""

    def encode(self, audio):
        found = super().encode(audio)["x"]
        return Encoding({"x": found if self.num_encodes < 2 else found * 1.0001})


class WithSeams(Envelope):
    """Knows nothing of what came before a slice."""

    def layers(self, x, _causal):
        return super().layers(x, CausalPass())


class WithShortFloats(Envelope):
    """Does as the process is told."""

    def encode(self, audio):
        short = torch.backends.fp32_precision == "tf32"
        found = super().encode(audio)["x"]
        return Encoding({"x": found.astype("f2").astype("f4") if short else found})


class WithAnAppetite(Envelope):
    """Takes 8 MiB more than it says."""

    def encode(self, audio):
        torch.zeros(16 * MIB, dtype=torch.uint8).sum()
        return super().encode(audio)


@pytest.fixture(autouse=True)
def one_thread():
    with on_threads(1):
        yield


def subject(encoder, on_cpu=None):
    return checks.Subject(
        family="toy",
        encoder=encoder,
        on_cpu=on_cpu or Envelope(),
        device=CPU,
        lengths=[1.0, 2.0, 4.0],
    )


def verdicts(check, encoder):
    return [finding.verdict.value for finding in check(subject(encoder))]


@pytest.mark.parametrize(
    "check, encoder, expected",
    [
        (checks.history, Envelope, ["ok", "ok", "ok"]),
        (checks.history, WithHistory, ["fails", "fails", "ok"]),
        (checks.history, WithSeams, ["ok", "ok", "fails"]),
        (checks.exactness, Envelope, ["ok", "ok", "ok"]),
        (checks.exactness, WithShortFloats, ["ok", "fails", "ok"]),
        (checks.need, Envelope, ["ok"]),
        (checks.need, WithAnAppetite, ["fails"]),
        (checks.gaps, Envelope, []),
    ],
)
def test_each_check_passes_what_is_right_and_finds_what_is_wrong(
    check, encoder, expected
):
    assert verdicts(check, encoder()) == expected


def test_one_slice_is_one_slice_inside_and_several_after():
    seen = []
    encoder = Envelope()
    encoder.layers = lambda x, causal: (
        seen.append(x.shape[-1]) or causal.convolve(encoder.conv, x)
    )
    with determinism.one_slice():
        encoder.encode(noise(3.0))
    encoder.encode(noise(3.0))
    assert seen == [132_300, 44_100, 44_100, 44_100]


# -------- float32


def test_flags_are_asked_for_tf32_and_put_back():
    before = torch.backends.fp32_precision
    with precision.tf32_asked_for():
        assert torch.backends.fp32_precision == "tf32"
    assert torch.backends.fp32_precision == before


def test_a_short_mantissa_is_not_exact():
    assert precision.are_exact(precision.precisions(CPU))
    assert not precision.are_exact({"convolutions": "tf32"})


@pytest.mark.parametrize(
    "change, is_near",
    [
        (lambda a: a, True),
        (lambda a: a * np.float32(1 + 1e-6), True),
        (lambda a: a * np.float32(1.001), False),  # as TF32
        (lambda a: a[:-1], False),
    ],
)
def test_real_numbers_are_near_if_they_round_as_float32(change, is_near):
    expected = Encoding({"x": np.arange(1.0, 9.0, dtype=np.float32)})
    found = Encoding({"x": change(expected["x"])})
    far = precision.distances(found, expected)
    assert precision.are_near(found, far) is is_near


@pytest.mark.parametrize("num_other, is_near", [(0, True), (10, True), (30, False)])
def test_of_codes_a_share_may_be_others(num_other, is_near):
    expected = Encoding({"codes": np.zeros(1_000, np.int16)})
    codes = np.zeros(1_000, np.int16)
    codes[:num_other] = 7
    found = Encoding({"codes": codes})
    far = precision.distances(found, expected)
    assert far == {"codes": num_other / 1_000}
    assert precision.are_near(found, far) is is_near


# -------- memory


def test_a_line_goes_through_the_peaks():
    found = Need.through({3.0: 130, 10.0: 200, 30.0: 400})
    assert found.bytes_per_second == pytest.approx(10)
    assert found.fixed_bytes == pytest.approx(100)
    with pytest.raises(ValueError, match="two lengths"):
        Need.through({3.0: 130})


def test_a_need_is_measured_on_the_cpu():
    """Samples, what they were copied from, and half as many results."""
    found = measure_need(Envelope(), CPU, [2.0, 4.0])
    assert 4 * 44_100 <= found.bytes_per_second <= 5 * 4 * 44_100


# -------- gaps


def test_replays_are_timed_for_as_long_as_it_encodes():
    gaps = replay.gaps_beside(lambda: time.sleep(0.002), lambda: time.sleep(0.05), 2)
    assert 5 <= gaps.num_replays <= 50
    assert 2.0 <= gaps.p50_ms <= gaps.p99_ms <= gaps.max_ms


def test_a_replay_that_is_held_up_shows_in_the_longest():
    gaps = replay.Gaps.of([0.001] * 99 + [0.1])
    assert (gaps.p50_ms, gaps.max_ms) == (1.0, 100.0)


def test_an_encode_that_fails_is_told():
    def fail():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        replay.gaps_beside(lambda: None, fail)


class Stream:
    """torch's stream, where there is no GPU."""

    made: ClassVar[list] = []

    def __init__(self, _device, priority):
        self.made.append(priority)

    @staticmethod
    def priority_range():
        return 0, -5

    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass


class Graph:
    """torch's graph: a replay takes a millisecond."""

    def replay(self):
        time.sleep(0.001)


def test_a_graph_is_replayed_alone_and_beside_encodes_of_each_priority(monkeypatch):
    """The calls in their order, and no more than that: the GPU is a stand-in."""
    cuda = replay.torch.cuda
    monkeypatch.setattr(cuda, "Stream", Stream)
    monkeypatch.setattr(cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(cuda, "set_device", lambda _: None)
    monkeypatch.setattr(cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(cuda, "graph", lambda _graph, **_: nullcontext())
    monkeypatch.setattr(replay, "_NUM_LAYERS", 2)
    monkeypatch.setattr(replay, "_WIDTH", 8)
    monkeypatch.setattr(replay, "ALONE_SECONDS", 0.05)
    Stream.made.clear()
    nap = partial(time.sleep, 0.02)
    found = replay.cuda_gaps(nap, nap, CPU)
    assert [name.partition(" an encode at ")[2] for name in found] == [
        "",
        "low priority",
        "high priority",
        "low",
        "",
    ]
    assert all(gaps.num_replays > 3 and gaps.p50_ms >= 1 for gaps in found.values())
    of_replays_and_encodes = [0, 0, 0, 0, -5, -5, 0]
    assert Stream.made == of_replays_and_encodes


def test_a_decode_like_step_runs():
    assert torch.isfinite(replay.decode_step(CPU)()).all()


# -------- the command


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to check")
def test_without_a_gpu_it_says_why_it_checks_nothing(capsys, tmp_path):
    assert command.main(["--out", str(tmp_path / "out.json")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("skipped: torch ")
    assert "--device cpu" in shown
    assert not (tmp_path / "out.json").exists()


def test_the_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "python -m benchmarks.gpu_check --encoders real --out gpu.json" in shown


def test_on_a_cpu_it_checks_every_encoder_of_a_family_and_writes_a_file(
    capsys, tmp_path
):
    out = tmp_path / "out.json"
    family = default_family().short_name
    given = ["--device", "cpu", "--encoders", "tiny", "--family", family]
    given += ["--seconds", "1", "3", "--out", str(out)]
    assert command.main(given) == 0
    shown = capsys.readouterr().out
    assert "a clip after clips of other lengths" in " ".join(shown.split())
    written = json.loads(out.read_text())
    assert written["computed_by"]["device"] == "cpu"
    found = written["findings"]
    assert {one["encoder"] for one in found} == {"speaker", "codec"}
    assert {one["verdict"] for one in found} == {"ok"}
    needs = [one["values"] for one in found if one["check"] == "memory of an encode"]
    assert all(need["measured"]["peaks"] for need in needs)


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on(monkeypatch):
    class Broken(Envelope):
        def encode(self, _audio):
            raise EncodeError("out of memory [sic]")

    loaded = [subject(Broken()), subject(Envelope())]
    monkeypatch.setattr(command, "_subjects", lambda *_: loaded)
    found = command.run([(None, None)], CPU, [])
    broken = [one for one in found if one.verdict is Verdict.FAILS]
    assert [one.check for one in broken] == ["history", "exactness", "need"]
    assert all("out of memory" in one.found for one in broken)
    assert len(found) == len(broken) + 7 + 1, "the other's, and what came before"


def test_a_check_that_fails_is_status_1(monkeypatch, capsys):
    failed = Finding(
        family="toy", encoder="x", check="c", found="as [sic]", verdict=Verdict.FAILS
    )
    monkeypatch.setattr(command, "run", lambda *_: [failed])
    monkeypatch.setattr(command, "trial_families", dict)
    assert command.main(["--device", "cpu"]) == 1
    shown = capsys.readouterr().out
    assert "fails" in shown
    assert "as [sic]" in shown


def test_it_checks_encoders_of_the_hosts_networks_without_vllm(tmp_path):
    """vLLM is built for one torch, which is not always that of the card's machine."""
    (tmp_path / "vllm").mkdir()
    broken = 'raise ImportError("libcudart.so: cannot open shared object file")'
    (tmp_path / "vllm" / "__init__.py").write_text(broken)
    out = tmp_path / "out.json"
    given = ["--device", "cpu", "--encoders", "tiny", "--seconds", "1", "3"]
    run = [sys.executable, "-m", "benchmarks.gpu_check", *given, "--out", str(out)]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run(run, check=True, timeout=600, env=env)
    findings = json.loads(out.read_text())["findings"]
    expected = {family.name for family in trial_families().values()}
    assert {each["family"] for each in findings} == expected


# -------- the counting of a CPU's memory


def counted(act):
    with TensorBytes() as bytes_:
        kept = act()
    return bytes_, kept


def test_what_is_there_at_a_time_is_counted_and_what_is_gone_is_not():
    def act():
        big = torch.zeros(1_000)
        del big
        return torch.zeros(10)

    found, kept = counted(act)
    assert (found.peak, found.now) == (4_000, 40)
    assert kept.numel() == 10


def test_views_and_results_in_place_take_nothing_more():
    found, _ = counted(lambda: torch.zeros(4, 8).view(32).add_(1.0)[3:])
    assert (found.peak, found.now) == (128, 128)


def test_what_came_from_outside_is_not_counted():
    weight = torch.zeros(1_000)
    found, _ = counted(lambda: weight.mul_(2.0).view(10, 100))
    assert (found.peak, found.now) == (0, 0)
    assert weight.sum() == 0


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_operations_that_are_made_of_others_show_what_these_take(mode):
    """In inference mode torch hands them over whole."""
    x = torch.zeros(1, 4, 100)
    conv = torch.nn.Conv1d(4, 4, 1, padding="same")

    def act():
        with mode():
            return torch.nn.functional.layer_norm(conv(x), (100,))

    found, kept = counted(act)
    assert found.peak >= 2 * kept.numel() * 4
