"""The file that says whose API keys are whose."""

from collections.abc import Iterator

from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.cli.doctor.finding import Finding, fail, ok, warn
from vllm_tts_cache.errors import ConfigError


def tenants(settings: Settings) -> Iterator[Finding]:
    """Say what is wrong with ``SPEAKER_TENANTS_FILE``, if there is one."""
    from vllm_tts_cache.entrypoints.tenant_keys import TenantKeys, is_open_to_others

    if (path := settings.tenants_file) is None:
        return
    try:
        keys = TenantKeys(path)
    except ConfigError as exc:
        hint = "a server does not start with it; one that runs keeps the keys it has"
        yield fail("tenants", str(exc), hint)
        return
    text = f"{path}: {len(keys.tenants)} tenants with keys"
    if is_open_to_others(path):
        yield warn("tenants", text, f"everybody here may read it: chmod 600 {path}")
    else:
        yield ok("tenants", text)
