"""The OmniVoice pipeline, taking a reference's codes by content address."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.models.omnivoice.pipeline_omnivoice import (
    OmniVoicePipeline,
    get_omnivoice_post_process_func,
)
from vllm_omni.model_executor.models.omnivoice import omnivoice_generator

from vllm_tts_cache.families.networks.prompts import KnownEncoding, checked_codes
from vllm_tts_cache.families.omnivoice.family import FAMILY
from vllm_tts_cache.families.omnivoice.limits import MAX_STEPS
from vllm_tts_cache.families.omnivoice.preparation import LOUDNESS
from vllm_tts_cache.model_executor.pipeline import CachedPipeline, looking_up_a_prompt
from vllm_tts_cache.model_executor.talker import on_device
from vllm_tts_cache.speaker.reference import FIELD

# The host looks the second up in the module of the first.
__all__ = ["CachedOmniVoicePipeline", "get_omnivoice_post_process_func"]

_RMS = "tts_cache_rms"  # in a request's state, if the host computes one step at a time


class CachedOmniVoicePipeline(CachedPipeline, OmniVoicePipeline):
    """The host's pipeline with a reference's codes from stored encodings.

    A quiet reference is encoded as if it were louder, and the speech is made as quiet
    again, both as in the official package.
    """

    tts_cache_family = FAMILY

    def __init__(self, *, od_config: Any, prefix: str = ""):
        super().__init__(od_config=od_config, prefix=prefix)
        # RMS of the references of the requests that are being prepared.
        self._rms: list[float | None] = []
        if self.device.type == "cpu":
            # The host takes Triton wherever it can be imported, on any device.
            omnivoice_generator._TRITON_AVAILABLE = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the pipeline, then the reference encoder: no request waits for that."""
        loaded = super().load_weights(weights)
        self._load_speakers_of(str(self.model_path), self.device, self.od_config.dtype)
        return loaded

    def forward(self, req: Any) -> list[DiffusionOutput]:
        """Speak a batch as the host does, each request as loud as its reference."""
        self._rms.clear()
        num_steps = req.requests[0].sampling_params.num_inference_steps
        if num_steps is not None and not 1 <= num_steps <= MAX_STEPS:
            # Without a step, masks would be decoded: on a GPU that ends the process.
            error = f"num_inference_steps is {num_steps}; 1 to {MAX_STEPS} are possible"
            return [DiffusionOutput(error=error) for _ in req.requests]
        outputs = super().forward(req)
        pairs = zip(outputs, self._rms, strict=True)
        return [as_loud(output, rms) for output, rms in pairs]

    def prepare_encode(self, state: Any) -> Any:
        """Prepare one request as the host does if it computes one step at a time."""
        self._rms.clear()
        state = super().prepare_encode(state)
        state.extra[_RMS] = self._rms.pop()
        return state

    def post_decode(self, state: Any, **kwargs: Any) -> DiffusionOutput:
        """Decode one request as the host does, as loud as its reference."""
        return as_loud(super().post_decode(state, **kwargs), state.extra.get(_RMS))

    def _prepare_request_input(self, prompt: Any, extra: dict[str, Any]) -> Any:
        """Build a request's input as the host does, from stored codes.

        It returns an error instead of raising, except as `_error` does: an exception of
        one request would fail the whole batch.
        """
        given, rms = prompt, None
        try:
            if isinstance(prompt, Mapping) and FIELD in prompt:
                with looking_up_a_prompt():
                    given, rms = self._with_codes(prompt)
            if (seed := extra.get("seed")) is not None:
                torch.Generator().manual_seed(seed)  # a bad seed fails here, alone
            return super()._prepare_request_input(given, extra)
        except Exception as exc:  # noqa: BLE001  its neighbours are in the batch
            return self._error(prompt, exc)
        finally:
            self._rms.append(rms)

    def _encode_ref_audio(self, audio_signal: Any, sr: int) -> torch.Tensor:
        if isinstance(audio_signal, KnownEncoding):
            return audio_signal.value
        return super()._encode_ref_audio(audio_signal, sr)

    def _with_codes(self, prompt: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
        """Return the prompt with its reference's codes, and the reference's RMS.

        Raises: TTSCacheError, ValueError: codes are missing or do not fit the model.
        """
        encoding = self._only_encoding(self._speaker(prompt))
        codes = encoding["codes"]
        expected = len(codes), self.config.num_audio_codebook
        codes = checked_codes(codes, expected, self.config.audio_mask_id)
        self._count_prompt()
        # ``(num_codebooks, num_frames)``, as the host's encoder returns them.
        known_codes = KnownEncoding(on_device(codes.T, self.device, torch.long))
        # Without rate and name, by which the host would cache what it encodes.
        given = {**prompt, "ref_audio": (known_codes, 0), "voice_name": None}
        return given, float(encoding["rms"][0])


def as_loud(output: DiffusionOutput, rms: float | None) -> DiffusionOutput:
    """Make an output as quiet as its reference, if that was encoded louder.

    It is left as it is if it has no audio, or had no reference, whose RMS is ``rms``.
    """
    if isinstance(output.output, torch.Tensor) and rms is not None and rms < LOUDNESS:
        output.output = output.output * rms / LOUDNESS
    return output
