"""What the encode thread does for a job: read the audio, encode it, keep the result."""

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext

from vllm_tts_cache.errors import EncodeError, StorageError
from vllm_tts_cache.model_executor.encode_device import EncodeDevice
from vllm_tts_cache.model_executor.encode_queue import MissingAudioError, Turn
from vllm_tts_cache.model_executor.waiting_line import EncodeJob
from vllm_tts_cache.speaker.reference_encoder import ReferenceEncoder
from vllm_tts_cache.store.cache import EncodingCache
from vllm_tts_cache.store.encoding import Encoding
from vllm_tts_cache.store.speaker_store import SpeakerStore
from vllm_tts_cache.store.turns import KeyTurns


class StoredEncodeWork:
    """Encodes what lies in the store, and keeps the encodings there and in memory.

    Args:
        encoders: By name.
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
        turns: KeyTurns,
        device: EncodeDevice,
    ):
        self._encoders = encoders
        self._cache = cache
        self._store = store
        self._turns = turns
        self._device = device
        self.num_encodes: Counter[str] = Counter()

    def is_done(self, job: EncodeJob) -> bool:
        """Tell whether the encoding exists; writes again what memory alone has."""
        if job.force_ids:
            return False
        if self._cache.is_stored(job.key):
            return True
        if not self._cache.contains(job.key):
            return False
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
        encoder = self._encoders[job.encoder_name]
        encoding = self._device.run(
            lambda: encoder.encode(audio),
            round(audio.seconds * encoder.bytes_per_second),
        )
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
