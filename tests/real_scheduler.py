"""The host's real scheduler over a KV cache of any size, without an engine."""

import inspect
from copy import deepcopy
from typing import Any
from zlib import crc32

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm_omni.core.sched.omni_ar_scheduler import OmniARAsyncScheduler, OmniARScheduler
from vllm_omni.engine.arg_utils import OmniEngineArgs

from tests.real_talker import inspected_here

BLOCK_SIZE = 32
NUM_BLOCKS = 40  # one of them is the null block
MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 8
STOP = 7
ATTENTION = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=BLOCK_SIZE, **ATTENTION)


def stage_config_of(case, checkpoint, **other: Any):
    """The config of stage 0, as its engine core has it."""
    init_none_hash(sha256)
    stage: dict[str, Any] = {
        "model": str(checkpoint),
        **case.stage,
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "enable_prefix_caching": True,
        "block_size": BLOCK_SIZE,
        "async_scheduling": False,
    }
    with inspected_here():
        return OmniEngineArgs(**{**stage, **other}).create_engine_config()


def unhooked_scheduler(config, **options):
    """As `new_scheduler`, without the hooks that are installed in this process."""
    with pytest.MonkeyPatch.context() as patch:
        plain = inspect.unwrap(OmniARScheduler.__init__)
        patch.setattr(OmniARScheduler, "__init__", plain)
        return new_scheduler(config, **options)


def new_scheduler(
    config,
    *,
    asynchronous=False,
    policy="fcfs",
    num_blocks=NUM_BLOCKS,
    groups=(FULL,),
    architecture=None,
    kind=None,
):
    config = deepcopy(config)
    config.cache_config.num_gpu_blocks = num_blocks
    config.scheduler_config.async_scheduling = asynchronous
    config.scheduler_config.policy = policy
    config.model_config.model_arch = architecture or config.model_config.model_arch
    kind = kind or (OmniARAsyncScheduler if asynchronous else OmniARScheduler)
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(groups)
            ],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )


def new_request(name, prompt, max_tokens, **kwargs):
    if isinstance(prompt, int):
        prompt = [crc32(name.encode())] * prompt
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=[STOP])
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    return Request(name, prompt, params, None, block_hasher=hasher, **kwargs)
