"""A clone's prefill never waits for the device: on the real talker, and a fake device.

A ``meta`` tensor has a shape and no numbers, so whatever would wait for one (``item``,
``cpu``, a branch on a value) raises; and each copy that goes there is recorded, with
whether it was from pinned memory and waited.
"""

import copy

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_tts_cache.families.qwen3_tts.family import CODEC, SPEAKER
from vllm_tts_cache.speaker.reference import FIELD
from vllm_tts_cache.store.encoding import Encoding

META = torch.device("meta")
NUM_FRAMES = 9
copies = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default


class Recorded(TorchDispatchMode):
    """Notes copies to the device: number of values, waits, from pinned memory."""

    def __init__(self, pinned):
        super().__init__()
        self.pinned = pinned
        self.copies = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in copies and made.device == META:
            source = args[1] if func is copies[1] else args[0]
            if source.device.type == "cpu":
                waits = not (kwargs or {}).get("non_blocking", False)
                is_pinned = source.data_ptr() in self.pinned
                self.copies.append((source.numel(), waits, is_pinned))
        return made


@pytest.fixture
def recorded(monkeypatch):
    """As where there is an accelerator: memory can be pinned."""
    pinned: list = []

    def pin_memory(tensor):
        copied = tensor.clone()
        pinned.append(copied)  # alive, so that no other has its address
        return copied

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)

    class Addresses:
        def __contains__(self, address):
            return any(tensor.data_ptr() == address for tensor in pinned)

    with Recorded(Addresses()) as mode:
        yield mode


@pytest.fixture(scope="module")
def talker(talker):
    """The talker on the fake device, as the second runner has it."""
    talker._use_v2_model_runner = True
    talker.to(META)
    # It was given the buffer before that moved.
    talker._prompt_builder._tts_pad_embed_buffer = talker._tts_pad_embed
    return talker


@pytest.fixture
def information(talker, monkeypatch):
    """A clone's, with its text cut into tokens as the runner does for a batch."""
    size = talker.config.speaker_encoder_config.enc_dim
    random = np.random.default_rng(0)
    found = {
        SPEAKER: Encoding({"speaker_embedding": random.random(size, np.float32)}),
        CODEC: Encoding({"codes": random.integers(0, 9, (NUM_FRAMES, 16), np.int16)}),
    }
    monkeypatch.setattr(
        type(talker.tts_cache_speakers),
        "prompt",
        lambda _self, _ref, names: {name: found[name] for name in names},
    )
    info = {
        FIELD: ["0" * 64, "registered"],
        "task_type": ["Base"],
        "text": ["Hello there."],
        "ref_text": ["What is said."],
        "x_vector_only_mode": [False],
        "ref_code_length": [NUM_FRAMES],
    }
    return copy.deepcopy(info)


@torch.no_grad()  # and not inference mode, in which torch shows no copy
def test_a_prefill_copies_its_encodings_pinned_and_waits_for_nothing(
    talker, information, recorded
):
    buffers = {"request": information}
    talker.preprocess_batch(
        req_ids=["request"], model_intermediate_buffer=buffers, device=META
    )
    recorded.copies.clear()
    ids = torch.ones(40, dtype=torch.long, device=META)
    _, rows, update = talker.preprocess(
        ids, None, **buffers["request"], request_id="request", _omni_is_prefill=True
    )
    assert "request" not in talker._failed_requests
    assert rows.device == update["codes"]["ref"].device == META
    assert update["codes"]["ref"].shape == (NUM_FRAMES, 16)
    assert (16 * NUM_FRAMES, False, True) in recorded.copies
    assert [num for num, waits, pinned in recorded.copies if waits or not pinned] == []
    assert len(recorded.copies) == 2
