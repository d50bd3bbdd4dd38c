"""The protocol of the networks that turn reference audio into encodings."""

from typing import Protocol

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.store.encoding import Encoding


class ReferenceEncoder(Protocol):
    """A network that turns reference audio into an encoding.

    Implementations own their modules, whole and in their own precision: a module
    shared with the decode loop would be cast or moved under one of the two. They
    encode one audio at a time, so an encoding never depends on its neighbours.
    """

    @property
    def name(self) -> str:
        """Which encoder of its family this is; unique there."""
        ...

    @property
    def fingerprint(self) -> str:
        """64 lowercase hex digits over all that decides an encoding but the device.

        Encoders of one fingerprint on one kind of device give the same bytes. Another
        kind (CPU or GPU, another chip) rounds otherwise; its encodings are taken as
        they are, since making all voices anew on a new card would be worse.
        """
        ...

    @property
    def bytes_per_second(self) -> int:
        """Device memory that a second of audio takes while it is encoded, at most."""
        ...

    def encode(self, audio: ReferenceAudio) -> Encoding:
        """Encode one audio; safe to call from any thread, several at once included.

        Raises:
            EncodeError: The network failed on this audio.
        """
        ...
