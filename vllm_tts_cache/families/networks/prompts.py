"""Helpers of several families' prompt builders, and the base of their batch prompts."""

import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Union

from vllm.inputs import tokens_input

from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.speaker.family import Family, Mode, refuse_tokens
from vllm_tts_cache.speaker.reference import FIELD, SpeakerRef
from vllm_tts_cache.store.encoding import Array, Encoding, EncodingKey

if TYPE_CHECKING:
    from vllm_tts_cache.entrypoints.speakers.inline import Clip
    from vllm_tts_cache.offline import PreparedSpeaker

# Keys of the host's additional_information: for the mode of a prompt of placeholders,
# and for where the reference stands.
MODE = "tts_cache_clone_mode"
ROWS = "tts_cache_reference_rows"

# A prompt as the host's engine takes it.
Prompt = dict[str, Any]
# A clip of a request or of a batch job, by its content address.
Reference = Union["Clip", "PreparedSpeaker"]


def engine_prompt(
    token_ids: list[int], information: dict[str, Any], salt: str | None = None
) -> dict[str, Any]:
    """Return the host's prompt of token ids, which may be placeholders.

    The worker reads ``information``. ``salt`` is that of the prefix cache; None for a
    family that is served without one.
    """
    prompt: dict[str, Any] = {**tokens_input(prompt_token_ids=token_ids)}
    prompt["additional_information"] = information
    if salt is not None:
        prompt["cache_salt"] = salt
    return prompt


def prompt_with_rows(
    token_ids: list[int], ref: SpeakerRef, where: "ReferenceRows", salt: str
) -> dict[str, Any]:
    """Return the host's prompt with a reference in the rows ``where``.

    ``salt`` names the voice in the prefix cache.
    """
    information = {FIELD: ref.to_wire(), ROWS: where.to_wire()}
    return engine_prompt(token_ids, information, salt)


def mode_of_request(family: Family, info: Mapping[str, Any]) -> Mode:
    """Read the mode out of a request's additional information.

    Raises: TTSCacheError if it does not name a mode of the family.
    """
    for mode in family.modes:
        if mode.name == info.get(MODE):
            return mode
    raise TTSCacheError(f"{family.title} has no mode {info.get(MODE)!r:.60}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRows:
    """The positions of a prompt at which the reference's rows stand, one row each.

    On Higgs Audio a row has a code of each codebook, each codebook one row later than
    the one before; on Audio8 TTS and Fish Speech a row is a frame.

    Attributes:
        start: The first position.
        num_rows: Number of rows, and of their positions.
        checksum: Checksum of the ids before the rows. These ids and the audio alone
            shape the rows' KV, and the worker does not see ids whose KV is cached.
    """

    start: int
    num_rows: int
    checksum: int

    @classmethod
    def behind(cls, ids: Sequence[int], num_rows: int) -> "ReferenceRows":
        """Return the positions of rows that follow these ids."""
        checksum = zlib.crc32(array("q", ids).tobytes())
        return cls(start=len(ids), num_rows=num_rows, checksum=checksum)

    def prefix(self, ref: SpeakerRef) -> str:
        """Return a name of the prompt's KV up to the last row."""
        return f"{ref.audio_sha256} {self.checksum}"

    def to_wire(self) -> list[int]:
        """Return plain integers, which survive the host's serialization."""
        return [self.start, self.num_rows, self.checksum]

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> "ReferenceRows":
        """Read the positions out of a request's additional information.

        Raises: ValueError if the positions are missing, or are not three counts.
        """
        match info.get(ROWS):
            case [int(start), int(num_rows), int(checksum)] if (
                min(start, num_rows, checksum) >= 0
            ):
                return cls(start=start, num_rows=num_rows, checksum=checksum)
            case other:
                raise ValueError(f"{ROWS} must be three counts, got {other!r:.60}")


@dataclass(frozen=True, slots=True, eq=False)
class KnownEncoding:
    """Takes the place of the audio in a request that the host would encode.

    ``value`` is what the host's own encoder would return for the audio.
    """

    value: Any


def check_length(made: int, announced: int) -> None:
    """Refuse a prompt of another length than announced. Raises: TTSCacheError."""
    if made != announced:
        counts = f"its prompt has {made} positions and was announced with {announced}"
        raise TTSCacheError(counts)


def checked_codes(codes: Array, expected: tuple[int, int], codebook_size: int) -> Array:
    """Return the codes if they fit the prompt and each is inside its codebook.

    A talker calls this before it uses ``(num_frames, num_codebooks)`` codes as indices.
    The prompt was made for codes of the shape ``expected``.

    Raises: TTSCacheError; ValueError if there are no codes.
    """
    if codes.shape != expected:
        reason = f"its codes are {codes.shape}, and its prompt was made for {expected}"
        raise TTSCacheError(reason)
    if codes.min() < 0 or codes.max() >= codebook_size:
        # On a GPU an index out of range would end the process.
        raise TTSCacheError("one of its codes is outside of its codebook")
    return codes


class PromptBuilder:
    """Builds prompts with a checkpoint's tokenizer, and refuses its control tokens.

    ``loading`` are further arguments with which the tokenizer is loaded.
    """

    family: ClassVar[Family]
    loading: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, model: str | None) -> "PromptBuilder":
        """Return a builder with the tokenizer of a checkpoint."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(model, **cls.loading))

    def check_text(self, field: str, text: str) -> None:
        """Refuse a control token in a text. Raises: InvalidSpeakerError."""
        refuse_tokens(self._control_tokens, field, text)

    @cached_property
    def _control_tokens(self) -> list[str]:
        """Cached, as listing them takes milliseconds."""
        return self.family.control.of(self._tokenizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticPromptBuilder:
    """The base of builders whose prompts hold semantic codes as token ids.

    ``first_semantic_id``, of code 0, is in the checkpoint's configuration.
    """

    tokenizer: Any
    first_semantic_id: int


class OfflinePrompts:
    """Checks texts and builds a checkpoint's prompts for ``Omni``.

    Args:
        model: The checkpoint's folder, or Hugging Face id.
        config: The checkpoint's ``config.json``.
        encoding: Returns one encoding of a prepared speaker, and its key.
    """

    prompt_builder: ClassVar[type[PromptBuilder]]

    def __init__(
        self,
        model: str,
        config: dict[str, Any],
        encoding: Callable[[SpeakerRef, str], tuple[EncodingKey, Encoding]],
    ):
        self._model = model
        self._config = config
        self._encoding = encoding

    def prompt(self, speaker: "PreparedSpeaker", text: str, language: str) -> Prompt:
        """Return the prompt that speaks ``text``; ``language`` is not used.

        Raises: InvalidSpeakerError, EncodeError, StorageError, WorkerRPCError.
        """
        del language
        self._builder.check_text("text", text)
        if speaker.ref_text is not None:
            self._builder.check_text("ref_text", speaker.ref_text)
        return self._clone(speaker, text)

    @cached_property
    def _builder(self) -> Any:
        """The family's prompt builder, see `PromptAdapter`; it loads the tokenizer."""
        return self.prompt_builder.of(self._model)

    def _clone(self, speaker: "PreparedSpeaker", text: str) -> dict[str, Any]:
        clone, mode = self._builder.clone, speaker.mode
        return clone(text, speaker.ref_text, mode=mode, clip=speaker)
