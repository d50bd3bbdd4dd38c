import pytest

from tests.in_process_workers import (
    METHODS,
    InProcessEngine,
    SpectrumEncoder,
    clip,
    ref_of,
    worker,
    worker_speakers,
    worker_with,
)
from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.workers import (
    UnsupportedModelError,
    Workers,
    checked_answers,
)
from vllm_tts_cache.errors import StorageError, WorkerRPCError
from vllm_tts_cache.store.audio_wiring import open_audio

OURS = {"rank": 0, "states": {}}


def test_answers_of_all_replicas_and_workers_come_out_flat():
    other = {"rank": 1, "states": {}}
    assert checked_answers("m", [[OURS, other], [OURS]]) == [OURS, other, OURS]


@pytest.mark.parametrize(
    ("results", "reason"),
    [
        ([], "m: no worker answered"),
        ([[]], "m: no worker answered"),
        ([{"supported": False, "error": "KeyError('x')"}], r"m: KeyError\('x'\)"),
        ([{"supported": False, "todo": "diffusion stage"}], "m: diffusion stage"),
        ([{"supported": False}], "m: .*supported"),
        ([[OURS], {"supported": False, "error": "dead"}], "m: dead"),
        ([None], "m: None"),
        (["lost"], "m: 'lost'"),
        ([[None]], "m: a worker answered None"),
        ([[OURS, "lost"]], "m: a worker answered 'lost'"),
        ([[{"failed": "disk"}]], "m: disk"),
        ([[{"supported": False, "error": "Boom"}]], "m: .*Boom"),
        ([[OURS, {"supported": False, "todo": "later"}]], "m: .*later"),
    ],
)
def test_what_is_no_answer_is_an_error_with_method_and_reason(results, reason):
    with pytest.raises(WorkerRPCError, match=f"^{reason}"):
        checked_answers("m", results)


def test_a_worker_without_a_speaker_side_is_an_error_of_its_own():
    with pytest.raises(UnsupportedModelError, match="m: Bark clones no voices"):
        checked_answers("m", [[OURS, {"unsupported": "Bark clones no voices"}]])


class UnreachableEngine:
    def __init__(self, error):
        self.error = error

    async def collective_rpc(self, *args, **kwargs):
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
        await Workers(UnreachableEngine(error)).call("tts_cache_stats")


async def test_every_method_says_which_model_has_no_speaker_side():
    class CodecDecoder:
        pass

    workers = Workers(InProcessEngine(worker(CodecDecoder())))
    calls = {
        "tts_cache_describe": (),
        "tts_cache_prepare": ([], []),
        "tts_cache_states": ([],),
        "tts_cache_encoding": ("0" * 64, "codec"),
        "tts_cache_forget": ([],),
        "tts_cache_stats": (),
    }
    assert calls.keys() == METHODS.keys()
    for method, args in calls.items():
        with pytest.raises(UnsupportedModelError, match=f"{method}: CodecDecoder "):
            await workers.call(method, *args)


async def test_a_worker_that_has_no_model_yet_is_no_crash():
    workers = Workers(InProcessEngine(worker(None)))
    with pytest.raises(UnsupportedModelError):
        await workers.call("tts_cache_stats")


async def test_a_forget_that_fails_is_told_and_not_buried(tmp_path):
    speakers = worker_speakers(tmp_path, [SpectrumEncoder("speaker")])
    workers = Workers(InProcessEngine(worker_with(speakers)))
    encodings = tmp_path / "encodings"
    if encodings.exists():
        encodings.rename(tmp_path / "aside")
    encodings.write_text("a file where the tier's directory was")
    with pytest.raises(StorageError):
        speakers.forget([clip().audio_sha256])
    with pytest.raises(WorkerRPCError, match="tts_cache_forget: "):
        await workers.call("tts_cache_forget", [clip().audio_sha256])


async def test_an_encoding_crosses_as_bytes_and_a_missing_one_as_none(tmp_path):
    speakers = worker_speakers(tmp_path, [SpectrumEncoder("speaker")])
    open_audio(Settings(samples_dir=tmp_path)).put(clip(), Segment.REGISTERED)
    speakers.prompt(ref_of(clip()), ["speaker"])
    workers = Workers(InProcessEngine(worker_with(speakers)))
    shas = (clip().audio_sha256, clip(1).audio_sha256)
    [[found], [missing]] = [
        await workers.call("tts_cache_encoding", sha, "speaker") for sha in shas
    ]
    assert found == {"encoding": speakers.stored_encoding(shas[0], "speaker")}
    assert found["encoding"]
    assert missing == {"encoding": None}


async def test_rank_0_alone_encodes(tmp_path):
    encoder, bystander = SpectrumEncoder("speaker"), SpectrumEncoder("speaker")
    engine = InProcessEngine(
        worker_with(worker_speakers(tmp_path, [encoder]), rank=0),
        worker_with(worker_speakers(tmp_path, [bystander]), rank=1),
    )
    answers = await Workers(engine).call(
        "tts_cache_prepare", [ref_of(clip()).to_wire()], ["speaker"]
    )
    assert [answer["rank"] for answer in answers] == [0, 1]
    states = [answer["states"][clip().audio_sha256]["speaker"] for answer in answers]
    assert states[1] == "pending"
    assert bystander.num_calls == 0
