"""How the encode thread stands beside decoding on a CPU."""

import logging
import os
import sys
import threading

logger = logging.getLogger("vllm.vllm_tts_cache")

# Takes what decoding leaves over, and a tenth of a core against a thread that wants
# all of it. At 19 that would be a seventieth: a reference would outlive its request's
# patience. Nobody needs a privilege to be nicer; only the way back needs one.
ENCODE_NICE = 10


def give_way() -> None:
    """Make the calling thread, and the threads it will start, nicer than decoding.

    Called before the thread's first tensor operation, because the threads that compute
    for it inherit its value at their start.
    """
    if sys.platform != "linux":  # elsewhere the value is the whole process's
        return
    thread_id = threading.get_native_id()
    nice = max(ENCODE_NICE, os.getpriority(os.PRIO_PROCESS, thread_id))
    try:
        os.setpriority(os.PRIO_PROCESS, thread_id, nice)
    except OSError as exc:  # a sandbox may refuse any call
        logger.info("The encode thread keeps its priority: %s", exc)
