"""Models of the zoo on a simulated mesh of data-parallel times tensor-parallel ranks, beside one process on the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from harness import Case, promote_casts
from torch import Tensor

from megafx.checks.simulate import Logical, local_inputs, run_logical
from megafx.compiler.compiled import Compiled
from megafx.compiler.pipeline import compile_program
from megafx.config import Config
from megafx.placements.data_axis import DataAxis
from megafx.placements.types import Cuts, cut_further
from megafx.testing import make_context


def compile_on(case: Case, data: DataAxis, t: int, **options: Any) -> Compiled:
    """The joint graph of a model for t tensor-parallel ranks, of which there are `data.ranks` groups."""
    config = Config(passes=(("after canonicalize", promote_casts),), **options)
    context = make_context(t, config, wants_grad=lambda spec: spec.kind == "param", data=data)
    return compile_program(case.program.copy(), context)


def storage(compiled: Compiled, data: DataAxis, case: Case) -> dict[str, Cuts]:
    """How the ranks of one copy hold each parameter together."""
    t, shapes = compiled.plan.t, dict(case.model.named_parameters(remove_duplicate=False))
    return {n: cut_further(p, shapes[n].shape, t, data.shard_ranks) for n, p in compiled.plan.params.items()}


def inputs_on(case: Case, compiled: Compiled, data: DataAxis, inputs: Mapping[str, Any]) -> list[list[Any]]:
    """What each rank of the mesh takes."""
    values = case.values(compiled.program, inputs)
    return local_inputs(compiled.program, values, compiled.plan.params, compiled.plan.t, data)


def run_on(case: Case, compiled: Compiled, data: DataAxis, inputs: Mapping[str, Any]) -> Logical:
    """What all ranks computed together: an error where copies that should be equal are not."""
    values = case.values(compiled.program, inputs)
    return run_logical(compiled.program, values, compiled.plan.params, compiled.plan.t, data=data)


def seeded(case: Case, batch: int, seq: int = 16) -> dict[str, Any]:
    """Inputs of a call in which ranks count unequal numbers of labels."""
    inputs: dict[str, Any] = case.inputs(batch, seq)
    labels = inputs.get("labels")
    if isinstance(labels, Tensor) and labels.dim() == 2 and not labels.dtype.is_floating_point:
        inputs["labels"] = labels.clone()
        inputs["labels"][0, : seq // 2] = -100
    torch.manual_seed(0)
    return inputs
