"""Texts for Fish Speech: which control tokens they may hold, and how they are spoken.

The host's rules, in one pass: its own expression for a control token tries every ``<|``
to the end of the text, so 200 KB of them keep it busy for half a minute.
"""

import re
from collections.abc import Iterator

from vllm_tts_cache.errors import InvalidSpeakerError

# Over an hour of speech in any language: more than the model has positions for.
MAX_CHARS = 65_536
# The host reads our texts with its own expression once more, and each of these may cost
# it a walk through all of the text.
MAX_LOOSE_OPENINGS = 16

_OPENING = "<|"
_LEGACY_SPEAKER = re.compile(r"<speaker:(\d+)>")
_SPEAKER = re.compile(r"<\|speaker:\d+\|>")
_ALLOWED = re.compile(r"<\|(?:speaker:\d+|phoneme_start|phoneme_end)\|>")
_MAX_NAMED, _MAX_NAME_CHARS = 4, 40


def checked_text(field: str, text: str) -> str:
    """Return the text as the model takes it, its speaker tags in the model's spelling.

    It takes time in proportion to the text: 0.1 ms for the longest that is allowed,
    30 ms if that is nothing but tags. So an event loop leaves a long one to a thread.

    Args:
        field: The request's field, for the message.
        text: What the client sent.

    Raises:
        InvalidSpeakerError: It is too long, or holds a control token that would end or
            forge a turn; the message names it.
    """
    if len(text) > MAX_CHARS:
        reason = f"it has {len(text)} characters, at most {MAX_CHARS} are allowed"
        raise InvalidSpeakerError(field, reason)
    spoken = normalised(text)
    tokens, num_loose = control_tokens(spoken)
    if refused := sorted({token for token in tokens if not _ALLOWED.fullmatch(token)}):
        reason = f"it contains unsupported control token(s): {_named(refused)}"
        raise InvalidSpeakerError(field, reason)
    if num_loose > MAX_LOOSE_OPENINGS:
        reason = (
            f"it contains {num_loose} times {_OPENING!r} that begins no tag, at most "
            f"{MAX_LOOSE_OPENINGS} are allowed"
        )
        raise InvalidSpeakerError(field, reason)
    return spoken


def normalised(text: str) -> str:
    """Return the text with its speaker tags in the model's spelling; checks nothing."""
    return _LEGACY_SPEAKER.sub(r"<|speaker:\1|>", text)


def transcript(ref_text: str, num_clips: int = 1) -> str:
    """Return a reference's transcript as the model reads it: somebody speaks in it.

    Source: ``generate_long`` of fish-speech, which numbers clips as it does speakers.

    Args:
        ref_text: What ``checked_text`` has let pass; of several clips a line for each.
        num_clips: How many there are.
    """
    spoken = normalised(ref_text)
    lines = [spoken] if num_clips == 1 else spoken.split("\n")
    return "\n".join(
        line if _SPEAKER.search(line) else f"<|speaker:{index}|>{line}"
        for index, line in enumerate(lines)
    )


def control_tokens(text: str) -> tuple[list[str], int]:
    """Find what the host takes for a control token: ``<|``, no ``>``, ``|>``.

    Returns:
        The tokens, in order, and the number of ``<|`` that begin none.
    """
    tokens: list[str] = []
    num_loose = 0
    for start, end in _spans(text):
        # At least one character stands between the bars.
        if end - start > len("<||>") and text.endswith("|>", start, end):
            tokens.append(text[start:end])
        else:
            num_loose += text.count(_OPENING, start, end)
    return tokens, num_loose


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Walk from each ``<|`` through the next ``>``, and on from there.

    The openings between the two share that end, so if the first begins no token, none
    of them does, and no character is looked at twice.
    """
    end = 0
    while (start := text.find(_OPENING, end)) >= 0:
        closing = text.find(">", start + len(_OPENING))
        end = len(text) if closing < 0 else closing + 1
        yield start, end


def _named(tokens: list[str]) -> str:
    shown = [
        token if len(token) <= _MAX_NAME_CHARS else f"{token[:_MAX_NAME_CHARS]}..."
        for token in tokens[:_MAX_NAMED]
    ]
    num_more = len(tokens) - len(shown)
    return ", ".join(shown) + (f" and {num_more} more" if num_more else "")
