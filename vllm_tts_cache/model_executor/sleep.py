"""Keeps the encode thread still while vLLM's sleep mode has the GPU's memory.

The encoders' own memory is none of what sleep mode takes (`encode_work` says why), so
an encode would do no harm here. It would take the memory that others were promised.
"""

from typing import Any

from vllm_tts_cache.model_executor.rpc import speakers_of


def install() -> None:
    """Put our methods before those of every vLLM-Omni worker."""
    from vllm_omni.worker.mixins import OmniWorkerMixin

    def sleep(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Go to sleep as the host does, once nothing is encoded."""
        host: Any = super(OmniWorkerMixin, self)
        if (speakers := speakers_of(self)) is None:
            return host.sleep(*args, **kwargs)
        speakers.sleep()
        try:
            return host.sleep(*args, **kwargs)
        except BaseException:
            speakers.wake_up()
            raise

    def wake_up(self: Any, tags: list[str] | None = None) -> Any:
        """Wake up as the host does; encode once it has all of its memory again."""
        host: Any = super(OmniWorkerMixin, self)
        answer = host.wake_up(tags)
        speakers = speakers_of(self)
        # Weights may be woken alone, to be loaded anew; the rest is woken after them.
        if speakers is not None and (tags is None or "kv_cache" in tags):
            speakers.wake_up()
        return answer

    for method in (sleep, wake_up):
        setattr(OmniWorkerMixin, method.__name__, method)
