"""The host's models on the CPU in this process, loaded by vLLM's own loader.

As a worker has them, without its engine and KV cache.
"""

from contextlib import contextmanager

import torch


def qwen3_talker(checkpoint, tmp_path):
    """Stage 0 of Qwen3-TTS, as a context manager."""
    return _loaded(
        checkpoint,
        tmp_path,
        model_stage="qwen3_tts",
        model_arch="Qwen3TTSTalkerForConditionalGeneration",
        worker_type="ar",
    )


def fish_slow_ar(checkpoint, tmp_path):
    """Stage 0 of Fish Speech S2 Pro, as a context manager."""
    return _loaded(
        checkpoint,
        tmp_path,
        model_stage="fish_speech_slow_ar",
        model_arch="FishSpeechSlowARForConditionalGeneration",
        worker_type="ar",
    )


def fish_codec_decoder(checkpoint, tmp_path):
    """Stage 1 of Fish Speech S2 Pro, as a context manager."""
    return _loaded(
        checkpoint,
        tmp_path,
        model_stage="dac_decoder",
        model_arch="FishSpeechDACDecoder",
        worker_type="generation",
    )


def voxcpm2_talker(checkpoint, tmp_path):
    """The one stage of VoxCPM2, as a context manager."""
    return _loaded(
        checkpoint,
        tmp_path,
        model_stage="latent_generator",
        model_arch="VoxCPM2TalkerForConditionalGeneration",
        worker_type="ar",
        async_chunk=False,
        enable_prefix_caching=False,
    )


@contextmanager
def _loaded(checkpoint, tmp_path, **stage):
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader import get_model
    from vllm_omni.engine.arg_utils import OmniEngineArgs

    from vllm_tts_cache.platforms.cpu import forgive_emptying_no_cache

    forgive_emptying_no_cache()
    options = {"async_chunk": True, **stage}
    config = OmniEngineArgs(
        model=str(checkpoint),
        dtype="bfloat16",
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
