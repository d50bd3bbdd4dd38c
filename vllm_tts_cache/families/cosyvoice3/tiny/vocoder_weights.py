"""Weights of the vocoder, in float32 and under the names of ``hift.pt``."""

from vllm_tts_cache.families.cosyvoice3.tiny import sizes
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

_NUM_HARMONICS = 9
_NUM_BINS = 9  # of the short spectra that it ends with: loudness, and phase of each
_UPSAMPLING = ((8, 16), (5, 11), (3, 7))
_DOWNSAMPLING = (15, 3, 1)
_SOURCE_KERNELS = (7, 7, 11)
_KERNELS = (3, 7, 11)
_NUM_DILATIONS = 3

_RESIDUAL_GAIN = 0.5
_UP_GAIN = 0.5  # neighbours are copies of one another, which add up
_SPECTRUM_GAIN = 0.5
_LOUDNESS = -1.5  # of the spectra, in logarithms: neither silence nor clipped
_PITCH_HZ = 200.0


def add_vocoder(weights: WeightBuilder) -> None:
    """Add all of it: from a mel to samples."""
    width = sizes.VOCODER_CHANNELS
    weights.linear("m_source.l_linear", _NUM_HARMONICS, 1)
    _add_normed(weights, "conv_pre", (width, sizes.NUM_MELS, 5))
    for stage, (_, kernel) in enumerate(_UPSAMPLING):
        channels = width // 2 ** (stage + 1)
        _add_normed(weights, f"ups.{stage}", (channels, 2 * channels, kernel), _UP_GAIN)
        _add_source(weights, stage, channels)
        for index, kernel_size in enumerate(_KERNELS):
            block = weights.under(f"resblocks.{stage * len(_KERNELS) + index}")
            _add_residual(block, channels, kernel_size)
    shape = 2 * _NUM_BINS, width // 2 ** len(_UPSAMPLING), 7
    _add_normed(weights, "conv_post", shape, _SPECTRUM_GAIN)
    weights.tensors["conv_post.bias"][:_NUM_BINS] = _LOUDNESS
    _add_pitch(weights.under("f0_predictor"))


def _add_source(weights: WeightBuilder, stage: int, channels: int) -> None:
    """What brings the tone that it goes by to the rate of a stage."""
    rate = _DOWNSAMPLING[stage]
    kernel = 1 if rate == 1 else 2 * rate
    shape = channels, 2 * _NUM_BINS, kernel
    weights.projection(f"source_downs.{stage}.weight", shape)
    weights.fill(f"source_downs.{stage}.bias", shape[:1], 0.0)
    block = weights.under(f"source_resblocks.{stage}")
    _add_residual(block, channels, _SOURCE_KERNELS[stage])


def _add_residual(block: WeightBuilder, channels: int, kernel: int) -> None:
    for index in range(_NUM_DILATIONS):
        for half in ("1", "2"):
            block.fill(f"activations{half}.{index}.alpha", (channels,), 1.0)
            shape = channels, channels, kernel
            _add_normed(block, f"convs{half}.{index}", shape, _RESIDUAL_GAIN)


def _add_pitch(predictor: WeightBuilder) -> None:
    inputs = sizes.NUM_MELS
    for index, kernel in zip(range(0, 10, 2), (4, 3, 3, 3, 3), strict=True):
        _add_normed(
            predictor, f"condnet.{index}", (sizes.PITCH_CHANNELS, inputs, kernel)
        )
        inputs = sizes.PITCH_CHANNELS
    predictor.linear("classifier", inputs, 1, _PITCH_HZ)


def _add_normed(
    weights: WeightBuilder, name: str, shape: tuple[int, int, int], gain: float = 1.0
) -> None:
    """A weight-normed convolution ``(out, in, kernel)``, as torch's parametrization.

    Inputs of unit variance come out with a standard deviation of ``gain``.
    """
    parameters = weights.under(f"{name}.parametrizations.weight")
    parameters.fill("original0", (shape[0], 1, 1), gain)
    parameters.normal("original1", shape, 1.0)
    weights.fill(f"{name}.bias", shape[:1], 0.0)
