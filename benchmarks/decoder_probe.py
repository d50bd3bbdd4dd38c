"""How long the codec decoder takes for each step: a plugin of the servers.

While the file that ``BENCHMARK_DECODER_FILE`` names exists, a line of JSON is appended
to it per step of the decoder. See `server_plugins`.
"""

import functools
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

VARIABLE = "BENCHMARK_DECODER_FILE"
_MARK = "benchmark_decoder_probe"


def register() -> None:
    """Wrap the decoder's forward; the API process has none."""
    if multiprocessing.parent_process() is None:
        return
    from vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_code2wav import (
        Qwen3TTSCode2Wav as Decoder,
    )

    if getattr(Decoder, _MARK, False):
        return
    path, decode = Path(os.environ[VARIABLE]), Decoder.forward

    @functools.wraps(decode)
    def timed(decoder: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not path.exists():
            return decode(decoder, input_ids, *args, **kwargs)
        began = time.perf_counter()
        output = decode(decoder, input_ids, *args, **kwargs)
        seen = {"ms": 1e3 * (time.perf_counter() - began), "num_ids": len(input_ids)}
        with path.open("a") as file:
            file.write(json.dumps(seen) + "\n")
        return output

    Decoder.forward = timed
    setattr(Decoder, _MARK, True)
