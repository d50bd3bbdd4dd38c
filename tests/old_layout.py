"""Writes a directory as the version before the catalogue left it."""

import os
import sqlite3
from pathlib import Path

import safetensors.numpy

from tests.encoding_samples import make_encoding
from tests.store_samples import clip, key
from vllm_tts_cache.store import serde

# As that version made them.
_SCHEMA = """
CREATE TABLE speaker (
    generation INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    name_key TEXT NOT NULL,
    name TEXT NOT NULL,
    audio_sha256 TEXT,
    num_samples INTEGER NOT NULL,
    sample_rate_hz INTEGER NOT NULL,
    ref_text TEXT,
    consent TEXT NOT NULL,
    description TEXT,
    mime_type TEXT,
    original_filename TEXT,
    file_size INTEGER,
    created_at REAL NOT NULL,
    embedding BLOB,
    UNIQUE (tenant, name_key),
    CHECK ((audio_sha256 IS NULL) <> (embedding IS NULL))
) STRICT;
CREATE INDEX speaker_audio ON speaker (audio_sha256) WHERE audio_sha256 IS NOT NULL;
CREATE TABLE imported_file (
    file_name TEXT PRIMARY KEY,
    mtime_ns INTEGER NOT NULL,
    size INTEGER NOT NULL,
    name_key TEXT,
    created_at REAL,
    deleted_at REAL
) STRICT;
CREATE INDEX imported_file_name ON imported_file (name_key);
PRAGMA user_version = 1;
PRAGMA journal_mode = WAL;
"""


class OldLayout:
    """One directory; close it before it is opened as it is today."""

    def __init__(self, directory: Path):
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.db = sqlite3.connect(directory / "registry.sqlite3", isolation_level=None)
        self.db.executescript(_SCHEMA)

    def close(self) -> None:
        self.db.close()

    def voice(self, name: str, number: int, **columns) -> int:
        """Registers a name with a clip; returns its generation."""
        audio = clip(number).audio
        row = {
            "tenant": "default",
            "name": name,
            "name_key": name.casefold(),
            "audio_sha256": audio.audio_sha256,
            "num_samples": audio.num_samples,
            "sample_rate_hz": audio.sample_rate_hz,
            "consent": "yes",
            "created_at": 1000.0 + number,
        } | columns
        names = ", ".join(row)
        marks = ", ".join("?" for _ in row)
        done = self.db.execute(
            f"INSERT INTO speaker ({names}) VALUES ({marks})", list(row.values())
        )
        assert done.lastrowid is not None
        return done.lastrowid

    def audio(self, number: int, segment: str = "registered") -> Path:
        audio = clip(number).audio
        sha = audio.audio_sha256
        path = self.directory / "audio/v1" / segment / sha[:2] / f"{sha}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"sample_rate": str(audio.sample_rate_hz), "audio_sha256": sha}
        data = safetensors.numpy.save({"audio": audio.samples}, metadata=metadata)
        path.write_bytes(data)
        os.utime(path, (2000 + number, 2000 + number))
        return path

    def encoding(
        self, number: int, segment: str = "registered", encoder: str = "e"
    ) -> Path:
        of = key(number, encoder)
        sha, name = of.audio_sha256, f"{of.encoder_fingerprint}.safetensors"
        path = self.directory / "encodings/v2" / segment / sha[:2] / sha / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(serde.encode(of, make_encoding(number)))
        os.utime(path, (3000 + number, 3000 + number))
        return path

    def rubbish(self) -> None:
        """What else that version, or one killed in the middle, left lying about."""
        for name in (
            "storage.lock",
            "registry.sqlite3.lock",
            "registry.sqlite3.import.lock",
            "locks/0a.lock",
            "audio/quarantine/bad.safetensors",
            "audio/v1/registered/aa/.partial-1",
            "encodings/quarantine/bad/bad.safetensors",
            "encodings/v1/registered/aa/bb/cc.safetensors",
            "encodings/v2/inline/aa/.partial-2",
        ):
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"rubbish")
