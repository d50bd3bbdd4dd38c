"""The base of every family's talker; mixed in before the host's class."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch

from vllm_tts_cache.errors import ConfigError, TTSCacheError
from vllm_tts_cache.logs import logger
from vllm_tts_cache.model_executor.failed_requests import (
    FailedRequests,
    SuspectPrefixes,
    ending_sampler,
    request_id_of,
)
from vllm_tts_cache.model_executor.loading import SpeakerSide
from vllm_tts_cache.speaker.family import Family
from vllm_tts_cache.store.encoding import Array

_SPOILT_PREFIX = "the KV of its prefix is that of a failed request"

# A span's ids, its rows, and what the runner stores for the request.
Built = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]


def failing_alone(build: Callable[..., Built]) -> Callable[..., Built]:
    """Wrap a talker's ``preprocess``: an exception fails that request alone.

    The runner builds the spans of all requests of a step, so an exception there would
    end the engine. The host's own routes pass on anything that their clients send.

    Args:
        build: The talker's ``preprocess``. For a failed request the talker's
            ``_passed_over(input_ids, info)`` is called instead.
    """

    @functools.wraps(build)
    def preprocess(
        self: Any, input_ids: torch.Tensor, input_embeds: Any = None, **info: Any
    ) -> Built:
        if not self._has_failed(info):
            try:
                return build(self, input_ids, input_embeds, **info)
            except Exception as exc:  # noqa: BLE001  raising here would end the engine
                self._fail(info, exc)
        passed_over: Built = self._passed_over(input_ids, info)
        return passed_over

    return preprocess


class CachedTalker(SpeakerSide):
    """Takes speaker prompts by content address, and lets a request fail alone."""

    # Whether `compute_logits` ends failed requests; else `sample` does.
    _ends_in_logits: ClassVar = True

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        is_second = getattr(vllm_config.model_config, "use_v2_model_runner", False)
        if is_second and self.tts_cache_family.needs_first_runner:
            problem = (
                f"{self.tts_cache_family.title} cannot be served on the second model "
                "runner: it passes over what gives requests their voices and ends "
                "those that fail. Set model_runner: v1 in the deploy file, or give "
                "--deploy-config the plain one of the model in vllm_omni/deploy."
            )
            raise logged_error(problem)
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.vllm_config = vllm_config
        failure_id = self.tts_cache_family.failure_id
        assert failure_id is not None, "a talker ends a failed request by an id"
        self._failed_requests = FailedRequests(failure_id)
        self._suspect_prefixes = SuspectPrefixes()
        self._requests_of_rows: list[str] = []
        if is_second:
            # Only then does that runner say which row of the logits is whose.
            self.logitsprocs_need_output_token_ids = True

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the talker, then our own encoders: no request pays for them."""
        host: Any = super()
        loaded: set[str] = host.load_weights(weights)
        self._load_speakers(self.vllm_config)
        return loaded

    def compute_logits(self, hidden_states: Any, sampling_metadata: Any = None) -> Any:
        """Force the id that ends a request without a speaker prompt as an error."""
        host: Any = super()
        logits = host.compute_logits(hidden_states, sampling_metadata)
        self._suspect_prefixes.end_step()  # all of its prefills were built
        if logits is None or not self._ends_in_logits:
            return logits
        return self._failed_requests.end(logits, self._requests_of_rows)

    def set_batch_req_ids(self, req_ids: Sequence[str]) -> None:
        """Note the requests of the next rows of logits; the v1 runner calls this."""
        self._requests_of_rows = list(req_ids)
        if (hosts := getattr(super(), "set_batch_req_ids", None)) is not None:
            hosts(req_ids)

    @contextmanager
    def mrv2_sampling_context(
        self, *, req_ids: Sequence[str], num_output_tokens: torch.Tensor
    ) -> Iterator[None]:
        """Note the requests for the second runner, which samples within the block."""
        hosts: Any = getattr(
            super(), "mrv2_sampling_context", lambda **_: nullcontext()
        )
        self._requests_of_rows = list(req_ids)
        try:
            with hosts(req_ids=req_ids, num_output_tokens=num_output_tokens):
                yield
        finally:
            self._requests_of_rows = []

    def mrv2_custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        """Wrap the sampler of the second runner, for which vLLM-Omni 0.32 asks."""
        hosts = getattr(super(), "mrv2_custom_sampler", lambda _: None)
        chosen, rejection_sampler = hosts(sampler) or (sampler, None)
        return ending_sampler(chosen, self._failed_requests), rejection_sampler

    def _has_failed(self, info: Mapping[str, Any]) -> bool:
        """Tell whether an earlier chunk of the request failed."""
        return request_id_of(info) in self._failed_requests

    def _fail(self, info: Mapping[str, Any], cause: Exception) -> None:
        """Let the request fail alone, when its first id is sampled.

        An error other than of memory is taken to occur on all ranks, which compute the
        same from the same bytes. An error of one rank's device would end the engine in
        the next step by itself.

        Raises: OutOfMemoryError of one rank of several. The others go on with the
            request, and would speak nonsense, so this ends the engine.
        """
        speakers = self.tts_cache_speakers
        is_own = isinstance(cause, torch.OutOfMemoryError)
        if is_own and speakers is not None and speakers.ranks.are_several:
            raise cause
        self._failed_requests.add(request_id_of(info), cause, speakers)

    def _refuse_suspect(self, prefix: str, info: Mapping[str, Any]) -> None:
        """Refuse KV that a request without a speaker prompt may have computed.

        Raises: TTSCacheError.
        """
        if not self._suspect_prefixes.rely_on(prefix, request_id_of(info)):
            raise TTSCacheError(_SPOILT_PREFIX)

    def _suspect(self, prefix: str) -> None:
        """Fail the requests that rely on the KV of a failing request, too."""
        for request_id in self._suspect_prefixes.add(prefix):
            if request_id not in self._failed_requests:
                spoilt = TTSCacheError(_SPOILT_PREFIX)
                self._failed_requests.add(request_id, spoilt, self.tts_cache_speakers)


def on_device(
    array: Array, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a copy of an array on the device, of its own dtype if ``dtype`` is None.

    It goes through pinned memory, and in its final dtype: otherwise torch would wait
    for the stream, on which the step of all other requests still runs.
    """
    tensor = torch.tensor(array, dtype=dtype)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def refuse_prefix_caching(vllm_config: Any, family: Family) -> None:
    """Refuse prefix caching, before anything is loaded: requests would share voices.

    Raises: ConfigError.
    """
    if vllm_config.cache_config.enable_prefix_caching:
        raise logged_error(
            f"{family.title} cannot be served with prefix caching: its prompts are "
            "placeholders, so a request would speak with another's voice and text. "
            "Set enable_prefix_caching: false in the deploy file."
        )


def logged_error(problem: str) -> ConfigError:
    """Return the error, and log it: the host surrounds an exception with pages."""
    logger.error(problem)
    return ConfigError(problem)


class SamplingTalker(CachedTalker):
    """Ends a failed request after the host's sampler, and not in its logits.

    Such a sampler draws from the ids that the model speaks with. With none of them left
    it would fail, and every request of the step with it.
    """

    _ends_in_logits = False

    def sample(self, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        """Sample as the host does, except for failed requests."""
        host: Any = super()
        # vLLM leaves out what no request of a step sets, and such a sampler then takes
        # other values than beside a neighbour that sets them.
        usual = {"temperature": 0.0, "top_p": 1.0, "top_k": logits.shape[-1]}
        values = {
            name: torch.full(logits.shape[:1], value, device=logits.device)
            for name, value in usual.items()
            if getattr(sampling_metadata, name) is None
        }
        output = host.sample(logits, replace(sampling_metadata, **values))
        if output is not None:
            sampled = output.sampled_token_ids
            self._failed_requests.force(sampled, self._requests_of_rows)
        else:  # vLLM samples next, by the logits
            self._failed_requests.end(logits, self._requests_of_rows)
        return output
