"""Covers: the kernels as Inductor sees them (compile=True): on CUDA, each family's chain gives what it gives in eager mode."""

from __future__ import annotations

import pytest
import torch
from profile_fusions import CASES, Job, Setting, Widths, call_values, example_inputs, prepare

from megafx.planner.hardware import Hardware

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SETTING_SIZES = {"tokens": (74,), "widths": Widths(hidden=768, head=32, vocab=1000)}


def results(job: Job, setting: Setting, compiled: bool) -> list[torch.Tensor]:
    """Outputs and gradients of the fused chain."""
    run, program = job.runs[True, True, compiled]
    torch.manual_seed(1)
    user = [x.detach() for x in example_inputs(job.case, job.widths, 2, 37, setting)]
    outputs, kept = run.forward(call_values(job, program, user, setting.device))
    assert kept is not None
    tangents = [torch.randn_like(outputs[i]) for i in run.differentiated]
    found = [*outputs, *run.backward(kept, tangents)]
    return [x for x in found if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(CASES))
def test_inductor_computes_what_eager_does(name, dtype):
    setting = Setting(Hardware.load("h200-nvlink"), torch.device("cuda"), dtype=dtype, **SETTING_SIZES)
    job = prepare(name, setting)
    eager, compiled = results(job, setting, False), results(job, setting, True)
    assert len(eager) == len(compiled) >= 2
    limit = 2e-3 if dtype == torch.float16 else 1e-2
    for ours, theirs in zip(compiled, eager, strict=True):
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-9)
        assert error < limit, (name, tuple(ours.shape), float(error))
