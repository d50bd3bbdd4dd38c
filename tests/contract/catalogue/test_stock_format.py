"""What stock vLLM-Omni writes, written by stock itself, is what the import reads."""

import asyncio
import io
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from vllm_tts_cache.store.stock_import import import_stock_voices

pytestmark = pytest.mark.sqlite  # it is about files of stock's
RATE = 16000


@pytest.fixture(scope="module")
def serving_class():
    # Here, so that collecting the tests does not wait for the host.
    from vllm_omni.entrypoints.openai.serving_speech import OmniOpenAIServingSpeech

    return OmniOpenAIServingSpeech


@pytest.fixture
def serving(serving_class, tmp_path, monkeypatch):
    """Stock's serving object with its speaker storage only; no engine."""
    monkeypatch.setenv("SPEAKER_SAMPLES_DIR", str(tmp_path))
    serving = object.__new__(serving_class)
    serving._adapter = None
    serving._init_speaker_storage()
    return serving


def upload_file(samples: np.ndarray):
    from starlette.datastructures import Headers, UploadFile

    content = io.BytesIO()
    soundfile.write(content, samples, RATE, format="WAV", subtype="FLOAT")
    content.seek(0)
    headers = Headers({"content-type": "audio/wav"})
    return UploadFile(content, filename="Ana María.wav", headers=headers)


def test_stocks_upload_is_imported_and_deleted_whole(serving, store, tmp_path: Path):
    rng = np.random.default_rng(0)
    stereo = rng.uniform(-0.5, 0.5, (RATE * 2, 2)).astype(np.float32)
    answer = asyncio.run(
        serving.upload_voice(
            upload_file(stereo),
            "consent 7",
            "Ana María",
            ref_text="¿qué tal?",
            speaker_description="warm",
        )
    )
    report = import_stock_voices(store)
    assert (report.imported, report.skipped) == (["Ana María"], [])
    record = store.find("ana maría").record
    assert (record.name, record.consent) == (answer["name"], answer["consent"])
    assert (record.ref_text, record.description) == ("¿qué tal?", "warm")
    assert record.created_at == answer["created_at"]
    assert (record.mime_type, record.file_size) == ("audio/wav", answer["file_size"])
    assert record.original_filename == "Ana María.wav"
    audio = store.read_audio(record.audio_sha256)
    assert (audio.sample_rate_hz, record.seconds) == (RATE, 2.0)
    assert np.array_equal(audio.samples, stereo.mean(axis=1))
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    store.remove_files(store.registrations.delete("Ana María"))
    assert not list(tmp_path.glob("*.safetensors"))


def test_an_embedding_upload_to_stock_is_imported_whole(serving, store):
    values = [0.5, -1.25, 0.1]
    upload = serving.upload_voice_embedding(json.dumps(values), "yes", "Bob")
    answer = asyncio.run(upload)
    report = import_stock_voices(store)
    assert (report.imported, report.skipped) == (["Bob"], [])
    record = store.find("bob").record
    assert store.speaker_embedding(record) == tuple(
        np.asarray(values, np.float32).tolist()
    )
    assert (record.created_at, record.embedding_dim) == (answer["created_at"], 3)
