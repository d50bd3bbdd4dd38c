"""Batch jobs against workers in this process, with an encoder that is no network."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.audio_clips import sndfile_bytes, voiced
from tests.in_process_workers import (
    SpectrumEncoder,
    SyncInProcessEngine,
    wait_until_idle,
    worker_speakers,
    worker_with,
)
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.errors import (
    ConfigError,
    EncodeError,
    EncodeTimeoutError,
    InvalidAudioError,
    ObjectStoreError,
)
from vllm_tts_cache.offline import OfflineSpeakers

RATE_HZ = 8_000
CLIP_BYTES = 4 * RATE_HZ  # as it is counted: float32


class Job:
    def __init__(self, checkpoint: Path, directory: Path):
        self.directory = directory
        model = directory / "model"
        model.mkdir()
        shutil.copy(checkpoint / "config.json", model)
        self.encoder = SpectrumEncoder("speaker")
        settings, encoders = load_settings(), [self.encoder, SpectrumEncoder("codec")]
        names = "inline_audio_max_bytes", "max_waiting_inline"
        limits = {name: getattr(settings, name) for name in names}
        self.worker = worker_speakers(settings.samples_dir, encoders, **limits)
        self.engine = SyncInProcessEngine(worker_with(self.worker), model=str(model))
        self.speakers = OfflineSpeakers(self.engine)

    def clips(self, num, first=0):
        return [self.clip(number) for number in range(first, first + num)]

    def clip(self, number):
        path = self.directory / f"clip-{number}.wav"
        samples = voiced(RATE_HZ, 1.0, pitch_hz=100.0 + number)
        path.write_bytes(sndfile_bytes(samples, RATE_HZ, subtype="FLOAT"))
        return path

    def prepare(self, clips):
        """Prepare, and let the worker finish with what it does after an encode."""
        prepared = self.speakers.prepare(clips)
        wait_until_idle(self.worker)
        return prepared

    def num_encodes(self):
        return self.worker.stats().encodes["speaker"]

    def close(self):
        self.encoder.gate.set()
        self.worker.close()
        self.speakers._store.close()


@pytest.fixture
def samples_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEAKER_SAMPLES_DIR", str(tmp_path / "samples"))
    return tmp_path / "samples"


@pytest.fixture
def job(default_checkpoint, samples_dir, tmp_path):
    job = Job(default_checkpoint, tmp_path)
    yield job
    job.close()


def remove(samples_dir, *, audio=True, encodings=True):
    for path in (samples_dir / "store").rglob("*.safetensors"):
        if audio if path.stem == "audio" else encodings:
            path.unlink()


def test_clips_are_prepared_once_each_whatever_they_are_called(job):
    first, other = job.clips(2)
    twin = job.directory / "twin.wav"
    twin.write_bytes(first.read_bytes())
    prepared = job.speakers.prepare([first, other, twin])
    assert prepared[0].ref == prepared[2].ref != prepared[1].ref
    assert [speaker.clip for speaker in prepared] == [first, other, twin]
    assert prepared[0].num_samples == prepared[0].sample_rate_hz == RATE_HZ
    assert job.num_encodes() == 2
    assert job.worker.stats().encodes["codec"] == 0, "no transcript: an x-vector"


@pytest.fixture
def bounded(request, monkeypatch):
    """A setting that bounds what is prepared at once; before the job begins."""
    monkeypatch.setenv(*request.param)


@pytest.mark.parametrize(
    "bounded",
    [
        ("SPEAKER_CACHE_INLINE_AUDIO_MAX_BYTES", str(5 * CLIP_BYTES)),
        ("SPEAKER_CACHE_INLINE_AUDIO_MAX_BYTES", str(CLIP_BYTES)),
        ("SPEAKER_CACHE_MAX_WAITING_INLINE", "3"),
    ],
    indirect=True,
)
def test_more_clips_than_are_kept_or_may_wait_are_prepared_in_windows(bounded, job):
    """A10: stored all at once, the first were evicted before they were encoded."""
    prepared = job.speakers.prepare(job.clips(12))
    assert len({speaker.ref.audio_sha256 for speaker in prepared}) == 12
    assert (job.num_encodes(), job.worker.stats().refused) == (12, 0)


def test_audio_that_is_evicted_too_early_is_stored_again(job, samples_dir, monkeypatch):
    ensure = job.speakers._ensure

    def evicted_first(speakers):
        remove(samples_dir)
        ensure(speakers)

    monkeypatch.setattr(job.speakers, "_ensure", evicted_first)
    job.speakers.prepare(job.clips(2))
    assert job.num_encodes() == 2


def test_audio_that_is_always_evicted_is_reported(job, samples_dir, monkeypatch):
    keep = job.speakers._store.store_inline

    def evicted_at_once(audio):
        keep(audio)
        remove(samples_dir)

    monkeypatch.setattr(job.speakers._store, "store_inline", evicted_at_once)
    clip = job.clip(0)
    with pytest.raises(EncodeError, match=rf"{clip} was evicted .*INLINE_AUDIO_MAX"):
        job.speakers.prepare([clip])


def test_an_encoding_that_went_too_early_is_made_again(job, samples_dir, monkeypatch):
    [prepared] = job.prepare([job.clip(0)])
    monkeypatch.setattr(job.speakers._prompts, "prompt", lambda *_: {"made": True})
    assert job.speakers.prompt(prepared, "Hello.") == {"made": True}
    assert job.num_encodes() == 1
    remove(samples_dir)
    job.worker.delete([prepared.ref.audio_sha256])
    assert job.speakers.prompt(prepared, "Hello.") == {"made": True}
    assert job.num_encodes() == 2


def test_a_clip_that_is_gone_with_its_encoding_is_named(job, samples_dir):
    [prepared] = job.prepare([job.clip(0)])
    remove(samples_dir)
    job.worker.delete([prepared.ref.audio_sha256])
    prepared.clip.unlink()
    with pytest.raises(InvalidAudioError, match=str(prepared.clip)):
        job.speakers.prompt(prepared, "Hello.")


def test_an_encoding_comes_from_the_store_and_else_from_a_worker(job, samples_dir):
    [prepared] = job.prepare([job.clip(0)])
    key, stored = job.speakers.encoding(prepared.ref, "speaker")
    assert "tts_cache_encoding" not in job.engine.calls
    remove(samples_dir)
    other_key, of_worker = job.speakers.encoding(prepared.ref, "speaker")
    assert job.engine.calls[-1] == "tts_cache_encoding"
    assert key == other_key
    np.testing.assert_array_equal(stored["spectrum"], of_worker["spectrum"])


def test_a_worker_that_finishes_nothing_ends_the_waiting(
    default_checkpoint, samples_dir, tmp_path, monkeypatch
):
    monkeypatch.setenv("SPEAKER_CACHE_ENCODE_TIMEOUT_SECONDS", "0.2")
    job = Job(default_checkpoint, tmp_path)
    job.encoder.gate.clear()
    with pytest.raises(EncodeTimeoutError, match=r"1 encodings .* within 0\.2 s"):
        job.speakers.prepare([job.clip(0)])
    job.close()


def test_transcripts_and_clips_match_and_each_voice_is_of_one_clip(job):
    with pytest.raises(ConfigError, match="2 clips have 1 transcripts"):
        job.speakers.prepare(job.clips(2), ["one"])
    with pytest.raises(ConfigError, match=r"clip-0\.wav.*is one clip"):
        job.speakers.prepare([job.clips(2)])


@pytest.mark.parametrize("error", [EncodeError("enough"), ObjectStoreError("s3", "")])
def test_a_clip_that_failed_fails_no_other(job, error):
    """Its failure was told again with each call, and taken for that of the next."""
    job.encoder.errors = [error]
    with pytest.raises(EncodeError):
        job.speakers.prepare([job.clip(0)])
    job.speakers.prepare(job.clips(2))
    assert job.num_encodes() == 2
