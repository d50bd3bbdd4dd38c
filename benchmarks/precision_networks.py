"""The networks of the reference encoders, apart from what prepares their input.

The encoders take one clip, in float32, and nothing else. To see what that is worth,
their networks are called here with other dtypes and with several clips at once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from benchmarks.precision_differences import (
    Values,
    code_shares,
    embedding_difference,
)
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.families.fish_speech import codec_encoder as fish_speech
from vllm_tts_cache.families.fish_speech.codec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from vllm_tts_cache.families.fish_speech.resample import resample as fish_resample
from vllm_tts_cache.families.qwen3_tts import codec_encoder as qwen3_codec
from vllm_tts_cache.families.qwen3_tts import speaker_encoder as qwen3_speaker
from vllm_tts_cache.families.qwen3_tts.resample import resample as qwen3_resample
from vllm_tts_cache.speaker.family import ReferenceEncoder


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Network:
    """One encoder's network.

    Attributes:
        encoder: It, with its front end; what it gives is what is right.
        module: Its weights.
        prepare: Audio -> ``(length, ...)`` float32, on the device.
        compute: ``(num_clips, length, ...)`` -> ``(num_clips, num_frames,
            num_codebooks)`` codes or ``(num_clips, hidden)`` embeddings.
        silence: What a shorter clip of a batch is filled up with.
        num_frames: How many frames an input of some length has; None: an embedding.
        first: What its first codebook is called.
        rest: What its other codebooks are called.
    """

    encoder: ReferenceEncoder
    module: nn.Module
    prepare: Callable[[ReferenceAudio], Tensor]
    compute: Callable[[Tensor], Tensor]
    silence: float = 0.0
    num_frames: Callable[[int], int] | None = None
    first: str = "first"
    rest: str = "rest"

    def values(self, batch: Tensor, length: int) -> Values:
        """What the first clip gets; it was ``length`` long before it was filled up."""
        computed = self.compute(batch)[0]
        if self.num_frames is not None:
            computed = computed[: self.num_frames(length)]
        # NumPy has no bfloat16; codes are integers already.
        return (computed if computed.dtype == torch.int64 else computed.float()).numpy(
            force=True
        )

    def expected(self, audio: ReferenceAudio) -> Values:
        """What the encoder itself gives."""
        (array,) = self.encoder.encode(audio).arrays.values()
        return np.asarray(array)


def network_of(encoder: ReferenceEncoder) -> Network:
    """The network of an encoder that ``load_reference_encoders`` gave.

    Raises: TypeError if it is one that is not known here.
    """
    match encoder:
        case fish_speech.CodecEncoder():
            return _fish_codec(encoder)
        case qwen3_codec.CodecEncoder():
            return _qwen3_codec(encoder)
        case qwen3_speaker.SpeakerEncoder():
            return _qwen3_speaker(encoder)
    raise TypeError(f"no network is known of {type(encoder).__name__}")


def _fish_codec(encoder: fish_speech.CodecEncoder) -> Network:
    quantizer: Any = encoder.network.quantizer

    def compute(batch: Tensor) -> Tensor:
        missing = -batch.shape[1] % SAMPLES_PER_FRAME
        latents = encoder.network.encoder(pad(batch, (0, missing)).unsqueeze(1))
        latents = quantizer.pre_module(quantizer.downsample(latents))
        semantic, semantic_codes, *_ = quantizer.semantic_quantizer(latents)
        _, residual_codes, *_ = quantizer.quantizer(latents - semantic)
        return torch.cat([semantic_codes, residual_codes], dim=1).mT

    return Network(
        encoder=encoder,
        module=encoder.network,
        prepare=lambda audio: fish_resample(audio, SAMPLE_RATE_HZ, encoder.device),
        compute=compute,
        num_frames=lambda length: math.ceil(length / SAMPLES_PER_FRAME),
        first="semantic",
        rest="residual",
    )


def _qwen3_codec(encoder: qwen3_codec.CodecEncoder) -> Network:
    def prepare(audio: ReferenceAudio) -> Tensor:
        samples = qwen3_resample(audio, encoder.sample_rate_hz)
        return torch.tensor(samples, device=encoder.device)

    def compute(batch: Tensor) -> Tensor:
        codes = encoder.network.encode(
            batch.unsqueeze(1), num_quantizers=encoder.num_codebooks, return_dict=False
        )[0]
        return codes.mT

    return Network(
        encoder=encoder,
        module=encoder.network,
        prepare=prepare,
        compute=compute,
        num_frames=lambda length: math.ceil(length / encoder.samples_per_frame),
    )


def _qwen3_speaker(encoder: qwen3_speaker.SpeakerEncoder) -> Network:
    return Network(
        encoder=encoder,
        module=encoder.network,
        prepare=lambda audio: encoder._mel(audio)[0].to(encoder.device),
        compute=encoder.network,
        silence=math.log(1e-5),  # the floor of its log-mel energies
    )


def differences(network: Network, given: Values, expected: Values) -> dict[str, float]:
    """How far an encoding is from the right one, by what is counted."""
    if network.num_frames is None:
        return embedding_difference(given, expected)
    first, rest = code_shares(given, expected)
    return {network.first: first, network.rest: rest}
