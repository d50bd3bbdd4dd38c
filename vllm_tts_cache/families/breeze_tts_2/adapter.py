"""A clone request on Breeze-TTS-2 becomes text and a content address."""

from functools import cached_property
from typing import Any

from vllm_omni.entrypoints.openai.tts_adapters.base import PreparedRequest
from vllm_omni.entrypoints.openai.tts_adapters.breeze_tts_2 import BreezeTTS2Adapter

from vllm_tts_cache.catalogue.names import fold
from vllm_tts_cache.entrypoints.serving.adapter import Speaker
from vllm_tts_cache.families.breeze_tts_2.family import FAMILY
from vllm_tts_cache.families.breeze_tts_2.prompt import (
    PromptBuilder,
    by_address,
    silence,
)
from vllm_tts_cache.families.networks.adapter import PromptAdapter

# What the host takes a voice for: who speaks, in the words of the prompt.
_LABELS = tuple(f"s{number}" for number in range(10))


class CachedBreezeTTS2Adapter(PromptAdapter, BreezeTTS2Adapter):
    """The host's adapter; a clone's prompt names its codes.

    The host reads no registered voice: to it a voice is a label. Here ``S0`` to ``S9``
    still are, and are listed as the model's own.
    """

    tts_cache_family = FAMILY
    _is_warming_up = False

    def validate(self, request: Any) -> str | None:
        """As the host, which looks at no instructions.

        Raises: InvalidSpeakerError: They hold a control token.
        """
        instructions = request.instructions or ""
        limit = self.ctx.server._max_instructions_length
        if len(instructions) > limit:
            return f"instructions are too long (at most {limit} characters)"
        self.tts_cache_check_text("instructions", instructions)
        return super().validate(request)

    async def warmup(self) -> None:
        """Load the tokenizer before the first request, then as the host."""
        self._is_warming_up = True  # no client is served before it is over
        try:
            await super().warmup()
        finally:
            self._is_warming_up = False

    async def build(
        self, request: Any, sampling_params_list: list[Any], has_inline_ref_audio: bool
    ) -> PreparedRequest:
        """As of every adapter, but for the clone that the host warms up with.

        That is for its own reference encoder, which no prompt of ours comes to. It is
        nobody's, so there would be no tenant to keep it for.

        Raises: SpeakerRequestError, ServerFaultError.
        """
        if self._is_warming_up:
            nobody = {"ref_audio": None, "ref_text": None}
            request, has_inline_ref_audio = request.model_copy(update=nobody), False
        return await super().build(request, sampling_params_list, has_inline_ref_audio)

    async def clone(self, speaker: Speaker) -> PreparedRequest:
        """Build the host's prompt for a clip of this length."""
        host: Any = self  # its registering decorator hides the class from checkers
        clip = speaker.clip
        sampling = host.ctx.engine_client.default_sampling_params_list[0]
        prompt = await host._build_async(speaker.request, sampling, silence(clip))
        return self._prepared(speaker, by_address(prompt, clip.ref))

    async def speak(
        self, request: Any, sampling_params_list: list[Any], has_inline_ref_audio: bool
    ) -> PreparedRequest:
        """As the host, which puts a label into the prompt in the letters it came in.

        Raises: InvalidSpeakerError.
        """
        if (label := request.voice) is not None and fold(label) in _LABELS:
            request = request.model_copy(update={"voice": label.upper()})
        return await super().speak(request, sampling_params_list, has_inline_ref_audio)

    def _load_supported_speakers(self) -> list[str]:
        return list(_LABELS)

    @cached_property
    def _builder(self) -> PromptBuilder:
        from transformers import AutoTokenizer

        host: Any = self
        if host.tokenizer is None:  # it is loaded where a prompt is built, too late
            config = host.ctx.engine_client.model_config
            host.tokenizer = AutoTokenizer.from_pretrained(
                config.model, config=config.hf_config
            )
        return PromptBuilder(host.tokenizer)
