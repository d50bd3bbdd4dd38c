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

TEXT = "Hello there, this is a test."
SPOKEN = "What is said in it."
SEED = 7


def main() -> None:
    from vllm_omni.entrypoints.omni import Omni

    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("deploy_file", type=Path)
    parser.add_argument("clips", type=Path, nargs="+", help="none of them quiet")
    given = parser.parse_args()
    omni = Omni(model=str(given.model), deploy_config=str(given.deploy_file))
    try:
        sys.stdout.write(json.dumps(heard(omni, given.clips)) + "\n")
    finally:
        omni.close()


def heard(omni: Any, clips: list[Path]) -> dict[str, Any]:
    from vllm_tts_cache.offline import OfflineSpeakers

    speakers = OfflineSpeakers(omni)
    prepared = speakers.prepare(clips, [SPOKEN] * len(clips))
    ours = [speakers.prompt(speaker, TEXT) for speaker in prepared]
    plain = {"input": TEXT}
    say = Voice(omni)
    return {
        "by_address": [say(prompt)[0] for prompt in ours],
        "by_waveform": [say(hosts_prompt(clip))[0] for clip in clips],
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
        extra = self._params[0].extra_args or {}
        self._params[0].extra_args = {**extra, "seed": SEED}

    def __call__(self, *prompts: dict[str, Any]) -> list[str]:
        made = self._omni.generate([*prompts], self._params, use_tqdm=False)
        by_request = {output.request_id: digest(output) for output in made}
        # Their numbers are the first part of their ids.
        return [by_request[rid] for rid in sorted(by_request, key=number_of)]


def number_of(request_id: str) -> int:
    return int(request_id.partition("_")[0])


def digest(output: Any) -> str:
    samples = np.asarray(output.multimodal_output["audio"], np.float32)
    return hashlib.sha256(samples.tobytes()).hexdigest() if samples.size else "silence"


def hosts_prompt(clip: Path) -> dict[str, Any]:
    """The host's, of a clip that was prepared as the official package prepares it."""
    from vllm_tts_cache.audio.decode import decode_path
    from vllm_tts_cache.families.networks.higgs_tokenizer.frames import (
        SAMPLES_PER_FRAME,
    )
    from vllm_tts_cache.families.omnivoice.preparation import LOUDNESS, prepare
    from vllm_tts_cache.families.omnivoice.silence import RATE_HZ

    prepared = prepare(decode_path(clip).audio, SAMPLES_PER_FRAME)
    assert prepared.rms >= LOUDNESS, "what is spoken by it would be made quieter"
    return {
        "input": TEXT,
        "ref_audio": (prepared.samples, RATE_HZ),
        "ref_text": SPOKEN,
    }


if __name__ == "__main__":
    main()
