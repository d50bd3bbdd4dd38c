"""What is done with a clip before it is encoded takes no more than its encoder says."""

import tracemalloc
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu_check.clips import noise
from benchmarks.gpu_check.memory import TensorBytes
from vllm_tts_cache.families.omnivoice import preparation
from vllm_tts_cache.families.omnivoice.encoders import load_reference_encoders
from vllm_tts_cache.speaker.reference_encoder import MemoryNeed


@pytest.fixture
def encoder(omnivoice_checkpoint):
    loaded = load_reference_encoders(omnivoice_checkpoint, torch.device("cpu"))
    return loaded["codec"]


def prepared_in(clip, encoder):
    """Bytes of numpy's arrays and of torch's, each at their fullest."""
    samples_per_frame = encoder.tokenizer.sizes.samples_per_frame
    with TensorBytes():  # what is imported and kept at the first time is not a clip's
        preparation.prepare(clip, samples_per_frame)
    tracemalloc.start()
    try:
        with TensorBytes() as counted:
            preparation.prepare(clip, samples_per_frame)
        return tracemalloc.get_traced_memory()[1] + counted.peak
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("seconds", [1.0, 3.9, 10.0])
def test_a_need_in_main_memory_has_the_preparation_in_it(encoder, seconds):
    without_network = replace(encoder.tokenizer, need=MemoryNeed())
    need = replace(encoder, tokenizer=without_network).need
    assert prepared_in(noise(seconds), encoder) <= need.of(seconds)
    assert encoder.need.of(seconds) >= need.of(seconds)


def test_a_need_of_a_gpus_memory_is_the_networks(encoder):
    on_gpu = replace(encoder.tokenizer, device=torch.device("cuda"))
    assert replace(encoder, tokenizer=on_gpu).need == encoder.tokenizer.need
