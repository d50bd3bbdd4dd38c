"""Loads a checkpoint's reference encoders as a server's start does; says how long.

``python -m benchmarks.encoders_process CHECKPOINT DIRECTORY``, where the
directory has the hashes of weights of an earlier start, or none.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from vllm_tts_cache.speaker.family import family_of_checkpoint


def main(checkpoint: Path, directory: Path) -> None:
    """Print the seconds of the load, without the imports that a server has anyway."""
    import torch

    from vllm_tts_cache.speaker.weight_hashes import remembered

    encoders = family_of_checkpoint(checkpoint).part("encoders_part")
    torch.set_num_threads(1)
    directory.mkdir(parents=True, exist_ok=True)

    def load() -> None:
        with remembered(directory):
            encoders(checkpoint, torch.device("cpu"))

    print(json.dumps({"seconds": _seconds(load)}))


def _seconds(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
