"""Two short clips of synthetic speech with their transcripts; see README.md."""

from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Clip:
    """A FLAC file, 22.05 kHz mono, and what is said in it."""

    path: Path
    transcript: str


SPEECH = Clip(
    _HERE / "keeper.flac",
    "The keeper counts the ships at dusk, and writes each name into a blue book.",
)
OTHER_SPEECH = Clip(
    _HERE / "bakery.flac",
    "Good morning. The bakery opens at seven, and the first bread is gone by eight.",
)
