"""What an encoded voice takes, in memory and on disk, by family and clip length."""

import tempfile
from pathlib import Path

import torch

from benchmarks.bench import Bench, clip
from benchmarks.measure import Row, Summary
from vllm_tts_cache.audio.decode import decode
from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.speaker.family import Family, families
from vllm_tts_cache.store import audio_file
from vllm_tts_cache.store.encoding import EncodingKey, encoding_to_bytes
from vllm_tts_cache.testing.tiny_checkpoint import TinyCheckpoint

NAME = "voice_cost"
SECONDS, QUICK_SECONDS = (3, 10, 30), (3,)
KB = 1000
_FINGERPRINT = "0" * 64


def run(bench: Bench) -> list[Row]:
    """Encode one clip of each length with each family's encoders."""
    rows: list[Row] = []
    seconds = bench.pick(full=SECONDS, quick=QUICK_SECONDS)
    for family in families():
        if not (family.encoders_part and family.tiny_part):
            continue
        bench.step(f"{NAME}: {family.title}")
        with tempfile.TemporaryDirectory(dir=bench.work) as directory:
            rows += _rows_of(family, Path(directory), seconds)
    return rows + [_audio_row(length) for length in seconds]


def _rows_of(family: Family, directory: Path, seconds: tuple[int, ...]) -> list[Row]:
    model_dir = TinyCheckpoint.of(family).ensure(directory / "checkpoint")
    encoders = family.part("encoders_part")(model_dir, torch.device("cpu"))
    rows: list[Row] = []
    for length in seconds:
        audio = decode(clip(length, 1)).audio
        key = EncodingKey(
            audio_sha256=audio.audio_sha256, encoder_fingerprint=_FINGERPRINT
        )
        try:
            found = [encoder.encode(audio) for encoder in encoders.values()]
        except TTSCacheError:  # the family takes shorter clips
            continue
        in_memory = sum(encoding.num_bytes for encoding in found)
        on_disk = sum(len(encoding_to_bytes(key, each)) for each in found)
        for where, num_bytes in (("in memory", in_memory), ("on disk", on_disk)):
            what = f"{family.name}: encodings of a {length} s clip, {where}"
            rows.append(_row(what, num_bytes))
    return rows


def _audio_row(length: int) -> Row:
    what = f"any model: the {length} s clip itself, 44.1 kHz of 16 bit, on disk"
    return _row(what, len(audio_file.to_bytes(decode(clip(length, 1)))))


def _row(what: str, num_bytes: int) -> Row:
    return Row(what, "kB", Summary.of([num_bytes / KB]), no_stock="keeps no file")
