import pytest

from tests.in_process_workers import (
    METHODS,
    InProcessEngine,
    SpectrumEncoder,
    SyncInProcessEngine,
    clip,
    prepare,
    ref_of,
    store_clip,
    want_call,
    worker,
    worker_speakers,
    worker_with,
)
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import EncodeError, WorkerRPCError
from vllm_tts_cache.speaker import wire
from vllm_tts_cache.speaker.rpc_client import (
    DESCRIBE,
    ENCODING,
    FAILED,
    FORGET,
    STATS,
    WANT,
    AsyncWorkers,
    SyncWorkers,
    UnsupportedModelError,
    checked_answers,
    encoding_of,
    fingerprints_of,
)
from vllm_tts_cache.speaker.wire import JobState
from vllm_tts_cache.store.keys import EncodingKey
from vllm_tts_cache.store.opening import open_store

SHA = clip().audio_sha256
OURS = wire.encode(wire.Described(rank=0, fingerprints={"codec": "f"}))
CALLS = {
    DESCRIBE: None,
    WANT: wire.WantCall(wants=[], lease_seconds=1.0),
    ENCODING: wire.EncodingCall(audio_sha256=SHA, encoder="speaker"),
    FORGET: wire.ForgetCall(audio_sha256s=[SHA]),
    FAILED: wire.FailedCall(request_ids=["x"]),
    STATS: None,
}
EVERY_METHOD = pytest.mark.parametrize(
    ("method", "request_"), CALLS.items(), ids=lambda value: getattr(value, "name", "")
)


@pytest.fixture
def speakers(tmp_path):
    speakers = worker_speakers(tmp_path, [SpectrumEncoder("speaker")])
    yield speakers
    speakers.close()


@pytest.fixture
def store(tmp_path):
    store = open_store(Settings(samples_dir=tmp_path))
    yield store
    store.close()


@pytest.fixture
def workers(speakers):
    return SyncWorkers(SyncInProcessEngine(worker_with(speakers)))


# -------- what a caller makes of an answer


def test_answers_of_all_replicas_and_workers_come_out_flat():
    other = wire.encode(wire.Described(rank=1, fingerprints={}))
    answers = checked_answers(DESCRIBE, [[OURS, other], [OURS]])
    assert [answer.rank for answer in answers] == [0, 1, 0]


@pytest.mark.parametrize(
    ("results", "reason"),
    [
        ([], "no worker answered"),
        ([[]], "no worker answered"),
        ([{"supported": False, "error": "KeyError('x')"}], r"KeyError\('x'\)"),
        ([{"supported": False, "todo": "diffusion stage"}], "diffusion stage"),
        ([{"supported": False}], ".*supported"),
        ([[OURS], {"supported": False, "error": "dead"}], "dead"),
        ([None], "a worker answered None"),
        (["lost"], "a worker answered 'lost'"),
        ([[None]], "a worker answered None"),
        ([[OURS, "lost"]], "a worker answered 'lost'"),
        ([[{"supported": False, "error": "Boom"}]], "Boom"),
        ([[OURS, {"supported": False, "todo": "later"}]], "later"),
        ([[b"\xff"]], "not the bytes of Described"),
        ([[wire.encode(wire.FailedPrompts(causes={}))]], "not the bytes of Described"),
        ([[wire.encode(wire.Failed(reason="a bug"))]], "a bug"),
    ],
)
def test_what_is_no_answer_is_an_error_with_method_and_reason(results, reason):
    with pytest.raises(WorkerRPCError, match=f"^tts_cache_describe: {reason}"):
        checked_answers(DESCRIBE, results)


def test_a_worker_without_a_speaker_side_is_an_error_of_its_own():
    answer = wire.encode(wire.Unsupported(reason="Bark clones no voices"))
    with pytest.raises(UnsupportedModelError, match="describe: Bark clones no voices"):
        checked_answers(DESCRIBE, [[OURS, answer]])


class UnreachableEngine:
    def __init__(self, error):
        self.error = error

    async def collective_rpc(self, *args, **kwargs):
        raise self.error


class UnreachableSyncEngine(UnreachableEngine):
    def collective_rpc(self, *args, **kwargs):
        raise self.error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TimeoutError(), r"TimeoutError\(\)"),
        (RuntimeError("the engine is gone"), "the engine is gone"),
    ],
)
async def test_an_engine_that_cannot_be_reached_is_an_error_of_ours(error, reason):
    with pytest.raises(WorkerRPCError, match=f"^tts_cache_stats: {reason}"):
        await AsyncWorkers(UnreachableEngine(error)).call(STATS)
    with pytest.raises(WorkerRPCError, match=f"^tts_cache_stats: {reason}"):
        SyncWorkers(UnreachableSyncEngine(error)).call(STATS)


def test_workers_with_different_encoders_are_refused():
    one, other = (wire.Described(rank=0, fingerprints={"codec": f}) for f in "ab")
    assert fingerprints_of([one, one]) == {"codec": "a"}
    with pytest.raises(WorkerRPCError, match="different encoders"):
        fingerprints_of([one, other])


def test_an_encoding_that_no_worker_has_or_that_is_damaged_is_an_error():
    key = EncodingKey(audio_sha256=SHA, encoder_fingerprint="0" * 64)
    with pytest.raises(EncodeError, match="not there any more"):
        encoding_of([wire.EncodingAnswer(encoding=None)], key)
    with pytest.raises(EncodeError, match="corrupt"):
        encoding_of([wire.EncodingAnswer(encoding=b"damaged")], key)


# -------- what the workers answer


def test_every_method_has_its_typed_call():
    assert {method.name for method in CALLS} == METHODS.keys()


@EVERY_METHOD
async def test_every_method_answers_both_kinds_of_caller_and_is_counted(
    speakers, method, request_
):
    engine = InProcessEngine(worker_with(speakers), worker_with(speakers, rank=1))
    answers = await AsyncWorkers(engine).call(method, request_)
    assert [type(answer) for answer in answers] == [method.answer] * 2
    engine = SyncInProcessEngine(worker_with(speakers))
    assert type(SyncWorkers(engine).call(method, request_)[0]) is method.answer
    assert speakers.stats()["rpc_calls"] == {method.name: 3}


@EVERY_METHOD
def test_every_method_says_which_model_has_no_speaker_side(method, request_):
    class CodecDecoder:
        pass

    for model, name in ((CodecDecoder(), "CodecDecoder"), (None, "NoneType")):
        workers = SyncWorkers(SyncInProcessEngine(worker(model)))
        with pytest.raises(UnsupportedModelError, match=f"{method.name}: {name} "):
            workers.call(method, request_)


@EVERY_METHOD
def test_no_method_raises_whatever_it_is_called_with(speakers, method, request_):
    """The host would make a value of an exception, in a form of its own."""
    for call in ((b"\xff",), (b"",), ("text",), (None,), (b"\x80", b"\x80")):
        answer = METHODS[method.name](worker_with(speakers), *call)
        found = wire.decode_answer(method.answer, answer)
        assert isinstance(found, wire.Failed)
        assert found.reason


def test_a_bug_in_the_speaker_side_is_told_and_not_raised(speakers, monkeypatch):
    monkeypatch.setattr(type(speakers), "stats", lambda self: 1 / 0)
    workers = SyncWorkers(SyncInProcessEngine(worker_with(speakers)))
    with pytest.raises(WorkerRPCError, match="tts_cache_stats: division by zero"):
        workers.call(STATS)


def test_an_encoding_crosses_as_bytes_and_a_missing_one_as_none(
    workers, speakers, store
):
    ref = store_clip(store, clip())
    prepare(speakers, ref, ["speaker"])
    [found] = workers.call(ENCODING, CALLS[ENCODING])
    assert found.encoding
    assert found.encoding == speakers.stored_encoding(SHA, "speaker")
    missing = wire.EncodingCall(audio_sha256=clip(1).audio_sha256, encoder="speaker")
    assert workers.call(ENCODING, missing)[0].encoding is None


def test_rank_0_alone_encodes(tmp_path, speakers, store):
    bystander = SpectrumEncoder("speaker")
    other = worker_speakers(tmp_path, [bystander])
    ref = store_clip(store, clip())
    engine = SyncInProcessEngine(worker_with(speakers), worker_with(other, rank=1))
    answers = SyncWorkers(engine).call(WANT, want_call(ref, ["speaker"]))
    assert [answer.rank for answer in answers] == [0, 1]
    assert [a.reports[0].state for a in answers] == [JobState.QUEUED, JobState.MISSING]
    assert bystander.num_calls == 0
    other.close()


def test_the_cause_of_a_failed_request_is_asked_for_and_not_read_out_of_a_text(
    workers, speakers
):
    with pytest.raises(EncodeError) as failed:
        speakers.prompt(ref_of(clip()), ["speaker"])
    speakers.remember_failed_prompt("speech-1-01234567", str(failed.value))
    call = wire.FailedCall(request_ids=["speech-1", "speech-2"])
    assert workers.call(FAILED, call)[0].causes == {"speech-1": str(failed.value)}
