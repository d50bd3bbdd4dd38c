"""What it costs to decode a clip: by FFmpeg, as we do, beside libsndfile.

``python -m benchmarks.decode_clips [--rounds N]``. Clips of 10 s are decoded in turns
by all of our `decode`, and by libsndfile block by block, with the same checks and the
same address behind it, as this package did until November 2026. Prints medians of this
thread's CPU time.
"""

import argparse
import io
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import soundfile

from tests.audio_clips import sndfile_bytes, voiced
from vllm_tts_cache.audio.decode import (
    FULL_SCALE,
    active_level_dbfs,
    check_level,
    clipped_share,
    decode,
)
from vllm_tts_cache.audio.reference import ReferenceAudio

SECONDS = 10.0
TARGET = 1.5
BLOCK_SAMPLES = 1 << 17
FORMS = [(form, rate) for form in ("WAV", "FLAC", "MP3") for rate in (24_000, 48_000)]


class Sequential(soundfile.SoundFile):
    """Reads on, whatever length the header claims."""

    def seekable(self) -> bool:
        return False


def by_libsndfile(data: bytes) -> ReferenceAudio:
    mono, full = [], []
    with Sequential(io.BytesIO(data)) as file:
        rate_hz, num_frames = file.samplerate, BLOCK_SAMPLES // file.channels
        while len(block := file.read(num_frames, dtype="float32", always_2d=True)):
            mono.append(np.mean(block, axis=-1))
            full.append(np.max(np.abs(block), axis=-1) >= FULL_SCALE)
    samples, at_full_scale = np.concatenate(mono), np.concatenate(full)
    assert np.isfinite(samples).all()
    check_level(active_level_dbfs(samples, rate_hz), clipped_share(at_full_scale))
    return ReferenceAudio.of(samples, rate_hz)


def cpu_ms(work: Callable[[bytes], object], data: bytes) -> float:
    began = time.thread_time()
    work(data)
    return 1e3 * (time.thread_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    print(f"{'10 s of':16} {'libsndfile':>10} {'ours':>8}   (target {TARGET:g}x)")
    for form, rate_hz in FORMS:
        for num_channels in (1, 2):
            samples = voiced(rate_hz, SECONDS, num_channels)
            data = sndfile_bytes(samples, rate_hz, form)
            times: dict[Callable, list[float]] = {by_libsndfile: [], decode: []}
            for _ in range(rounds):
                for work, spent in times.items():
                    spent.append(cpu_ms(work, data))
            theirs, ours = map(median, times.values())
            what = f"{form} {rate_hz // 1000}k {'mono' if num_channels == 1 else '2ch'}"
            print(f"{what:16} {theirs:8.1f} ms {ours:5.1f} ms  {ours / theirs:.2f}x")


if __name__ == "__main__":
    main()
