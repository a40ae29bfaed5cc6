"""Numbers of a program whose batch data-parallel ranks share (`Program.batch`): all of them in the simulator, put together.

What place_batch typed is run on slices of one batch, as many times as long as one rank's. Where ranks have losses of their
own, all get the same rows: what each computes is then what one does, and so is the average of their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megafx.collectives import BATCH_AXIS, REPLICA_AXIS, SHARD_AXIS, TENSOR_AXIS
from megafx.data_axis import DataAxis
from megafx.ir import VAL, Program
from megafx.overlap import is_region_gather
from megafx.placements import I, Placement, dual
from megafx.placements_nested import nested
from megafx.sharding import shard_tensor, unshard_tensors
from megafx.simulate import Logical, local_inputs, logical_of, simulate


def rows_dim(program: Program, value: Any) -> int | None:
    """The dim of an input that has the batch."""
    symbol = program.sizes.symbols.get("batch")
    sizes = value.shape if isinstance(value, Tensor) else ()
    for dim, n in enumerate(sizes):
        if isinstance(n, torch.SymInt) and symbol in n.node.expr.free_symbols:
            return dim
    return None


def run_on_data(
    program: Program, values: Mapping[str, Any], storage: Mapping[str, Placement], data: DataAxis, t: int
) -> Logical:
    """As `run_logical`, on data.ranks times t ranks. values: of the whole batch, or of one rank's where losses are its own."""
    sharded = any(map(is_region_gather, program.graph.nodes))
    inputs: list[list[Any]] = []
    for part in range(data.ranks):
        given = local_inputs(program, _part(program, values, part, data.ranks), storage, t)
        for rank, mine in enumerate(given if sharded else ()):
            for i, spec in enumerate(program.inputs):
                if spec.kind == "param":
                    mine[i] = _shard(values[spec.name], storage.get(spec.name, I), data, t, part, rank)
        inputs += given
    sizes = {REPLICA_AXIS: data.replicas, SHARD_AXIS: data.shard_ranks} if data.sharded else {BATCH_AXIS: data.ranks}
    results = simulate(program, inputs, mesh={**sizes, TENSOR_AXIS: t})
    reduced = program.unreduced is not None
    skipped = "gradient" if sharded and reduced else ""
    parts = [
        logical_of(program, results[k * t : (k + 1) * t], inputs[k * t], storage, t, skipped) for k in range(data.ranks)
    ]
    found = parts[0]
    assert program.batch is not None
    for output, placement in zip(program.outputs, program.batch.outputs, strict=False):
        each: list[Any] = [p.outputs.get(output.name) for p in parts]
        if placement.is_shard and isinstance(each[0], Tensor):
            found.outputs[output.name] = torch.cat(each, placement.dim)
        elif placement.kind == "P" and not reduced and isinstance(each[0], Tensor):
            found.outputs[output.name] = torch.stack(each).sum(0)
    if skipped:
        _unshard(program, found, results, values, storage, data, t)
    elif not reduced:
        for name, first in found.gradients.items():
            if first is not None:
                total = torch.stack([p.gradients[name] for p in parts]).sum(0)  # type: ignore[misc]  # every part has it where one has
                found.gradients[name] = total if program.batch.summed else total / data.ranks
    if program.batch.whole and not program.batch.summed:  # the average is to be compared with the sum
        found.gradients = {n: None if g is None else g * data.ranks for n, g in found.gradients.items()}
    return found


def _part(program: Program, values: Mapping[str, Any], part: int, parts: int) -> dict[str, Any]:
    """What one data-parallel rank has of the inputs, and of tangents."""
    assert program.batch is not None
    if not program.batch.whole:
        return dict(values)
    outputs = zip(program.outputs, program.batch.outputs, strict=False)
    dims = {spec.name: p.dim for spec, p in outputs if p.is_shard}
    mine = dict(values)
    for node, spec in zip(program.placeholders(), program.inputs, strict=True):
        dim = dims.get(spec.name) if spec.kind == "tangent" else None
        if spec.kind == "user":
            dim = rows_dim(program, node.meta[VAL])
        if dim is not None and spec.name in mine:
            mine[spec.name] = mine[spec.name].chunk(parts, dim)[part].contiguous()
    return mine


def _shard(whole: Tensor, tensor: Placement, data: DataAxis, t: int, part: int, rank: int) -> Tensor:
    placement = nested(tensor, whole.shape, t, data.shard_ranks)
    return shard_tensor(whole, placement, part % data.shard_ranks * t + rank, data.shard_ranks * t).clone()


def _unshard(
    program: Program,
    found: Logical,
    results: list[list[Any]],
    values: Mapping[str, Any],
    storage: Mapping[str, Placement],
    data: DataAxis,
    t: int,
) -> None:
    """Gradients from the shards of the ranks of the first copy."""
    n = data.shard_ranks * t
    for i, spec in enumerate(program.outputs):
        if spec.kind == "gradient":
            locals_ = [r[i] for r in results[:n]]
            placement = nested(storage.get(spec.name, I), values[spec.name].shape, t, data.shard_ranks)
            whole = None if locals_[0] is None else unshard_tensors(locals_, dual(placement), n)
            found.gradients[spec.name] = whole
