"""What an encoder says that it takes of a device's memory is what it takes.

Counted on a CPU, where a test can: the tensors that are there at a time. A GPU's
workspaces come on top, and `EncodeDevice` leaves a margin for them.
"""

import tracemalloc
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu_check.clips import noise
from benchmarks.gpu_check.memory import MIB, TensorBytes, peak_bytes
from tests.families.cases import cases, unlike_cases
from vllm_tts_cache.families.networks.higgs_tokenizer.encoder import network_need
from vllm_tts_cache.families.omnivoice import preparation
from vllm_tts_cache.families.omnivoice.encoders import PREPARATION_BYTES_PER_SECOND
from vllm_tts_cache.speaker.reference import MemoryNeed

CPU = torch.device("cpu")


@unlike_cases
@pytest.mark.parametrize("seconds", [1.0, 1.9, 3.9, 10.0])
@pytest.mark.usefixtures("one_thread")
def test_no_encode_takes_more_than_its_encoder_says(case, encoders_of, seconds):
    """The tiny ones: a need is that of the released size, and as much as it is wide."""
    clip = noise(seconds)
    for encoder in encoders_of(case).values():
        measured = peak_bytes(CPU, lambda encoder=encoder: encoder.encode(clip))
        declared = encoder.need.of(seconds)
        assert measured <= declared, f"{encoder.name}: {measured / MIB:.1f} MiB"
        if seconds == 10.0:
            assert declared <= 10 * measured, f"{encoder.name} says far too much"


@pytest.fixture
def encoder(encoders_of):
    """OmniVoice's, which makes a clip louder and cuts it before it encodes."""
    (case,) = (case for case in cases() if case.name == "omnivoice")
    return encoders_of(case)["codec"]


def prepared_in(clip, encoder):
    """Bytes of numpy's arrays and of torch's, each at their fullest."""
    samples_per_frame = encoder.sizes.samples_per_frame
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
    need = MemoryNeed(bytes_per_second=PREPARATION_BYTES_PER_SECOND)
    assert prepared_in(noise(seconds), encoder) <= need.of(seconds)
    assert encoder.need.of(seconds) >= need.of(seconds)


def test_a_need_of_a_gpus_memory_is_the_networks(encoder):
    on_gpu = replace(encoder, device=torch.device("cuda"))
    assert on_gpu.need == network_need(encoder.sizes)
