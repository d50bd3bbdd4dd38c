"""Speaks with the real engine of a tiny checkpoint, by address and by waveform.

Run as a program: an engine is not started twice in one process, and never in a test's.
It prints one JSON object: what was heard, as digests, and the worker's counters. A
family's part is the ``heard.py`` of its folder.
"""

import argparse
import copy
import hashlib
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

TEXT = "Hello there, this is a test."
SPOKEN = "What is said in it."


def main() -> None:
    from vllm_omni.entrypoints.omni import Omni

    parser = argparse.ArgumentParser()
    parser.add_argument("family")
    parser.add_argument("model", type=Path)
    parser.add_argument("deploy_file", type=Path)
    parser.add_argument("clips", type=Path, nargs="+")
    given = parser.parse_args()
    part = import_module(f"tests.families.{given.family}.heard")
    omni = Omni(model=str(given.model), deploy_config=str(given.deploy_file))
    try:
        sys.stdout.write(json.dumps(heard(omni, part, given.model, given.clips)) + "\n")
    finally:
        omni.close()


def heard(omni: Any, part: Any, model: Path, clips: list[Path]) -> dict[str, Any]:
    from vllm_tts_cache.offline import OfflineSpeakers

    speakers = OfflineSpeakers(omni)
    cloned = [(clip, spoken) for spoken in part.TRANSCRIPTS for clip in clips]
    prepared = speakers.prepare(*map(list, zip(*cloned, strict=True)))
    ours = [speakers.prompt(speaker, TEXT) for speaker in prepared]
    hosts = [part.hosts_prompt(model, clip, spoken) for clip, spoken in cloned]
    plain = part.hosts_prompt(model, None, None)
    say = Voice(omni, part)
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

    def __init__(self, omni: Any, part: Any):
        self._omni, self._part = omni, part
        self._params = copy.deepcopy(omni.default_sampling_params_list)
        part.seed(self._params[0])

    def __call__(self, *prompts: dict[str, Any]) -> list[str]:
        made = self._omni.generate([*prompts], self._params, use_tqdm=False)
        by_request = {output.request_id: self._digest(output) for output in made}
        # Their numbers are the first part of their ids.
        return [by_request[rid] for rid in sorted(by_request, key=number_of)]

    def _digest(self, output: Any) -> str:
        samples: Any = np.asarray(self._part.samples(output), np.float32)
        whole = hashlib.sha256(samples.tobytes()).hexdigest()
        return whole if samples.size else "silence"


def number_of(request_id: str) -> int:
    return int(request_id.partition("_")[0])


if __name__ == "__main__":
    main()
