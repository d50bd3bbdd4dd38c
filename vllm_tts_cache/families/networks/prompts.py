"""What several families share of building a clone's prompt."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from vllm.inputs import tokens_input

from vllm_tts_cache.errors import InvalidSpeakerError, TTSCacheError
from vllm_tts_cache.speaker.family import Family, Mode
from vllm_tts_cache.speaker.reference import SpeakerRef

# Where a prompt of placeholders names its mode, in the host's additional_information.
MODE = "tts_cache_clone_mode"


class Reference(Protocol):
    """A clip by address: a request's, or a batch job's."""

    @property
    def ref(self) -> SpeakerRef:
        """Its content address."""
        ...

    @property
    def num_samples(self) -> int:
        """At its own rate."""
        ...

    @property
    def sample_rate_hz(self) -> int:
        """Its own."""
        ...


def engine_prompt(
    token_ids: list[int], information: dict[str, Any], salt: str | None = None
) -> dict[str, Any]:
    """Return the host's prompt of token ids.

    Args:
        token_ids: Real ones, or placeholders.
        information: For the worker.
        salt: Of the prefix cache; None where the host is served without one.
    """
    prompt: dict[str, Any] = {**tokens_input(prompt_token_ids=token_ids)}
    prompt["additional_information"] = information
    if salt is not None:
        prompt["cache_salt"] = salt
    return prompt


def refuse_tokens(tokens: Iterable[str], field: str, text: str) -> None:
    """Refuse control tokens in a text.

    Raises: InvalidSpeakerError that names the first one.
    """
    for token in tokens:
        if token in text:
            reason = f"{token!r} is a control token of the model; leave it out"
            raise InvalidSpeakerError(field, reason)


def mode_of_request(family: Family, info: Mapping[str, Any]) -> Mode:
    """Read the mode out of a request's additional information.

    Raises: TTSCacheError if there is none of that name.
    """
    for mode in family.modes:
        if mode.name == info.get(MODE):
            return mode
    raise TTSCacheError(f"{family.title} has no mode {info.get(MODE)!r:.60}")
