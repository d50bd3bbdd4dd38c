"""The base of every family's diffusion pipeline; mixed in before the host's class.

Such a model samples no tokens, so a pipeline ends a request by returning an error as
its output. It has no KV that a failed request could leave to others.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.distributed import parallel_state

from vllm_tts_cache.errors import ServerFaultError, log_text_of
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.model_executor import rpc_methods
from vllm_tts_cache.model_executor.failed_requests import REASON
from vllm_tts_cache.model_executor.loading import SpeakerSide
from vllm_tts_cache.model_executor.speakers import ALONE, Ranks, tensor_parallel_ranks
from vllm_tts_cache.speaker.reference import REQUEST_FIELD

throttled = ThrottledLog()


class MissingPromptError(ServerFaultError):
    """A speaker prompt is missing, so the API process submits the request again."""


@contextmanager
def looking_up_a_prompt() -> Iterator[None]:
    """Raise any exception of the block as a MissingPromptError."""
    try:
        yield
    except Exception as exc:
        raise MissingPromptError(str(exc) or repr(exc)) from exc


class CachedPipeline(SpeakerSide):
    """Takes speaker prompts by content address, and lets a request fail alone."""

    def __init__(self, *, od_config: Any, prefix: str = ""):
        super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]
        rpc_methods.install_on_diffusion()

    def _load_speakers_of(
        self, model_dir: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Load the reference encoders of a checkpoint, after the pipeline's weights."""
        # As much of vLLM's configuration as loading reads; the host's has other names.
        vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                model=model_dir, revision=None, dtype=dtype, hf_token=None
            ),
            load_config=SimpleNamespace(download_dir=None),
            device_config=SimpleNamespace(device=device),
        )
        self._load_speakers(vllm_config)

    def _ranks(self) -> Ranks:
        """Return the processes that compute one request together.

        Data-parallel replicas have requests of their own. Then only tensor-parallel
        ranks are known to compute one request together.
        """
        if not parallel_state.model_parallel_is_initialized():
            return ALONE
        if parallel_state.get_data_parallel_world_size() > 1:
            return tensor_parallel_ranks()
        group = parallel_state.get_world_group()
        return ALONE if group.world_size == 1 else Ranks(group.cpu_group)

    def _error(self, prompt: object, cause: Exception) -> DiffusionOutput:
        """Return the error that ends a request.

        Args:
            prompt: The request's.
            cause: What was raised. A `MissingPromptError` is noted for the API process,
                which then submits the request once more.

        Raises: OutOfMemoryError of one rank of several: the others would wait for it.
        """
        speakers = self.tts_cache_speakers
        is_missing = isinstance(cause, MissingPromptError)
        original = cause.__cause__ if is_missing else cause
        are_several = speakers is not None and speakers.ranks.are_several
        if are_several and isinstance(original, torch.OutOfMemoryError):
            raise original
        if not (is_missing and isinstance(prompt, Mapping)):
            return DiffusionOutput(error=str(cause) or repr(cause))
        request_id = str(prompt.get(REQUEST_FIELD, "of a batch job"))
        message = "No prompt for request %s: %s"
        throttled.warn_of("no speaker prompt", message, request_id, log_text_of(cause))
        if speakers is not None:
            speakers.remember_failed_prompt(request_id, str(cause))
        return DiffusionOutput(error=REASON)
