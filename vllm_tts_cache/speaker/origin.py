"""What of this machine computes encodings, by its name."""

import platform
from functools import cache
from pathlib import Path

import torch

from vllm_tts_cache.store.encoding import Origin

_CPU_INFO = Path("/proc/cpuinfo")


@cache
def origin_of(device: torch.device) -> Origin:
    """Name a device that encoders compute on; of a CUDA device its context is made."""
    if device.type == "cpu":
        name = cpu_name()
    elif device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = str(device)
    return Origin(
        device=device.type, device_name=name, torch_version=str(torch.__version__)
    )


def cpu_name() -> str:
    """The CPU as its maker calls it, or else its architecture."""
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.is_file() else []
    names = (line.split(":", 1)[1].strip() for line in lines if _names_it(line))
    return next(names, platform.processor() or platform.machine())


def _names_it(line: str) -> bool:
    return line.startswith("model name") and ":" in line
