"""Entry points: each attaches what its process needs, and imports it only then.

Which group runs where (vLLM-Omni 0.30):

* ``vllm_omni.general_plugins`` -> :func:`register`: the API process, each stage
  process and each worker. A plain ``vllm serve`` of a text model never loads it.
* ``vllm.general_plugins`` -> :func:`register_engine_core`: every vLLM process;
  needed because an engine core in a process of its own loads no other group.
* ``vllm_omni.platform_plugins`` -> :func:`cpu_platform`.
"""

import logging
import sys
from functools import cache
from importlib import metadata

from vllm_tts_cache import SUPPORTED_HOST

logger = logging.getLogger("vllm.vllm_tts_cache")

_API_SERVER = "vllm_omni.entrypoints.openai.api_server"
_OFFLINE = "vllm_omni.entrypoints.omni"
_ENGINE_CORE = "vllm_omni.engine.stage_engine_core_proc"


def register() -> None:
    """Attach everything this process needs; a second call changes nothing.

    Raises: ConfigError: A setting is wrong; the message names the variable.
    """
    if not _is_wanted():
        return
    from vllm_tts_cache.model_executor import failed_requests, rpc_methods

    rpc_methods.replace_models()
    rpc_methods.install()
    failed_requests.install()
    if _OFFLINE in sys.modules:
        from vllm_tts_cache.entrypoints.attach import attach_offline

        attach_offline()
    if _API_SERVER in sys.modules:
        from vllm_tts_cache.entrypoints.attach import attach

        attach()


def register_engine_core() -> None:
    """Attach the scheduler hook, in vLLM-Omni's engine cores only."""
    if _ENGINE_CORE not in sys.modules or not _is_wanted():
        return
    from vllm_tts_cache.model_executor import failed_requests

    failed_requests.install()


def cpu_platform() -> str | None:
    """Name our CPU platform; None unless vLLM is built for CPUs and there is no GPU."""
    from vllm_tts_cache.config import load_settings

    if not _host_is_supported() or not load_settings().cpu_platform:
        return None
    from vllm_tts_cache import platforms

    if not platforms.is_for_this_machine():
        return None
    return "vllm_tts_cache.platforms.cpu.CPUOmniPlatform"


def _is_wanted() -> bool:
    if not _host_is_supported():
        return False
    from vllm_tts_cache.config import load_settings

    return load_settings().enabled


def _host_is_supported() -> bool:
    try:
        version = metadata.version("vllm-omni")
    except metadata.PackageNotFoundError:
        return False
    if version == SUPPORTED_HOST or version.startswith(f"{SUPPORTED_HOST}."):
        return True
    _warn_once(
        f"vllm-tts-cache supports vllm-omni {SUPPORTED_HOST}.x and found {version}: it "
        "stays switched off. Install a matching version of vllm-tts-cache."
    )
    return False


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)
