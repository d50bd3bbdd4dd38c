"""How well SPEAKER_SIMILARITY tells people apart: error rates on clips of people.

The clips are in packages of Debian: telephone prompts (Asterisk), two games' dialogues
and words for children (KTuberling). Each speaker's sentences, in random order, are
joined into clips. Nothing is installed: the packages are unpacked in a folder.

usage: python -m benchmarks.similar_voices [FOLDER]
"""

import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
from tqdm import tqdm

from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.entrypoints.features.similarity import OTHER_BELOW, SAME_FROM
from vllm_tts_cache.entrypoints.features.timbre import TimbreEncoder, similarities
from vllm_tts_cache.errors import InvalidAudioError

PACKAGES = (
    *(f"asterisk-core-sounds-{language}-wav" for language in ("en", "es", "fr")),
    *(f"asterisk-core-sounds-{language}-wav" for language in ("it", "ru")),
    *("asterisk-prompt-es-co", "asterisk-prompt-fr-armelle"),
    *("asterisk-prompt-it-menardi-wav", "ktuberling-data"),
    *("fillets-ng-data-cs", "fillets-ng-data-nl"),
)
# These are one recording in four spellings.
SAME = {"sr@ijekavian", "sr@ijekavianlatin", "sr@latin"}
SECONDS = (4.0, 8.0, 15.0)
MAX_CLIPS = 12
SUFFIXES = {".wav", ".ogg", ".gsm", ".g722"}
SEED = 1


def unpack(folder: Path) -> None:
    """Download and unpack the packages that the folder does not have."""
    for name in tqdm(PACKAGES, desc="packages", disable=None):
        if (folder / name).is_dir():
            continue
        subprocess.run(["apt-get", "download", "-qq", name], cwd=folder, check=True)
        (file,) = folder.glob(f"{name}_*.deb")
        subprocess.run(["dpkg", "-x", file, folder / name], check=True)


def speakers(folder: Path) -> dict[str, list[Path]]:
    """Return each speaker's files."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*/usr/**/*")):
        if path.suffix not in SUFFIXES or path.is_symlink():
            continue
        package = path.relative_to(folder).parts[0]
        speaker = package
        if package.startswith("fillets"):  # airplane/cs/let-m-divna.ogg: the small fish
            role = path.stem.split("-")[1:2]
            if role not in (["m"], ["v"]):
                continue
            speaker = f"{package}-{role[0]}"
        elif package == "ktuberling-data":
            if path.parent.name in SAME:
                continue
            speaker = f"ktuberling-{path.parent.name}"
        found.setdefault(speaker, []).append(path)
    return found


def clips(files: list[Path], seconds: float) -> Iterator[ReferenceAudio]:
    """Join a speaker's files into clips of so many seconds."""
    files = random.Random(SEED).sample(files, len(files))
    parts: list[ReferenceAudio] = []
    num_clips = 0
    for path in files:
        try:
            part = decode_path(path).audio
        except InvalidAudioError:  # beeps and pauses are among the prompts
            continue
        parts = [p for p in parts if p.sample_rate_hz == part.sample_rate_hz]
        parts.append(part)
        if sum(p.seconds for p in parts) >= seconds:
            samples = np.concatenate([p.samples for p in parts])
            size = int(seconds * part.sample_rate_hz)
            yield ReferenceAudio.of(samples[:size], part.sample_rate_hz)
            parts, num_clips = [], num_clips + 1
            if num_clips == MAX_CLIPS:
                return


def main() -> None:
    """Print the error rates for clips of several lengths."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        unpack(folder)
        files, encoder = speakers(folder), TimbreEncoder()
        for seconds in SECONDS:
            who: list[str] = []
            vectors: list[bytes] = []
            for speaker, its in tqdm(
                files.items(), desc=f"{seconds:g} s", disable=None
            ):
                for clip in clips(its, seconds):
                    if (vector := encoder.vector(clip)) is not None:
                        who.append(speaker)
                        vectors.append(vector)
            report(seconds, who, vectors)


def report(seconds: float, who: list[str], vectors: list[bytes]) -> None:
    """Print the shares of pairs that are judged wrongly, by threshold."""
    same: list[float] = []
    other: list[float] = []
    rows = [similarities(vector, vectors) for vector in vectors]
    for a, b in combinations(range(len(who)), 2):
        (same if who[a] == who[b] else other).append(float(rows[a][b]))
    people = len(set(who))
    print(f"\n{seconds:g} s: {len(who)} clips of {people} speakers, ", end="")
    print(f"{len(same)} pairs of one speaker, {len(other)} of two")
    print("threshold  one speaker is below  two speakers are above")
    thresholds = sorted({*np.arange(0.60, 0.95, 0.04).round(2), SAME_FROM, OTHER_BELOW})
    for threshold in thresholds:
        missed = np.mean(np.array(same) < threshold)
        wrong = np.mean(np.array(other) >= threshold)
        print(f"{threshold:9.2f} {missed:21.2%} {wrong:23.3%}")


if __name__ == "__main__":
    main()
