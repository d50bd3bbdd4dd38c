"""Which names speakers may have, which of them are equal, and ids that clients keep."""

import re
import secrets
import unicodedata
from functools import partial
from typing import Literal

from vllm_tts_cache.errors import InvalidSpeakerError

MAX_NAME_CHARS = 128
# No registered name is longer, however much its characters are decomposed.
MAX_LOOKED_UP_CHARS = 8 * MAX_NAME_CHARS
# Composing a text takes time in the square of the combining marks that follow one
# another, and holds Python's global lock meanwhile.
_MAX_COMPOSED_CHARS = 2048

_composed = partial(unicodedata.normalize, "NFC")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
# Control characters and line or paragraph separators forge lines in logs.
_FORGING = ("Cc", "Zl", "Zp")
# What OpenAI clients send when their user has chosen no voice: all of them would get a
# voice that is registered under it.
PLACEHOLDER = "default"
# Invisible, though Unicode files them under letters, marks and symbols: fillers,
# the grapheme joiner, variation selectors, the empty Braille pattern.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)
_ZERO_WIDTH_NON_JOINER, _ZERO_WIDTH_JOINER = "\u200c", "\u200d"
_PRESENTATION = ("\ufe0e", "\ufe0f")  # as text, as emoji
_VIRAMA = 9  # the canonical combining class of what suppresses an Indic vowel

KeyColumn = Literal["speaker_id", "name_key", "alias_key"]

VOICE_PREFIX = "voice_"
CONSENT_PREFIX = "cons_"

_NUM_BYTES = 16  # as many as a UUID: an id cannot be guessed, and is unique
_ID = re.compile(f"({VOICE_PREFIX}|{CONSENT_PREFIX})[0-9a-f]{{{2 * _NUM_BYTES}}}")


def fold(name: str) -> str:
    """Return the form in which names are compared; folding it again changes nothing.

    A text that is too long to be composed, and to be a name, is only case-folded.
    """
    name = name.strip()
    if len(name) > _MAX_COMPOSED_CHARS:
        return name.casefold()
    # Case folding can take a character apart that NFC puts together, hence NFC before
    # it and after it.
    return _composed(_composed(name).casefold())


def keys_of(name: str) -> tuple[tuple[KeyColumn, str], ...]:
    """Return the columns, and the values in them, by which to look up a voice.

    A text in the form of an id is looked up as an id first, and then as a name: older
    names may have that form; last as an alias. For a text that cannot be a name there
    are none.
    """
    name = name.strip()
    if len(name) > MAX_LOOKED_UP_CHARS or _UNSTORABLE.search(name) is not None:
        return ()
    key = fold(name)
    if is_voice_id(name):
        return ("speaker_id", name), ("name_key", key)
    # Once more as a name: by two statements, a change that swaps a voice's name and an
    # alias of it could be missed.
    return ("name_key", key), ("alias_key", key), ("name_key", key)


def clean(name: str) -> str:
    """Return the name to show: as given, without the white space around it.

    For voices that stock accepted and labels of recordings; see also `clean_new`.

    Raises: InvalidSpeakerError: The name cannot be one of a speaker.
    """
    name = name.strip()
    if (reason := _why_invalid(name)) is not None:
        raise InvalidSpeakerError("name", reason)
    return name


def clean_new(name: str) -> str:
    """Clean a name that is registered now, and refuse what could pass for another.

    Looking up and deleting take any name, so that what was registered before these
    rules can still be used and removed.

    Raises: InvalidSpeakerError: The name cannot be one of a speaker, is the placeholder
        ``default``, has the form of an id, or holds invisible characters.
    """
    name = clean(name)
    reason = None
    if (folded := fold(name)) == PLACEHOLDER:
        reason = f"{name!r} is what OpenAI clients send for no voice at all"
    elif is_voice_id(folded) or is_consent_id(folded):
        reason = f"{name!r} has the form of an id"
    if reason is not None:
        raise InvalidSpeakerError("name", f"{reason}; choose another")
    if (unseen := _first_unseen(name)) is not None:
        character = f"the invisible character U+{ord(unseen):04X}"
        raise InvalidSpeakerError("name", f"it contains {character}; leave it out")
    return name


def search_text(*texts: str | None) -> str:
    """Return the text that searches look in: the texts, folded, each on its own line.

    They are folded in parts, as texts of stock's voices may have any length.
    """
    size = _MAX_COMPOSED_CHARS
    return "\n".join(
        "".join(
            _composed(_composed(text[at : at + size]).casefold())
            for at in range(0, len(text), size)
        )
        for text in (text.strip() for text in texts if text)
    )


def is_storable(text: str) -> bool:
    """Whether every database stores the text.

    None stores unpaired surrogates, and not all store NUL; JSON may contain both.
    """
    return _UNSTORABLE.search(text) is None


def _why_invalid(name: str) -> str | None:
    if not name:
        return "it is empty"
    if len(name) > MAX_NAME_CHARS:
        return f"it has {len(name)} characters, at most {MAX_NAME_CHARS} are allowed"
    if not is_storable(name):
        return "it contains an unpaired surrogate or NUL, which are no characters"
    # A name is one segment of a URL: a proxy may take these apart, escaped or not.
    if name in (".", "..") or {"/", "\\"} & set(name):
        return "'/', '\\', '.' and '..' have a meaning in URLs; leave them out"
    categories = [unicodedata.category(character) for character in name]
    if any(category in _FORGING for category in categories):
        return "it contains a control character; leave it out"
    if all(category[0] in "CZ" for category in categories):
        return "it has no visible character"
    return None


def _first_unseen(name: str) -> str | None:
    """Return the first invisible character that shapes no visible one beside it."""
    for at, character in enumerate(name):
        is_format = unicodedata.category(character) == "Cf"
        is_unseen = is_format or _INVISIBLE.match(character)
        if is_unseen and not _shapes_neighbours(name, at):
            return character
    return None


def _shapes_neighbours(name: str, at: int) -> bool:
    """Whether the character at ``at`` stands where it belongs to a visible sign.

    Emoji are put together with the zero-width joiner and variation selectors, Indic
    conjuncts with either joiner behind a virama (RFC 5892, appendix A).
    """
    character, before, after = name[at], name[:at][-1:], name[at + 1 :][:1]
    if not before:
        return False
    if character in _PRESENTATION:
        return unicodedata.category(before)[0] == "S"
    if character not in (_ZERO_WIDTH_NON_JOINER, _ZERO_WIDTH_JOINER):
        return False
    if unicodedata.combining(before) == _VIRAMA:
        return True
    joins_emoji = _is_emoji_part(before) and unicodedata.category(after or " ") == "So"
    return character == _ZERO_WIDTH_JOINER and joins_emoji


def _is_emoji_part(character: str) -> bool:
    # Skin tones are modifier symbols, Sk.
    return character in _PRESENTATION or unicodedata.category(character) in ("So", "Sk")


def new_id(prefix: str) -> str:
    """Return a new random id: the prefix, and 32 hex digits."""
    return f"{prefix}{secrets.token_hex(_NUM_BYTES)}"


def is_voice_id(text: str) -> bool:
    """Whether the text has the form of a voice's id."""
    return text.startswith(VOICE_PREFIX) and _ID.fullmatch(text) is not None


def is_consent_id(text: str) -> bool:
    """Whether the text has the form of a consent recording's id."""
    return text.startswith(CONSENT_PREFIX) and _ID.fullmatch(text) is not None
