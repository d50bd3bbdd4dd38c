"""What crosses the RPC between the API process and the workers, as msgpack bytes.

A call takes the bytes of one struct and answers those of one; structs and not dicts,
because the host mangles what it does not know, and bytes of a known type can be
checked whole where they arrive. A worker that cannot answer returns `Unsupported` or
`Failed`, so no caller has to parse an error text.
"""

from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from vllm_tts_cache.store.cache import TierStats

# Upper bounds of the classes in which workers count durations: a fast GPU encodes in
# milliseconds, the slowest CPU a long clip in minutes. One more class has no bound.
DURATION_BOUNDS_SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0),
)


class JobState(StrEnum):
    """How far one encoding is in one worker."""

    ENCODING = "encoding"
    READY = "ready"  # stored, or in memory and perhaps not stored yet
    AWAY = "away"  # the bucket or the catalogue does not answer; the report says which
    FAILED = "failed"  # the encoder raised; the report says why
    REFUSED = "refused"  # too many inline clips wait already
    NO_ENCODER = "no_encoder"  # the worker has others: it was loaded anew
    NO_AUDIO = "no_audio"  # its reference audio is not stored (any more)


class _Message(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A whole call or answer; its class name travels with it."""


class _Part(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message."""


class Want(_Part, frozen=True, kw_only=True):
    """One encoding that a client, an API process or a batch job, waits for.

    Attributes:
        id: Unique among its client's wants. Sent again, it is the same want.
        fingerprint: Of the encoder.
        segment: Value of a `Segment`: whose budget it counts against.
        tenant: The tenant in whose turn it is encoded.
        urgent: Whether a request waits, and not only a precompute.
        force: Whether to encode even if the encoding exists.
    """

    id: int
    audio_sha256: str
    fingerprint: str
    segment: str
    tenant: str = ""
    urgent: bool = False
    force: bool = False


class WantCall(_Message, frozen=True):
    """Queue a client's new wants, withdraw others, and ask which have ended.

    Attributes:
        client_id: The same for as long as the client lives.
        new: Wants that the worker has not received yet, or that changed since.
        withdrawn: Ids of wants that no request waits for, or whose end is known.
        lease_seconds: For how long the worker keeps the client's wants from now on.
    """

    client_id: str
    new: list[Want]
    withdrawn: list[int]
    lease_seconds: float


class WantReport(_Part, frozen=True):
    """How far one want is.

    Attributes:
        reason: Why it failed, for the client; else empty.
        encoding_seconds: How long its encode has been running, while ``ENCODING``.
    """

    id: int
    state: JobState
    reason: str = ""
    encoding_seconds: float = 0.0


class WantAnswer(_Message, frozen=True):
    """How far a client's wants are in one worker.

    Attributes:
        knew_client: Whether the client's lease had not run out. If it had, the worker
            knows no wants but those of this call.
        reports: Of wants that have ended, until they are withdrawn, and of the one that
            is being encoded.
        num_finished: Jobs that ended since the worker's start; it only grows, so a
            client that waits sees whether the queue moves.
    """

    rank: int
    knew_client: bool
    reports: list[WantReport]
    num_finished: int


class DescribeCall(_Message, frozen=True):
    """Take the secret by which speakers are signed, and describe the worker."""

    secret: bytes


class Described(_Message, frozen=True):
    """The encoders and the store of one worker.

    Attributes:
        fingerprints: Of its encoders, by name.
        store_id: Id of the store that it reads reference audio from.
        store_place: Host and path, or URL, of that store, for messages.
    """

    rank: int
    fingerprints: dict[str, str]
    store_id: str = ""
    store_place: str = ""


class DeleteCall(_Message, frozen=True):
    """Delete these audios, or all there are, from memory and from the queue."""

    audio_sha256s: list[str]
    everything: bool = False


class Deleted(_Message, frozen=True):
    """What was deleted.

    Attributes:
        num_entries: Encodings that left memory.
        busy: Addresses of audios that are being encoded, or that have copies on the
            worker's disk; delete these again.
    """

    num_entries: int
    busy: list[str]


class FailedCall(_Message, frozen=True):
    """Ask which of these requests had no speaker prompt."""

    request_ids: list[str]


class FailedPrompts(_Message, frozen=True):
    """The cause by request id, of those that were asked for and had no prompt."""

    causes: dict[str, str]


class EncodingCall(_Message, frozen=True):
    """Ask for one encoding's stored bytes."""

    audio_sha256: str
    fingerprint: str


class EncodingAnswer(_Message, frozen=True):
    """The encoding as `store.encoding` writes it; None if the worker has none."""

    encoding: bytes | None


class Durations(_Part, frozen=True):
    """Durations since a worker's start.

    Attributes:
        counts: How many were at most as long as each of `DURATION_BOUNDS_SECONDS` and
            longer than the one before, and how many were longer than the last.
        total_seconds: All of them.
    """

    counts: list[int]
    total_seconds: float


class EncodeTimes(_Part, frozen=True):
    """How long one encoder's encodes of one segment took, and waited before.

    Attributes:
        segment: Value of a `Segment`.
        encode: From when the encode thread began to read the audio until it had the
            encoding.
        queue: From when the job was queued until that beginning.
    """

    encoder: str
    segment: str
    encode: Durations
    queue: Durations


class SpeakerStats(_Part, frozen=True, kw_only=True):
    """What one worker counted since its start, and what it holds.

    Attributes:
        hits: Lookups answered, by tier: ``memory`` and ``disk``.
        misses: Lookups that neither could answer.
        corrupt: Encodings that did not match their key; each counts as a miss.
        tier_errors: Lookups that the disk could not answer.
        tiers: The memory's own counts. Its misses include those that the disk answered.
        waiting: Queued encodes, by segment; ``in_flight``: all of these, and the
            running one.
        dropped: Queued encodes that were removed because no client waits for them.
        refused: Wants that were refused because too many inline jobs were queued.
        encodes: Finished encodes, by encoder; ``failed_encodes``: failed ones.
        disk_evictions: By segment.
        bucket: Counts of what became of objects; empty without an object store.
    """

    hits: dict[str, int]
    misses: int
    evictions: int
    corrupt: int
    tier_errors: int
    tiers: dict[str, TierStats]
    in_flight: int
    waiting: dict[str, int]
    dropped: int
    refused: int
    encodes: dict[str, int]
    failed_encodes: dict[str, int]
    disk_evictions: dict[str, int]
    bucket: dict[str, int]
    prompts: int
    failed_prompts: int
    rpc_calls: dict[str, int]


class WorkerStats(_Message, frozen=True):
    """Counters and sizes of one worker.

    Attributes:
        worker_id: Another one in each process, so that counters that begin anew can be
            distinguished from counters that fall.
        encode_times: For each encoder and segment with finished encodes.
    """

    rank: int
    stats: SpeakerStats
    worker_id: str = ""
    encode_times: list[EncodeTimes] = []

    @property
    def shown(self) -> dict[str, Any]:
        """The counters as the stats route shows them."""
        return {"rank": self.rank, **msgspec.to_builtins(self.stats)}


class DecoderStats(_Message, frozen=True):
    """Counters and sizes of a decoder that keeps a state of each voice.

    Attributes:
        states: Number of stored states; they take ``bytes`` of ``max_bytes``.
        hits: Requests whose state was stored; ``made``: those for which one was made.
    """

    rank: int
    states: int
    bytes: int
    max_bytes: int
    hits: int
    made: int
    evictions: int
    rpc_calls: dict[str, int]
    worker_id: str

    @property
    def shown(self) -> dict[str, Any]:
        """The counters as the stats route shows them."""
        fields = asdict(self)
        del fields["worker_id"]
        return fields


class Unsupported(_Message, frozen=True):
    """The model that this worker runs clones no voices, or not through us."""

    reason: str


class Failed(_Message, frozen=True):
    """The worker could not answer."""

    reason: str


encode = msgspec.msgpack.encode  # a message as bytes
