"""The tiny checkpoint is what the official package reads."""

import json

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from voxcpm.model.voxcpm2 import VoxCPM2Model, VoxCPMConfig
from voxcpm.modules.audiovae import AudioVAEV2


def test_the_official_class_finds_every_weight_that_it_has_and_no_other(own_checkpoint):
    """Only names and shapes: it loads whatever fits, and no more."""
    written = json.loads((own_checkpoint / "config.json").read_text())
    config = VoxCPMConfig.model_validate(written)
    assert config.audio_vae_config is not None
    tokenizer = AutoTokenizer.from_pretrained(own_checkpoint)
    with torch.device("meta"):
        audio_vae = AudioVAEV2(config.audio_vae_config)
        model = VoxCPM2Model(config, tokenizer, audio_vae, device="cpu")
    weights = load_file(own_checkpoint / "model.safetensors")
    vae = torch.load(own_checkpoint / "audiovae.pth")["state_dict"]
    whole = weights | {f"audio_vae.{name}": tensor for name, tensor in vae.items()}
    model.load_state_dict(whole, strict=True, assign=True)
