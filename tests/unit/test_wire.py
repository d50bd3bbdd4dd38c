import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.errors import WorkerRPCError
from vllm_tts_cache.speaker import wire
from vllm_tts_cache.speaker.rpc_client import Method, checked_answers
from vllm_tts_cache.store.cache import SegmentStats, TierStats

SHA = "a" * 64
WANT = wire.Want(id=7, audio_sha256=SHA, fingerprint=SHA, segment="inline")
REPORT = wire.WantReport(7, wire.JobState.FAILED, "out of memory", 1.5)
TIMED = "codec", "inline", wire.Durations([0, 2], 0.5), wire.Durations([2, 0], 0.1)
SEGMENT = SegmentStats(
    entries=1, bytes=9, max_bytes=90, max_entries=9, hits=3, misses=2, evictions=1
)
STATS = wire.SpeakerStats(
    hits={"memory": 3, "disk": 0},
    misses=1,
    evictions=1,
    corrupt=0,
    tier_errors=0,
    tiers={"memory": TierStats.of({Segment.INLINE: SEGMENT})},
    in_flight=1,
    waiting={"inline": 0},
    dropped=0,
    refused=0,
    encodes={"codec": 2},
    failed_encodes={"codec": 0},
    disk_evictions={},
    bucket={},
    prompts=4,
    failed_prompts=0,
    rpc_calls={"tts_cache_want": 7},
)
MESSAGES = (
    wire.WantCall("client", [WANT], [6], 2.0),
    wire.WantAnswer(rank=0, knew_client=True, reports=[REPORT], num_finished=7),
    wire.Described(rank=0, fingerprints={}, store_id="9", store_place="node-b:/voices"),
    wire.DeleteCall(audio_sha256s=[SHA]),
    wire.Deleted(num_entries=2, busy=[SHA]),
    wire.FailedCall(request_ids=["speech-1"]),
    wire.FailedPrompts(causes={"speech-1": "not stored"}),
    wire.EncodingCall(SHA, SHA),
    wire.EncodingAnswer(encoding=b"\0\xff" * 9),
    wire.WorkerStats(
        rank=1, stats=STATS, worker_id="9", encode_times=[wire.EncodeTimes(*TIMED)]
    ),
    wire.Unsupported(reason="Whisper clones no voices"),
    wire.Failed(reason="no memory"),
)
BY_KIND = {type(message): message for message in MESSAGES}
names = pytest.mark.parametrize("kind", BY_KIND, ids=lambda kind: kind.__name__)


def answer_of(kind, data):
    """What a caller gets whose worker answers this."""
    return checked_answers(Method(kind.__name__, kind), [[data]])


@names
def test_a_message_of_another_kind_is_refused(kind):
    for other, message in BY_KIND.items():
        if other is not kind:
            with pytest.raises(WorkerRPCError, match=kind.__name__):
                answer_of(kind, wire.encode(message))


@pytest.mark.parametrize(
    "data",
    [
        None,
        {"supported": False, "error": "method not found"},
        [b"\x80"],
        "text",
        b"",
        b"\x80",
        b"\x91" * 100_000,
        msgspec.msgpack.encode({"type": "Deleted", "num_entries": "two", "busy": []}),
        msgspec.msgpack.encode({"type": "Deleted", "num_entries": 2}),
        msgspec.msgpack.encode({"type": "D" * 100_000}),
        msgspec.msgpack.encode(
            {"type": "Deleted", "num_entries": 2, "busy": [], "more": 1}
        ),
        wire.encode(BY_KIND[wire.Deleted])[:-1],
        wire.encode(BY_KIND[wire.Deleted]) + b"\0",
    ],
    ids=range(13),
)
def test_what_is_no_message_is_one_short_error_that_names_what_was_expected(data):
    with pytest.raises(WorkerRPCError, match="Deleted") as caught:
        answer_of(wire.Deleted, data)
    assert len(str(caught.value)) < 300


@names
@settings(max_examples=100)
@given(data=st.binary(max_size=200) | st.integers() | st.text())
def test_garbage_is_nothing_but_an_rpc_error(kind, data):
    try:
        answer_of(kind, data)
    except WorkerRPCError:
        return


def test_a_state_that_nobody_knows_is_refused():
    data = wire.encode(BY_KIND[wire.WantAnswer]).replace(b"failed", b"frozen")
    with pytest.raises(WorkerRPCError, match="frozen"):
        answer_of(wire.WantAnswer, data)


def test_a_call_for_64_voices_is_small():
    call = wire.WantCall("client", [WANT] * 64, [], 2.0)
    assert len(wire.encode(call)) <= 16 * 1024


def test_counters_that_are_not_whole_are_refused():
    told = msgspec.msgpack.decode(wire.encode(wire.WorkerStats(rank=0, stats=STATS)))
    told["stats"] = {"hits": 3}
    with pytest.raises(WorkerRPCError):
        answer_of(wire.WorkerStats, msgspec.msgpack.encode(told))
