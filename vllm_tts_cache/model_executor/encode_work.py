"""What the encode thread does for a job: read the audio, encode it, keep the result."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext

import numpy as np

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import EncodeError, StorageError
from vllm_tts_cache.model_executor.encode_device import EncodeDevice
from vllm_tts_cache.model_executor.encode_line import EncodeJob
from vllm_tts_cache.model_executor.encode_queue import MissingAudioError, Turn
from vllm_tts_cache.speaker.reference import ReferenceEncoder
from vllm_tts_cache.store.cache import EncodingCache
from vllm_tts_cache.store.encoding import Encoding
from vllm_tts_cache.store.locks import Turns
from vllm_tts_cache.store.speaker_store import SpeakerStore

# Of the first encode. Long enough for every kernel that a longer clip runs.
_WARM_UP_SECONDS = 5.0
_WARM_UP_RATE_HZ = 48_000


class StoredEncodeWork:
    """Encodes what lies in the store, and keeps the encodings there and in memory.

    Args:
        encoders: By name; none where `load` brings them.
        cache: Where encodings go.
        store: Where reference audio comes from.
        turns: Keep two processes from encoding one key at a time.
        device: Where the encoders compute.
    """

    def __init__(
        self,
        *,
        encoders: Mapping[str, ReferenceEncoder],
        cache: EncodingCache,
        store: SpeakerStore,
        turns: Turns,
        device: EncodeDevice,
    ):
        self._encoders = dict(encoders)
        self._cache = cache
        self._store = store
        self._turns = turns
        self._device = device
        self.num_encodes: Counter[str] = Counter()
        self.disk_evictions = store.writer.evictions
        self.bucket_counts = store.bucket_counts

    def load(
        self, load: Callable[[], Mapping[str, ReferenceEncoder]]
    ) -> dict[str, str]:
        """Load encoders in the place of others; returns their fingerprints.

        Called on the encode thread, so that their memory is none of the thread's that
        loads the model: vLLM's sleep mode takes that away, while an encode runs too.

        Raises: CheckpointError, whatever ``load`` raises.
        """
        with self._device.entered():
            self._encoders = dict(load())
        return {name: e.fingerprint for name, e in self._encoders.items()}

    def warm_up(self) -> None:
        """Encode noise once with every encoder, for nobody; on the encode thread.

        Libraries make their handles for a thread, and load kernels, at the first use:
        hundreds of megabytes and a second or two, beside running streams otherwise.

        Raises: EncodeError.
        """
        num_samples = round(_WARM_UP_SECONDS * _WARM_UP_RATE_HZ)
        noise = np.random.default_rng(0).uniform(-0.1, 0.1, num_samples)
        audio = ReferenceAudio.of(noise.astype(np.float32), _WARM_UP_RATE_HZ)
        for encoder in self._encoders.values():
            self._run(encoder, audio)

    def is_done(self, job: EncodeJob) -> bool:
        """Tell whether the encoding exists; writes again what memory alone has."""
        if job.is_forced:
            return False
        if self._cache.is_stored(job.key):
            return True
        if not self._cache.contains(job.key):
            return self._store.copies is not None and self._load(job)
        if (found := self._cache.get(job.key, job.segment)) is None:
            return False
        self._cache.put(job.key, found, job.segment)
        return True

    def take_turn(self, job: EncodeJob) -> Turn | None:
        """Take the key's turn among processes; None if another one has it."""
        try:
            return self._turns.try_take(job.key)
        except StorageError:
            return nullcontext()  # turns save work; nothing depends on them

    def encode(self, job: EncodeJob) -> Encoding:
        """Make the encoding. Raises: MissingAudioError, EncodeError, StorageError."""
        audio = self._store.read_audio(job.key.audio_sha256)
        if audio is None:
            raise MissingAudioError("its reference audio is not stored (any more)")
        encoder = self._encoders.get(job.encoder_name)
        if encoder is None or encoder.fingerprint != job.key.encoder_fingerprint:
            raise EncodeError(
                "the model was loaded anew, with other encoders; try again"
            )
        encoding = self._run(encoder, audio)
        self.num_encodes[job.encoder_name] += 1
        return encoding

    def keep(self, job: EncodeJob, encoding: Encoding) -> None:
        """Store the encoding, on disk and in memory; where one fails, in the other.

        Raises:
            MissingAudioError: Its audio was deleted meanwhile.
            EncodeError: Neither keeps it.
        """
        self._cache.put(job.key, encoding, job.segment)
        if self._cache.contains(job.key):
            return
        if not self._store.has_audio(job.key.audio_sha256):
            raise MissingAudioError("its reference audio was deleted meanwhile")
        raise EncodeError("its encoding fits neither in memory nor on the disk")

    def _load(self, job: EncodeJob) -> bool:
        """Have here what another machine made, if one has."""
        return self._cache.load(job.key, job.segment) and self._cache.contains(job.key)

    def _run(self, encoder: ReferenceEncoder, audio: ReferenceAudio) -> Encoding:
        num_bytes = encoder.need.of(audio.seconds)
        return self._device.run(lambda: encoder.encode(audio), num_bytes)
