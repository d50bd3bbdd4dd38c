"""An encoding's arrays on the talker's device, without waiting for what runs there."""

import torch

from vllm_tts_cache.store.encoding import Array


def on_device(
    array: Array, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a copy of the array on the device.

    From pinned memory, and already of its type: from pageable memory, or where the type
    changes on the way, torch waits for the stream, and that is the step that is still
    running for everybody else.

    Args:
        array: Immutable; it stays in memory for the next request.
        device: Where ``preprocess`` was given its input ids.
        dtype: The array's own if None.
    """
    tensor = torch.tensor(array, dtype=dtype)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
