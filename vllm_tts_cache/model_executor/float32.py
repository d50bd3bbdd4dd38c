"""What a worker's process does with float32 while encoders are loaded, and after."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vllm_tts_cache.speaker.precision import REDUCED

logger = logging.getLogger("vllm.vllm_tts_cache")


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Load and encode with the default dtype that every later encode finds.

    The host loads a model with its dtype for the default, of all threads.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def hold_exact_matmuls(model_dtype: torch.dtype) -> None:
    """Compute float32 matrix products exactly from now on, as encoders do.

    ``VLLM_FLOAT32_MATMUL_PRECISION`` may ask for less. An encode would turn that off
    and on again, and whatever torch has compiled in this process depends on it: the
    decode loop would be compiled anew, beside running streams. Before anything is
    compiled it costs nothing, where the model has other matrix products than those.
    """
    # Read through torch's new interface: the old one raises where both were used.
    precision = str(torch.backends.cuda.matmul.fp32_precision)
    if precision in REDUCED and model_dtype is not torch.float32:
        logger.info(
            "float32 matrix products are computed exactly here, and not in %s: "
            "reference encoders need it so, and the model has few of them.",
            precision,
        )
        torch.set_float32_matmul_precision("highest")
