"""Puts a worker's speaker side together from the settings; the one place that does."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_tts_cache.config import Settings, load_settings
from vllm_tts_cache.model_executor.agreement import all_tensor_parallel_ranks
from vllm_tts_cache.model_executor.encode_device import EncodeDevice
from vllm_tts_cache.model_executor.encode_queue import EncodeQueue
from vllm_tts_cache.model_executor.encode_work import StoredEncodeWork
from vllm_tts_cache.model_executor.recency import Recency
from vllm_tts_cache.model_executor.speakers import WorkerSpeakers
from vllm_tts_cache.speaker.family import Family
from vllm_tts_cache.speaker.reference_encoder import ReferenceEncoder
from vllm_tts_cache.store.cache import open_cache
from vllm_tts_cache.store.opening import open_store
from vllm_tts_cache.store.turns import open_turns


def load_worker_speakers(
    vllm_config: Any, family: Family, model_dir: Path
) -> WorkerSpeakers:
    """Load the checkpoint's reference encoders and open the store.

    Raises: TTSCacheError if the checkpoint's encoders are not what they should be.
    """
    device = _own_device(vllm_config.device_config.device)
    encoders = family.part("encoders_part")(model_dir, device)
    return build_worker_speakers(
        encoders, load_settings(), device, all_ranks=all_tensor_parallel_ranks()
    )


def build_worker_speakers(
    encoders: Mapping[str, ReferenceEncoder],
    settings: Settings,
    device: torch.device,
    *,
    all_ranks: Callable[[bool], bool] = bool,
) -> WorkerSpeakers:
    """Put encoders, store and encode thread together.

    Raises: StorageError.
    """
    store = open_store(settings, import_stock=False)  # the API process does that
    cache = open_cache(settings, store)
    encode_device = EncodeDevice(device)
    encode_device.log_need(max(e.bytes_per_second for e in encoders.values()))
    work = StoredEncodeWork(
        encoders=encoders,
        cache=cache,
        store=store,
        turns=open_turns(settings),
        device=encode_device,
    )
    queue = EncodeQueue(
        work,
        max_waiting_inline=settings.max_waiting_inline,
    )
    return WorkerSpeakers(
        encoders=encoders,
        cache=cache,
        queue=queue,
        work=work,
        recency=Recency(store.used),
        close_store=store.close,
        clock=time.monotonic,
        all_ranks=all_ranks,
    )


def _own_device(device: torch.device | str) -> torch.device:
    """Add the index: the host names the kind only, and a new thread starts at 0."""
    kind = torch.device(device)
    if kind.type == "cuda" and kind.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return kind
