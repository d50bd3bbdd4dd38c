"""Keeps names and texts of voices out of what the host writes into its logs.

Ours write none above DEBUG: they take `TTSCacheError.log_text`. The host writes what we
raise, some names of its own accord, and uvicorn every path, whose last part may be one.
"""

import logging
import re

from vllm_tts_cache.errors import TTSCacheError

HIDDEN = "..."
_MAX_CHARS = 1000  # of what a client sent

# What the host says of a request, with a voice or texts of it among the values.
NAMING_MESSAGES = {
    "vllm_omni.entrypoints.openai.serving_speech": (
        "Resolved uploaded voice '%s' for %s",
        "Applied extra_params: %s",
        "Applied extra_params to diffusion: %s",
    ),
    "vllm_omni.entrypoints.openai.tts_adapters.qwen3_tts": (
        "Auto-set speaker_embedding for uploaded voice: %s",
        "Auto-set ref_audio for uploaded voice: %s (icl=%s)",
        (
            "Ignoring voice=%r for Qwen3-TTS Base request because inline ref_audio "
            "takes precedence"
        ),
    ),
}
# Where the host writes errors of requests to.
ERROR_LOGGERS = (
    "vllm_omni.entrypoints.openai.serving_speech",
    "vllm_omni.entrypoints.openai.serving_speech_stream",
)
ACCESS_LOGGER = "uvicorn.access"

# Behind a voice there may be what is to be done with it; a name may contain a slash.
_VOICE_PATH = re.compile(
    r"(?P<list>/v1/audio/(?:voices|voice_archive))"
    r"(?P<voice>/[^?]*?)?(?P<action>(?<!voices)/(?:cache|audio|preview|bundle))?"
    r"(?P<query>\?.*)?$"
)
_PATH_PLACE = 2  # among the values of a line of uvicorn's: address, method, path, ...


def install() -> None:
    """Put the filters before the host's loggers; again, it changes nothing."""
    for name in {ACCESS_LOGGER, *ERROR_LOGGERS, *NAMING_MESSAGES}:
        logger = logging.getLogger(name)
        if not any(isinstance(each, _Filter) for each in logger.filters):
            is_access = name == ACCESS_LOGGER
            logger.addFilter(_AccessFilter() if is_access else _HostFilter())


class _Filter(logging.Filter):
    """One of ours."""


class _AccessFilter(_Filter):
    """Shows which route of the voices was called, and not of which voice."""

    def filter(self, record: logging.LogRecord) -> bool:
        values = record.args
        if isinstance(values, tuple) and len(values) > _PATH_PLACE:
            path = str(values[_PATH_PLACE])
            hidden = _cut(without_voice(path))
            record.args = (*values[:_PATH_PLACE], hidden, *values[_PATH_PLACE + 1 :])
        return True


class _HostFilter(_Filter):
    """Shows of our errors what a log may show, and hides the names of voices."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG:
            return True
        hides = record.msg in NAMING_MESSAGES.get(record.name, ())
        if isinstance(record.args, tuple):
            record.args = tuple(_shown(value, hides=hides) for value in record.args)
        elif hides:  # a mapping that is the only value stands for itself
            record.args = (HIDDEN,)
        if record.exc_info and _ours(record.exc_info[1]) is not None:
            # It has the message again, and is no fault of the host's.
            record.exc_info = record.exc_text = None
        return True


def without_voice(path: str) -> str:
    """Return a path of the voices routes without the voice, and any other as it is."""
    return _VOICE_PATH.sub(_hidden, path)


def _hidden(found: "re.Match[str]") -> str:
    parts = [found["list"]]
    if found["voice"] is not None:
        parts += [f"/{HIDDEN}", found["action"] or ""]
    if found["query"]:
        parts.append(f"?{HIDDEN}")
    return "".join(parts)


def _shown(value: object, *, hides: bool) -> object:
    if isinstance(value, BaseException) and (error := _ours(value)) is not None:
        return error.log_text
    if not isinstance(value, str):
        return value
    return HIDDEN if hides else _cut(value)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}{HIDDEN}"


def _ours(error: BaseException | None) -> TTSCacheError | None:
    """Return the error of ours that one of the host's or of ours stands for."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, TTSCacheError):
            return error
        seen.add(id(error))
        error = error.__cause__
    return None
