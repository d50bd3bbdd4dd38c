"""Encoders run no TorchScript: on a GPU it is fused as it goes, and rounds otherwise.

What a fused kernel computes depends on the lengths that the process has seen before,
so an encoding would as well. A CPU never fuses; that a script is run shows there, too.
"""

import torch
from torch.autograd.profiler import profile

from tests.families.cases import every_case
from tests.families.test_shared import audio

TORCHSCRIPT_FUNCTION = 2  # at::RecordScope


def scripts_run_by(compute):
    with profile() as seen:
        compute()
    assert seen is not None
    events = seen.function_events
    assert events is not None
    return {e.name for e in events if e.scope == TORCHSCRIPT_FUNCTION}


@every_case
def test_no_encoder_runs_a_script(case, tiny):
    encoders = case.family.part("encoders_part")(tiny(case.family), torch.device("cpu"))
    for encoder in encoders.values():
        # At another rate than its own, so that the resampler runs as well.
        assert (
            scripts_run_by(lambda e=encoder: e.encode(audio(32_000, 64_000))) == set()
        )


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_a_script_is_seen_where_there_is_one():
    assert "scripted" in scripts_run_by(lambda: scripted(torch.ones(1)))
