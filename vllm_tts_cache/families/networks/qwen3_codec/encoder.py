"""The 12 Hz codec's encoder: reference audio to the codes of an in-context clone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import (
    configuration_qwen3_tts_tokenizer_v2 as configuration,
)
from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import (
    modeling_qwen3_tts_tokenizer_v2 as modeling,
)

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import CheckpointError, EncodeError
from vllm_tts_cache.families.networks.qwen3_codec.convolutions import (
    SlicedEncoder,
    can_be_sliced,
)
from vllm_tts_cache.families.networks.resample import RESAMPLER, resample
from vllm_tts_cache.speaker.checkpoint import (
    assign_float32,
    encoder_fingerprint,
    read_tensors,
)
from vllm_tts_cache.speaker.checkpoint_dir import read_json
from vllm_tts_cache.speaker.precision import exact_float32
from vllm_tts_cache.speaker.reference import MemoryNeed
from vllm_tts_cache.store.encoding import Encoding

# What the encoder is called in stored voices.
CODEC = "codec"

# Raise it with any change here that changes what the encoder computes.
REVISION = 1

# What is read of the encoder's config; how long its attention looks back is not.
_READ = (
    "attention_bias",
    "audio_channels",
    "codebook_dim",
    "codebook_size",
    "compress",
    "dilation_growth_rate",
    "frame_rate",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "kernel_size",
    "last_kernel_size",
    "max_position_embeddings",
    "norm_eps",
    "num_attention_heads",
    "num_filters",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_quantizers",
    "num_residual_layers",
    "num_semantic_quantizers",
    "pad_mode",
    "residual_kernel_size",
    "rope_parameters",
    "sampling_rate",
    "upsampling_ratios",
    "use_causal_conv",
    "use_conv_shortcut",
    "vector_quantization_hidden_dimension",
)

# With the released 64 filters; see docs/gpu.md for where the figures come from. Two
# slices are fixed.
_NUM_FILTERS = 64
_NEED = MemoryNeed(fixed_bytes=128 * 1024**2, bytes_per_second=4 * 1024**2)

# Longer than any audio: the official package's transformers, 4.57, knows no window
# here, and with one at least as long as the input this one's attention is the same,
# plain causal kernel.
_NO_WINDOW = 2**30


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CodecEncoder:
    """Gives ``codes``: ``(num_frames, num_codebooks)`` int16, the coarsest first.

    Attributes:
        num_codebooks: How many of the quantizer's codebooks the talker speaks.
        samples_per_frame: Samples at ``sample_rate_hz`` that one frame stands for.
    """

    network: modeling.Qwen3TTSTokenizerV2Encoder
    device: torch.device
    sample_rate_hz: int
    samples_per_frame: int
    num_codebooks: int
    fingerprint: str
    need: MemoryNeed
    name: str = CODEC

    def encode(self, audio: ReferenceAudio) -> Encoding:
        """Encode one audio; its last frame may be filled up with silence.

        Raises:
            EncodeError: The network failed on this audio.
        """
        try:
            samples = resample(audio, self.sample_rate_hz)
            num_frames = -(-samples.size // self.samples_per_frame)
            with exact_float32(self.device):
                waveform = torch.tensor(samples, device=self.device)
                # The finer codebooks refine what the coarser ones left over, so
                # leaving out those that nobody reads changes none of the others.
                (codes,) = self.network.encode(
                    waveform.view(1, 1, -1),
                    num_quantizers=self.num_codebooks,
                    use_streaming=False,
                    return_dict=False,
                )[0]
        except (RuntimeError, ValueError) as exc:
            raise EncodeError(f"codec encoder: {exc}") from exc
        return Encoding(
            {"codes": codes[:, :num_frames].T.cpu().numpy().astype(np.int16)}
        )


def load_codec_encoder(directory: Path, device: torch.device) -> CodecEncoder:
    """Load it from the folder of the codec, which lies in the checkpoint's.

    Raises:
        CheckpointError: Its weights or its settings are not what it needs.
    """
    section = read_json(directory / "config.json")
    config = configuration.Qwen3TTSTokenizerV2Config(**section)
    if config.encoder_config.codebook_size > np.iinfo(np.int16).max + 1:
        raise CheckpointError(str(directory), "its codes do not fit into 16 bits")
    tensors = read_tensors(directory, "encoder.")
    network, weights = _build(config, tensors, path=f"{directory} encoder.*")
    return CodecEncoder(
        network=network.to(device),  # pyright: ignore[reportArgumentType]
        device=device,
        sample_rate_hz=config.input_sample_rate,
        samples_per_frame=config.encode_downsample_rate,
        num_codebooks=config.encoder_valid_num_quantizers,
        fingerprint=encoder_fingerprint(
            network="qwen3 12 hz codec",
            revision=REVISION,
            resampler=RESAMPLER,
            weights=weights,
            settings=_settings(config),
        ),
        need=_NEED.scaled(config.encoder_config.num_filters / _NUM_FILTERS),
    )


def _settings(config: configuration.Qwen3TTSTokenizerV2Config) -> dict[str, Any]:
    # With its defaults filled in, which another version of the host may change.
    return {
        "config": {name: getattr(config.encoder_config, name) for name in _READ},
        "attention": "causal",
        "sample_rate_hz": config.input_sample_rate,
        "samples_per_frame": config.encode_downsample_rate,
        "num_codebooks": config.encoder_valid_num_quantizers,
    }


def _build(
    config: configuration.Qwen3TTSTokenizerV2Config,
    tensors: dict[str, torch.Tensor],
    *,
    path: str,
) -> tuple[modeling.Qwen3TTSTokenizerV2Encoder, dict[str, torch.Tensor]]:
    """The encoder in float32 on the CPU, and its tensors as the checkpoint has them.

    What only decoding needs is left out.

    It is built on the meta device: the class makes a decoder first and then drops
    it, and drawing random weights would disturb the process's random state.
    """
    encoder_config = config.encoder_config
    encoder_config.sliding_window = _NO_WINDOW
    encoder_config._attn_implementation = "sdpa"
    with torch.device("meta"):
        network = modeling.Qwen3TTSTokenizerV2Encoder(encoder_config)
    weights = assign_float32(network, tensors, path=path)
    _compute_derived_buffers(network)
    _delete_unread_codebooks(network, config.encoder_valid_num_quantizers)
    if can_be_sliced(network.encoder):
        sliced = SlicedEncoder(network.encoder, config.input_sample_rate)
        network.encoder = sliced  # pyright: ignore[reportAttributeAccessIssue]
    return network, weights


def _compute_derived_buffers(network: modeling.Qwen3TTSTokenizerV2Encoder) -> None:
    """Rotary frequencies and padding sizes; no checkpoint holds them."""
    stored = network.state_dict().keys()
    derived = [name for name, _ in network.named_buffers() if name not in stored]
    for owner_name in sorted({name.rpartition(".")[0] for name in derived}):
        owner = network.get_submodule(owner_name)
        owner.to_empty(device="cpu", recurse=False)
        network._init_weights(owner)


def _delete_unread_codebooks(
    network: modeling.Qwen3TTSTokenizerV2Encoder, num_codebooks: int
) -> None:
    """Free the codebooks that the talker does not speak; half of them as released."""
    quantizer = network.quantizer
    acoustic = quantizer.acoustic_residual_vector_quantizer
    num_acoustic = num_codebooks - quantizer.num_semantic_quantizers
    acoustic.layers = nn.ModuleList(list(acoustic.layers)[:num_acoustic])
