"""The reference encoders: ECAPA-TDNN, of the talker's x-vector, and the 12 Hz codec."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm_omni.model_executor.models.qwen3_tts import (
    configuration_qwen3_tts as configuration,
)
from vllm_omni.model_executor.models.qwen3_tts import prompt_embeds_builder

try:  # vLLM-Omni 0.32
    from vllm_omni.model_executor.models.common.ecapa_tdnn import (  # pyright: ignore[reportMissingImports]
        ECAPATimeDelayNet as SpeakerNetwork,
    )
except ModuleNotFoundError:
    from vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_talker import (
        Qwen3TTSSpeakerEncoder as SpeakerNetwork,
    )

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.networks.mel import mel_filters
from vllm_tts_cache.families.networks.qwen3_codec.encoder import load_codec_encoder
from vllm_tts_cache.families.networks.resample import RESAMPLER, resample
from vllm_tts_cache.families.qwen3_tts.family import CODEC, SPEAKER, kind_of
from vllm_tts_cache.speaker import checkpoint
from vllm_tts_cache.speaker.checkpoint_dir import read_json
from vllm_tts_cache.speaker.precision import encoding_exactly
from vllm_tts_cache.speaker.reference import Encoders, MemoryNeed
from vllm_tts_cache.store.encoding import Encoding

# Raise it with any change here that changes what the encoder computes.
REVISION = 1

SAMPLE_RATE_HZ = 24_000

# Fixed in the official package's code, so no checkpoint can change them.
_NUM_FFT = 1024
_NUM_MELS = 128
_HOP_SAMPLES = 256
_MAX_HZ = 12_000

# docs/gpu.md has the source of this figure.
_NEED = MemoryNeed(bytes_per_second=10 * 1024**2)

# The used fields of the encoder's config; the rate is missing, as only one is allowed.
_READ = (
    *("mel_dim", "enc_dim", "enc_channels", "enc_kernel_sizes", "enc_dilations"),
    *("enc_attention_channels", "enc_res2net_scale", "enc_se_channels"),
)

# Fields of the config that tell whether these two encoders are the checkpoint's.
_EXPECTED = {
    "model_type": "qwen3_tts",
    "tts_model_type": "base",
    "tokenizer_type": "qwen3_tts_tokenizer_12hz",
}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SpeakerEncoder:
    """Gives ``speaker_embedding``: ``(hidden,)`` float32."""

    network: nn.Module
    device: torch.device
    fingerprint: str
    name: str = SPEAKER
    need: MemoryNeed = _NEED

    def encode(self, audio: ReferenceAudio) -> Encoding:
        """Encode one audio of at least 0.1 s.

        Raises: EncodeError if the network failed on this audio.
        """
        with encoding_exactly(self.device, "speaker encoder"):
            embedding = self.network(self._mel(audio).to(self.device))[0]
        return Encoding({"speaker_embedding": embedding.cpu().numpy()})

    def _mel(self, audio: ReferenceAudio) -> Tensor:
        """Log-mel frames ``(1, num_frames, 128)``, made on the CPU as officially."""
        waveform = torch.tensor(resample(audio, SAMPLE_RATE_HZ), device="cpu")
        filters = mel_filters(SAMPLE_RATE_HZ, _NUM_FFT, _NUM_MELS, _MAX_HZ)
        return prompt_embeds_builder.mel_spectrogram(
            waveform.unsqueeze(0),
            n_fft=_NUM_FFT,
            num_mels=_NUM_MELS,
            sampling_rate=SAMPLE_RATE_HZ,
            hop_size=_HOP_SAMPLES,
            win_size=_NUM_FFT,
            fmin=0,
            mel_basis=torch.tensor(filters, device="cpu"),
            # The host would cache a window of the current default dtype.
            hann_window=torch.hann_window(_NUM_FFT, dtype=torch.float32, device="cpu"),
        ).transpose(1, 2)


def load_speaker_encoder(
    model_dir: Path, config: Mapping[str, Any], device: torch.device
) -> SpeakerEncoder:
    """Load the encoder of a checkpoint; ``config`` is the model's ``config.json``.

    Raises: CheckpointError if a file cannot be read, or weights or settings do not fit.
    """
    section = config.get("speaker_encoder_config") or {}
    if (rate_hz := section.get("sample_rate", SAMPLE_RATE_HZ)) != SAMPLE_RATE_HZ:
        reason = f"its speaker encoder takes {rate_hz} Hz, not {SAMPLE_RATE_HZ} Hz"
        raise CheckpointError(str(model_dir / "config.json"), reason)
    encoder_config = configuration.Qwen3TTSSpeakerEncoderConfig(**section)
    with torch.device("meta"):
        network = SpeakerNetwork(encoder_config)
    tensors = checkpoint.read_tensors(model_dir, "speaker_encoder.")
    path = f"{model_dir} speaker_encoder.*"
    weights = checkpoint.assign_float32(network, tensors, path=path)
    # Defaults are filled in, because another version of the host may change them.
    settings = {
        "config": {name: getattr(encoder_config, name) for name in _READ},
        "sample_rate_hz": SAMPLE_RATE_HZ,
        "mel": [_NUM_FFT, _NUM_MELS, _HOP_SAMPLES, _MAX_HZ],
    }
    fingerprint = checkpoint.encoder_fingerprint(
        "qwen3 ecapa speaker encoder", REVISION, RESAMPLER, weights, settings
    )
    return SpeakerEncoder(
        network=network.to(device), device=device, fingerprint=fingerprint
    )


def load_reference_encoders(model_dir: Path, device: torch.device) -> Encoders:
    """Load the encoders of a checkpoint, as `Family.encoders_part` says.

    Raises: CheckpointError that names the field, if it is no Base checkpoint with the
    12 Hz codec, or the tensors that do not fit.
    """
    config = read_json(model_dir / "config.json")
    for field, expected in _EXPECTED.items():
        found = config.get(field)
        if (kind_of(config) if field == "tts_model_type" else found) != expected:
            reason = f"{field} is {found!r}; voices are cloned by {expected!r} only"
            raise CheckpointError(str(model_dir / "config.json"), reason)
    return {
        SPEAKER: load_speaker_encoder(model_dir, config, device),
        CODEC: load_codec_encoder(model_dir / "speech_tokenizer", device),
    }
