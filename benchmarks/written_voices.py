"""Storage directories that are full at once, and a process that opens one.

``python -m benchmarks.written_voices SIDE DIR`` opens a storage directory as an API
process of that side does; with ours it then looks voices up and lists them. It prints
JSON. A process of its own, because its memory is measured.
"""

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.bench import SAMPLE_RATE_HZ
from benchmarks.measure import percentile
from benchmarks.models import TRANSCRIPT
from vllm_tts_cache.audio.reference import AUDIO, Segment
from vllm_tts_cache.catalogue import owners
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.schema import speaker, stored_file, usage
from vllm_tts_cache.config import Settings
from vllm_tts_cache.store.directory import StoreDirectory
from vllm_tts_cache.store.encoding import Encoding, EncodingKey, encoding_to_bytes
from vllm_tts_cache.store.opening import open_catalogue, open_store
from vllm_tts_cache.store.speaker_store import SpeakerStore

PAGE = 100
NUM_PAGES = 50
NUM_LOOK_UPS = 5_000
STOCK_CLIP_SECONDS = 3
# Name -> int16 values of each encoding that a written voice has.
ENCODERS = {"speaker": 512, "codec": 600}


def write_voices(directory: Path, num_voices: int) -> None:
    """A directory as if so many voices had been registered and encoded.

    Rows by the thousand and no fsync of each file: it takes seconds, not hours. The
    audio is an empty file, which nobody reads for a voice that is encoded.
    """
    directory.mkdir(parents=True)
    files, database = StoreDirectory(directory), open_catalogue(directory)
    num_bytes = 0
    with database.write() as db:
        for some in _thousands(num_voices):
            rows = []
            for sha in map(_sha256, some):
                files.audio_directory(sha).mkdir(parents=True)
                stored = {AUDIO: b""}
                for name in ENCODERS:
                    key = key_of(sha, name)
                    blob = encoding_to_bytes(key, encoding_of(sha, name))
                    stored[key.encoder_fingerprint] = blob
                for artifact, blob in stored.items():
                    Path(files.file_name(sha, artifact)).write_bytes(blob)
                    rows.append(_file_row(sha, artifact, len(blob)))
                    num_bytes += len(blob)
            db.execute(speaker.insert(), [_speaker_row(number) for number in some])
            db.execute(stored_file.insert(), rows)
        if num_voices:
            owners.recount(db)
            db.execute(usage.delete())
            sums = ((True, 1, 0), (False, len(ENCODERS), num_bytes))
            db.execute(
                usage.insert(),
                [
                    {
                        "segment": Segment.REGISTERED.value,
                        "is_audio": int(is_audio),
                        "num_files": each * num_voices,
                        "num_bytes": num_bytes_,
                    }
                    for is_audio, each, num_bytes_ in sums
                ],
            )
    database.close()


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


def key_of(audio_sha256: str, encoder: str) -> EncodingKey:
    fingerprint = hashlib.sha256(encoder.encode()).hexdigest()
    return EncodingKey(audio_sha256=audio_sha256, encoder_fingerprint=fingerprint)


def encoding_of(audio_sha256: str, encoder: str) -> Encoding:
    """``values``, int16: the address, over and over."""
    address = np.frombuffer(bytes.fromhex(audio_sha256), np.int16)
    return Encoding({"values": np.resize(address, ENCODERS[encoder])})


def open_ours(directory: Path) -> SpeakerStore:
    return open_store(Settings(samples_dir=directory, max_uploaded=0))


def start(side: str, directory: Path) -> dict[str, float]:
    """Milliseconds of the start, what follows it, and the memory of it all."""
    rss_before = machine.rss_bytes()
    if side == "stock":
        found = {"start_ms": _start_stock(directory)}
    else:
        found = _start_ours(directory)
    return {**found, "rss_bytes": machine.rss_bytes() - rss_before}


def _start_ours(directory: Path) -> dict[str, float]:
    began = time.perf_counter()
    store = open_ours(directory)
    store.find(speaker_name(0))
    took_ms = 1e3 * (time.perf_counter() - began)
    return {"start_ms": took_ms, **_follow(store)}


def _start_stock(directory: Path) -> float:
    """Of the host's serving class, its speaker storage alone: it opens every file."""
    os.environ["SPEAKER_SAMPLES_DIR"] = str(directory)
    from vllm_omni.entrypoints.openai.serving_speech import OmniOpenAIServingSpeech

    began = time.perf_counter()
    serving = object.__new__(OmniOpenAIServingSpeech)
    serving._adapter = None  # type: ignore[assignment]
    serving._init_speaker_storage()
    return 1e3 * (time.perf_counter() - began)


def _follow(store: SpeakerStore) -> dict[str, float]:
    """Recover, look voices up in any order, and list pages."""
    began = time.perf_counter()
    store.recover()
    recovered = time.perf_counter() - began
    num_voices = store.num_speakers()
    order = np.random.default_rng(0).integers(max(1, num_voices), size=NUM_LOOK_UPS)
    look_ups, pages, after = [], [], ""
    for number in order.tolist():
        began = time.perf_counter()
        store.find(speaker_name(number))
        look_ups.append(1e3 * (time.perf_counter() - began))
    for _ in range(NUM_PAGES):
        began = time.perf_counter()
        page = store.records(Page(limit=PAGE, after=after))
        pages.append(1e3 * (time.perf_counter() - began))
        after = page[-1].name if page else ""
    return {
        "recover_seconds": recovered,
        "look_up_p99_ms": percentile(look_ups, 99),
        "page_ms": percentile(pages, 50),
    }


def _thousands(count: int) -> Iterable[range]:
    for first in range(0, count, 1_000):
        yield range(first, min(first + 1_000, count))


def _speaker_row(number: int) -> dict[str, Any]:
    return {
        "speaker_id": f"voice_{number:032x}",
        "tenant": "default",
        "name_key": speaker_name(number).lower(),
        "name": speaker_name(number),
        "search_text": speaker_name(number).lower(),
        "audio_sha256": _sha256(number),
        "num_samples": 10 * SAMPLE_RATE_HZ,
        "sample_rate_hz": SAMPLE_RATE_HZ,
        "ref_text": "What is said in the reference.",
        "consent": "consent-1",
        "created_at": time.time(),
    }


def _file_row(sha: str, artifact: str, num_bytes: int) -> dict[str, Any]:
    return {
        "audio_sha256": sha,
        "artifact": artifact,
        "segment": Segment.REGISTERED.value,
        "is_audio": int(artifact == AUDIO),
        "num_bytes": num_bytes,
        "used_at": time.time_ns() // 1_000,
        "created_at": time.time(),
    }


def _sha256(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=("ours", "stock"))
    parser.add_argument("directory", type=Path)
    given = parser.parse_args()
    print(json.dumps(start(given.side, given.directory)), flush=True)


if __name__ == "__main__":
    main()
