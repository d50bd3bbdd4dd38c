"""A clone request on Breeze-TTS-2 becomes text and a content address."""

from functools import cached_property
from typing import Any

from vllm_omni.entrypoints.openai.tts_adapters.base import PreparedRequest
from vllm_omni.entrypoints.openai.tts_adapters.breeze_tts_2 import BreezeTTS2Adapter

from vllm_tts_cache.catalogue.names import fold
from vllm_tts_cache.entrypoints.serving.adapter import Speaker
from vllm_tts_cache.families.breeze_tts_2 import prompt as prompts
from vllm_tts_cache.families.breeze_tts_2.family import FAMILY
from vllm_tts_cache.families.networks.adapter import PromptAdapter

# The host takes a voice's name for such a label, which names the speaker in a prompt.
_LABELS = tuple(f"s{number}" for number in range(10))


class CachedBreezeTTS2Adapter(PromptAdapter, BreezeTTS2Adapter):
    """The host's adapter; a clone's prompt names its codes.

    The host knows no registered voices and takes each name for a label. Here only
    ``S0`` to ``S9`` are labels, and are listed as the model's own voices.
    """

    tts_cache_family = FAMILY
    bounds_instructions = True
    _is_warming_up = False

    async def warmup(self) -> None:
        """Load the tokenizer before the first request, then warm up as the host."""
        self._is_warming_up = True  # no client is served before the warm-up ends
        try:
            await super().warmup()
        finally:
            self._is_warming_up = False

    async def build(
        self, request: Any, sampling_params_list: list[Any], has_inline_ref_audio: bool
    ) -> PreparedRequest:
        """Build as every adapter, but drop the reference of the host's warm-up clone.

        That clone warms up the host's own encoder, which our prompts never use. And its
        clip, which no tenant owns, could not be stored.

        Raises: SpeakerRequestError, ServerFaultError.
        """
        if self._is_warming_up:
            unset = {"ref_audio": None, "ref_text": None}
            request, has_inline_ref_audio = request.model_copy(update=unset), False
        return await super().build(request, sampling_params_list, has_inline_ref_audio)

    async def clone(self, speaker: Speaker) -> PreparedRequest:
        """Build the host's prompt with silence, then replace that by the address."""
        host: Any = self  # its registering decorator hides the class from checkers
        clip = speaker.clip
        sampling = host.ctx.engine_client.default_sampling_params_list[0]
        silent = prompts.silence(clip)
        prompt = await host._build_async(speaker.request, sampling, silent)
        return self._prepared(speaker, prompts.by_address(prompt, clip.ref))

    async def speak(self, request: Any, *others: Any) -> PreparedRequest:
        """Build as the host, with a label in upper case: the host copies it as sent."""
        if (label := request.voice) is not None and fold(label) in _LABELS:
            request = request.model_copy(update={"voice": label.upper()})
        return await super().speak(request, *others)

    def _load_supported_speakers(self) -> list[str]:
        return list(_LABELS)

    @cached_property
    def _builder(self) -> prompts.PromptBuilder:
        from transformers import AutoTokenizer

        host: Any = self
        if host.tokenizer is None:  # the host loads it with the first prompt, too late
            config = host.ctx.engine_client.model_config
            read = AutoTokenizer.from_pretrained
            host.tokenizer = read(config.model, config=config.hf_config)
        return prompts.PromptBuilder(host.tokenizer)
