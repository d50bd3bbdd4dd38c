"""``vllm-tts-cache`` in a process that sends itself a signal after so many steps."""

import sys

from tests.fault import killing
from vllm_tts_cache.entrypoints.cli import main

if __name__ == "__main__":
    if num_steps := int(sys.argv[1]):
        killing.die_after(num_steps, of=int(sys.argv[2]))
    raise SystemExit(main(sys.argv[3:]))
