"""Entry points: each attaches what its process needs, and imports it only then.

Which group runs where (vLLM-Omni 0.30 and 0.32):

* ``vllm_omni.general_plugins`` -> :func:`register`: the API process, each stage
  process and each worker. A plain ``vllm serve`` of a text model never loads it.
* ``vllm.general_plugins`` -> :func:`register_engine_core`: every vLLM process;
  needed because an engine core in a process of its own loads no other group.
* ``vllm_omni.platform_plugins`` -> :func:`cpu_platform`.
"""

import logging
import sys
from contextlib import closing
from functools import cache
from pathlib import Path

from vllm_tts_cache import SUPPORTED_HOSTS, installed_version, is_supported_host

logger = logging.getLogger("vllm.vllm_tts_cache")
_warn_once = cache(logger.warning)

_API_SERVER = "vllm_omni.entrypoints.openai.api_server"
_OFFLINE = "vllm_omni.entrypoints.omni"
_ENGINE_CORE = "vllm_omni.engine.stage_engine_core_proc"
_ADVICE = "Install a version of vllm-tts-cache that is for this host"


def register() -> None:
    """Attach everything this process needs; a second call changes nothing.

    Raises: ConfigError: A setting is wrong; the message names the variable. Or the
        host is not supported, and would serve voices or tenants without this plugin.
    """
    if not _is_wanted():
        _refuse_unsupported_host()
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
    version = installed_version("vllm-omni")
    if version is None or is_supported_host(version):
        return version is not None
    _warn_once(f"{_unsupported(version)} it stays switched off. {_ADVICE}.")
    return False


def _refuse_unsupported_host() -> None:
    """End an API server if stock would speak without keys, or without its voices.

    Raises: ConfigError.
    """
    from vllm_tts_cache.config import load_settings
    from vllm_tts_cache.errors import ConfigError

    version = installed_version("vllm-omni")
    if _API_SERVER not in sys.modules or version is None or is_supported_host(version):
        return
    settings = load_settings()
    is_in_use = settings.tenants_file or settings.catalogue_url
    if not settings.enabled or not (is_in_use or _has_voices(settings.samples_dir)):
        return
    message = (
        f"{_unsupported(version)} without it no registered voice would be found, and "
        f"no tenant's key asked for. {_ADVICE}, or set SPEAKER_CACHE_ENABLED=0 to "
        "serve without the plugin."
    )
    logger.error(message)
    raise ConfigError(message)


def _has_voices(directory: Path) -> bool:
    """Tell whether there are voices in the catalogue's file; True if in doubt."""
    import sqlite3

    from vllm_tts_cache.catalogue.sqlite import FILE_NAME

    if not (file := directory.absolute() / FILE_NAME).exists():
        return False
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=rw", uri=True)) as db:
            return db.execute("SELECT 1 FROM speaker LIMIT 1").fetchone() is not None
    except sqlite3.Error:
        return True


def _unsupported(version: str) -> str:
    hosts = " and ".join(SUPPORTED_HOSTS)
    return f"vllm-tts-cache supports vllm-omni {hosts}, and found {version}:"
