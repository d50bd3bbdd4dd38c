"""CosyVoice3's reference encoders, and nothing but what they read of a checkpoint."""

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import load, save

from tests.families.clip import noisy_tone as audio
from vllm_tts_cache.errors import CheckpointError, EncodeError
from vllm_tts_cache.families.cosyvoice3 import encoders as ours
from vllm_tts_cache.families.cosyvoice3.encoders import load_reference_encoders

CPU = torch.device("cpu")
FILES = ("speech_tokenizer_v3.onnx", "campplus.onnx")


def fingerprints(directory):
    loaded = load_reference_encoders(directory, CPU)
    return {name: encoder.fingerprint for name, encoder in loaded.items()}


@pytest.fixture
def copy(own_checkpoint, tmp_path):
    for name in FILES:
        shutil.copy(own_checkpoint / name, tmp_path)
    return tmp_path


def test_a_clip_of_more_than_30_seconds_is_refused(encoders):
    """The released tokenizer would make something else of it."""
    for encoder in encoders.values():
        with pytest.raises(EncodeError, match="30 s at most"):
            encoder.encode(audio(480_001))


def threads():
    return {path.name for path in Path("/proc/self/task").iterdir()}


@pytest.mark.parametrize("policy", [os.SCHED_OTHER, os.SCHED_IDLE])
def test_no_thread_is_started_so_the_encode_threads_ways_hold(own_checkpoint, policy):
    """A pool of the runtime's own would compute beside decoding, and not give way."""
    started, own = [], set()

    def work():
        own.add(str(threading.get_native_id()))
        os.sched_setscheduler(threading.get_native_id(), policy, os.sched_param(0))
        torch.set_num_threads(1)
        loaded = load_reference_encoders(own_checkpoint, CPU)
        before = threads()
        for encoder in loaded.values():
            encoder.encode(audio(32_000))
        started.extend(threads() - before)

    before = threads()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert started == []
    # The system may still list a thread that Python has joined.
    assert threads() - own <= before


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_in_the_fingerprint_of_its_own_encoder_only(copy, name):
    before = fingerprints(copy)
    content = (copy / name).read_bytes()
    # ONNX files take unknown fields: this one means nothing to the network.
    (copy / name).write_bytes(content + b"\xfa\x3f\x01x")
    try:
        after = fingerprints(copy)
    except CheckpointError:
        pytest.skip("this runtime takes no unknown fields")
    changed = {encoder for encoder in before if before[encoder] != after[encoder]}
    assert changed == {"speech_tokens" if "tokenizer" in name else "speaker"}


@pytest.mark.parametrize("name", FILES)
def test_weights_beside_a_file_are_refused(copy, name):
    """No fingerprint would know of a change in them."""
    beside = {"save_as_external_data": True, "location": "weights.bin"}
    save(load(copy / name), copy / name, **beside)
    assert (copy / "weights.bin").stat().st_size > 0
    with pytest.raises(CheckpointError, match=f"{name}: .*another file"):
        load_reference_encoders(copy, CPU)


def test_a_network_of_other_inputs_is_refused(copy):
    shutil.copy(copy / "campplus.onnx", copy / "speech_tokenizer_v3.onnx")
    with pytest.raises(CheckpointError, match="1 inputs"):
        load_reference_encoders(copy, CPU)


@pytest.mark.parametrize(
    ("name", "spoiled", "says"),
    [
        ("speech_tokens", np.array([[5, 6_561]], np.int32), "no codes"),
        ("speech_tokens", np.array([[-1, 7]], np.int32), "no codes"),
        ("speech_tokens", np.zeros((1, 0), np.int32), "no codes"),
        ("speaker", np.zeros((1, 512)), "not a vector"),
        ("speaker", np.full((1, 192), np.nan), "not a vector"),
    ],
)
def test_what_is_no_code_is_the_clips_error(encoders, monkeypatch, name, spoiled, says):
    monkeypatch.setattr(ours.OnnxNetwork, "__call__", lambda *_: spoiled)
    with pytest.raises(EncodeError, match=says):
        encoders[name].encode(audio(16_000))


def test_no_network_is_downloaded_and_no_other_is_opened(own_checkpoint, monkeypatch):
    """The host fetches another tokenizer, of a gigabyte, at its first request."""
    import huggingface_hub

    def refuse(*_, **__):
        raise AssertionError("it fetches something")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    monkeypatch.setitem(__import__("sys").modules, "s3tokenizer", None)
    loaded = load_reference_encoders(own_checkpoint, CPU)
    for encoder in loaded.values():
        encoder.encode(audio(16_000))
