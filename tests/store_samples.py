"""Stores, clips and voices for tests; one number always gives the same clip."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.encoding_samples import make_encoding
from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.records import NewSpeaker, SpeakerRecord
from vllm_tts_cache.catalogue.schema import speaker, stored_file
from vllm_tts_cache.config import Settings
from vllm_tts_cache.store.encoding import EncodingKey
from vllm_tts_cache.store.opening import open_store
from vllm_tts_cache.store.registering import Registered
from vllm_tts_cache.store.speaker_store import SpeakerStore

RATE = 24_000


def catalogue_url_of(directory: Path) -> str:
    """The catalogue of a directory's voices; tests on PostgreSQL have another one."""
    return ""


def store_url_of(directory: Path) -> str:
    """Where a directory's files are; tests with a bucket have another one."""
    return ""


def settings_of(directory: Path, **settings) -> Settings:
    urls = {"catalogue_url": catalogue_url_of(directory)}
    given: dict[str, Any] = urls | {"store_url": store_url_of(directory)} | settings
    return Settings(samples_dir=directory, **given)


def opened(directory: Path, *, import_stock: bool = True, **settings) -> SpeakerStore:
    return open_store(settings_of(directory, **settings), import_stock=import_stock)


def clip(number: int = 0, num_samples: int = 2_000) -> DecodedAudio:
    """Audio that no FLAC of 16 or 24 bits holds: its file is a bit longer than it."""
    samples = np.random.default_rng(number).uniform(-0.5, 0.5, num_samples)
    return DecodedAudio(ReferenceAudio.of(samples.astype(np.float32), RATE), ())


def long_clip(number: int = 0) -> DecodedAudio:
    """As `clip`, and as long as an upload has to be."""
    return clip(number, 30_000)


def address(number: int = 0) -> str:
    return clip(number).audio.audio_sha256


def path_of(store: SpeakerStore, number: int = 0, artifact: str = "audio") -> Path:
    return Path(store.files.file_name(address(number), artifact))


def voice(name: str, audio: DecodedAudio | None, **fields) -> NewSpeaker:
    if audio is None:
        return NewSpeaker(name=name, **{"consent": "yes", "embedding": (0.5,)} | fields)
    given = {
        "consent": "yes",
        "audio_sha256": audio.audio.audio_sha256,
        "num_samples": audio.audio.num_samples,
        "sample_rate_hz": audio.audio.sample_rate_hz,
    }
    return NewSpeaker(name=name, **given | fields)


def register(store: SpeakerStore, name: str, number: int = 0, **fields) -> Registered:
    return store.registrations.register(
        voice(name, clip(number), **fields), clip(number)
    )


def register_vector(store: SpeakerStore, name: str, **fields) -> SpeakerRecord:
    """Register a voice that is an embedding."""
    return store.registrations.register(voice(name, None, **fields), None).record


def key(number: int = 0, encoder: str = "e") -> EncodingKey:
    return EncodingKey(
        audio_sha256=address(number), encoder_fingerprint=encoder[0] * 64
    )


def publish(store: SpeakerStore, number: int = 0, encoder: str = "e") -> bool:
    return store.writer.publish(key(number, encoder), make_encoding(number))


def delete(store: SpeakerStore, name: str) -> None:
    """All that a DELETE does, but for participants."""
    deletion = store.registrations.delete(name)
    store.remove_files(deletion)
    store.acknowledge(deletion.id)


def fill(store: SpeakerStore, num_speakers: int) -> None:
    """Rows only, without files: each with audio and two encodings."""
    voices = [
        {
            "tenant": "default",
            "name": f"s{n:05d}",
            "name_key": f"s{n:05d}",
            "speaker_id": f"voice_{n:032x}",
            "search_text": f"s{n:05d}",
            "audio_sha256": f"{n:064x}",
            "num_samples": 1,
            "sample_rate_hz": 1,
            "consent": "yes",
            "created_at": 0.0,
        }
        for n in range(num_speakers)
    ]
    files = [
        {
            "audio_sha256": f"{n:064x}",
            "artifact": kind,
            "segment": "registered",
            "is_audio": int(kind == "audio"),
            "num_bytes": 1,
            "used_at": n,
            "created_at": 0.0,
        }
        for n in range(num_speakers)
        for kind in ("audio", "e" * 64, "f" * 64)
    ]
    with store.database.write() as db:
        db.execute(speaker.insert(), voices)
        db.execute(stored_file.insert(), files)


def traces(directory: Path, text: str) -> list[str]:
    """Where below a directory a text is: in names of files, and in all bytes."""
    found = [str(path) for path in directory.rglob("*") if text in path.name]
    for path in directory.rglob("*"):
        if path.is_file() and text.encode() in path.read_bytes():
            found.append(f"in {path}")
    return found
