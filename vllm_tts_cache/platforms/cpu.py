"""What vLLM-Omni asks a platform, answered for the CPU."""

from typing import Any

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

from vllm_tts_cache import patch_once


def _always(answer: Any) -> Any:
    """Return a class method that returns ``answer`` for any arguments."""
    return classmethod(lambda _cls, *_args, **_options: answer)


_WORKERS = "vllm_tts_cache.platforms.cpu_worker"


class CPUOmniPlatform(OmniPlatform, CpuPlatform):
    """vLLM's CPU platform with the answers that vLLM-Omni asks for on top."""

    _omni_enum = OmniPlatformEnum.OOT
    # The host starts the stages of one device one after the other, by this variable's
    # number. vLLM's own variable names memory nodes.
    device_control_env_var = "TTS_CACHE_CPU_DEVICE"
    # Also the key of a deploy YAML's `platforms:` overlay.
    device_name = "cpu"

    get_omni_ar_worker_cls = _always(f"{_WORKERS}.CPUARWorker")
    get_omni_generation_worker_cls = _always(f"{_WORKERS}.CPUGenerationWorker")
    get_diffusion_worker_cls = _always(f"{_WORKERS}.CPUDiffusionWorker")
    get_default_stage_config_path = _always("vllm_omni/deploy")  # vLLM-Omni's own
    # Compiling the code predictor costs more than it saves here.
    supports_torch_inductor = _always(False)
    get_torch_device = _always(torch.device("cpu"))
    get_device_count = _always(1)  # for all cores
    get_device_version = _always(None)  # there is no driver
    # A CPU has no queue and no caching allocator. Diffusion workers call these.
    synchronize = empty_cache = reset_peak_memory_stats = _always(None)
    max_memory_reserved = max_memory_allocated = _always(0)

    @classmethod
    def get_diffusion_attn_backend_cls(cls, *_: Any, **__: Any) -> str:
        """Return torch's own attention, and make it run in the process that asks.

        Layers of codec decoders have it as well as those of diffusion stages, also as
        the fallback that some models compute with on an unknown device.
        """
        from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl

        patch_once(SDPAImpl, "forward", lambda _: SDPAImpl.forward_cuda)
        return f"{SDPABackend.__module__}.{SDPABackend.__name__}"

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        """Return free main memory, in bytes."""
        return cls.get_device_memory(device)[0]

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        """Return free and total main memory, in bytes."""
        del device
        memory = psutil.virtual_memory()
        return memory.available, memory.total
