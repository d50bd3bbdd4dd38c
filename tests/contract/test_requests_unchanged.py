"""Requests of models that we do not serve reach the host's adapters unchanged.

What an adapter's ``build`` is given, beside what it is given on the host's own serving
class, where the same voice was uploaded to it: after its validation, in which the host
looks voices up. Over the host's own list of adapters.
"""

import io
from types import SimpleNamespace

import pytest
from starlette.datastructures import Headers, UploadFile
from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest
from vllm_omni.entrypoints.openai.serving_speech import OmniOpenAIServingSpeech

from tests.contract.test_other_models import OTHERS, glm
from tests.speaking import data_url, wav
from tests.speech_server import running

SPOKEN = "What is said in it."
REQUESTS = {
    "text": {},
    "voice": {"voice": "Ann"},
    "voice in other letters": {"voice": "ANN"},
    "voice and transcript": {"voice": "Ann", "ref_text": "Other words."},
    "inline": {"ref_audio": data_url(pitch_hz=330.0), "ref_text": SPOKEN},
    "parameters": {
        "voice": "Ann",
        "language": "English",
        "seed": 5,
        "extra_params": {"temperature": 0.5},
    },
}


@pytest.fixture
async def ours(default_checkpoint, tmp_path, monkeypatch):
    made = glm(default_checkpoint, tmp_path / "ours", monkeypatch)
    async with running(made) as server:
        yield server


@pytest.fixture
def stock(ours, tmp_path, monkeypatch):
    """The host's own serving class on the same engine."""
    monkeypatch.setenv("SPEAKER_SAMPLES_DIR", str(tmp_path / "stock"))
    models = SimpleNamespace(is_base_model=lambda name: True, lora_requests={})
    handler = OmniOpenAIServingSpeech(ours.engine, models, request_logger=None)
    handler._media_connector = ours.handler._media_connector
    yield handler
    handler.shutdown()


class Given(Exception):
    """Ends a request where its prompt would be built."""


async def given(handler, name, fields):
    """What the model's adapter builds from; the refusal if it comes to none."""
    handler._tts_model_type = name
    adapter, seen = handler._get_tts_adapter(), []

    async def build(request, params, has_inline_ref_audio):
        # Some look the clip up only here.
        clip = request.voice and handler._get_uploaded_audio_data(request.voice)
        seen.append((request.model_dump(), params, has_inline_ref_audio, clip))
        raise Given

    adapter.build = build
    request = OpenAICreateSpeechRequest(input="Hello.", model="m", **fields)
    try:
        await handler._prepare_speech_generation(request)
    except Given:
        return seen
    except ValueError as exc:
        return str(exc)


@pytest.mark.parametrize("fields", REQUESTS.values(), ids=REQUESTS)
async def test_each_adapter_is_given_what_it_is_given_on_stock(ours, stock, fields):
    headers = Headers({"content-type": "audio/wav"})
    upload = UploadFile(io.BytesIO(wav()), filename="clip.wav", headers=headers)
    await stock.upload_voice(upload, "yes", "Ann", ref_text=SPOKEN)
    assert (await ours.register("Ann", wav(), ref_text=SPOKEN)).status_code == 200
    made = {name: await given(ours.handler, name, fields) for name in OTHERS}
    expected = {name: await given(stock, name, fields) for name in OTHERS}
    assert made == expected
    spoken = [told for told in made.values() if isinstance(told, list)]
    assert spoken and all(len(told) == 1 for told in spoken)
    if "voice" in fields:
        assert all(clip is not None for [(*_, clip)] in spoken)
