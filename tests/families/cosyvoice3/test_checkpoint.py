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
