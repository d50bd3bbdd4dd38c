"""The tiny checkpoint: what the host reads of it, and what it refuses to run."""

import pickle
import shutil

import pytest
import torch
from vllm_omni.model_executor.models.cosyvoice3.cosyvoice3_code2wav import (
    CosyVoice3Code2Wav,
)

from tests.families.cosyvoice3.case import CASE
from tests.real_talker import loaded_talker
from vllm_tts_cache.families.cosyvoice3.tiny import sizes
from vllm_tts_cache.families.cosyvoice3.tiny.networks import write_speaker_network
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

CPU = torch.device("cpu")


class Marks:
    """Runs code where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (self.path.touch, ())


@pytest.mark.parametrize("name", ["flow.pt", "hift.pt", "llm.pt"])
def test_weights_that_would_run_code_are_refused(own_checkpoint, tmp_path, name):
    """The host leaves that to torch, which did not refuse them before 2.6."""
    copy = shutil.copytree(own_checkpoint, tmp_path / "copy")
    torch.save({"weight": Marks(tmp_path / "ran")}, copy / name)
    with pytest.raises(pickle.UnpicklingError):
        if name == "llm.pt":
            with loaded_talker(CASE, copy, tmp_path, **CASE.loading):
                pass
        else:
            decoder = CosyVoice3Code2Wav(CASE.hf_config(copy))
            decoder.load_weights(str(copy), CPU)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_real_stand_ins_have_as_many_weights_as_the_released_networks(tmp_path):
    weights = WeightBuilder(0)
    write_speaker_network(tmp_path / "campplus.onnx", weights, sizes.SPEAKER["real"])
    num_weights = sum(t.numel() for t in weights.tensors.values())
    assert num_weights == pytest.approx(7.2e6, rel=0.15)
    size = sizes.TOKENIZER["real"]
    blocks = 2 * size.num_blocks * size.width * size.inner
    halving = 3 * size.width * (sizes.TOKENIZER_MELS + size.width)
    assert blocks + halving == pytest.approx(242e6, rel=0.05)
