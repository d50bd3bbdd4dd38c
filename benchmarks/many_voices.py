"""Storage directories that look as if many voices had been registered."""

import hashlib
from pathlib import Path

import numpy as np

from benchmarks.clips import SAMPLE_RATE_HZ, TRANSCRIPT
from vllm_tts_cache.catalogue import rows
from vllm_tts_cache.catalogue.record import NewSpeaker
from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.catalogue.sqlite import Database
from vllm_tts_cache.config import Settings
from vllm_tts_cache.store.audio_wiring import open_audio

STOCK_CLIP_SECONDS = 3


def write_rows(path: Path, num_speakers: int) -> None:
    """A registry of so many speakers; one transaction, since each commit syncs."""
    database = Database(path)
    with database.write() as db:
        for number in range(num_speakers):
            rows.replace(db, speaker(number))
    database.close()


def write_ours(directory: Path, num_speakers: int) -> None:
    """A registry, and an empty file for each audio: a start looks at names only."""
    directory.mkdir(parents=True)
    write_rows(directory / "registry.sqlite3", num_speakers)
    audio = open_audio(Settings(samples_dir=directory))
    for number in range(num_speakers):
        path = audio._layout.path(_sha256(number), Segment.REGISTERED)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def write_stock(directory: Path, num_speakers: int) -> None:
    """Stock's own layout: one safetensors file a voice, metadata in its header."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True)
    samples = np.zeros(STOCK_CLIP_SECONDS * SAMPLE_RATE_HZ, np.float32)
    for number in range(num_speakers):
        created = 1_700_000_000 + number
        header = {
            "name": speaker_name(number),
            "voice_name_lower": speaker_name(number).lower(),
            "consent": "consent-1",
            "created_at": str(created),
            "mime_type": "audio/wav",
            "original_filename": "clip.wav",
            "file_size": str(samples.nbytes),
            "ref_text": TRANSCRIPT,
            "sample_rate": str(SAMPLE_RATE_HZ),
            "embedding_source": "audio",
        }
        name = f"{speaker_name(number).lower().replace(' ', '_')}_{created}"
        path = directory / f"{name}.safetensors"
        save_file({"audio": samples}, path, metadata=header)


def speaker(number: int) -> NewSpeaker:
    return NewSpeaker(
        name=speaker_name(number),
        consent="consent-1",
        ref_text="What is said in the reference.",
        audio_sha256=_sha256(number),
        num_samples=10 * SAMPLE_RATE_HZ,
        sample_rate_hz=SAMPLE_RATE_HZ,
    )


def speaker_name(number: int) -> str:
    return f"Speaker {number:06d}"


def _sha256(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()
