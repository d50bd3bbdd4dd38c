"""How a talker gets its speakers, with a family and a checkpoint of no network."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import fake_hub
from tests.in_process_workers import SpectrumEncoder, clip, prepare, store_clip
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import CheckpointError, EncodeError
from vllm_tts_cache.model_executor import loading
from vllm_tts_cache.model_executor.failed_requests import FailedRequests
from vllm_tts_cache.model_executor.speakers import ALONE, Ranks
from vllm_tts_cache.model_executor.talker import CachedTalker
from vllm_tts_cache.speaker.precision import computed_on
from vllm_tts_cache.store.opening import open_store

NAMES = ("speaker", "codec")
ACCELERATOR = "meta"  # torch has it everywhere


class LoadedFamily:
    """A family of `WarmEncoder`; notes with what, and on which thread, it is loaded."""

    side_files = ("config.json",)
    encodes_on_cpu = False

    def __init__(self):
        self.refusal: str | None = None
        self.error: Exception | None = None
        self.loads = []
        self.encoders = {}

    def clones(self, model_dir):
        assert (model_dir / "config.json").is_file()
        return self.refusal

    def part(self, name):
        assert name == "encoders_part"
        return self._load

    def _load(self, model_dir, device):
        thread = threading.current_thread()
        self.loads.append((model_dir, device, torch.get_default_dtype(), thread))
        if self.error is not None:
            raise self.error
        self.encoders = {name: WarmEncoder(name) for name in NAMES}
        return self.encoders


class WarmEncoder(SpectrumEncoder):
    """Notes with which default dtype it encodes, and fails if its class is told to."""

    failure: Exception | None = None

    def __init__(self, name):
        super().__init__(name)
        self.default_dtypes = []

    def encode(self, audio):
        self.default_dtypes.append(torch.get_default_dtype())
        if self.failure is not None:
            raise self.failure
        return super().encode(audio)


@pytest.fixture
def loaded():
    return LoadedFamily()


@pytest.fixture
def talker(loaded, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEAKER_SAMPLES_DIR", str(tmp_path / "samples"))
    monkeypatch.setattr(loading, "tensor_parallel_ranks", lambda: ALONE)
    talker: Any = object.__new__(CachedTalker)
    talker.tts_cache_family = loaded
    before, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    torch.set_default_dtype(torch.bfloat16)  # as the host loads a model
    yield talker
    torch.set_default_dtype(before)
    torch.set_float32_matmul_precision(precision)
    if talker.tts_cache_speakers is not None:
        talker.tts_cache_speakers.close()


def vllm_config(directory: Path, device=ACCELERATOR, dtype=torch.bfloat16):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    return fake_hub.vllm_config(str(directory), dtype=dtype, device=device)


def encode_threads():
    return [t for t in threading.enumerate() if t.name == "tts-cache-encode"]


def test_an_accelerators_encode_thread_warms_up(talker, loaded, tmp_path, plugin_log):
    talker._load_speakers(vllm_config(tmp_path / "model"))
    (load,) = loaded.loads
    model_dir, device, dtype, thread = load
    assert (model_dir, device) == (tmp_path / "model", torch.device(ACCELERATOR))
    assert dtype is torch.float32, "as every encode finds it later"
    assert torch.get_default_dtype() is torch.bfloat16
    assert [thread] == encode_threads()
    for encoder in loaded.encoders.values():
        assert encoder.thread is thread
        assert encoder.default_dtypes == [torch.float32]
    assert talker.tts_cache_speakers.stats().encodes == {"speaker": 0, "codec": 0}
    assert list((tmp_path / "samples").rglob("*.safetensors")) == []
    assert "Warmed the reference encoders up in" in plugin_log.text


def test_encoders_on_the_cpu_compute_beside_any_talker(talker, loaded, tmp_path):
    """No GPU memory is asked for, the thread is nice, the CPU is named as origin."""
    loaded.encodes_on_cpu = True
    talker._load_speakers(vllm_config(tmp_path / "model"))
    (load,) = loaded.loads
    assert load[1] == torch.device("cpu")
    assert [e.num_calls for e in loaded.encoders.values()] == [0, 0], "no warm-up"
    store = open_store(Settings(samples_dir=tmp_path / "samples"))
    prepare(talker.tts_cache_speakers, ref := store_clip(store, clip()), NAMES)
    found = talker.tts_cache_speakers.prompt(ref, NAMES)
    here = computed_on(torch.device("cpu"))
    assert [each.origin for each in found.values()] == [here, here]
    store.close()


def test_a_model_that_did_not_warm_up_speaks(talker, tmp_path, plugin_log, monkeypatch):
    monkeypatch.setattr(WarmEncoder, "failure", EncodeError("CUDA out of memory"))
    talker._load_speakers(vllm_config(tmp_path / "model"))
    assert talker.tts_cache_speakers is not None
    assert "failed: CUDA out of memory" in plugin_log.text


def test_no_encode_runs_on_beside_vllms_measuring(talker, tmp_path, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(loading, "_WARM_UP_TIMEOUT_SECONDS", 0.01)
    monkeypatch.setattr(WarmEncoder, "encode", lambda *_: gate.wait(30))
    threading.Timer(1.0, gate.set).start()
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        talker._load_speakers(vllm_config(tmp_path / "model"))
    assert talker.tts_cache_speakers is None


def test_encoders_that_cannot_be_loaded_leave_nothing_behind(talker, loaded, tmp_path):
    loaded.error = CheckpointError("codec.pth", "not a torch file")
    with pytest.raises(CheckpointError, match="not a torch file"):
        talker._load_speakers(vllm_config(tmp_path / "model"))
    assert talker.tts_cache_speakers is None
    assert encode_threads() == []
    assert torch.get_default_dtype() is torch.bfloat16
    loaded.error = None
    talker._load_speakers(vllm_config(tmp_path / "model"))
    assert talker.tts_cache_speakers is not None


def test_weights_that_are_loaded_again_change_no_speakers(talker, loaded, tmp_path):
    """Training sends weights to a running model, a few tensors a call."""
    config = vllm_config(tmp_path / "model", "cpu")
    talker._load_speakers(config)
    speakers, threads = talker.tts_cache_speakers, encode_threads()
    store = open_store(Settings(samples_dir=tmp_path / "samples"))
    prepare(speakers, ref := store_clip(store, clip()), NAMES)
    for _ in range(3):
        talker._load_speakers(config)
    assert talker.tts_cache_speakers is speakers
    assert len(loaded.loads) == 1
    assert encode_threads() == threads
    assert speakers.prompt(ref, NAMES).keys() == set(NAMES)
    store.close()


def test_a_checkpoint_without_clones_has_a_reason(talker, loaded, tmp_path):
    loaded.refusal = "It has presets only."
    talker._load_speakers(vllm_config(tmp_path / "model"))
    assert talker.tts_cache_refusal == "It has presets only."
    assert talker.tts_cache_speakers is None
    assert loaded.loads == []
    loaded.refusal = None
    talker._load_speakers(vllm_config(tmp_path / "other"))
    assert talker.tts_cache_refusal is None
    loaded.refusal = "It has presets only."
    talker._load_speakers(vllm_config(tmp_path / "model"))
    assert talker.tts_cache_speakers is None
    assert encode_threads() == []


def test_a_rank_of_several_that_is_out_of_memory_does_not_go_on_alone(talker, tmp_path):
    talker._load_speakers(vllm_config(tmp_path / "model"))
    talker._failed_requests = FailedRequests(7)
    error = torch.OutOfMemoryError("CUDA out of memory")
    talker._fail({"request_id": "x"}, error)
    assert talker._has_failed({"request_id": "x"})
    talker.tts_cache_speakers.ranks = Ranks("a group")
    talker._fail({"request_id": "y"}, EncodeError("it is not stored"))
    with pytest.raises(torch.OutOfMemoryError):
        talker._fail({"request_id": "z"}, error)


@pytest.mark.parametrize(
    ("dtype", "held"), [(torch.bfloat16, "highest"), (torch.float32, "high")]
)
def test_a_shorter_float32_is_given_up_early(talker, tmp_path, dtype, held, plugin_log):
    """Unless the model itself computes in float32, and was to be fast."""
    torch.set_float32_matmul_precision("high")
    talker._load_speakers(vllm_config(tmp_path / "model", "cpu", dtype))
    assert torch.get_float32_matmul_precision() == held
    assert ("not in tf32" in plugin_log.text) is (held == "highest")
