"""The features of voxcpm 2.0.3."""

import torch
from voxcpm.model.voxcpm2 import VoxCPM2Model

from tests.families.clip import Clip

# Where the official package fills a clip up, by our encoders' names.
SIDES = {"reference": "right", "continuation": "left"}
# Lengths: the shortest allowed, primes, whole positions, one sample more and one less,
# 30 s less a sample. At 8,463 Hz 33,852 samples are exactly 25 positions, which
# floating point makes a sample longer, so 26.
CLIPS = (
    Clip(8_000, 8_000),
    Clip(8_000, 12_801, 2),
    Clip(8_000, 16_411, 1, "FLOAT"),
    Clip(8_463, 33_852),
    Clip(11_025, 55_127, 2, "PCM_24"),
    Clip(16_000, 16_001, 1, "FLOAT"),
    Clip(16_000, 17_920),
    Clip(16_000, 20_479, 2, "PCM_24"),
    Clip(16_000, 479_999),
    Clip(22_050, 23_173, 2),
    Clip(22_050, 66_150, 1, "PCM_24"),
    Clip(22_050, 231_529, 1, "FLOAT"),
    Clip(24_000, 24_000),
    Clip(24_000, 48_001, 2, "PCM_24"),
    Clip(24_000, 26_880, 2, "FLOAT"),
    Clip(44_100, 44_101),
    Clip(44_100, 49_392, 2, "PCM_24"),
    Clip(44_100, 463_050, 1, "FLOAT"),
    Clip(48_000, 48_017, 1, "PCM_24"),
    Clip(48_000, 53_760, 2, "FLOAT"),
    Clip(48_000, 96_001, 2),
    Clip(96_000, 191_999, 1, "PCM_24"),
)


def load(checkpoint) -> VoxCPM2Model:
    return VoxCPM2Model.from_local(str(checkpoint), optimize=False, device="cpu")


@torch.inference_mode()
def features(model, path, name):
    return model._encode_wav(str(path), padding_mode=SIDES[name]).numpy()


def encodings(checkpoint, _folder, paths):
    model = load(checkpoint)
    return {
        (path.stem, name): features(model, path, name)
        for path in paths
        for name in SIDES
    }
