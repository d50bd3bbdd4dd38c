"""The second stage says the same again, whatever it has said in between.

The host draws new noise for each chunk, so stock does not; the official code has one
noise for all.
"""

from typing import Any

import numpy as np
import pytest
import torch
from vllm_omni.model_executor.models.cosyvoice3 import cosyvoice3
from vllm_omni.model_executor.models.cosyvoice3.code2wav_core import cfm
from vllm_omni.model_executor.models.output_templates import OmniOutput

from tests.families.cosyvoice3.case import DECODER_STAGE
from tests.real_talker import loaded
from vllm_tts_cache.families.cosyvoice3.prompt import MODE, TEXT_IDS
from vllm_tts_cache.families.cosyvoice3.worker import MAX_FRAMES, NUM_MELS
from vllm_tts_cache.speaker.reference import FIELD

PROMPT = {FIELD: ["0" * 64, "registered"], MODE: "zero_shot", TEXT_IDS: [[1], [2]]}


class TensorRT:
    """Stands for the setting that the host reads before it looks for TensorRT."""

    def __init__(self):
        self.now, self.asked = "at the start", []

    def is_wanted(self):
        self.asked.append(self.now)
        return False


@pytest.fixture(scope="module")
def tensorrt():
    tensorrt = TensorRT()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cosyvoice3, "_cosyvoice3_trt_enabled", tensorrt.is_wanted)
        yield tensorrt


@pytest.fixture(scope="module")
def decoder(own_checkpoint, tmp_path_factory, tensorrt):
    directory = tmp_path_factory.mktemp("decoder")
    with loaded(own_checkpoint, directory, **DECODER_STAGE) as model:
        torch.set_num_threads(1)
        tensorrt.now = "in a step"
        yield model


def told(seed, num_tokens=50):
    """What stage 0 hands on of a voice."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 6_561, (1, num_tokens)).astype(np.int32)
    mel = rng.normal(-5, 2, (1, 2 * num_tokens, 80)).astype(np.float32)
    vector = rng.normal(0, 1, (1, 192)).astype(np.float32)
    arrays = {"speech_token": codes, "speech_feat": mel, "embedding": vector}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def codes_of(seed, length=40):
    rng = np.random.default_rng([seed, 1])
    return torch.from_numpy(rng.integers(0, 6_561, length))


@torch.inference_mode()
def speak(decoder, *requests):
    """The samples of each request of a step: ``(embed, codes)``, or with ``meta``."""
    embeds, codes, *metas = zip(*requests, strict=True)
    metas = metas[0] if metas else ({},) * len(requests)
    ids = torch.cat(codes)
    output = decoder(
        input_ids=ids,
        positions=torch.arange(len(ids)),
        model_intermediate_buffer=[
            # What the prompt told the talker may come along.
            {"embed": embed, **PROMPT, **({"meta": meta} if meta else {})}
            for embed, meta in zip(embeds, metas, strict=True)
        ],
        seq_token_counts=[len(each) for each in codes],
    )
    assert isinstance(output, OmniOutput)
    outputs: Any = output.multimodal_outputs
    return [audio.clone() for audio in outputs["audio"]]


def test_tensorrts_file_is_looked_for_at_the_start_and_in_no_step(decoder, tensorrt):
    """Where there is none the host fetches it, and in its first step."""
    speak(decoder, (told(1), codes_of(1)))
    assert tensorrt.asked == ["at the start"]


def test_one_request_sounds_the_same_twice_alone_and_beside_another(decoder):
    request, other = (told(1), codes_of(1)), (told(2), codes_of(2))
    (alone,) = speak(decoder, request)
    assert len(alone) > 20_000 and alone.std() > 0.003 and alone.abs().max() < 0.99
    (again,) = speak(decoder, request)
    first, second = speak(decoder, request, other)
    swapped = speak(decoder, other, request)
    assert torch.equal(alone, again) and torch.equal(alone, first)
    assert torch.equal(alone, swapped[1]) and torch.equal(second, swapped[0])
    assert not torch.equal(first, second)


def stream(decoder, name, voice, codes, beside=None):
    """The samples of a request in two chunks, as the first stage sends them."""
    parts = []
    for begin, end, is_last in ((0, 28, False), (25, len(codes), True)):
        meta = {
            "req_id": [name],
            "left_context_size": begin,
            "stream_finished": torch.tensor(is_last),
        }
        request = (voice, codes[:end], meta)
        if beside is not None:
            speak(decoder, beside)
        parts += speak(decoder, request)
    return torch.cat(parts)


def test_a_stream_sounds_the_same_whatever_is_spoken_between_its_chunks(decoder):
    voice, codes = told(1), codes_of(1, 60)
    alone = stream(decoder, "alone", voice, codes)
    assert len(alone) > 40_000
    other = told(2), codes_of(2)
    assert torch.equal(alone, stream(decoder, "again", voice, codes))
    assert torch.equal(alone, stream(decoder, "beside", voice, codes, other))


def test_the_noise_is_the_official_codes(decoder):
    torch.manual_seed(0)
    expected = torch.randn([1, 80, 50 * 300])
    noise = decoder.code2wav.flow_model.decoder.noise
    assert noise.shape == (1, NUM_MELS, MAX_FRAMES)
    assert torch.equal(noise, expected)


def flow_inputs(num_frames=60):
    torch.manual_seed(3)
    return {
        "mu": torch.randn(1, 80, num_frames),
        "mask": torch.ones(1, 1, num_frames),
        "n_timesteps": 4,
        "spks": torch.randn(1, 80),
        "cond": torch.randn(1, 80, num_frames),
        "streaming": True,
    }


def test_from_the_same_noise_it_is_the_hosts(decoder, monkeypatch):
    ours = decoder.code2wav.flow_model.decoder
    given = flow_inputs()
    expected_noise = ours.noise[:, :, : given["mu"].size(2)].clone()
    monkeypatch.setattr(cfm.torch, "randn", lambda *_, **__: expected_noise.clone())
    hosts, _ = cfm.CausalConditionalCFM.forward(ours, **given)
    mine, _ = ours(**given)
    assert torch.equal(mine, hosts)
