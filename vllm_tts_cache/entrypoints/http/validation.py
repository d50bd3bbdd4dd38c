"""What FastAPI and pydantic find wrong with a request, in sentences.

The host answers with Python's text of each of their errors, which repeats what was
sent: of a clip that came as text its first bytes.

Half a character in a text is refused here as well, since no encoder, tokenizer or
engine takes it. Clients that cut text at UTF-16 units, as JavaScript counts it, leave
half of an emoji at an end. JSON can say that (``"\\ud83d"``), UTF-8 cannot: the host's
message to its engine ends the server. So all JSON that routes and sockets of ours read
passes here.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm.entrypoints.serve.exception_handling.handlers.validation import (
    clean_loc_for_param,
)

from vllm_tts_cache.errors import InvalidSpeakerError, SpeakerRequestError
from vllm_tts_cache.logs import encodable

_MAX_FIELDS = 5
_MAX_FIELD_CHARS = 64
_MAX_VALUE_CHARS = 64
_MAX_REASON_CHARS = 300
_AS_FILE = "as a file: its part of the form needs a filename (curl: -F {}=@clip.wav)"
# How pydantic's messages begin that say what a value has to be.
_SUBJECT = re.compile(r"^(?:Input|String|List|Dictionary|Tuple|Value) should ")
_SHOULD = "it should "
_OF_VALUES = "value_error", "assertion_error"

_HALF = re.compile("[\ud800-\udfff]")
_FIRST_HALVES = "\ud800", "\udbff"
_MAX_QUOTED = 64


class InvalidRequestError(SpeakerRequestError):
    """Fields of a request are missing or wrong.

    Attributes:
        param: Where the first of them is, as the host writes it.
    """

    def __init__(self, message: str, param: str | None):
        super().__init__(message)
        self.param = param


def invalid_request(
    errors: Iterable[Any], *, is_form: bool, files: Container[str]
) -> InvalidRequestError:
    """Return what is to be answered.

    Args:
        errors: As FastAPI's exception has them: pydantic's, or texts.
        is_form: Whether the route takes a form; else it is JSON, if anything.
        files: Names of the form's fields that are files.
    """
    params: list[str] = []
    reasons: dict[str, list[str]] = {}
    shown: dict[str, str] = {}
    for error in errors:
        if not isinstance(error, Mapping):
            reasons.setdefault("request", []).append(str(error)[:_MAX_REASON_CHARS])
            continue
        params.append(clean_loc_for_param(error["loc"]))
        field, reason = _field(error["loc"], files), _reason(error, is_form, files)
        if reason.startswith(_SHOULD):
            shown[field] = f"{_shown(error.get('input'))} was sent, and "
        told = reasons.setdefault(field, [])
        if reason not in told:  # each type that a field may have is an error
            told.append(reason)
    sentences = [
        f"Invalid {field}: {shown.get(field, '')}{' or '.join(told).rstrip('.')}."
        for field, told in reasons.items()
    ]
    if (num_more := len(sentences) - _MAX_FIELDS) > 0:
        sentences[_MAX_FIELDS:] = [f"{num_more} more fields are wrong."]
    return InvalidRequestError(
        encodable(" ".join(sentences)), encodable(params[0]) if params else None
    )


def _field(loc: Sequence[Any], files: Container[str]) -> str:
    if len(loc) < 2 or (loc[0] == "body" and isinstance(loc[1], int)):
        return str(loc[0])  # all of it, or a place in JSON that is none
    if loc[1] in files:
        return str(loc[1])
    return clean_loc_for_param(tuple(loc[1:]))[:_MAX_FIELD_CHARS]


def _reason(error: Mapping[str, Any], is_form: bool, files: Container[str]) -> str:
    kind, loc = error["type"], error["loc"]
    name = loc[1] if len(loc) > 1 else None
    context = error.get("ctx") or {}
    if kind == "missing":
        return f"it is missing. Send it {_place(loc, is_form, files)}"
    if name is not None and name in files:
        return f"it is no file. Send it {_AS_FILE.format(name)}"
    if kind in _OF_VALUES:
        return str(context.get("error", error["msg"]))[:_MAX_REASON_CHARS]
    if name is None:
        return "it is no JSON object. Send one, as Content-Type: application/json"
    if kind == "json_invalid":
        return f"it is not JSON ({context.get('error')}, character {name})"
    if kind == "extra_forbidden":
        return "there is no such field here. Leave it out, or correct its name"
    return _SUBJECT.sub(_SHOULD, error["msg"])[:_MAX_REASON_CHARS]


def _place(loc: Sequence[Any], is_form: bool, files: Container[str]) -> str:
    if loc[0] != "body":
        return f"in the {loc[0]}"
    if len(loc) < 2:
        return "as a JSON object, as Content-Type: application/json"
    if loc[1] in files:
        return _AS_FILE.format(loc[1])
    return "as a field of the form" if is_form else "in the JSON body"


def _shown(value: object) -> str:
    if isinstance(value, str) and len(value) > _MAX_VALUE_CHARS:
        return f"{value[:_MAX_VALUE_CHARS]!r}…"
    if value is None or isinstance(value, (str, bool, float)):
        return "null" if value is None else repr(value)
    if isinstance(value, int):  # Python writes no number of more than 4,300 digits
        return str(value) if value.bit_length() < _MAX_VALUE_CHARS else "a large number"
    return "a list" if isinstance(value, list) else "an object"


def refuse_halves(given: object) -> None:
    """Refuse JSON that holds half a character, in a value or in a key.

    Raises: InvalidSpeakerError that names the field.
    """
    for field, text in _texts(given):
        if not text.isascii() and (half := _HALF.search(text)) is not None:
            found = half.group().encode("unicode_escape").decode()
            reason = (
                f"it holds half of a character, {found} at {half.start()}, as is left "
                "of text that is cut in the middle of an emoji; send whole characters"
            )
            raise InvalidSpeakerError(encodable(field) or "request", reason)


def _texts(given: object) -> Iterator[tuple[str, str]]:
    """Each text in it, under the name of its field."""
    waiting: list[tuple[str, Any]] = [("", given)]
    while waiting:
        field, value = waiting.pop()
        if isinstance(value, str):
            yield field, value
        elif isinstance(value, dict):
            for name, each in value.items():
                inner = _inside(field, f".{name[:_MAX_QUOTED]}" if field else name)
                yield inner, name
                waiting.append((inner, each))
        elif isinstance(value, list):
            waiting += [
                (_inside(field, f"[{place}]"), each)
                for place, each in enumerate(value)
                if isinstance(each, (str, dict, list))  # an embedding has thousands
            ]


def _inside(field: str, name: str) -> str:
    # Bounded, as names inside of one another add up.
    return f"{field}{name}"[:_MAX_QUOTED]


class Pieces:
    """Text that comes in pieces, cut wherever.

    Two halves in two pieces make the character that was cut. A half without its other
    one is left out: who streams what a model writes cannot know where it is cut.
    """

    _first_half = ""

    def feed(self, piece: str) -> str:
        """Return the text so far that is whole, beginning where the last one ended."""
        text = self._first_half + piece
        self._first_half = ""
        if text and _FIRST_HALVES[0] <= text[-1] <= _FIRST_HALVES[1]:
            text, self._first_half = text[:-1], text[-1]
        if text.isascii():
            return text
        pairs_joined = text.encode("utf-16-le", "surrogatepass")
        return pairs_joined.decode("utf-16-le", "ignore")

    def end(self) -> None:
        """Leave out what nothing follows."""
        self._first_half = ""
