"""Speaks with the real engine of a tiny checkpoint, by address and by waveform.

Run as a program: an engine is not started twice in one process, and never in a test's.
It prints one JSON object: what was heard, as digests, and the worker's counters.
"""

import argparse
import copy
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

TEXT = "Hello there, this is a test."
SPOKEN = "What is said in it."
SEED = 7


def main() -> None:
    from vllm_omni.entrypoints.omni import Omni

    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("deploy_file", type=Path)
    parser.add_argument("clips", type=Path, nargs="+", help="at the encoder's rate")
    given = parser.parse_args()
    omni = Omni(model=str(given.model), deploy_config=str(given.deploy_file))
    try:
        sys.stdout.write(json.dumps(heard(omni, given.model, given.clips)) + "\n")
    finally:
        omni.close()


def heard(omni: Any, model: Path, clips: list[Path]) -> dict[str, Any]:
    from vllm_tts_cache.offline import OfflineSpeakers

    speakers = OfflineSpeakers(omni)
    ref_texts = [None] * len(clips) + [SPOKEN] * len(clips)
    prepared = speakers.prepare(clips * 2, ref_texts)
    ours = [speakers.prompt(speaker, TEXT) for speaker in prepared]
    hosts = [
        hosts_prompt(model, clip, ref_text)
        for clip, ref_text in zip(clips * 2, ref_texts, strict=True)
    ]
    plain = hosts_prompt(model, None, None)
    say = Voice(omni)
    return {
        "by_address": [say(prompt)[0] for prompt in ours],
        "by_waveform": [say(prompt)[0] for prompt in hosts],
        "without_a_voice": say(plain)[0],
        "together": say(*ours, plain),
        "again": say(*ours[::-1]),
        "worker": speakers.stats()[0],
    }


class Voice:
    """Speaks prompts, those of one call at the same time."""

    def __init__(self, omni: Any):
        self._omni = omni
        self._params = copy.deepcopy(omni.default_sampling_params_list)
        self._params[0].seed = SEED

    def __call__(self, *prompts: dict[str, Any]) -> list[str]:
        made = self._omni.generate([*prompts], self._params, use_tqdm=False)
        by_request = {output.request_id: digest(output) for output in made}
        # Their numbers are the first part of their ids.
        return [by_request[rid] for rid in sorted(by_request, key=number_of)]


def number_of(request_id: str) -> int:
    return int(request_id.partition("_")[0])


def digest(output: Any) -> str:
    found = output.outputs[0].multimodal_output
    audio = found.get("audio", found.get("model_outputs"))
    parts = audio if isinstance(audio, list) else [audio]
    samples = np.concatenate([part.reshape(-1).float().numpy() for part in parts])
    return hashlib.sha256(samples.tobytes()).hexdigest() if samples.size else "silence"


def hosts_prompt(model: Path, clip: Path | None, ref_text: str | None) -> Any:
    from transformers import AutoTokenizer
    from vllm_omni.model_executor.models.voxcpm2 import voxcpm2_talker as host
    from vllm_omni.transformers_utils.configs.voxcpm2 import VoxCPM2Config

    tokenizer = AutoTokenizer.from_pretrained(model)
    samples: Any = None
    rate_hz = None
    if clip is not None:
        samples, rate_hz = soundfile.read(clip)
    return host.build_voxcpm2_prompt(
        VoxCPM2Config.from_pretrained(model),
        tokenizer,
        host.build_cjk_split_map(tokenizer),
        TEXT,
        ref_audio=None if samples is None else samples.tolist(),
        ref_sr=rate_hz,
        ref_text=ref_text,
    )


if __name__ == "__main__":
    main()
