"""The CPU as a vLLM-Omni platform: to try and test the product without a GPU."""

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

from vllm_tts_cache import patch_once


def forgive_emptying_no_cache() -> None:
    """Have ``torch.accelerator.empty_cache`` do nothing where there is no accelerator.

    It raises there, and models of the host call it when they are built.
    """
    if not torch.accelerator.is_available():
        patch_once(torch.accelerator, "empty_cache", lambda _: _do_nothing)


def say_that_nothing_is_captured() -> None:
    """Have ``torch.cuda.is_current_stream_capturing`` answer in a build without CUDA.

    It raises there, and Higgs Audio's decoder asks it about each chunk.
    """
    if not torch.backends.cuda.is_built():
        patch_once(torch.cuda, "is_current_stream_capturing", lambda _: _no)


def _do_nothing() -> None:
    pass


def _no() -> bool:
    return False


class CPUOmniPlatform(OmniPlatform, CpuPlatform):
    """vLLM's CPU platform with the answers that vLLM-Omni asks for on top."""

    _omni_enum = OmniPlatformEnum.OOT
    # By its number the host lets one stage of a device start at a time. Servers with
    # other numbers start beside one another; vLLM's own variable names memory nodes.
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
        """Keep the code predictor eager: compiling costs more than it saves here."""
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
        """Return 1: all cores are one device."""
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        """Return None: there is no driver."""
        return None

    @classmethod
    def synchronize(cls) -> None:
        """Do nothing: the CPU has no queue."""

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

    # What diffusion workers ask an allocator, of which there is none here.

    @classmethod
    def empty_cache(cls) -> None:
        """Do nothing: memory that is free is the system's."""

    @classmethod
    def reset_peak_memory_stats(cls) -> None:
        """Do nothing: nobody counts."""

    @classmethod
    def max_memory_reserved(cls) -> int:
        """Return 0: nobody counts."""
        return 0

    @classmethod
    def max_memory_allocated(cls) -> int:
        """Return 0: nobody counts."""
        return 0
