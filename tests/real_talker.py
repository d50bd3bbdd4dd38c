"""The host's models on the CPU, loaded by vLLM's own loader, without its engine."""

from contextlib import contextmanager

import pytest
import torch


@contextmanager
def inspected_here():
    """Inside, vLLM inspects classes here: it would start a process for each new one."""
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
        yield


def loaded_talker(case, checkpoint, tmp_path, **options):
    """Stage 0 of a family, as a context manager."""
    return loaded(checkpoint, tmp_path, **case.stage, **options)


@contextmanager
def loaded(checkpoint, tmp_path, **stage):
    """A stage that the host knows by these engine arguments."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader import get_model
    from vllm_omni.engine.arg_utils import OmniEngineArgs

    from vllm_tts_cache.platforms.cpu_worker import answer_without_accelerator

    answer_without_accelerator()
    rotary_embedding._ROPE_DICT.clear()  # of a talker that a test may have moved
    options = {"async_chunk": True, "dtype": "bfloat16", **stage}
    with inspected_here():
        config = OmniEngineArgs(
            model=str(checkpoint),
            enforce_eager=True,
            max_model_len=4096,
            max_num_seqs=2,
            kv_cache_memory_bytes=1 << 26,
            **options,
        ).create_engine_config()
    num_threads = torch.get_num_threads()
    try:
        with set_current_vllm_config(config):
            rendezvous = f"file://{tmp_path / 'rendezvous'}"
            parallel_state.init_distributed_environment(1, 0, rendezvous, 0, "gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)
            yield get_model(vllm_config=config)
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        torch.set_num_threads(num_threads)
