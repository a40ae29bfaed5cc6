"""Covers: the placement M (placements/types.py): rules that give it, what may read it, its one transition, and that a missing
reduction is noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import megafx.kernels.fp8.scaled_mm
import megafx.ops.collectives  # noqa: F401  registers the ops
from megafx.analysis.communication import collective_nodes
from megafx.checks.rules import check_rules
from megafx.checks.simulate import simulate
from megafx.errors import PlacementError
from megafx.ir.program import VAL, Program
from megafx.ir.sizes import Sizes
from megafx.passes.communicate.expand_transitions import expand_transitions
from megafx.placements.moves import TENSORS, apply_transition
from megafx.placements.tensors import shard_tensor, unshard_tensors
from megafx.placements.types import ALL_REDUCE, TRANSITIONS, Layout, M, P, Placement, R, S, collectives, dual
from megafx.rules.grammar import RuleError, parse
from megafx.rules.inference import infer
from megafx.testing import graph, make_context, transition

aten, mfx = torch.ops.aten, torch.ops.megafx
OPS = ("fp8_amax", "fp8_amax_both", "fp8_quantize", "fp8_quantize_both", "fp8_transposed", "scaled_mm")


def test_the_type() -> None:
    assert Placement.parse("M") == M and M.tag == "M" and not M.is_shard
    assert collectives(M, R).forward == ALL_REDUCE and [row for row in TRANSITIONS if "M" in row] == [("M", "R")]
    with pytest.raises(AssertionError, match="no gradient"):
        dual(M)
    parts = [torch.tensor([1.0, 5.0]), torch.tensor([3.0, 2.0])]
    assert unshard_tensors(parts, M, 2).tolist() == [3.0, 5.0]
    assert shard_tensor(parts[0], M, 1, 2) is parts[0]


def test_the_grammar() -> None:
    rule = parse("max: m k -> m")
    assert rule.reduces == "M" and rule.groups == ()
    assert not parse("lin: m k -> m").reduces and parse("sum: m k -> m").reduces == "P"
    with pytest.raises(RuleError, match=r"'max:' or 'sum:'"):
        parse("min: m -> m")


@pytest.mark.parametrize("op", OPS)
def test_every_row_is_what_the_op_does(op: str) -> None:
    report = check_rules([f"megafx.{op}.default"])
    assert report.ok, str(report)
    assert op != "fp8_amax" or {"S0 -> M", "S1 -> M", "R -> R"} <= {f.row for f in report.of("ok")}


@pytest.mark.parametrize("rule", ["lin: m k -> ", "nl: m k -> "])
def test_a_largest_that_is_called_a_sum_or_neither_is_found(rule: str) -> None:
    report = check_rules({"megafx.fp8_amax.default": rule})
    assert not report.ok


def node_of(target: Any, *args: Any) -> fx.Node:
    made, nodes = fx.Graph(), []
    for i, a in enumerate(args):
        if isinstance(a, torch.Tensor):
            nodes.append(made.placeholder(f"x{i}"))
            nodes[-1].meta[VAL] = a
        else:
            nodes.append(a)
    node = made.call_function(target, tuple(nodes))
    node.meta[VAL] = target(*args)
    return node


def test_what_is_inferred() -> None:
    cut, x, sizes = S(1, Layout.contiguous(8, 2)), torch.randn(6, 4), Sizes()
    for kept, made in ((-1, M), (0, M), (1, S(0, cut.cut))):
        node = node_of(mfx.fp8_amax.default, x, kept, -1, [], "tp")
        operand = node.all_input_nodes[0]
        assert infer(node, {operand: cut}, 2, sizes) == made
        assert infer(node, {operand: R}, 2, sizes) == R
        with pytest.raises(PlacementError, match="not linear in the operands that are partial"):
            infer(node, {operand: P}, 2, sizes)


@pytest.mark.parametrize("target", [aten.neg.default, aten.exp.default, aten.clone.default, aten.t.default])
def test_nothing_but_its_reduction_reads_a_largest_of_a_part(target: Any) -> None:
    node = node_of(target, torch.ones(4))
    with pytest.raises(PlacementError, match=r"each rank has the largest of its part alone[\s\S]*M -> R is missing"):
        infer(node, {node.all_input_nodes[0]: M}, 2, Sizes())


def test_a_transition_starts_from_what_is_there() -> None:
    def move(src: str, dst: str) -> fx.Node:
        return node_of(mfx.transition.default, torch.ones(4), src, dst, [], [], "tp", 1)

    reduced = move("M", "R")
    (operand,) = reduced.all_input_nodes
    assert infer(reduced, {operand: M}, 2, Sizes()) == R
    assert infer(reduced, {operand: R}, 2, Sizes()) == R  # the largest of equal values
    for node, have in ((move("P", "R"), M), (move("M", "R"), P), (move("M", "I"), M)):
        with pytest.raises(PlacementError):
            infer(node, {node.all_input_nodes[0]: have}, 2, Sizes())


def largest(t: int) -> Program:
    """Largest magnitudes of the columns of a matrix that is cut by rows, 7 on t ranks."""

    def function(x: Any) -> Any:
        found = mfx.fp8_amax(x, 1, 0, [1, 7, 1], "tp")
        return aten.mul(transition(found, "R", src="M"), 1.0)

    return graph(function, x="f64[7 5] S0@tp", out="I@tp", mesh=f"tp={t}", local=True)


@pytest.mark.parametrize("t", [2, 3, 4])
def test_ranks_find_the_largest_of_all_rows(t: int) -> None:
    program = largest(t)
    whole = torch.randn(7, 5, dtype=torch.float64)
    inputs = [[shard_tensor(whole, S(0, Layout.contiguous(7, t)), rank, t)] for rank in range(t)]
    wanted = whole.abs().amax(0)
    for _ in range(2):
        for found in simulate(program, inputs):
            torch.testing.assert_close(found[0], wanted, rtol=0, atol=0)
        if not collective_nodes(program.graph):
            assert expand_transitions(program, make_context()) >= 1
    (start,) = collective_nodes(program.graph)
    assert start.args[1] == "max"


def test_the_table_knows_no_other_way() -> None:
    with pytest.raises(PlacementError, match="no transition from M to S0"):
        apply_transition(torch.ones(4), "M", "S0", [], [1, 4, 1], 2, TENSORS)
