"""Workers in this process: the real RPC functions over a real speaker side."""

import hashlib
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from tests.store_samples import settings_of
from tests.waiting import wait_until
from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.audio.reference import ReferenceAudio, Segment
from vllm_tts_cache.catalogue.records import NewSpeaker
from vllm_tts_cache.model_executor import rpc_methods
from vllm_tts_cache.model_executor.speakers import ALONE, WorkerEncodings
from vllm_tts_cache.speaker.reference import MemoryNeed, SpeakerRef
from vllm_tts_cache.speaker.wire import (
    DescribeCall,
    JobState,
    Want,
    WantCall,
    WantReport,
)
from vllm_tts_cache.store.encoding import Encoding, EncodingKey

METHODS = {method.__name__: method for method in rpc_methods.METHODS}
WAIT_SECONDS = 60.0
LEASE_SECONDS = 60.0
QUEUED: Any = "queued"  # no report of it yet
SECRET = b"the tests' own"

_numbers = itertools.count()


class SpectrumEncoder:
    """A reference encoder without a network: ``spectrum``, ``(8,)`` float32.

    Close ``gate`` to hold it inside ``encode``; what is in ``errors`` is raised, one
    a call. ``thread`` was the last to call it.
    """

    need = MemoryNeed()

    def __init__(self, name):
        self.name = name
        self.fingerprint = hashlib.sha256(name.encode()).hexdigest()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.errors = []
        self.num_calls = 0
        self.thread: threading.Thread | None = None

    def encode(self, audio):
        self.num_calls += 1
        self.thread = threading.current_thread()
        self.entered.set()
        assert self.gate.wait(WAIT_SECONDS), "the test never opened the gate"
        if self.errors:
            raise self.errors.pop(0)
        spectrum = np.abs(np.fft.rfft(audio.samples, 14)).astype(np.float32)
        return Encoding({"spectrum": spectrum})


class InProcessEngine:
    """The host's engine client; what crosses it is as between processes."""

    def __init__(self, *workers):
        self.workers = workers
        self.calls = []
        self.request_states = {}  # of speech that is with the engine
        self.errored = False

    async def collective_rpc(
        self, method, timeout=None, args=(), kwargs=None, stage_ids=None
    ):
        return self.called(method, args)

    def called(self, method, args=()):
        self.calls.append(method)
        args = across_processes(args)
        answers = [METHODS[method](worker, *args) for worker in self.workers]
        return [across_processes(answers)]


class SyncInProcessEngine(InProcessEngine):
    """The same for a batch job."""

    def __init__(self, *workers, model="", revision=None):
        super().__init__(*workers)
        self.model = model
        stage = SimpleNamespace(model_config=SimpleNamespace(revision=revision))
        self.engine = SimpleNamespace(stage_vllm_configs=[stage, None])

    def collective_rpc(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, method, timeout=None, args=(), kwargs=None, stage_ids=None
    ):
        return self.called(method, args)


def across_processes(value):
    """As the host sends it: in MessagePack, which knows plain types and bytes only."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def worker(model, rank=0):
    """What the RPC functions read of a worker."""
    return SimpleNamespace(rank=rank, model_runner=SimpleNamespace(model=model))


def worker_with(speakers, rank=0):
    return worker(SimpleNamespace(tts_cache_speakers=speakers), rank)


def worker_speakers(samples_dir, encoders, *, ranks=ALONE, **settings):
    """A worker's speaker side on a directory; `close` it where threads are counted."""
    return WorkerEncodings(
        {encoder.name: encoder for encoder in encoders},
        settings_of(samples_dir, **settings),
        torch.device("cpu"),
        ranks=ranks,
    )


def prepare(speakers, ref, encoder_names, *, rank=0, **want):
    """Have encodings made, and wait until the worker is idle; what it said at first."""
    speakers.describe(DescribeCall(SECRET), rank)
    reports = wanted(speakers, ref, encoder_names, rank=rank, **want)
    wait_until_idle(speakers)
    return {name: report.state for name, report in reports.items()}


def wanted(speakers, ref, encoder_names, *, rank=0, **want):
    """Want encodings; what the worker says of each, ``QUEUED`` if nothing."""
    call = want_call(speakers, ref, encoder_names, **want)
    said = {report.id: report for report in speakers.queue.want(call, rank).reports}
    return {
        name: said.get(new.id, WantReport(new.id, QUEUED))
        for name, new in zip(encoder_names, call.new, strict=True)
    }


def want_call(speakers, ref, encoder_names, *, number=None, **want):
    """What a client sends that wants encodings, each under an id of its own."""
    new = [
        Want(
            id=next(_numbers) if number is None else number,
            audio_sha256=ref.audio_sha256,
            fingerprint=speakers.fingerprints[name],
            segment=ref.segment.value,
            **want,
        )
        for name in encoder_names
    ]
    return WantCall("a test", new, [], LEASE_SECONDS)


def looked(speakers, ref, encoder_names):
    """Encoder name -> ``READY`` if the worker has the encoding, else None."""
    fingerprints, cache, found = speakers.fingerprints, speakers._cache, {}
    for name in encoder_names:
        key = EncodingKey(
            audio_sha256=ref.audio_sha256, encoder_fingerprint=fingerprints[name]
        )
        is_there = cache.memory.contains(key) or cache.is_stored(key)
        found[name] = JobState.READY if is_there else None
    return found


def wait_until_idle(speakers):
    wait_until(lambda: not speakers.stats().in_flight)


def clip(seed=0, seconds=1.0, rate_hz=8_000):
    noise = np.random.default_rng(seed).standard_normal(round(seconds * rate_hz))
    return ReferenceAudio.of((0.1 * noise).astype(np.float32), rate_hz)


def decoded(audio):
    """As the decoder returns it."""
    return DecodedAudio(audio, ())


def order_of(encoder):
    """The audios that it encodes from now on, in their order."""
    order, encode = [], encoder.encode

    def noted(audio):
        order.append(audio.audio_sha256)
        return encode(audio)

    encoder.encode = noted
    return order


def new_speaker(name, audio, **fields):
    return NewSpeaker(
        name=name,
        consent="given",
        audio_sha256=audio.audio_sha256,
        sample_rate_hz=audio.sample_rate_hz,
        num_samples=audio.num_samples,
        **fields,
    )


def store_clip(store, audio, segment=Segment.REGISTERED, *, name=None):
    """Register a clip, or keep it as an inline one; returns what a request names."""
    if segment is Segment.REGISTERED:
        name = name or f"voice-{audio.audio_sha256[:8]}"
        store.registrations.register(new_speaker(name, audio), decoded(audio))
    else:
        store.store_inline(decoded(audio))
    return ref_of(audio, segment)


def ref_of(audio, segment=Segment.REGISTERED):
    ref = SpeakerRef(audio_sha256=audio.audio_sha256, segment=segment)
    return ref.signed(SECRET, "")
