"""Run by official.py in a process that has the official qwen-tts.

usage: python official_encode.py MODEL_DIR OUT.safetensors CLIP.wav...

Everything from the file to the encoding is the package's own: decoding, downmixing,
resampling, rounding. It writes ``<clip stem>/codes`` and ``<clip stem>/embedding``.
"""

import sys
from pathlib import Path

import torch
import transformers
from qwen_tts import Qwen3TTSModel  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file


def main(model_dir: str, out: str, *clips: str) -> None:
    assert transformers.__version__ == "4.57.3", transformers.__version__
    model = Qwen3TTSModel.from_pretrained(model_dir, dtype=torch.float32)
    tensors: dict[str, torch.Tensor] = {}
    for clip in clips:
        (item,) = model.create_voice_clone_prompt(ref_audio=clip, ref_text="unused")
        stem = Path(clip).stem
        tensors[f"{stem}/codes"] = item.ref_code.contiguous()
        tensors[f"{stem}/embedding"] = item.ref_spk_embedding.contiguous()
    save_file(tensors, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
