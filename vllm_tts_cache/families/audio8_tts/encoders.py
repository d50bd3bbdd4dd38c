"""The reference encoder of Audio8 TTS: its codec's encode half, the host's network."""

from functools import partial
from pathlib import Path

import torch
from vllm_omni.model_executor.models.audio8_tts import codec as host

from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.audio8_tts.family import CODEC
from vllm_tts_cache.families.networks.dac import encoder as dac
from vllm_tts_cache.families.networks.sinc_resample import RESAMPLER
from vllm_tts_cache.speaker import checkpoint
from vllm_tts_cache.speaker.checkpoint_dir import read_json
from vllm_tts_cache.speaker.reference import Encoders, MemoryNeed

# Raise it with any change here that changes what the encoder computes.
REVISION = 1

SAMPLE_RATE_HZ = host.ArkttsCodec.sample_rate
SAMPLES_PER_FRAME = host.ArkttsCodec.frame_length
NUM_CODEBOOKS = 10

# A checkpoint's config sets sizes of the decode half only.
_DECODER_SIZES = {
    "post_n_layer": "codec_post_n_layer",
    "post_n_head": "codec_post_n_head",
    "post_n_local_heads": "codec_post_n_local_heads",
    "post_intermediate_size": "codec_post_intermediate_size",
}

# Without slices: five activations of the first convolutions, 64 channels wide at
# 44.1 kHz. Estimated, not measured.
_NEED = MemoryNeed(
    fixed_bytes=64 * 1024**2, bytes_per_second=5 * 64 * 4 * SAMPLE_RATE_HZ
)


def _delete_masks(network: host.ArkttsCodec) -> None:
    """Delete the masks that the host's network keeps of each length so far."""
    for module in network.modules():
        if isinstance(module, host.ArkttsCodecWindowTransformer):
            module._mask_cache.clear()
            module._rope_cache.clear()


def load_reference_encoders(model_dir: Path, device: torch.device) -> Encoders:
    """Load the encoder out of ``codec.pth``, as `Family.encoders_part` says.

    Raises: CheckpointError that names the file, or the tensors that do not fit.
    """
    path = model_dir / "codec.pth"
    config = read_json(model_dir / "config.json")
    given = {ours: config.get(name) for ours, name in _DECODER_SIZES.items()}
    sizes = {name: size for name, size in given.items() if size is not None}
    if not all(type(size) is int and size > 0 for size in sizes.values()):
        names = ", ".join(_DECODER_SIZES.values())
        reason = f"expected positive integers under {names}"
        raise CheckpointError(str(model_dir / "config.json"), reason)
    state = dac.read_codec_file(path)
    with torch.device("meta"):  # the constructor draws random weights
        network = host.build_arktts_codec(**sizes)
    left_out = "decoder", "quantizer.post_module", "quantizer.upsample"
    weights = dac.keep_half(network, state, left_out, path=str(path))
    checkpoint.assign_float32(network, weights, path=str(path))
    network.to(device)
    dac.fix_weight_norms(network)
    settings = {
        "sample_rate_hz": SAMPLE_RATE_HZ,
        "samples_per_frame": SAMPLES_PER_FRAME,
        "num_codebooks": NUM_CODEBOOKS,
    }
    encoder = dac.DACEncoder(
        network=network,
        device=device,
        sample_rate_hz=SAMPLE_RATE_HZ,
        samples_per_frame=SAMPLES_PER_FRAME,
        fingerprint=checkpoint.encoder_fingerprint(
            "audio8 dac", REVISION, RESAMPLER, weights, settings
        ),
        need=_NEED,
        name=CODEC,
        clean_up=partial(_delete_masks, network),
    )
    return {CODEC: encoder}
