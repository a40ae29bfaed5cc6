"""Covers passes/lower/bind_mesh.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lowered import bound as bound_to
from torch import fx
from torch.nn import functional as F

from megafx.ir.program import Program
from megafx.ops import embedding_of_rank  # noqa: F401  registers the op
from megafx.ops.axes import AxisContext, on_mesh
from megafx.ops.shared_heads import HEADS_OF_RANK, HEADS_OF_RANK_GRADIENT
from megafx.passes.communicate.expand_transitions import expand_transitions
from megafx.placements.types import Layout
from megafx.testing import expect, graph, run_pass, transition

aten, mfx = torch.ops.aten, torch.ops.megafx


def bound(dst: str, x: str, rank: int, after: Any = lambda y: y, out: str | None = None) -> Program:
    out = out if out is not None else dst.partition("/")[0]
    program = graph(lambda x: after(transition(x, dst)), x=x, out=f"{out}@tp", local=True)
    return bound_to(run_pass(expand_transitions, program), {"tp": AxisContext(rank, 2, "7")})


def test_groups_are_named() -> None:
    expect(
        bound("I", "f32[4 6] P@tp", 0),
        """
        %0 = x                           # f32[4 6] P@tp
        %1 = all_reduce(%0, 'sum', '7')  # f32[4 6]
        %2 = wait_tensor(%1)             # f32[4 6] I@tp
        return %2
        """,
        t=2,
    )


def test_a_contiguous_part_is_a_view() -> None:
    expect(
        bound("S0", "f32[4 6] I@tp", 1, after=lambda y: aten.mul(y, 2.0)),
        """
        %0 = x                     # f32[4 6] I@tp
        %1 = view(%0, [2, 2, 6])   # f32[2 2 6]
        %2 = select.int(%1, 0, 1)  # f32[4/2 6] S0@tp
        %3 = mul(%2, 2.0)          # f32[4/2 6] S0@tp
        return %3
        """,
        t=2,
    )


def test_a_strided_part_is_copied_for_those_who_need_it() -> None:
    program = bound("S1", "f32[4 6] I@tp", 1, after=lambda y: aten.view(y, [12]), out="S0")
    assert [str(n.target) for n in program.graph.nodes if n.op == "call_function"] == [
        "aten.view.default",
        "aten.permute.default",
        "aten.select.int",
        "aten.clone.default",
        "aten.view.default",
    ]
    fx.Interpreter(program.gm).run(torch.zeros(4, 6))


def test_parts_that_are_joined_are_not_copied() -> None:
    program = bound("S1/2x1+4x1", "f32[4 6] I@tp", 0)
    assert not program.graph.find_nodes(op="call_function", target=aten.clone.default)
    found = program.gm(torch.arange(24.0).view(4, 6))[0]
    assert found[0].tolist() == [0, 2, 3]


def test_a_result_does_not_keep_all_parts_alive() -> None:
    (result,) = bound("S0", "f32[4 6] I@tp", 1).gm(torch.randn(4, 6))
    assert result.untyped_storage().nbytes() == result.nbytes


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_fill_in_their_coordinate(rank: int) -> None:
    x = torch.randn(4, 6)
    assert torch.equal(bound("P", "f32[4 6] R@tp", rank).gm(x)[0], x if rank == 0 else torch.zeros(4, 6))
    placed = bound("P", "f32[8 6] S0@tp", rank).gm(x)[0]
    assert torch.equal(placed.view(2, 4, 6)[rank], x) and placed.count_nonzero() == 24


def test_the_program_of_all_ranks_is_left_as_it_was() -> None:
    program = run_pass(
        expand_transitions, graph(lambda x: transition(x, "S1"), x="f32[4 6] I@tp", out="S1@tp", local=True)
    )
    before = str(program.graph)
    bound_to(program, {"tp": AxisContext(1, 2, "7")})
    assert str(program.graph) == before


SEVEN = [1, 7, 1]  # rows: 4 and 3 on two ranks


@pytest.mark.parametrize(("rank", "t"), [(rank, t) for t in (2, 3, 4) for rank in range(t)])
@pytest.mark.parametrize("padding", [-1, 1, 5])
def test_the_lookup_in_a_shared_table(rank: int, t: int, padding: int) -> None:
    """As the whole table gives it for this rank's rows, and zeros; the op and what is written out for it."""
    rows = -(-7 // t)
    mine = slice(rank * rows, (rank + 1) * rows)
    table, ids = torch.randn(7, 3, dtype=torch.float64), torch.tensor([[0, 3, 4], [6, 1, 5]])
    part = F.pad(table, (0, 0, 0, t * rows - 7))[mine].requires_grad_()
    program = graph(
        lambda w, ids: mfx.embedding_of_rank.default(w, ids, padding, SEVEN, "tp", t),
        w=f"f64[{rows} 3]",
        ids="i64[2 3]",
        local=True,
    )
    wanted = torch.where((ids // rows == rank)[..., None], F.embedding(ids, table), 0.0)
    assert torch.equal(bound_to(program, {"tp": AxisContext(rank, t)}).gm(part, ids)[0], wanted)
    with on_mesh({"tp": AxisContext(rank, t)}):
        found = mfx.embedding_of_rank.default(part, ids, padding, SEVEN, "tp", t)
        assert torch.equal(found, wanted)
        whole = table.clone().requires_grad_()
        grad = torch.randn(2, 3, 3, dtype=torch.float64)
        F.embedding(ids, whole, padding if padding >= 0 else None).backward(grad)
        found.backward(grad)
    assert torch.equal(part.grad, F.pad(whole.grad, (0, 0, 0, t * rows - 7))[mine])


def test_a_lookup_is_written_out() -> None:
    """With the coordinate of the rank, as ATen ops that Inductor knows."""
    program = graph(
        lambda w, ids: mfx.embedding_of_rank.default(w, ids, -1, SEVEN, "tp", 2), w="f32[4 3]", ids="i64[6]", local=True
    )
    expect(
        bound_to(program, {"tp": AxisContext(1, 2)}),
        """
        %0 = w                                        # f32[4 3]
        %1 = ids                                      # i64[6]
        %2 = sub(%1, 4)                               # i64[6]
        %3 = clamp(%2, 0, 3)                          # i64[6]
        %4 = ne(%3, %2)                               # bool[6]
        %5 = embedding(%0, %3)                        # f32[6 3]
        %6 = scalar_tensor(0, dtype=f32, device=cpu)  # f32[]
        %7 = unsqueeze(%4, -1)                        # bool[6 1]
        %8 = where.self(%7, %6, %5)                   # f32[6 3] I@tp
        return %8
        """,
        t=2,
    )


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(("repeats", "layout"), [(1, [1, 3, 1]), (2, [1, 6, 1]), (4, [1, 4, 3]), (5, [1, 15, 1])])
def test_shared_heads_are_parts_of_the_whole(rank: int, repeats: int, layout: list[int]) -> None:
    """What a rank takes of 3 heads, and what it gives back, as slices: the ops' own results, in memory of their own."""
    local = Layout.from_flat(layout).local_size(4)
    for op, n in ((HEADS_OF_RANK, 3), (HEADS_OF_RANK_GRADIENT, local)):
        shared_heads_are_parts(partial(op, repeats=repeats, layout=layout, axis="tp", t=4), n, rank)


def shared_heads_are_parts(op: Any, n: int, rank: int) -> None:
    x, axes = torch.randn(2, n, 4, 5), {"tp": AxisContext(rank, 4)}
    with on_mesh(axes):
        wanted = op(x)
    program = graph(lambda x: op(x), x=f"f32[2 {n} 4 5]", local=True)
    (node,) = (n for n in program.graph.nodes if n.op == "call_function")
    node.args, node.kwargs = (*node.args, *node.kwargs.values()), {}
    program = bound_to(program, axes)
    (found,) = program.gm(x)
    assert torch.equal(found, wanted) and found.is_contiguous()
    assert found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert "megafx" not in str(program.graph)


def test_nothing_that_depends_on_the_rank_is_left() -> None:
    for dst, x in (("S1/2x1+4x1", "f32[4 6] I@tp"), ("P", "f32[4 6] S1@tp"), ("P", "f32[4 6] I@tp")):
        for node in bound(dst, x, 1).graph.nodes:
            assert "megafx" not in str(node.target)
