"""The transcript of a voice: of several clips a line for each, in their order."""

from collections.abc import Sequence

from vllm_tts_cache.errors import InvalidSpeakerError


def lines_of(ref_text: str) -> list[str]:
    """Return its lines, without white space around them, and those that say something.

    Only what ends a line in every editor does so here.
    """
    unified = ref_text.replace("\r\n", "\n").replace("\r", "\n")
    return [line for each in unified.split("\n") if (line := each.strip())]


def of_clips(ref_text: str | None, num_clips: int) -> str | None:
    """Return the transcript of so many clips; that of one stays as it was written.

    Raises: InvalidSpeakerError if there are not as many lines as clips.
    """
    if ref_text is None or num_clips == 1:
        return ref_text
    lines = lines_of(ref_text)
    if len(lines) == num_clips:
        return "\n".join(lines)
    if not lines:
        return None
    reason = (
        f"it has {_counted(len(lines), 'line')}, and the voice {num_clips} clips; "
        "write one line for each clip, in their order"
    )
    raise InvalidSpeakerError("ref_text", reason)


def joined(ref_texts: Sequence[str], num_clips: int) -> str | None:
    """Return the one transcript of a form that gives it once, or once for each clip.

    Raises: InvalidSpeakerError if it is given another number of times.
    """
    given = [text.strip() for text in ref_texts]
    if not any(given):
        return None
    if len(given) == 1:
        return of_clips(given[0], num_clips)
    if len(given) != num_clips:
        there = "is 1 clip" if num_clips == 1 else f"are {num_clips} clips"
        reason = f"it is given {len(given)} times, and there {there}; give it once"
        reason += " for each, or once with a line for each"
        raise InvalidSpeakerError("ref_text", reason)
    return of_clips("\n".join(" ".join(lines_of(text)) for text in given), num_clips)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
