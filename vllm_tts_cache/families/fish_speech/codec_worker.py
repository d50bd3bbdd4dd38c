"""Fish Speech's codec decoder, loaded whole and before the first request."""

from collections.abc import Iterable

import torch
from vllm_omni.model_executor.models.fish_speech.dac_modules import DAC
from vllm_omni.model_executor.models.fish_speech.fish_speech_dac_decoder import (
    FishSpeechDACDecoder,
)

from vllm_tts_cache.families.fish_speech.codec import read_sizes
from vllm_tts_cache.families.fish_speech.codec_halves import build_decoding_half
from vllm_tts_cache.families.fish_speech.family import FAMILY
from vllm_tts_cache.families.networks.dac.file import read_codec_file
from vllm_tts_cache.speaker.checkpoint_dir import whole_checkpoint

# As many as the host's deploy file decodes first.
_NUM_WARM_UP_FRAMES = 4


class CachedFishSpeechDACDecoder(FishSpeechDACDecoder):
    """The host's decoder; only how its codec is loaded is ours.

    The host takes what tensors of ``codec.pth`` it knows by name, at the first
    request. A file in another spelling, or none of a codec, then speaks noise.
    """

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the codec, which is not among ``weights``, and decode once.

        Raises:
            CheckpointError: ``codec.pth`` cannot be read, or a tensor of the codec is
                missing or of another shape; the message names them.
        """
        loaded = super().load_weights(weights)
        self._ensure_codec_loaded()
        self._warm_up()
        return loaded | {name for name, _ in self.named_parameters()}

    def _ensure_codec_loaded(self) -> None:
        # The host calls it before each decoding.
        if self._codec is None:
            self._codec = self._load_codec()

    def _load_codec(self) -> DAC:
        model_dir = whole_checkpoint(self.vllm_config, FAMILY.side_files)
        path = model_dir / "codec.pth"
        state = read_codec_file(path)
        codec, _ = build_decoding_half(read_sizes(model_dir), state, path=str(path))
        # The host's steps in the host's order, so that the same samples come out.
        self._bake_weight_norm(codec)
        self._cache_attention_masks(codec)
        codec.to(device=self.vllm_config.device_config.device, dtype=self._dac_dtype)
        # With lengths, a batch's shorter clips end where they should.
        self._codec_decode_takes_lengths = True
        return codec

    def _warm_up(self) -> None:
        """Let the libraries choose and compile their kernels."""
        num_codes = self._num_codebooks * _NUM_WARM_UP_FRAMES
        device = self.vllm_config.device_config.device
        self(torch.zeros(num_codes, dtype=torch.long, device=device))
