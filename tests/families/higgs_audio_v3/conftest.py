"""The tiny checkpoint of the family, and its API process."""

import numpy as np
import pytest

from tests.in_process_workers import SpectrumEncoder
from tests.speech_server import Server, running
from vllm_tts_cache.families.higgs_audio_v3.family import FAMILY
from vllm_tts_cache.families.networks.higgs_tokenizer.frames import num_clip_frames
from vllm_tts_cache.store.encoding import Encoding


@pytest.fixture(scope="session")
def higgs_audio_v3_checkpoint(tiny):
    """Do not write to it."""
    return tiny(FAMILY)


class CodesEncoder(SpectrumEncoder):
    """``codes`` of the audio's length."""

    def encode(self, audio):
        super().encode(audio)
        number = num_clip_frames(audio.num_samples, audio.sample_rate_hz)
        return Encoding({"codes": np.zeros((number, 8), np.int16)})


@pytest.fixture
async def server(higgs_audio_v3_checkpoint, tmp_path, monkeypatch):
    server = Server(
        higgs_audio_v3_checkpoint,
        tmp_path,
        monkeypatch,
        encoders=[CodesEncoder("codec")],
        family=FAMILY,
    )
    async with running(server) as server:
        yield server
