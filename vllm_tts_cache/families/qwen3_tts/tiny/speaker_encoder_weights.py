"""Weights of the speaker encoder (ECAPA-TDNN), in float32."""

from vllm_tts_cache.families.qwen3_tts.tiny import sizes
from vllm_tts_cache.families.qwen3_tts.tiny.gains import Gains
from vllm_tts_cache.families.qwen3_tts.tiny.sizes import SpeakerEncoderSizes
from vllm_tts_cache.testing.tiny_parts import WeightBuilder


def add_speaker_encoder(
    weights: WeightBuilder, size: SpeakerEncoderSizes, gains: Gains
) -> None:
    """Add everything below ``speaker_encoder.``."""
    encoder = weights.under("speaker_encoder")
    gain, channels, kernels = gains.speaker_encoder, size.channels, size.kernel_sizes
    _add_conv(
        encoder, "blocks.0.conv", (channels[0], sizes.NUM_MEL_BINS, kernels[0]), gain
    )
    for index in (1, 2, 3):
        _add_block(encoder.under(f"blocks.{index}"), size, index, gain)
    pooled = channels[4]
    _add_conv(encoder, "mfa.conv", (pooled, pooled, kernels[4]), gain)
    attention = size.attention_channels
    _add_conv(encoder, "asp.tdnn.conv", (attention, 3 * pooled, 1), gain)
    _add_conv(encoder, "asp.conv", (pooled, attention, 1), gain)
    _add_conv(
        encoder, "fc", (sizes.TALKER.hidden, 2 * pooled, 1), gains.speaker_embedding
    )


def _add_block(
    block: WeightBuilder, size: SpeakerEncoderSizes, index: int, gain: float
) -> None:
    """One squeeze-excitation Res2Net block."""
    inner, outer = size.channels[index - 1], size.channels[index]
    group = outer // size.res2net_scale
    _add_conv(block, "tdnn1.conv", (outer, inner, 1), gain)
    for part in range(size.res2net_scale - 1):
        shape = (group, group, size.kernel_sizes[index])
        _add_conv(block, f"res2net_block.blocks.{part}.conv", shape, gain)
    _add_conv(block, "tdnn2.conv", (outer, outer, 1), gain)
    _add_conv(block, "se_block.conv1", (size.se_channels, outer, 1), gain)
    _add_conv(block, "se_block.conv2", (outer, size.se_channels, 1), gain)


def _add_conv(
    encoder: WeightBuilder, name: str, shape: tuple[int, int, int], gain: float
) -> None:
    encoder.centred(f"{name}.weight", shape, gain)
    encoder.fill(f"{name}.bias", shape[:1], 0.0)
