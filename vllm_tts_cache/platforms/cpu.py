"""The CPU as a vLLM-Omni platform, to try and test the plugin without a GPU."""

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

from vllm_tts_cache import patch_once


def forgive_emptying_no_cache() -> None:
    """Make ``torch.accelerator.empty_cache`` a no-op if there is no accelerator.

    It raises there, and models of the host call it when they are built.
    """
    if not torch.accelerator.is_available():
        patch_once(torch.accelerator, "empty_cache", lambda _: lambda: None)


def say_that_nothing_is_captured() -> None:
    """Make ``torch.cuda.is_current_stream_capturing`` False in a build without CUDA.

    It raises there, and Higgs Audio's decoder calls it for each chunk.
    """
    if not torch.backends.cuda.is_built():
        patch_once(torch.cuda, "is_current_stream_capturing", lambda _: lambda: False)


class CPUOmniPlatform(OmniPlatform, CpuPlatform):
    """vLLM's CPU platform with the answers that vLLM-Omni asks for on top."""

    _omni_enum = OmniPlatformEnum.OOT
    # The host starts one stage of a device at a time, by this variable's number. vLLM's
    # own variable names memory nodes.
    device_control_env_var = "TTS_CACHE_CPU_DEVICE"
    # Also the key of a deploy YAML's `platforms:` overlay.
    device_name = "cpu"

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        """Return the worker of autoregressive stages."""
        return "vllm_tts_cache.platforms.cpu_worker.CPUARWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        """Return the worker of codec-decoder stages."""
        return "vllm_tts_cache.platforms.cpu_worker.CPUGenerationWorker"

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        """Return the worker of diffusion stages."""
        return "vllm_tts_cache.platforms.cpu_kernels.CPUDiffusionWorker"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        """Return where vLLM-Omni keeps its own deploy files."""
        return "vllm_omni/deploy"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls,
        selected_backend: str | None,  # noqa: ARG003  the host's signature
        head_size: int,  # noqa: ARG003
        allow_trtllm_default: bool = False,  # noqa: ARG003
    ) -> str:
        """Return torch's own attention: the only one that runs here."""
        return "vllm_tts_cache.platforms.cpu_kernels.CPUDiffusionBackend"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        """Return False: compiling the code predictor costs more than it saves here."""
        return False

    @classmethod
    def get_torch_device(
        cls,
        local_rank: int | None = None,  # noqa: ARG003
    ) -> torch.device:
        """Return the CPU, whatever the rank."""
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        """Return 1, for all cores."""
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        """Return None, as there is no driver."""
        return None

    @classmethod
    def synchronize(cls) -> None:
        """Return at once, as a CPU has no queue."""

    @classmethod
    def get_free_memory(
        cls,
        device: torch.device | None = None,  # noqa: ARG003
    ) -> int:
        """Return free main memory, in bytes."""
        return psutil.virtual_memory().available

    @classmethod
    def get_device_memory(
        cls,
        device: torch.device | None = None,  # noqa: ARG003
    ) -> tuple[int, int]:
        """Return free and total main memory, in bytes."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    # Diffusion workers call these. A CPU has no caching allocator.

    @classmethod
    def empty_cache(cls) -> None:
        """Return at once."""

    @classmethod
    def reset_peak_memory_stats(cls) -> None:
        """Return at once."""

    @classmethod
    def max_memory_reserved(cls) -> int:
        """Return 0."""
        return 0

    max_memory_allocated = max_memory_reserved
