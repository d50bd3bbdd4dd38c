"""The kernel is asked how nice a thread is; nothing here measures a time."""

import os
import sys
import threading

import pytest
import torch

from tests.encoding_samples import make_encoding
from vllm_tts_cache.model_executor.encode_device import EncodeDevice
from vllm_tts_cache.speaker.precision import NICE

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux has nice threads"
)

WAIT = 60.0


def own_nice():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def nice_while_encoding(device):
    """How nice the encode thread was in each of two jobs."""
    seen = []

    def encode():
        seen.append(own_nice())
        return make_encoding()

    def run():
        for _ in range(2):
            on_device.run(encode, 0)

    on_device = EncodeDevice(torch.device(device))
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(WAIT)
    return seen


def test_only_the_thread_that_encodes_on_a_cpu_is_nicer_than_decoding():
    before = own_nice()
    assert nice_while_encoding("cpu") == [max(NICE, before)] * 2
    assert nice_while_encoding("meta") == [before] * 2  # an accelerator's
    assert own_nice() == before
