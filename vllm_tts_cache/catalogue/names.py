"""What a speaker may be called, and when two names are one."""

import re
import unicodedata

from vllm_tts_cache.errors import InvalidSpeakerError

MAX_NAME_CHARS = 128

_SURROGATE = re.compile("[\ud800-\udfff]")
# A name is one segment of a URL: a proxy may take these apart, escaped or not.
_SEPARATORS = ("/", "\\")
_DOT_SEGMENTS = (".", "..")
# Control characters and line or paragraph separators forge lines in logs.
_FORGING = ("Cc", "Zl", "Zp")


def fold(name: str) -> str:
    """The form in which names are compared; folding twice changes nothing.

    Case folding can take a character apart that NFC puts together, hence NFC
    before it and after it.
    """
    composed = unicodedata.normalize("NFC", name.strip())
    return unicodedata.normalize("NFC", composed.casefold())


def clean(name: str) -> str:
    """The name to show: as given, without the white space around it.

    Raises:
        InvalidSpeakerError: It cannot be the name of a speaker.
    """
    name = name.strip()
    if (reason := _why_invalid(name)) is not None:
        raise InvalidSpeakerError("name", reason)
    return name


def is_storable(text: str) -> bool:
    """Whether the text has a UTF-8 form: JSON can smuggle in half a character."""
    return _SURROGATE.search(text) is None


def _why_invalid(name: str) -> str | None:
    if not name:
        return "it is empty"
    if len(name) > MAX_NAME_CHARS:
        return f"it has {len(name)} characters, at most {MAX_NAME_CHARS} are allowed"
    if not is_storable(name):
        return "it contains an unpaired surrogate, which is not a character"
    if name in _DOT_SEGMENTS or any(separator in name for separator in _SEPARATORS):
        return "'/', '\\', '.' and '..' have a meaning in URLs"
    categories = [unicodedata.category(character) for character in name]
    if any(category in _FORGING for category in categories):
        return "it contains a control character"
    if all(category[0] in "CZ" for category in categories):
        return "it has no visible character"
    return None
