"""Run by test_official.py: what the official omnivoice makes of clips and transcripts.

usage: python official_encode.py CHECKPOINT TEXTS.json OUT.safetensors CLIP...

In a process of its own: the package gives transformers names that the host gives it as
well, and the second one is an error. Everything from the file to the codes is the
package's: decoding, downmixing, resampling, loudness, silence, cutting.

It writes ``<clip stem>/samples`` (what is encoded), ``codes``, ``rms`` and ``answer``
(what is noise of one loudness, as loud as it makes an answer to this clip), ``answer``
and ``plain`` (the noise, and as it makes an answer without a clip), and prints the
transcripts as they are after it.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omnivoice.models.omnivoice import (
    OmniVoice,
    OmniVoiceGenerationConfig,
    _combine_text,
)
from omnivoice.utils.text import add_punctuation
from safetensors.torch import save_file
from transformers import HiggsAudioV2TokenizerModel


def main(checkpoint: str, texts: str, out: str, *clips: str) -> None:
    torch.set_num_threads(1)
    directory = Path(checkpoint) / "audio_tokenizer"
    tokenizer = HiggsAudioV2TokenizerModel.from_pretrained(directory).eval()
    seen = SeenTokenizer(tokenizer)
    # All that it asks of the model: no language model is needed.
    model: Any = SimpleNamespace(
        audio_tokenizer=seen, sampling_rate=tokenizer.config.sample_rate, _asr_pipe=None
    )
    answer = np.random.default_rng(0).normal(0, 0.1, (1, 24_000)).astype(np.float32)
    tensors = {
        "answer": torch.from_numpy(answer),
        "plain": as_loud(model, answer, None),
    }
    for clip in clips:
        with torch.inference_mode():
            prompt = OmniVoice.create_voice_clone_prompt(model, clip, ref_text="words")
        stem = Path(clip).stem
        tensors[f"{stem}/samples"] = seen.samples.flatten().clone()
        tensors[f"{stem}/codes"] = prompt.ref_audio_tokens.contiguous().clone()
        tensors[f"{stem}/rms"] = torch.tensor([prompt.ref_rms], dtype=torch.float64)
        tensors[f"{stem}/answer"] = as_loud(model, answer, prompt.ref_rms)
    save_file(tensors, out)
    given = json.loads(Path(texts).read_text())
    ended = [add_punctuation(text) for text in given]
    combined = [_combine_text("What is said.", text) for text in ended]
    sys.stdout.write(json.dumps({"ended": ended, "combined": combined}) + "\n")


def as_loud(model: Any, answer: np.ndarray, rms: float | None) -> torch.Tensor:
    """What it makes of an answer but for silences, fades and pads."""
    config = OmniVoiceGenerationConfig(
        postprocess_output=False, pad_duration=0.0, fade_duration=0.0
    )
    done = OmniVoice._post_process_audio(model, answer.copy(), rms, config)
    return torch.from_numpy(done)


class SeenTokenizer:
    """A tokenizer that keeps what it was given last."""

    samples: torch.Tensor

    def __init__(self, tokenizer: HiggsAudioV2TokenizerModel):
        self._tokenizer = tokenizer
        self.config, self.device = tokenizer.config, tokenizer.device

    def encode(self, samples: torch.Tensor):
        self.samples = samples
        return self._tokenizer.encode(samples)


if __name__ == "__main__":
    main(*sys.argv[1:])
