"""Whether a transcript can be what is said in a clip, by how much of it there is.

Syllables are guessed from the script, for every language alike. So the bounds are wide:
what they find is the transcript of another clip, or of half of it, not a wrong word.
"""

import unicodedata

# People read aloud at 5.2 (Mandarin) to 7.8 (Japanese) syllables a second on average.
# Source: Pellegrino, Coupé, Marsico, "A cross-language perspective on speech
# information rate", Language 87 (2011). The bounds, and their slack, are ours.
MIN_SYLLABLES_PER_SECOND = 1.5
MAX_SYLLABLES_PER_SECOND = 12.0
_SLACK_SYLLABLES = 4.0

# Europeans write 2.5 to 3 letters for a syllable; others fewer, without the vowels.
_PER_LETTER = 0.4
_PER_DIGIT = 1.5  # "7" is one syllable to three, "70" two to four
# A character is a syllable, or two in Japanese: kana, Chinese characters, Korean.
_SYLLABIC = (
    (0x3040, 0x30FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0xF900, 0xFAFF),
    (0x20000, 0x323AF),
)


def num_syllables(text: str) -> float:
    """About how many syllables a text is spoken in."""
    # Korean may come in letters; composed, it comes in syllables.
    return sum(map(_syllables, unicodedata.normalize("NFC", text)))


def is_plausible(text: str, speech_seconds: float) -> bool:
    """Tell whether this can be what is said in so much speech, without its pauses."""
    syllables = num_syllables(text)
    least = MIN_SYLLABLES_PER_SECOND * speech_seconds - _SLACK_SYLLABLES
    most = MAX_SYLLABLES_PER_SECOND * speech_seconds + _SLACK_SYLLABLES
    return least <= syllables <= most


def _syllables(char: str) -> float:
    code = ord(char)
    if any(first <= code <= last for first, last in _SYLLABIC):
        return 1.0
    if char.isdigit():
        return _PER_DIGIT
    return _PER_LETTER if char.isalpha() else 0.0
