"""Workers in this process: the real RPC functions over a real speaker side."""

import hashlib
import threading
from types import SimpleNamespace

import msgspec
import numpy as np
import torch

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.config import Settings
from vllm_tts_cache.model_executor import rpc
from vllm_tts_cache.model_executor.speakers import WorkerSpeakers
from vllm_tts_cache.speaker.ref import SpeakerRef
from vllm_tts_cache.store.audio_wiring import open_audio
from vllm_tts_cache.store.encoding import Encoding
from vllm_tts_cache.store.wiring import open_cache

METHODS = {method.__name__: method for method in rpc.METHODS}


class SpectrumEncoder:
    """A reference encoder without a network: ``spectrum``, ``(8,)`` float32.

    Close ``gate`` to hold it inside ``encode``; what is in ``errors`` is raised, one
    a call.
    """

    def __init__(self, name):
        self.name = name
        self.fingerprint = hashlib.sha256(name.encode()).hexdigest()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.errors = []
        self.num_calls = 0

    def encode(self, audio):
        self.num_calls += 1
        self.entered.set()
        assert self.gate.wait(30), "the test never opened the gate"
        if self.errors:
            raise self.errors.pop(0)
        spectrum = np.abs(np.fft.rfft(audio.samples, 14)).astype(np.float32)
        return Encoding({"spectrum": spectrum})


class InProcessEngine:
    """The host's engine client; what crosses it is as between processes."""

    def __init__(self, *workers):
        self.workers = workers
        self.calls = []

    async def collective_rpc(
        self, method, timeout=None, args=(), kwargs=None, stage_ids=None
    ):
        self.calls.append(method)
        args = across_processes(args)
        answers = [METHODS[method](worker, *args) for worker in self.workers]
        return [across_processes(answers)]


def across_processes(value):
    """As the host sends it: in MessagePack, which knows plain types and bytes only."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def worker(model, rank=0):
    """What the RPC functions read of a worker."""
    return SimpleNamespace(rank=rank, model_runner=SimpleNamespace(model=model))


def worker_with(speakers, rank=0):
    return worker(SimpleNamespace(tts_cache_speakers=speakers), rank)


def worker_speakers(samples_dir, encoders, *, timeout_seconds=10.0, **settings):
    settings = Settings(samples_dir=samples_dir, **settings)
    return WorkerSpeakers(
        encoders={encoder.name: encoder for encoder in encoders},
        cache=open_cache(settings),
        audio=open_audio(settings),
        device=torch.device("cpu"),
        encode_timeout_seconds=timeout_seconds,
        encode_yield_seconds=settings.encode_yield_seconds,
    )


def clip(seed=0, seconds=1.0, rate_hz=8_000):
    noise = np.random.default_rng(seed).standard_normal(round(seconds * rate_hz))
    return ReferenceAudio.of((0.1 * noise).astype(np.float32), rate_hz)


def ref_of(audio, segment=Segment.REGISTERED):
    return SpeakerRef(audio_sha256=audio.audio_sha256, segment=segment)
