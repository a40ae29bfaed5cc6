"""Covers megafx/ops/collectives.py: every row of TRANSITIONS, forward and backward, and the rank-dependent ops."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from megafx.errors import PlacementError, UsageError
from megafx.ir.nodes import op_name
from megafx.ir.program import Program
from megafx.ops import axes, collectives
from megafx.ops.axes import AxisContext, on_mesh
from megafx.passes.communicate.expand_transitions import expand_transitions
from megafx.placements.types import TRANSITIONS, Layout
from megafx.testing import graph, make_context, run_logically, run_pass, transition, with_backward

aten, mfx = torch.ops.aten, torch.ops.megafx
ROWS = sorted(row for row in TRANSITIONS if "M" not in row)  # maxima have no gradient: tests/placements/test_maxima.py
CUTS = {  # text of a layout on t ranks
    "even": lambda t: f"{2 * t}",
    "padded": lambda t: f"{2 * t + 1}",
    "blocks": lambda t: f"{t}x2+{2 * t}x1",
    "padded blocks": lambda t: f"{t + 1}x2+{t}x1+1x3",
    "repeated": lambda t: f"3*({t}x1)",
    "repeated padded": lambda t: f"2*({t + 1}x2+{t}x1)",
}


def cases(row: tuple[str, str], t: int) -> list[tuple[int, str]]:
    """(dim, cut): every cut, and every dim with some."""
    cuts = [cut(t) for cut in CUTS.values()] if "S" in row else ["4"]
    return [((i + t) % 3, cut) for i, cut in enumerate(cuts)]


def size_of(cut: str) -> int:
    rep, _, body = cut.rpartition("*")
    blocks = [b.split("x") for b in body.strip("()").split("+")]
    return int(rep or 1) * sum(int(b[0]) * int(b[1] if len(b) > 1 else 1) for b in blocks)


def program_of(row: tuple[str, str], cut: str, dim: int, t: int) -> Program:
    """x at the source of a row, moved: a LOCAL program. Shards are of `dim`, all-to-all goes to the next dim."""
    shape = [3, 2 * t + 1, 5]
    shape[dim] = size_of(cut)
    ends = [f"S{dim}/{cut}" if kind == "S" else kind for kind in row]
    if row == ("S", "S"):
        ends[1] = f"S{(dim + 1) % 3}/{shape[(dim + 1) % 3]}"
    text = f"f64[{' '.join(map(str, shape))}] {ends[0]}@tp"
    # An op of its own after it: an identity vanishes, and with it the placement of a result.
    return graph(
        lambda x: aten.mul(transition(x, ends[1]), 1.0), x=text, out=ends[1] + "@tp", mesh=f"tp={t}", local=True
    )


def failures(program: Program, t: int) -> str:
    """What is wrong with 'the output is the input, and its gradient is the tangent', as logical tensors."""
    result = run_logically(program, t)
    moved, gradient = result.outputs["0"], result.gradients["x"]
    assert gradient is not None
    value, tangent = random_like(moved, 0), random_like(moved, 1)  # as run_logically draws them
    wrong = []
    if not torch.allclose(moved, value, rtol=1e-14, atol=1e-14):
        wrong.append("forward")
    if not torch.allclose(gradient, tangent, rtol=1e-14, atol=1e-14):
        wrong.append("backward")
    return ", ".join(wrong)


def random_like(x: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("t", [2, 3, 4])
@pytest.mark.parametrize("row", ROWS, ids="->".join)
def test_a_transition_changes_no_logical_value_nor_gradient(row: tuple[str, str], t: int) -> None:
    for dim, cut in cases(row, t):
        assert failures(program_of(row, cut, dim, t), t) == ""


@pytest.mark.parametrize("t", [2, 3, 4])
@pytest.mark.parametrize("row", ROWS, ids="->".join)
def test_its_expansion_means_the_same(row: tuple[str, str], t: int) -> None:
    for dim, cut in cases(row, t):
        program = with_backward(program_of(row, cut, dim, t))
        assert expand_transitions(program, make_context()) == 2
        assert failures(program, t) == ""


@pytest.mark.parametrize("t", [2, 3])
def test_another_cut_of_the_same_dim(t: int) -> None:
    dst = f"S1/{t}x2+{2 * t}x1"
    program = graph(
        lambda x: transition(x, dst), x=f"f64[2 {4 * t}] S1@tp", out=dst + "@tp", mesh=f"tp={t}", local=True
    )
    assert failures(program, t) == ""
    program = with_backward(program)
    expand_transitions(program, make_context())
    assert failures(program, t) == ""


def broken(src: str, dst: str, src_layout: Any, dst_layout: Any, axis: str, size: int) -> tuple[Any, ...]:
    """A backward that takes a partial for a whole or the other way round; an all-to-all that takes the wrong way."""
    start, end, *rest = right(src, dst, src_layout, dst_layout, axis, size)
    if start[0] == end[0] == "S":
        return end, start, *rest[1::-1], axis, size
    if start[0] == "S":
        end = "R" if end == "P" else "P"
    else:
        start = "R" if start == "P" else "P"
    return start, end, *rest


right = collectives.dual_arguments


@pytest.mark.parametrize("row", ROWS, ids="->".join)
def test_breaking_a_backward_is_seen(row: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def one_row_broken(src: str, dst: str, *rest: Any) -> tuple[Any, ...]:
        return (broken if (src[0], dst[0]) == row else right)(src, dst, *rest)

    monkeypatch.setattr(collectives, "dual_arguments", one_row_broken)
    with contextlib.suppress(PlacementError, RuntimeError):  # ranks that differ, or shapes that do not fit
        assert failures(program_of(row, "4", 1, 2), 2) == "backward"
    monkeypatch.undo()
    assert failures(program_of(row, "4", 1, 2), 2) == ""


@pytest.mark.parametrize("row", [r for r in ROWS if "S" in r], ids="->".join)
def test_dynamic_sizes_even_and_odd(row: tuple[str, str]) -> None:
    """One graph with a dynamic sequence, for lengths that two ranks divide and others."""
    src, dst = ("S1" if k == "S" else k for k in row)
    dst = "S2" if row == ("S", "S") else dst
    program = graph(
        lambda ids, x: (ids, transition(x, dst)),
        ids="i64[b s]",  # from whose size all others come
        x=f"f64[b s k=4] {src}@tp",
        out=("I@tp", f"{dst}@tp"),
        mesh="tp=2",
        local=True,
    )
    joint = with_backward(program)
    expanded = run_pass(expand_transitions, joint)
    for length in (9, 8, 2):
        wanted = run_logically(program, 2, sizes=length).outputs["1"]
        for each in (joint, expanded):
            result = run_logically(each, 2, sizes=length)
            moved, gradient = result.outputs["1"], result.gradients["x"]
            assert moved.shape == (length, length + 1, 4)
            assert torch.equal(moved, wanted)
            torch.testing.assert_close(gradient, random_like(moved, 1))


def test_tracing_with_symbolic_sizes_keeps_it_whole() -> None:
    def gather(x: torch.Tensor) -> torch.Tensor:
        s = x.shape[0]
        return mfx.transition(x, "R", "S0", [], [1, s, 1], "tp", 2)

    traced = make_fx(gather, tracing_mode="symbolic")(torch.randn(7, 4))
    (node,) = traced.graph.find_nodes(op="call_function", target=mfx.transition.default)
    size = node.meta["val"].shape[0]
    assert str(size.node.expr).replace(" ", "") in ("((s77+1)//2)", f"(({traced_symbol(traced)}+1)//2)")
    with on_mesh({"tp": AxisContext(1, 2)}):
        assert torch.equal(traced(torch.arange(10.0).view(5, 2)), torch.tensor([[6.0, 7], [8, 9], [0, 0]]))


def traced_symbol(traced: torch.fx.GraphModule) -> str:
    (x,) = traced.graph.find_nodes(op="placeholder")
    return str(x.meta["val"].shape[0])


def test_integers_are_sliced_too() -> None:
    with on_mesh({"tp": AxisContext(1, 2)}):
        part = mfx.transition(torch.arange(5), "I", "S0", [], Layout.contiguous(5, 2).flat(), "tp", 2)
    assert part.tolist() == [3, 4, 0]


def test_rank_ops_and_their_gradients() -> None:
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    for rank in range(3):
        with on_mesh({"tp": AxisContext(rank, 3)}):
            assert torch.equal(mfx.rank_select(x, "tp"), x[rank])
            assert torch.equal(mfx.rank_place(x[0], 3, "tp")[rank], x[0])
            assert mfx.rank_place(x[0], 3, "tp").count_nonzero() == 2
            assert torch.equal(mfx.rank0_only(x, "tp"), x if rank == 0 else torch.zeros_like(x))
            for op, args in ((mfx.rank_select, ()), (mfx.rank_place, (3,)), (mfx.rank0_only, ())):
                assert torch.autograd.gradcheck(lambda v, op=op, args=args: op(v, *args, "tp"), (x,))


@pytest.mark.parametrize(
    "op, args",
    [
        ("transition", ("R", "S0", [], [1, 3, 1], "tp", 2)),
        ("transition", ("I", "R", [], [], "tp", 2)),
        ("rank_select", ("tp",)),
        ("rank_place", (2, "tp")),
        ("rank0_only", ("tp",)),
    ],
)
def test_ops_keep_the_dispatcher_contracts(op: str, args: tuple[Any, ...]) -> None:
    with on_mesh({"tp": AxisContext(0, 2)}):
        torch.library.opcheck(
            getattr(mfx, op).default,
            (torch.randn(3, 2, requires_grad=True), *args),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


def test_a_graph_outside_of_the_mesh_says_so() -> None:
    with pytest.raises(UsageError, match="mesh axis 'tp' runs outside of the mesh"):
        mfx.rank_select(torch.zeros(2), "tp")
    with on_mesh({"dp": AxisContext(0, 2)}), pytest.raises(UsageError, match="on_mesh"):
        mfx.rank_select(torch.zeros(2), "tp")


def test_a_mesh_of_another_size_is_refused() -> None:
    with on_mesh({"tp": AxisContext(0, 4)}), pytest.raises(UsageError, match="for 2 ranks runs on axis 'tp' of 4"):
        mfx.transition(torch.zeros(2), "R", "P", [], [], "tp", 2)


def test_meshes_nest_and_are_seen_by_other_threads() -> None:
    import threading

    seen = []
    with on_mesh({"tp": AxisContext(0, 2)}):
        with on_mesh({"tp": AxisContext(1, 2)}):
            thread = threading.Thread(target=lambda: seen.append(axes.axis_rank("tp")))
            thread.start()
            thread.join()
        assert seen == [1] and axes.axis_rank("tp") == 0
        assert axes.axis_size("tp") == 2


@pytest.mark.parametrize(("rows", "wanted"), [(4, 4), (6, 4), (4, 3)])
def test_rows_are_padded_only_where_some_are_missing(rows: int, wanted: int) -> None:
    x = torch.randn(wanted, 2)
    padded = mfx.pad_rows(x, rows)
    assert padded.shape == (rows, 2) and torch.equal(padded[:wanted], x) and not padded[wanted:].any()
    assert (padded.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == (rows == wanted)


def test_scattered_rows_of_a_dynamic_size_are_not_copied() -> None:
    before = graph(lambda x: transition(x, "S0"), x="f32[b 6] P@tp", out="S0@tp", local=True)
    after = run_pass(expand_transitions, before)
    names = [op_name(n) for n in after.graph.nodes if n.op == "call_function"]
    assert names[-3:] == ["pad_rows", "reduce_scatter_tensor", "wait_tensor"]
    assert not {"cat", "contiguous", "permute", "clone"}.intersection(names)
