"""What stock does with a clone on Higgs Audio v3, and ours does not: side by side.

The prompts of both are built in one process, by the host's serving class.
"""

import msgspec
import pytest
import torch
import transformers
from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest
from vllm_omni.entrypoints.openai.tts_adapters.higgs_audio_v3 import (
    HiggsAudioV3Adapter,
)
from vllm_omni.model_executor.models.higgs_audio_v2 import higgs_audio_v2_tokenizer
from vllm_omni.model_executor.models.higgs_audio_v3 import higgs_audio_v3_tokenizer

from tests.families.higgs_audio_v3.test_requests import SPOKEN, ann
from tests.speaking import data_url
from vllm_tts_cache.families.networks.higgs_tokenizer.frames import num_clip_frames

TEXTS = ("Hello.", "Something else.")
SECONDS = 29.5


class FetchedError(Exception):
    """A tokenizer would be downloaded, or loaded, now."""


@pytest.fixture
def nothing_to_fetch(monkeypatch):
    def fetch():
        raise FetchedError

    monkeypatch.setattr(higgs_audio_v2_tokenizer, "_ENCODER_CACHE", None)
    monkeypatch.setattr(higgs_audio_v2_tokenizer, "_load_audio_tokenizer", fetch)


async def stocks_prompt(server, text=TEXTS[0], seconds=1.5):
    adapter = HiggsAudioV3Adapter(server.handler._get_tts_adapter().ctx)
    request = OpenAICreateSpeechRequest(
        input=text, model="m", ref_audio=data_url(seconds=seconds), ref_text=SPOKEN
    )
    return (await adapter.build(request, [], True)).prompt


async def test_the_api_process_encodes_nothing_and_fetches_nothing(
    server, nothing_to_fetch
):
    await ann(server, ref_text=SPOKEN)
    inline = {"ref_audio": data_url(pitch_hz=330.0), "ref_text": SPOKEN}
    for fields in ({"voice": "Ann"}, inline):
        answer = await server.speak(**fields)
        assert answer.status_code == 200, answer.text
    with pytest.raises(FetchedError):
        await stocks_prompt(server)


async def test_text_without_a_voice_loads_no_second_tokenizer(server, monkeypatch):
    """Stock loads it on the event loop, for hundreds of milliseconds."""
    await ann(server, ref_text=SPOKEN)
    assert (await server.speak(voice="Ann")).status_code == 200

    def load(*_, **__):
        raise FetchedError

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)
    assert (await server.speak()).status_code == 200
    with pytest.raises(FetchedError):
        await stocks_prompt(server)


async def test_a_voices_texts_share_a_prefix_and_send_no_codes(server, monkeypatch):
    def encode(wav, sr):
        return torch.zeros(num_clip_frames(len(wav), sr), 8, dtype=torch.long)

    monkeypatch.setattr(higgs_audio_v3_tokenizer, "encode_reference_audio", encode)
    stocks = [await stocks_prompt(server, text, SECONDS) for text in TEXTS]
    await ann(server, seconds=SECONDS, ref_text=SPOKEN)
    for text in TEXTS:
        assert (await server.speak(voice="Ann", input=text)).status_code == 200
    ours = server.engine.prompts
    assert (
        len({len(prompt["prompt_token_ids"]) for prompt in (stocks[0], ours[0])}) == 1
    )
    # The host's salt is of the text as well, so its prefix cache finds nothing.
    assert [len({p["cache_salt"] for p in each}) for each in (stocks, ours)] == [2, 1]
    codes = stocks[0]["additional_information"]["audio_input_ids"]
    assert 20 * len(msgspec.msgpack.encode(ours[0])) < codes.nbytes
