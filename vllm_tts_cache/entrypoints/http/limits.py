"""Limits of a request's JSON, checked before the host reads it.

Sizes are bounded: the host tokenizes texts and parses URLs on the event loop, repeats
wrong values to the client and to its log, and has pydantic look at each value of a
list first.

Half characters are refused: no encoder, tokenizer or engine takes one. Clients that
cut text at UTF-16 units, as JavaScript counts it, leave half of an emoji at an end.
JSON can hold half a character (``"\\ud83d"``), UTF-8 cannot: the host's message to its
engine would end the server.
"""

from codecs import getincrementaldecoder
from collections.abc import Iterator
from typing import Any

from vllm_tts_cache.audio.decode import is_data_url
from vllm_tts_cache.catalogue.names import MAX_LOOKED_UP_CHARS
from vllm_tts_cache.errors import InvalidAudioError, InvalidSpeakerError
from vllm_tts_cache.logs import encodable

MAX_INPUT_CHARS = 32_768  # half an hour of speech
MAX_URL_CHARS = 8192  # except a data URL
MAX_TEXT_CHARS = 16_384  # of any other field, and of all texts in options together
MAX_WORD_CHARS = 1024
MAX_VALUES = 8192  # of an embedding, or of all options
MAX_ITEMS = 1024
_MAX_FIELDS = 256
_MAX_DEPTH = 8
_MAX_QUOTED = 64

_MOST_CHARS = {
    "input": MAX_INPUT_CHARS,
    "model": MAX_WORD_CHARS,
    "language": MAX_WORD_CHARS,
}
_LOOKED_UP = ("voice", "speaker")
_SCHEMES = ("http:", "https:", "file:", "data:")
_URLS = ("ref_audio", "ref_audio_2")
_REFERENCES, _PATH = "references", "audio_path"


def check_scheme(field: str, url: str) -> None:
    """Refuse a reference that is no URL. Raises: InvalidSpeakerError."""
    if not url[:_MAX_QUOTED].lower().startswith(_SCHEMES):
        shown = f"{url[:_MAX_QUOTED]!r}{'…' * (len(url) > _MAX_QUOTED)}"
        reason = (
            f"{shown} begins with none of http:, https:, file: and data:. A clip in "
            "base64 needs data:audio/wav;base64, before it"
        )
        raise InvalidSpeakerError(field, reason)


def check_speech(given: object) -> None:
    """Refuse a request's JSON whose texts or lists are too long.

    Raises: InvalidSpeakerError that names the field, InvalidAudioError.
    """
    if not isinstance(given, dict):
        return
    if len(given) > _MAX_FIELDS:
        raise InvalidSpeakerError("request", f"it has more than {_MAX_FIELDS} fields")
    for name, value in given.items():
        field = name[:_MAX_QUOTED]
        if name in _URLS:
            _check_urls(field, value)
        elif name in _LOOKED_UP and isinstance(value, str):
            if len(value.strip()) > MAX_LOOKED_UP_CHARS:
                raise _too_long(field, MAX_LOOKED_UP_CHARS)
        elif name == _REFERENCES and isinstance(value, list):
            _check_references(value)
        elif name in _MOST_CHARS and isinstance(value, str):
            if len(value) > _MOST_CHARS[name]:
                raise _too_long(field, _MOST_CHARS[name])
        else:
            _check_values(field, value)


def check_batch(given: object) -> None:
    """Check a batch and each of its items, as `check_speech` does a request."""
    if not isinstance(given, dict):
        return
    check_speech({name: value for name, value in given.items() if name != "items"})
    items = given.get("items")
    if isinstance(items, list):
        if len(items) > MAX_ITEMS:
            raise InvalidSpeakerError("items", f"at most {MAX_ITEMS:,} are taken")
        for item in items:
            check_speech(item)


def _check_references(given: list[Any]) -> None:
    """Check ``references``, in which Higgs Audio's own examples send a clip."""
    _check_number(_REFERENCES, len(given))
    for each in given:
        others = [each]
        if isinstance(each, dict):
            _check_urls(_REFERENCES, each.get(_PATH))
            others = [value for name, value in each.items() if name != _PATH]
        _check_values(_REFERENCES, others)


def _check_urls(field: str, value: object) -> None:
    urls = value if isinstance(value, list) else [value]
    _check_number(field, len(urls))
    for url in urls:
        if isinstance(url, str):
            if len(url) > MAX_URL_CHARS and not is_data_url(url):
                check_scheme(field, url)
                reason = f"a URL has {MAX_URL_CHARS:,} characters at most"
                raise InvalidAudioError(reason)
        elif isinstance(url, (dict, list)):
            _check_values(field, url)


def _check_values(field: str, value: object) -> None:
    """Refuse more values and more text than any model has options for."""
    num_values = num_chars = 0
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for each in level:
            if isinstance(each, str):
                num_chars += len(each)
            elif isinstance(each, (dict, list)):
                num_values += len(each)
                _check_number(field, num_values)
                if isinstance(each, dict):
                    num_chars += sum(map(len, each))
                    below += each.values()
                else:
                    below += each
            if num_chars > MAX_TEXT_CHARS:
                raise _too_long(field, MAX_TEXT_CHARS)
        if not below:
            return
        level = below
    raise InvalidSpeakerError(field, f"at most {_MAX_DEPTH} levels are taken")


def _check_number(field: str, num_values: int) -> None:
    if num_values > MAX_VALUES:
        raise InvalidSpeakerError(field, f"at most {MAX_VALUES:,} values are taken")


def _too_long(field: str, max_chars: int) -> InvalidSpeakerError:
    return InvalidSpeakerError(field, f"at most {max_chars:,} characters are allowed")


def refuse_halves(given: object) -> None:
    """Refuse JSON that holds half a character, in a value or in a key.

    Raises: InvalidSpeakerError that names the field.
    """
    for field, text in _texts(given):
        if text.isascii():  # takes no time, not even for a clip in base64
            continue
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            found = text[exc.start].encode("unicode_escape").decode()
            reason = (
                f"it holds half of a character, {found} at {exc.start}, as text does "
                "that is cut in the middle of an emoji; send whole characters"
            )
            raise InvalidSpeakerError(encodable(field) or "request", reason) from None


def _texts(given: object) -> Iterator[tuple[str, str]]:
    """Yield each text of the JSON after the name of its field."""
    waiting: list[tuple[str, Any]] = [("", given)]
    while waiting:
        field, value = waiting.pop()
        if isinstance(value, str):
            yield field, value
        elif isinstance(value, dict):
            for name, each in value.items():
                inner = f"{field}.{name[:_MAX_QUOTED]}" if field else name
                inner = inner[:_MAX_QUOTED]  # nested names would grow with their depth
                yield inner, name
                waiting.append((inner, each))
        elif isinstance(value, list):
            waiting += [
                (f"{field}[{place}]"[:_MAX_QUOTED], each)
                for place, each in enumerate(value)
                if isinstance(each, (str, dict, list))  # an embedding has thousands
            ]


class Pieces:
    """Joins text that arrives in pieces, which may be cut within a character.

    Two halves in successive pieces become the character that was cut. A half without
    the other is left out: a client that streams a model's text does not choose the cut.
    """

    def __init__(self) -> None:
        self._whole = getincrementaldecoder("utf-16-le")("ignore")

    def feed(self, piece: str) -> str:
        """Return the whole characters so far that were not returned yet."""
        return self._whole.decode(piece.encode("utf-16-le", "surrogatepass"))

    def end(self) -> None:
        """End the text: leave out a half whose other half did not arrive."""
        self._whole.reset()
