"""What previews are called beside their audio: by whose they are, and by their digest.

Tenants that have the same clip share its encodings, and not what they had it say.
"""

import hashlib
from collections.abc import Callable, Iterable

from vllm_tts_cache.catalogue.record import PREVIEW_PREFIX

_DIGITS = 64
_TENANT_DIGITS = 16


def preview_kind(tenant: str, told: str) -> str:
    """The kind of a preview of all that decides what is heard."""
    digest = hashlib.sha256(told.encode()).hexdigest()
    return _begin(tenant) + digest[: _DIGITS - _TENANT_DIGITS]


def of_other_tenants(tenants: Iterable[str]) -> Callable[[str], bool]:
    """Return what tells whether a preview is one of these tenants'."""
    begins = tuple(map(_begin, tenants))
    return lambda kind: kind.startswith(begins)


def _begin(tenant: str) -> str:
    digest = hashlib.sha256(f"preview of {tenant}".encode()).hexdigest()
    return f"{PREVIEW_PREFIX}{digest[:_TENANT_DIGITS]}"
