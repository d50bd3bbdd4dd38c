"""Adapters of models that read control tokens in a text."""

import hashlib
from abc import abstractmethod
from collections import OrderedDict
from functools import cached_property
from typing import Any

from vllm_omni.entrypoints.openai.tts_adapters.base import PreparedRequest

from vllm_tts_cache.entrypoints.adapter import CachedAdapter

# A text is checked and cut into tokens in microseconds; a long one holds up the loop.
SHORT_CHARS = 2000
_MAX_STORED = 1024


class TextCheckingAdapter(CachedAdapter):
    """Refuses control tokens in what is to be spoken and in its transcript."""

    @abstractmethod
    def tts_cache_check_text(self, field: str, text: str) -> None:
        """Refuse text that the model would read as something else.

        Raises: InvalidSpeakerError.
        """

    async def check_texts(self, request: Any, *, has_own_ref_text: bool) -> None:
        """Refuse a control token that would end or forge a turn.

        Raises: InvalidSpeakerError.
        """
        await self._check_text("input", request.input)
        if request.ref_text is None:
            return
        if has_own_ref_text:
            await self._check_text("ref_text", request.ref_text)
        else:
            await self._check_stored(request.ref_text)

    async def speak(
        self, request: Any, sampling_params_list: list[Any], has_inline_ref_audio: bool
    ) -> PreparedRequest:
        """As the host.

        Raises: InvalidSpeakerError.
        """
        await self._check_text("input", request.input)
        return await super().speak(request, sampling_params_list, has_inline_ref_audio)

    async def _check_text(self, field: str, text: str) -> None:
        if len(text) <= SHORT_CHARS:
            self.tts_cache_check_text(field, text)
        else:
            await self._service.texts.run(self.tts_cache_check_text, field, text)

    async def _check_stored(self, text: str) -> None:
        """Once for each: registered for another model or by stock, it was not yet."""
        # Not by the text: it would outlive its voice here.
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in self._checked:
            await self._check_text("ref_text", text)
        self._checked[digest] = None
        self._checked.move_to_end(digest)
        while len(self._checked) > _MAX_STORED:
            self._checked.popitem(last=False)

    @cached_property
    def _checked(self) -> OrderedDict[bytes, None]:
        """The digests of stored transcripts that may be spoken, the last used last."""
        return OrderedDict()
