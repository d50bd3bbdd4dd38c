"""What several families share of building prompts for an ``Omni`` engine."""

from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any

from vllm_tts_cache.offline.speakers import PreparedSpeaker
from vllm_tts_cache.speaker.reference import SpeakerRef
from vllm_tts_cache.store.encoding import Encoding, EncodingKey


class OfflinePrompts:
    """Builds the prompts of one checkpoint, once their texts are checked.

    Args:
        model: Its folder, or Hugging Face id.
        config: Its ``config.json``.
        encoding: Returns one encoding of a prepared speaker, and its key.
    """

    def __init__(
        self,
        model: str,
        config: dict[str, Any],
        encoding: Callable[[SpeakerRef, str], tuple[EncodingKey, Encoding]],
    ):
        self._model = model
        self._config = config
        self._encoding = encoding

    def prompt(
        self, speaker: PreparedSpeaker, text: str, _language: str
    ) -> dict[str, Any]:
        """Return the prompt that speaks ``text``, in the language that it is in.

        Raises: InvalidSpeakerError, EncodeError, StorageError, WorkerRPCError.
        """
        self._builder.check_text("text", text)
        if speaker.ref_text is not None:
            self._builder.check_text("ref_text", speaker.ref_text)
        return self._clone(speaker, text)

    @cached_property
    @abstractmethod
    def _builder(self) -> Any:
        """The family's prompt builder, see `PromptAdapter`; it loads the tokenizer."""

    def _clone(self, speaker: PreparedSpeaker, text: str) -> dict[str, Any]:
        return self._builder.clone(
            text, speaker.ref_text, mode=speaker.mode, clip=speaker
        )
