"""Models of the zoo on a simulated mesh of data-parallel times tensor-parallel ranks, beside one process on the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from harness import Case, promote_casts
from torch import Tensor

from megafx.checks.simulate import Logical, local_inputs, simulate
from megafx.compiler.compiled import Compiled
from megafx.compiler.pipeline import compile_program
from megafx.config import Config
from megafx.placements.data_axis import DataAxis
from megafx.placements.tensors import shard_tensor, unshard_tensors
from megafx.placements.types import Placement, dual, nested
from megafx.testing import make_planner


def compile_on(case: Case, data: DataAxis, t: int, **options: Any) -> Compiled:
    """The joint graph of a model for t tensor-parallel ranks, of which there are `data.ranks` groups."""
    config = Config(passes=(("after canonicalize", promote_casts),), **options)
    planner = make_planner(t, config, wants_grad=lambda spec: spec.kind == "param", data=data)
    return compile_program(case.program.copy(), planner)


def rows(inputs: Mapping[str, Any], part: int, parts: int) -> dict[str, Any]:
    """One rank's part of a batch."""
    return {k: v.tensor_split(parts)[part] if isinstance(v, Tensor) and v.dim() else v for k, v in inputs.items()}


def mesh_of(data: DataAxis, t: int) -> dict[str, int]:
    """Sizes of the axes of the simulated mesh."""
    if not data.sharded:
        return {"dp": data.ranks, "tp": t}
    return {"dp_replicate": data.replicas, "dp_shard": data.shard_ranks, "tp": t}


def storage(compiled: Compiled, data: DataAxis, case: Case) -> dict[str, Placement]:
    """How the ranks of one copy hold each parameter together."""
    t, shapes = compiled.plan.t, dict(case.model.named_parameters(remove_duplicate=False))
    if not data.sharded:
        return dict(compiled.plan.params)
    return {n: nested(p, shapes[n].shape, t, data.shard_ranks) for n, p in compiled.plan.params.items()}


def inputs_on(case: Case, compiled: Compiled, data: DataAxis, inputs: Mapping[str, Any]) -> list[list[Any]]:
    """What each rank of the mesh takes."""
    program, t, stored = compiled.program, compiled.plan.t, storage(compiled, data, case)
    per_rank = []
    for part in range(data.ranks):
        values = case.values(program, rows(inputs, part, data.ranks))
        for rank, mine in enumerate(local_inputs(program, values, {}, t)):
            member = part % data.shard_ranks * t + rank
            for i, spec in enumerate(program.inputs):
                if spec.kind == "tangent" and program.batch is not None and program.batch.summed:
                    mine[i] = mine[i] / data.ranks  # as the runtime divides them
                if spec.kind == "param":
                    n = data.shard_ranks * t
                    mine[i] = shard_tensor(values[spec.name], stored[spec.name], member, n).clone()
            per_rank.append(mine)
    return per_rank


def run_on(case: Case, compiled: Compiled, data: DataAxis, inputs: Mapping[str, Any]) -> list[Logical]:
    """What the ranks of each copy of the parameters computed, put together over them."""
    program, t, stored = compiled.program, compiled.plan.t, storage(compiled, data, case)
    results = simulate(program, inputs_on(case, compiled, data, inputs), mesh=mesh_of(data, t))
    found, n = [], data.shard_ranks * t
    for copy in range(data.replicas):
        mine = results[copy * n : (copy + 1) * n]
        logical = Logical()
        for i, spec in enumerate(program.outputs):
            locals_ = [r[i] for r in mine]
            if spec.kind == "gradient" and isinstance(locals_[0], Tensor):
                logical.gradients[spec.name] = unshard_tensors(locals_, dual(stored[spec.name]), n)
            elif spec.kind == "gradient":
                logical.gradients[spec.name] = None
            elif spec.loss:
                logical.outputs[spec.name] = locals_[0]
        found.append(logical)
    return found


def seeded(case: Case, batch: int, seq: int = 16) -> dict[str, Any]:
    """Inputs of a call in which ranks count unequal numbers of labels."""
    inputs: dict[str, Any] = case.inputs(batch, seq)
    labels = inputs.get("labels")
    if isinstance(labels, Tensor) and labels.dim() == 2 and not labels.dtype.is_floating_point:
        inputs["labels"] = labels.clone()
        inputs["labels"][0, : seq // 2] = -100
    torch.manual_seed(0)
    return inputs
