"""What ``speaker_cache`` says of the catalogue and of this process."""

from dataclasses import asdict

from vllm_tts_cache.catalogue.stored_files import Usage
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.record_memory import RecordMemory
from vllm_tts_cache.entrypoints.tenant_keys import TenantKeys
from vllm_tts_cache.store.speaker_store import SpeakerStore
from vllm_tts_cache.tenants import Tenant


class Counts:
    """Adds up what is registered and stored; every method reads the catalogue."""

    def __init__(
        self,
        store: SpeakerStore,
        settings: Settings,
        tenants: TenantKeys,
        known_records: RecordMemory,
    ):
        self._store = store
        self._tenants = tenants
        self._known_records = known_records
        self._max_bytes = {
            "registered_audio": settings.audio_max_bytes,
            "inline_audio": settings.inline_audio_max_bytes,
            "encodings": settings.disk_max_bytes,
        }

    def of_all(self) -> dict[str, object]:
        """What there is, and of several tenants what each has. Raises: StorageError."""
        catalogue = self._store.catalogue
        storage: dict[str, object] = {
            segment.value: {kind: _shown(used) for kind, used in kinds.items()}
            for segment, kinds in catalogue.usage().items()
        }
        storage["max_bytes"] = self._max_bytes
        known = self._known_records
        counts = {
            "registry": {"speakers": catalogue.count()},
            "storage": storage,
            "deletions": {"unfinished": catalogue.num_unfinished_deletions()},
            "records": {"speakers": len(known), **asdict(known.counts)},
        }
        if bucket := self._store.blobs.counts():
            counts["bucket"] = bucket
        if not self._tenants.is_on:
            return counts
        names = catalogue.usage_of_tenants().keys() | self._tenants.tenants.keys()
        tenants = {name: self._tenants.tenants.get(name) for name in sorted(names)}
        each = {
            name: self.of_tenant(tenant or Tenant(name=name))
            for name, tenant in tenants.items()
        }
        return {**counts, "tenants": each}

    def of_tenant(self, tenant: Tenant) -> dict[str, object]:
        """What one of several tenants has. Raises: StorageError."""
        catalogue = self._store.catalogue
        used, limits = catalogue.usage_of(tenant.name), tenant.limits
        return {
            "registry": {
                "speakers": used.num_voices,
                "consents": used.num_consents,
                "pinned": used.num_pinned,
                "audio_bytes": used.audio_bytes,
            },
            "limits": {
                "speakers": limits.max_voices,
                "consents": limits.max_voices,
                "pinned": limits.max_pinned,
                "audio_bytes": limits.max_audio_bytes,
            },
            "deletions": {
                "unfinished": catalogue.num_unfinished_deletions(tenant.name)
            },
        }


def _shown(used: Usage) -> dict[str, int]:
    return {"files": used.num_files, "bytes": used.num_bytes}
