"""Covers: passes/communicate/gather_casts.py, and with it passes/lower/regather.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowered import parts_of

import megafx.kernels.fp8.quantize  # noqa: F401  registers the ops
from megafx.analysis.communication import collective_nodes, is_region_gather
from megafx.checks.sabotage import changed_collective, with_another, without
from megafx.checks.simulate import simulate
from megafx.config import Config
from megafx.ir.contracts import verify
from megafx.ir.nodes import BACKWARD
from megafx.ir.program import FQN, PHASE, Output, Program
from megafx.passes.communicate.coalesce_maxima import coalesce_maxima
from megafx.passes.communicate.gather_casts import gather_casts
from megafx.passes.communicate.gather_parameters import gather_parameters
from megafx.placements.data_axis import DataAxis
from megafx.placements.types import I
from megafx.planner.plan import Plan
from megafx.testing import graph, make_context

aten, mfx = torch.ops.aten, torch.ops.megafx
SHAPES = {"a": (5, 8), "b": (48, 8), "c": (96, 8), "d": (7, 8)}  # b and c are read as one; a has padding
CONFIG = Config(fp8="hybrid", fp8_recipe="tensorwise")


def casts_of_weights(kept: int, reads_too: bool = False) -> Program:
    """Forward reads casts of a, and of b and c as one; backward their transposes, by other scales where these are of rows."""

    def function(x, a, b, c, d):
        found = [aten.mm.default(x, aten.t.default(d))]
        bc = mfx.join_parameters.default([b, c])
        for w in (a, bc):
            for k, turned in ((kept, False), ({0: 1, 1: 0, -1: -1}[kept], True)):
                if kept >= 0 or not turned:
                    largest = mfx.fp8_amax.default(w, k, -1, [], "tp")
                cast = mfx.fp8_quantize.default(w, largest, k, "e4m3", False, not turned, turned)
                found += [cast[1 if turned else 0], cast[2]]
        return (*found, aten.neg.default(a)) if reads_too else tuple(found)

    count = 10 if reads_too else 9
    values = {n: f"param f64[{' '.join(f'd{i}{n}={k}' for i, k in enumerate(s))}]" for n, s in SHAPES.items()}
    program = graph(function, local=True, out=("I@tp",) * count, x="f64[t=4 k=8]", **values)
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.meta[FQN] = "layer"
    for cast in program.graph.find_nodes(op="call_function", target=mfx.fp8_quantize.default):
        if cast.args[6]:
            for node in (cast, *cast.users, *([cast.args[1]] if kept >= 0 else [])):
                node.meta[PHASE] = BACKWARD
    program.outputs = [
        Output("gradient", "x") if in_backward else Output("user", str(i))
        for i, in_backward in enumerate(PHASE in r.meta for r in program.results())
    ]
    return program


def on_ranks(program: Program, ranks: int, **axes: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    whole = {n: torch.randn(s, generator=generator).double() for n, s in {"x": (4, 8), **SHAPES}.items()}
    inputs = []
    for rank in range(ranks):
        mine = [whole["x"]]
        for name in SHAPES:
            rows = -(-len(whole[name]) // ranks)
            padded = torch.cat([whole[name], whole[name].new_full((ranks, *SHAPES[name][1:]), 7e3)])
            mine.append((padded[rank * rows : (rank + 1) * rows] if ranks > 1 else whole[name]).clone())
        inputs.append(mine)
    return [list(r) for r in simulate(program, inputs, mesh={"dp_shard": ranks, "tp": 1, **axes})]


def gathered(kept: int, ranks: int, **options: Any) -> tuple[Program, int]:
    program, context = casts_of_weights(kept, **options), make_context(1, CONFIG, data=DataAxis(ranks, "fsdp", ranks))
    context.plan = Plan(1, params=dict.fromkeys(SHAPES, I))
    gather_parameters(program, context)
    return program, gather_casts(program, context)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kept", [-1, 0, 1])
def test_bytes_are_gathered_and_are_the_same(kept: int, ranks: int) -> None:
    (wanted,) = on_ranks(casts_of_weights(kept), 1)
    program, count = gathered(kept, ranks)
    verify(program)
    assert count == 2
    moved = [n.meta["val"].dtype for n in program.graph.nodes if is_region_gather(n)]
    bytes_, scales = (1, 0) if kept < 0 else (2, 1)  # rowwise: forward and backward have casts of their own
    assert sorted(map(str, moved)) == ["torch.float64"] * (1 + scales) + ["torch.uint8"] * bytes_
    before = len([n for n in collective_nodes(program.graph) if "all_reduce" in str(n.target)])
    assert before == 2  # of a, and of b and c: of rows nothing is to be reduced
    for found in on_ranks(program, ranks):
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert coalesce_maxima(program, make_context(1, CONFIG)) == 1
    for found in on_ranks(program, ranks):
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kept", [-1, 0])
def test_a_largest_that_is_not_reduced_is_noticed(kept: int) -> None:
    program, _ = gathered(kept, 2)
    (wanted,) = on_ranks(casts_of_weights(kept), 1)
    starts = [n for n in collective_nodes(program.graph) if "max" in n.args]
    assert len(starts) == 2
    for start in starts:
        for change in (without, with_another):
            with changed_collective(program.graph, start, 2, change):
                found = on_ranks(program, 2)
                assert not all(torch.equal(x, y) for f in found for x, y in zip(f, wanted, strict=True)), start


def test_backward_gathers_bytes_again_and_what_else_is_read_stays() -> None:
    program, _ = gathered(-1, 2)
    parts = parts_of(program)
    for part in (parts.forward, parts.backward):
        dtypes = {str(n.meta["val"].dtype) for n in part.graph.nodes if is_region_gather(n)}
        assert "torch.uint8" in dtypes
    turned = [n for n in parts.backward.graph.nodes if n.target is mfx.fp8_transposed.default]
    assert len(turned) == 2
    casts = [n.meta["val"][0].shape[0] for n in parts.backward.graph.nodes if n.target is mfx.fp8_quantize.default]
    assert casts == [3, 24, 48]  # of this rank's rows
    program, count = gathered(-1, 2, reads_too=True)
    assert count == 1  # of b and c: a is read as it is too
    (wanted,) = on_ranks(casts_of_weights(-1, reads_too=True), 1)
    for found in on_ranks(program, 2):
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
