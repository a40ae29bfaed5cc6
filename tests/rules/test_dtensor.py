"""Covers: rules/ against DTensor's: each placement of operands that an op of torch.distributed.tensor takes as it is, on two
ranks, with the placement of the result, is a row of ours. Where it is not, the table below says why."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from megafx.checks.rule_samples import samples_of
from megafx.checks.rules import Row, Trial, _map, text
from megafx.placements.types import I, Layout, P, Placement, R, S
from megafx.rules.aten import RULES
from megafx.rules.families import FAMILIES, VIEWS
from megafx.rules.grammar import registered_rule

RANKS = 2
MOST = 400  # combinations of placements that are tried of one op
COUNT = "DTensor adds counts of booleans; no value without a gradient is a summand here"
WHY = {  # op -> why DTensor's further rows are none of ours
    "aten._native_batch_norm_legit_no_training.default": "its other results are empty: cut or whole, they are the same",
    "aten.any.default": COUNT,
    "aten.any.dim": COUNT,
    "aten.any.dims": COUNT,
    "aten.histc.default": "a count has no gradient, and no value without one is a summand here",
    "aten.nll_loss_forward.default": "the sum of weights has no gradient, and no value without one is a summand here",
    "aten.view_as_complex.default": "summands are added up before they are complex: not every collective takes such numbers",
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def theirs(placement: Placement) -> Any:
    return Partial() if placement == P else Shard(placement.dim) if placement.is_shard else Replicate()


def result(trial: Trial, ins: tuple[Placement, ...], mesh: DeviceMesh) -> tuple[Placement | None, ...] | None:
    """How DTensor places the results of operands that lie so; None where it moves an operand first, or refuses."""
    placements = dict(zip(trial.operands, ins, strict=True))
    specs = iter(
        DTensorSpec(mesh, (theirs(placements.get(i, I)),), TensorMeta(v.shape, v.stride(), v.dtype))
        for i, v in enumerate(trial.whole)
    )
    args, kwargs = _map((trial.sample.args, trial.sample.kwargs), lambda _: next(specs))
    known = DTensor._op_dispatcher.sharding_propagator
    tables = (known.op_to_schema_info, known.op_to_schema_info_for_single_dim_strategy)
    info = next((table[trial.target] for table in tables if trial.target in table), None)
    schema = OpSchema(trial.target, tuple(args), kwargs, schema_info=info)
    try:
        found = known.propagate_op_sharding_non_cached(schema)
    except (RuntimeError, NotImplementedError, ValueError):
        return None
    lies = lambda s: [x.placements for x in tree_leaves(s.args_schema) if isinstance(x, DTensorSpec)]
    if found.needs_redistribute and lies(found.redistribute_schema) != lies(schema):  # else sizes change to local ones
        return None
    outs = found.output_spec if isinstance(found.output_spec, (tuple, list)) else (found.output_spec,)
    placed: list[Placement | None] = []
    for spec, value in zip(outs, trial.outputs, strict=False):
        (p,) = spec.placements if spec is not None else (None,)
        if p is None:
            placed.append(None)
        elif type(p) is Shard:
            placed.append(S(p.dim, Layout.contiguous(value.shape[p.dim], RANKS)))
        elif type(p) is Partial and p.reduce_op == "sum":
            placed.append(P)
        elif p.is_replicate():
            placed.append(R)
        else:
            return None  # a maximum of parts, a norm of parts: no placement of ours
    return tuple(placed)


def compared(op: str, mesh: DeviceMesh, own: str | None = None) -> Iterator[tuple[Row, bool]]:
    """Each row of DTensor's, and whether it is one of ours. own: a rule in place of the op's."""
    known = DTensor._op_dispatcher.sharding_propagator
    try:
        trial = Trial(samples_of(op, registered_rule(op))[0], own, RANKS)
    except (RuntimeError, AttributeError):  # an op of complex numbers, or of another version of torch
        return
    tables = (known.op_strategy_funcs, known.op_to_rules, known.op_single_dim_strategy_funcs)
    if trial.rule.kind == "none" or not any(trial.target in table for table in tables):
        return
    claimed, options = set(trial.claims()), []
    for i in trial.operands:
        value, needs = trial.whole[i], trial.specs[i].kind == "x"
        shards = [S(d, Layout.contiguous(n, RANKS)) for d, n in enumerate(value.shape) if n > 1 and n % RANKS == 0]
        options.append([R, P, *shards] if needs else [I, *shards])
    if math.prod(map(len, options)) > MOST:
        return
    for ins in itertools.product(*options):
        whole = all(p in (R, I) for p in ins)
        if not whole and (outs := result(trial, ins, mesh)) is not None:
            yield (ins, outs), (ins, outs) in claimed


@pytest.mark.skipif(
    torch.__version__.startswith("2.11"), reason="its DTensor ends in an assertion for index_put's indices"
)
@pytest.mark.parametrize("part", range(4))
def test_what_dtensor_allows_is_allowed(part: int, mesh: DeviceMesh) -> None:
    ops, rows, other = set(), 0, dict[str, list[str]]()
    for op in sorted({*RULES, *FAMILIES, *VIEWS})[part::4]:
        if not op.startswith("aten.") or not samples_of(op, registered_rule(op)):
            continue
        for row, same in compared(op, mesh):
            ops.add(op)
            rows += 1
            if not same:
                other.setdefault(op, []).append(text(row))
    assert {op: found for op, found in other.items() if op not in WHY} == {}
    assert ops & set(WHY) <= set(other), "a difference is gone: delete its reason"
    print(f"{len(ops)} ops, {rows} rows of DTensor's, {sum(map(len, other.values()))} none of ours")
    assert len(ops) > 40 and rows > 70


def test_a_rule_that_lacks_a_row_is_found(mesh: DeviceMesh) -> None:
    assert all(same for _, same in compared("aten.mm.default", mesh))
    lacking = compared("aten.mm.default", mesh, "lin: m k!, k! n -> m n")
    assert [text(row) for row, same in lacking if not same] == ["S1 S0 -> P"]
