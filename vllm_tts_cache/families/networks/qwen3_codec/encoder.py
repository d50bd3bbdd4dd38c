"""The 12 Hz codec's encoder: reference audio to the codes of an in-context clone.

Its long convolutions run in slices of time.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.mimi import modeling_mimi as mimi
from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import (
    configuration_qwen3_tts_tokenizer_v2 as configuration,
)
from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import (
    modeling_qwen3_tts_tokenizer_v2 as modeling,
)

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.networks.resample import RESAMPLER, resample
from vllm_tts_cache.families.networks.slices import CausalPass, in_slices
from vllm_tts_cache.speaker import checkpoint
from vllm_tts_cache.speaker.checkpoint_dir import read_json
from vllm_tts_cache.speaker.precision import encoding_exactly
from vllm_tts_cache.speaker.reference import MemoryNeed
from vllm_tts_cache.store.encoding import Encoding

# Name of the encoder in stored voices.
CODEC = "codec"

# Raise it with any change here that changes what the encoder computes.
REVISION = 1

# Fields of the encoder's config that are used; its attention window is not.
_READ = (
    *("attention_bias", "audio_channels", "codebook_dim", "codebook_size", "compress"),
    *("dilation_growth_rate", "frame_rate", "head_dim", "hidden_act", "hidden_size"),
    *("intermediate_size", "kernel_size", "last_kernel_size"),
    *("max_position_embeddings", "norm_eps", "num_attention_heads", "num_filters"),
    *("num_hidden_layers", "num_key_value_heads", "num_quantizers"),
    *("num_residual_layers", "num_semantic_quantizers", "pad_mode"),
    *("residual_kernel_size", "rope_parameters", "sampling_rate", "upsampling_ratios"),
    *("use_causal_conv", "use_conv_shortcut", "vector_quantization_hidden_dimension"),
)

# With the released 64 filters; see docs/gpu.md for where the figures come from. The
# fixed part is that of two slices.
_NUM_FILTERS = 64
_NEED = MemoryNeed(fixed_bytes=128 * 1024**2, bytes_per_second=4 * 1024**2)

# A kernel computes less than two slices: 3 GFLOP at most at the released size.
SLICE_SECONDS = 2.0
# Lowest rate of a sliced layer's input. Slower layers are wide and short: for 30 s the
# largest kernel has 20 GFLOP, and slices would spend their time on fetching weights.
_MIN_SLICED_RATE_HZ = 2_000

# Longer than any audio: transformers 4.57 of the official package has no window here.
# With a window that is longer than the input, the host's transformers uses the same
# kernel, the plain causal one.
_NO_WINDOW = 2**30


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CodecEncoder:
    """Gives ``codes``: ``(num_frames, num_codebooks)`` int16, the coarsest first.

    These are the codebooks that the talker speaks, of all that the quantizer has.
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

        Raises: EncodeError if the network failed on this audio.
        """
        with encoding_exactly(self.device, "codec encoder"):
            samples = resample(audio, self.sample_rate_hz)
            num_frames = -(-samples.size // self.samples_per_frame)
            waveform = torch.tensor(samples, device=self.device)
            # Each codebook codes the residual of the coarser ones, so leaving out the
            # finest, which the talker does not speak, changes no other code.
            (codes,) = self.network.encode(
                waveform.view(1, 1, -1),
                num_quantizers=self.num_codebooks,
                use_streaming=False,
                return_dict=False,
            )[0]
        frames = codes[:, :num_frames].T.cpu().numpy()
        return Encoding({"codes": frames.astype(np.int16)})


class SlicedEncoder(nn.Module):
    """Replaces the host's encoder module; its long layers run in slices.

    The host's is causal and padded with silence, see `can_be_sliced`.
    """

    def __init__(self, encoder: mimi.MimiEncoder, sample_rate_hz: int):
        super().__init__()
        num_sliced, stride = 0, 1
        for number, layer in enumerate(encoder.layers, start=1):
            if sample_rate_hz < stride * _MIN_SLICED_RATE_HZ:
                break
            num_sliced = number
            if isinstance(layer, mimi.MimiConv1d):
                stride *= layer.conv.stride[0]
        self.sliced = nn.Sequential(*encoder.layers[:num_sliced])
        self.whole = nn.Sequential(*encoder.layers[num_sliced:])
        self.num_samples = round(SLICE_SECONDS * sample_rate_hz / stride) * stride

    def forward(self, samples: Tensor, padding_cache: None = None) -> Tensor:  # noqa: ARG002
        """``(batch, 1, num_samples)`` to ``(batch, hidden, num_samples / 960)``.

        ``padding_cache``, of the host's signature for streams, is always None.
        """
        sliced = partial(_compute, self.sliced)
        x = in_slices(sliced, samples, num_samples=self.num_samples)
        return _compute(self.whole, x, CausalPass())


def can_be_sliced(encoder: mimi.MimiEncoder) -> bool:
    """Tell whether all convolutions are causal and pad with silence, as released."""
    convs = (conv for conv in encoder.modules() if isinstance(conv, mimi.MimiConv1d))
    return all(conv.causal and conv.pad_mode == "constant" for conv in convs)


def _compute(layer: nn.Module, x: Tensor, causal: CausalPass) -> Tensor:
    match layer:
        case nn.Sequential():
            for part in layer:
                x = _compute(part, x, causal)
            return x
        case mimi.MimiResnetBlock():
            inner = x
            for part in layer.block:
                inner = _compute(part, inner, causal)
            return _compute(layer.shortcut, x, causal) + inner
        case mimi.MimiConv1d():
            return causal.convolve(layer.conv, x)
    return layer(x)


def load_codec_encoder(directory: Path, device: torch.device) -> CodecEncoder:
    """Load the encoder from the codec's folder in a checkpoint.

    Raises: CheckpointError if a file cannot be read, or weights or settings do not fit.
    """
    section = read_json(directory / "config.json")
    config = configuration.Qwen3TTSTokenizerV2Config(**section)
    if config.encoder_config.codebook_size > np.iinfo(np.int16).max + 1:
        raise CheckpointError(str(directory), "its codes do not fit into 16 bits")
    tensors = checkpoint.read_tensors(directory, "encoder.")
    network, weights = _build(config, tensors, path=f"{directory} encoder.*")
    # Defaults are filled in, because another version of the host may change them.
    settings = {
        "config": {name: getattr(config.encoder_config, name) for name in _READ},
        "attention": "causal",
        "sample_rate_hz": config.input_sample_rate,
        "samples_per_frame": config.encode_downsample_rate,
        "num_codebooks": config.encoder_valid_num_quantizers,
    }
    return CodecEncoder(
        network=network.to(device),  # pyright: ignore[reportArgumentType]
        device=device,
        sample_rate_hz=config.input_sample_rate,
        samples_per_frame=config.encode_downsample_rate,
        num_codebooks=config.encoder_valid_num_quantizers,
        fingerprint=checkpoint.encoder_fingerprint(
            "qwen3 12 hz codec", REVISION, RESAMPLER, weights, settings
        ),
        need=_NEED.scaled(config.encoder_config.num_filters / _NUM_FILTERS),
    )


def _build(
    config: configuration.Qwen3TTSTokenizerV2Config,
    tensors: dict[str, torch.Tensor],
    *,
    path: str,
) -> tuple[modeling.Qwen3TTSTokenizerV2Encoder, dict[str, torch.Tensor]]:
    """Return the encoder in float32 on the CPU, and its tensors as in the checkpoint.

    Codebooks and layers that only decoding needs are left out.

    It is built on the meta device: the host's class makes a decoder first and drops it,
    and drawing random weights would change the process's random state.
    """
    encoder_config = config.encoder_config
    encoder_config.sliding_window = _NO_WINDOW
    encoder_config._attn_implementation = "sdpa"
    with torch.device("meta"):
        network = modeling.Qwen3TTSTokenizerV2Encoder(encoder_config)
    weights = checkpoint.assign_float32(network, tensors, path=path)
    _compute_derived_buffers(network)
    # Codebooks that the talker does not speak are half of them, as released.
    quantizer = network.quantizer
    acoustic = quantizer.acoustic_residual_vector_quantizer
    num_spoken = config.encoder_valid_num_quantizers - quantizer.num_semantic_quantizers
    acoustic.layers = nn.ModuleList(list(acoustic.layers)[:num_spoken])
    if can_be_sliced(network.encoder):
        sliced = SlicedEncoder(network.encoder, config.input_sample_rate)
        network.encoder = sliced  # pyright: ignore[reportAttributeAccessIssue]
    return network, weights


def _compute_derived_buffers(network: modeling.Qwen3TTSTokenizerV2Encoder) -> None:
    """Compute rotary frequencies and padding sizes, which no checkpoint holds."""
    stored = network.state_dict().keys()
    derived = [name for name, _ in network.named_buffers() if name not in stored]
    for owner_name in sorted({name.rpartition(".")[0] for name in derived}):
        owner = network.get_submodule(owner_name)
        owner.to_empty(device="cpu", recurse=False)
        network._init_weights(owner)
