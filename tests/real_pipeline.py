"""The host's diffusion pipelines on the CPU in this process, as a worker has them."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch


@contextmanager
def loaded_pipeline(pipeline_class, architecture, checkpoint):
    """One of ours, with its weights and its speakers."""
    from vllm_omni.diffusion.config import set_current_diffusion_config
    from vllm_omni.diffusion.data import OmniDiffusionConfig

    config = OmniDiffusionConfig(
        model=str(checkpoint), model_class_name=architecture, dtype=torch.float32
    )
    num_threads = torch.get_num_threads()
    with set_current_diffusion_config(config):
        pipeline = pipeline_class(od_config=config)
    pipeline.load_weights(())
    # Its tensors are tiny: to hand them to more threads takes longer than they do.
    torch.set_num_threads(1)
    try:
        yield pipeline
    finally:
        pipeline._close_speakers()
        torch.set_num_threads(num_threads)


def batch(*prompts, seed=7, **params):
    """What the host's runner gives a pipeline: a request of each prompt."""
    given = {"num_inference_steps": None, "guidance_scale": None, **params}
    return SimpleNamespace(
        requests=[
            SimpleNamespace(
                prompt=prompt,
                sampling_params=SimpleNamespace(extra_args={"seed": seed}, **given),
            )
            for prompt in prompts
        ]
    )


def one_step_at_a_time(prompt):
    """A request's state, where the host computes a step at a time."""
    sampling = SimpleNamespace(
        extra_args={"seed": 7}, num_inference_steps=4, guidance_scale=None
    )
    return SimpleNamespace(prompt=prompt, sampling=sampling, extra={}, step_index=0)
