"""Builds the speaker side of a model in a worker, from the settings."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from vllm_tts_cache.config import load_settings
from vllm_tts_cache.errors import EncodeError, TTSCacheError
from vllm_tts_cache.logs import logger
from vllm_tts_cache.model_executor.speakers import (
    Ranks,
    WorkerEncodings,
    tensor_parallel_ranks,
)
from vllm_tts_cache.speaker.checkpoint_dir import checkpoint_dir, whole_checkpoint
from vllm_tts_cache.speaker.family import Family
from vllm_tts_cache.speaker.precision import float32_by_default, hold_exact_matmuls
from vllm_tts_cache.speaker.reference import ReferenceEncoder, SpeakerRef
from vllm_tts_cache.store.encoding import Encoding

# The first use of a library may read a gigabyte of kernels from a slow disk.
_WARM_UP_TIMEOUT_SECONDS = 120.0


def load_worker_speakers(
    vllm_config: Any, family: Family, ranks: Ranks
) -> WorkerEncodings:
    """Open the store and load the checkpoint's reference encoders.

    Raises: TTSCacheError if the encoders cannot be loaded.
    """
    device = _encode_device(vllm_config, family)
    speakers = WorkerEncodings({}, load_settings(), device, ranks=ranks)
    try:
        load_encoders(speakers, vllm_config, family)
    except BaseException:
        speakers.close()
        raise
    return speakers


def load_encoders(speakers: WorkerEncodings, vllm_config: Any, family: Family) -> None:
    """Load a checkpoint's reference encoders, which replace those loaded before.

    On an accelerator they encode once, before vLLM measures how much memory is left.

    Raises:
        TTSCacheError: The encoders cannot be loaded.
        TimeoutError: The first encode still runs, and would disturb that measurement.
    """
    device = _encode_device(vllm_config, family)
    ranks = speakers.ranks
    hold_exact_matmuls(vllm_config.model_config.dtype)

    def load() -> Mapping[str, ReferenceEncoder]:
        model_dir = whole_checkpoint(vllm_config, family.side_files)
        return family.part("encoders_part")(model_dir, device)

    with float32_by_default():
        speakers.fingerprints = ranks.from_rank_0(partial(speakers.load_encoders, load))
        if not ranks.is_first or device.type == "cpu":
            return
        began_at = time.monotonic()
        try:
            speakers.warm_up(_WARM_UP_TIMEOUT_SECONDS)
        except EncodeError as exc:  # without voices to clone, the model still speaks
            logger.warning("The first encode of the reference encoders failed: %s", exc)
            return
        seconds = time.monotonic() - began_at
        logger.info("Warmed the reference encoders up in %.1f s.", seconds)


def _encode_device(vllm_config: Any, family: Family) -> torch.device:
    """Return the device of the family's encoders, with its index.

    The host names the kind only, and a new thread starts with index 0.
    """
    if family.encodes_on_cpu:
        return torch.device("cpu")
    kind = torch.device(vllm_config.device_config.device)
    if kind.type == "cuda" and kind.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return kind


class SpeakerSide:
    """Loads a checkpoint's reference encoders, and looks encodings up.

    Attributes:
        tts_cache_speakers: None before the encoders are loaded, and if there are none.
        tts_cache_refusal: Why the checkpoint clones no voices, if it does not.
    """

    tts_cache_family: ClassVar[Family]
    tts_cache_speakers: WorkerEncodings | None = None
    tts_cache_refusal: str | None = None
    # The model and its revision that both attributes were set for.
    _speakers_of: tuple[str, str | None] | None = None

    def _load_speakers(self, vllm_config: Any) -> None:
        """Load the reference encoders, if the checkpoint has any.

        The host may load weights repeatedly, from memory or from another checkpoint.
        The encode thread, its queue and the store outlive that.
        """
        model = vllm_config.model_config
        if (checkpoint := (model.model, model.revision)) == self._speakers_of:
            return
        family, ranks = self.tts_cache_family, self._ranks()
        self.tts_cache_refusal = ranks.from_rank_0(
            lambda: family.clones(checkpoint_dir(*checkpoint))
        )
        if self.tts_cache_refusal is not None:
            self._close_speakers()
        elif self.tts_cache_speakers is None:
            self.tts_cache_speakers = load_worker_speakers(vllm_config, family, ranks)
        else:
            load_encoders(self.tts_cache_speakers, vllm_config, family)
        self._speakers_of = checkpoint

    def _close_speakers(self) -> None:
        speakers, self.tts_cache_speakers = self.tts_cache_speakers, None
        if speakers is not None:
            speakers.close()

    def _encodings(
        self, ref: SpeakerRef, encoder_names: Sequence[str]
    ) -> dict[str, Encoding]:
        """Return a prompt's encodings. Raises: TTSCacheError if one is missing."""
        return self._cloning().prompt(ref, encoder_names)

    def _only_encoding(self, ref: SpeakerRef) -> Encoding:
        """Return a prompt's encoding, of a family with one. Raises: TTSCacheError."""
        (name,) = self.tts_cache_family.encoders
        return self._encodings(ref, (name,))[name]

    def _speaker(self, info: Mapping[str, Any]) -> SpeakerRef:
        """Return the speaker of a request. Raises: TTSCacheError, ValueError."""
        return self._cloning().named_by(info)

    def _cloning(self) -> WorkerEncodings:
        if self.tts_cache_speakers is None:
            raise TTSCacheError(self.tts_cache_refusal or "the model clones no voices")
        return self.tts_cache_speakers

    def _count_prompt(self) -> None:
        if self.tts_cache_speakers is not None:
            self.tts_cache_speakers.num_prompts += 1

    def _ranks(self) -> Ranks:
        """Return the processes that run the model together."""
        return tensor_parallel_ranks()
