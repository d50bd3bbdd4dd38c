"""Speak lines with many voices, without a server.

All reference clips are encoded before the first line is spoken, so no line waits for
one.

    python examples/offline_batch.py --model Qwen/Qwen3-TTS-12Hz-1.7B-Base \
        --out out/ --text "First line." --text "Second line." anna.wav bert.flac

A transcript beside a clip (anna.txt) makes an in-context clone, else it is an x-vector
clone. Voices and encodings are kept under SPEAKER_SAMPLES_DIR, so the next job, or a
server on the same directory, does not encode them again.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from rich.console import Console

console = Console(soft_wrap=True)


def main() -> None:
    """Prepare all voices, then speak every line with each."""
    arguments = _arguments()
    # Only now: engine processes import this file again.
    from vllm_omni.entrypoints.omni import Omni

    from vllm_tts_cache.offline import OfflineSpeakers

    engine: dict[str, Any] = {}
    if arguments.deploy_config:
        engine["deploy_config"] = str(arguments.deploy_config)
    omni = Omni(model=arguments.model, **engine)
    try:
        speakers = OfflineSpeakers(omni)
        clips: list[Path] = arguments.clips
        prepared = speakers.prepare(clips, [_transcript(clip) for clip in clips])
        console.print(f"{len(prepared)} voices are ready")
        arguments.out.mkdir(parents=True, exist_ok=True)
        for clip, speaker in zip(clips, prepared, strict=True):
            for line, text in enumerate(arguments.text, start=1):
                prompt: Any = speakers.prompt(speaker, text)
                [output] = omni.generate(prompt, _seeded(omni, arguments.seed))
                _save(arguments.out / f"{clip.stem}-{line}.wav", output)
        (arguments.out / "stats.json").write_text(json.dumps(speakers.stats()))
    finally:
        omni.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speak lines with many voices.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--deploy-config", type=Path, help="needed on a CPU only")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("clips", type=Path, nargs="+")
    return parser.parse_args()


def _transcript(clip: Path) -> str | None:
    path = clip.with_suffix(".txt")
    return path.read_text().strip() if path.exists() else None


def _seeded(omni: Any, seed: int) -> list[Any]:
    params = copy.deepcopy(omni.default_sampling_params_list)
    params[0].seed = seed
    # The codebooks after the first are sampled by the talker itself.
    params[0].extra_args = {**(params[0].extra_args or {}), "tts_local_seed": seed}
    return params


def _save(path: Path, output: Any) -> None:
    found = output.multimodal_output
    chunks = found["audio"] if isinstance(found["audio"], list) else [found["audio"]]
    rates = found["sr"] if isinstance(found["sr"], list) else [found["sr"]]
    samples = np.concatenate([np.ravel(chunk.float().numpy()) for chunk in chunks])
    soundfile.write(path, samples, int(rates[-1]), subtype="PCM_16")
    console.print(f"{path}: {samples.size / int(rates[-1]):.1f} s")


if __name__ == "__main__":
    main()
