"""Fish Speech's codec decoder, loaded completely and before the first request."""

from collections.abc import Iterable

import torch
from vllm_omni.model_executor.models.fish_speech import fish_speech_dac_decoder as host

from vllm_tts_cache.families.fish_speech.codec import build_half
from vllm_tts_cache.families.fish_speech.family import FAMILY
from vllm_tts_cache.families.fish_speech.sizes import read_sizes
from vllm_tts_cache.families.networks.dac.encoder import read_codec_file
from vllm_tts_cache.speaker.checkpoint_dir import whole_checkpoint

# The frames of the first chunk in the host's deploy file.
_NUM_WARM_UP_FRAMES = 4


class CachedFishSpeechDACDecoder(host.FishSpeechDACDecoder):
    """The host's decoder with a codec that is loaded whole, and at the start.

    The host loads those tensors of ``codec.pth`` whose names it knows, at the first
    request. From a file in another spelling, or of no codec, it then speaks noise.
    """

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the codec, which is not among ``weights``, and decode once.

        Raises: CheckpointError that names the file, or the tensors that do not fit.
        """
        loaded = super().load_weights(weights)
        self._ensure_codec_loaded()
        # So that the libraries choose and compile their kernels now.
        num_codes = self._num_codebooks * _NUM_WARM_UP_FRAMES
        device = self.vllm_config.device_config.device
        self(torch.zeros(num_codes, dtype=torch.long, device=device))
        return loaded | {name for name, _ in self.named_parameters()}

    def _ensure_codec_loaded(self) -> None:
        # The host calls it before each decoding.
        if self._codec is not None:
            return
        model_dir = whole_checkpoint(self.vllm_config, FAMILY.side_files)
        path = model_dir / "codec.pth"
        state = read_codec_file(path)
        codec, _ = build_half("decoding", read_sizes(model_dir), state, path=str(path))
        # The host's steps in the host's order, so that the same samples come out.
        self._bake_weight_norm(codec)
        self._cache_attention_masks(codec)
        codec.to(device=self.vllm_config.device_config.device, dtype=self._dac_dtype)
        # So that the host passes lengths, and a batch's shorter clips end in time.
        self._codec_decode_takes_lengths = True
        self._codec = codec
