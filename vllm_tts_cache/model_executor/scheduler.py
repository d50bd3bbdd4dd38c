"""Turns a request whose speaker prompt cannot be had into an error of that request.

An exception in ``preprocess`` would end the engine and every stream with it. So the
talker lets such a request sample one id that nothing else can sample, and this hook,
where the scheduler takes in sampled ids, finishes the request as an error with our
reason: a 500 with text, while its neighbours go on.
"""

from typing import Any

from vllm_tts_cache.speaker.family import family_of_model
from vllm_tts_cache.speaker.ref import FIELD

# For people: the API process asks the workers, by the request's id, and reads nothing
# out of this.
REASON = (
    "The speaker prompt of this voice was not there when its request began. The "
    "request failed alone; the server log has the cause. Try again; if it goes on, "
    "register the voice again."
)


def install() -> None:
    """Hook the scheduler class; the asynchronous one inherits from it."""
    from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler

    from vllm_tts_cache.model_executor import reservation, voice_blocks

    OmniARScheduler._update_request_with_output = _update_request_with_output
    reservation.install()
    voice_blocks.install()


def _update_request_with_output(
    self: Any, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any
) -> tuple[list[int], bool]:
    from vllm.v1.request import RequestStatus
    from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler

    scheduler: Any = super(OmniARScheduler, self)
    inherited = scheduler._update_request_with_output
    token_ids, stopped = inherited(request, new_token_ids, *args, **kwargs)
    family = family_of_model(*self.vllm_config.model_config.architectures)
    if family is None or family.failure_id not in token_ids:
        return token_ids, stopped
    if not (family.needs_voice or _names_a_speaker(request)):
        return token_ids, stopped
    request.status = RequestStatus.FINISHED_ERROR
    request.stop_reason = REASON
    request.resumable = False
    _delete_prefix(self.kv_cache_manager, request.request_id)
    return [], True


def _delete_prefix(kv_cache_manager: Any, request_id: str) -> None:
    """Take the request's blocks out of the prefix cache.

    They were put there when they were scheduled, under the voice's ids and salt, and
    hold no voice: the next request of it would speak with them, and not fail.
    """
    groups = kv_cache_manager.get_block_ids(request_id)
    kv_cache_manager.evict_blocks({block for group in groups for block in group})


def _names_a_speaker(request: Any) -> bool:
    info = getattr(request, "additional_information", None)
    return FIELD in (getattr(info, "entries", None) or info or ())
