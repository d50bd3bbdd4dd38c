"""What `GET /v1/audio/speaker_cache` answers, as the OpenAPI document says it."""

from pydantic import BaseModel, ConfigDict, Field


class _Counts(BaseModel):
    """Documents counts; none is checked against it while it is served."""

    model_config = ConfigDict(extra="allow")


class Registry(_Counts):
    """What is registered; of one tenant of several, what the tenant has."""

    speakers: int
    consents: int | None = None
    pinned: int | None = None
    audio_bytes: int | None = None


class TenantLimits(_Counts):
    """What a tenant may have; null is what all together may."""

    speakers: int | None
    consents: int | None
    pinned: int | None
    audio_bytes: int | None


class Files(_Counts):
    """Files of one kind."""

    files: int
    bytes: int


class Segment(_Counts):
    """Audio and what was made of it."""

    audio: Files
    encodings: Files


class Storage(_Counts):
    """What is stored, as the catalogue adds it up."""

    registered: Segment
    inline: Segment
    max_bytes: dict[str, int]


class Unfinished(_Counts):
    """Deletions of which something is left to do."""

    unfinished: int


class Records(_Counts):
    """Rows of voices that this process remembers, and how often that was of use."""

    speakers: int
    remembered: int
    read: int


class KVWarmings(_Counts):
    """Voices that were prefilled before their first text, in this process."""

    waiting: int


class TenantCache(_Counts):
    """What one tenant of several has, and may have."""

    registry: Registry
    limits: TenantLimits
    deletions: Unfinished


class Worker(_Counts):
    """One worker's counters since its start, and sizes; by the model there are more."""

    rank: int
    encodes: dict[str, int] = Field(description="by encoder")
    failed_encodes: dict[str, int]
    prompts: int
    failed_prompts: int = Field(description="0 on a healthy server")


class DecoderStates(_Counts):
    """What a worker of the codec decoder keeps of voices."""

    rank: int
    states: int
    bytes: int
    max_bytes: int
    hits: int
    made: int


class SpeakerCache(_Counts):
    """What there is: all of it, or to a tenant's key what the tenant has."""

    registry: Registry
    deletions: Unfinished
    limits: TenantLimits | None = Field(default=None, description="to a tenant's key")
    storage: Storage | None = None
    records: Records | None = None
    bucket: dict[str, int] | None = Field(
        default=None, description="files of an object store, where there is one"
    )
    flights: int | None = Field(
        default=None, description="encodings that callers of this process wait for"
    )
    workers: list[Worker] | None = None
    decoders: list[DecoderStates] | None = None
    kv_warming: KVWarmings | None = None
    tenants: dict[str, TenantCache] | None = Field(
        default=None, description="to an administrator's key"
    )
