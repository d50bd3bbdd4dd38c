"""What the benchmarks call of the product's own classes, below HTTP.

All of it is here, so that a change of those classes is a change of one file.
"""

import hashlib
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench import SAMPLE_RATE_HZ
from benchmarks.models import TRANSCRIPT
from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue import tenant_usage
from vllm_tts_cache.catalogue.catalogue import open_catalogue
from vllm_tts_cache.catalogue.deletions import Deletion
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.record import (
    AUDIO_KIND,
    NewSpeaker,
    Segment,
    SpeakerRecord,
)
from vllm_tts_cache.catalogue.schema import speaker, stored_file, usage
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import SpeakerNotFoundError
from vllm_tts_cache.store import serde
from vllm_tts_cache.store.cache import open_cache
from vllm_tts_cache.store.directory import StoreDirectory
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.opening import open_store

REGISTERED, INLINE = Segment.REGISTERED, Segment.INLINE
# Name -> int16 values of an encoding that `write_voices` and `encoding_of` give.
ENCODERS = {"speaker": 512, "codec": 600}
STOCK_CLIP_SECONDS = 3
_NOISE_RATE_HZ = 8_000


class OurStorage:
    """The storage directory of a server, and a worker's cache over it."""

    def __init__(self, directory: Path, **settings: Any):
        given = Settings(samples_dir=directory, max_uploaded=0, **settings)
        self._store = open_store(given)
        self._cache = open_cache(given, self._store)

    def find(self, name: str) -> SpeakerRecord | None:
        found = self._store.find(name)
        return None if found is None else found.record

    def page(self, limit: int, after: str) -> Sequence[SpeakerRecord]:
        return self._store.catalogue.records(Page(limit=limit, after=after))

    def count(self) -> int:
        return self._store.catalogue.count()

    def register(self, name: str, audio: ReferenceAudio) -> None:
        """Register; what the name took over goes."""
        done = self._store.register(_new_speaker(name, audio), DecodedAudio(audio, ()))
        self._carry_out(done.deletion)

    def keep_inline(self, audio: ReferenceAudio) -> None:
        self._store.keep_inline(DecodedAudio(audio, ()))

    def delete(self, name: str) -> None:
        """Delete, on disk and in memory; nothing happens without such a voice."""
        with suppress(SpeakerNotFoundError):
            deletion = self._store.delete(name)
            self._carry_out(deletion)
            self._store.acknowledge(deletion.id)

    def get(self, key: EncodingKey, segment: Segment) -> Encoding | None:
        """From memory, then disk."""
        return self._cache.get(key, segment)

    def put(self, key: EncodingKey, encoding: Encoding, segment: Segment) -> None:
        self._cache.put(key, encoding, segment)

    def read(self, key: EncodingKey) -> Encoding | None:
        """From disk, verified."""
        return self._store.read(key)

    def path(self, key: EncodingKey) -> Path:
        files = self._store.files
        return Path(files.file_name(key.audio_sha256, key.encoder_fingerprint))

    def memory(self) -> tuple[int, int]:
        """Bytes of all arrays in memory, and how many encodings were evicted there."""
        stats = self._cache.stats()
        return stats.memory.bytes, stats.memory.evictions

    def recover(self) -> None:
        self._store.recover()

    def verify(self) -> list[str]:
        return self._store.verify()

    def num_registered_files(self) -> int:
        used = self._store.catalogue.usage()[REGISTERED]
        return sum(kind.num_files for kind in used.values())

    def close(self) -> None:
        self._store.close()

    def _carry_out(self, deletion: Deletion | None) -> None:
        if deletion is None:
            return
        self._store.remove_files(deletion)
        if deletion.audio_sha256 is not None:
            self._cache.delete(deletion.audio_sha256)


def write_voices(directory: Path, num_voices: int) -> None:
    """A directory as if so many voices had been registered and encoded.

    Rows by the thousand and no fsync of each file: it takes seconds, not hours. The
    audio is an empty file, which nobody reads for a voice that is encoded.
    """
    directory.mkdir(parents=True)
    files, catalogue = StoreDirectory(directory), open_catalogue(directory)
    num_bytes = 0
    with catalogue.database.write() as db:
        for some in _thousands(num_voices):
            rows = []
            for sha in map(_sha256, some):
                files.audio_directory(sha).mkdir(parents=True)
                stored = {AUDIO_KIND: b""}
                for name in ENCODERS:
                    key = key_of(sha, name)
                    blob = serde.encode(key, encoding_of(sha, name))
                    stored[key.encoder_fingerprint] = blob
                for kind, blob in stored.items():
                    Path(files.file_name(sha, kind)).write_bytes(blob)
                    rows.append(_file_row(sha, kind, len(blob)))
                    num_bytes += len(blob)
            db.execute(speaker.insert(), [_speaker_row(number) for number in some])
            db.execute(stored_file.insert(), rows)
        if num_voices:
            tenant_usage.recount(db)
            db.execute(usage.delete())
            sums = ((True, 1, 0), (False, len(ENCODERS), num_bytes))
            db.execute(
                usage.insert(),
                [
                    {
                        "segment": REGISTERED.value,
                        "is_audio": int(is_audio),
                        "num_files": each * num_voices,
                        "num_bytes": num_bytes_,
                    }
                    for is_audio, each, num_bytes_ in sums
                ],
            )
    catalogue.close()


def write_stock(directory: Path, num_voices: int) -> None:
    """Stock's own layout: one safetensors file a voice, metadata in its header."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True)
    samples = np.zeros(STOCK_CLIP_SECONDS * SAMPLE_RATE_HZ, np.float32)
    for number in range(num_voices):
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


def speaker_name(number: int) -> str:
    return f"Speaker {number:06d}"


def noise(seed: int, seconds: float = 1.0) -> ReferenceAudio:
    """A clip unlike that of any other seed."""
    samples = np.random.default_rng(seed).standard_normal(
        round(seconds * _NOISE_RATE_HZ)
    )
    return ReferenceAudio.of((0.1 * samples).astype(np.float32), _NOISE_RATE_HZ)


def key_of(audio_sha256: str, encoder: str) -> EncodingKey:
    fingerprint = hashlib.sha256(encoder.encode()).hexdigest()
    return EncodingKey(audio_sha256=audio_sha256, encoder_fingerprint=fingerprint)


def encoding_of(
    audio_sha256: str, encoder: str, num_values: int | None = None
) -> Encoding:
    """``values``, ``(num_values,)`` int16: the address, over and over."""
    address = np.frombuffer(bytes.fromhex(audio_sha256), np.int16)
    return Encoding({"values": np.resize(address, num_values or ENCODERS[encoder])})


def _new_speaker(name: str, audio: ReferenceAudio) -> NewSpeaker:
    return NewSpeaker(
        name=name,
        consent="consent-1",
        audio_sha256=audio.audio_sha256,
        num_samples=audio.num_samples,
        sample_rate_hz=audio.sample_rate_hz,
    )


def _thousands(count: int) -> Iterable[range]:
    for first in range(0, count, 1_000):
        yield range(first, min(first + 1_000, count))


def _speaker_row(number: int) -> dict[str, Any]:
    return {
        "speaker_id": f"voice_{number:032x}",
        "tenant": "default",
        "name_key": speaker_name(number).lower(),
        "name": speaker_name(number),
        "audio_sha256": _sha256(number),
        "num_samples": 10 * SAMPLE_RATE_HZ,
        "sample_rate_hz": SAMPLE_RATE_HZ,
        "ref_text": "What is said in the reference.",
        "consent": "consent-1",
        "created_at": time.time(),
    }


def _file_row(sha: str, kind: str, num_bytes: int) -> dict[str, Any]:
    return {
        "audio_sha256": sha,
        "kind": kind,
        "segment": REGISTERED.value,
        "is_audio": int(kind == AUDIO_KIND),
        "num_bytes": num_bytes,
        "used_at": time.time_ns() // 1_000,
        "created_at": time.time(),
    }


def _sha256(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()
