"""Covers megafx/checks/simulate.py, megafx/checks/divergence.py and megafx/testing.py."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from megafx.checks.divergence import first_divergence
from megafx.checks.simulate import local_inputs, relative_error, replica_error, run_logical, simulate
from megafx.errors import PlacementError, UsageError
from megafx.ir.program import PLACEMENT, Phase, Program
from megafx.ops.axes import axis_rank
from megafx.placements.types import I, Layout, P, S
from megafx.testing import assert_same, expect, graph, run_pass, transition, with_backward

aten, c10d, mfx = torch.ops.aten, torch.ops._c10d_functional, torch.ops.megafx


def traced(target: Any, *args: Any, **kwargs: Any) -> fx.GraphModule:
    """A graph that returns target(x, *args)."""
    made = fx.Graph()
    made.output((made.call_function(target, (made.placeholder("x"), *args), kwargs),))
    return fx.GraphModule(torch.nn.Module(), made)


X = [torch.arange(4.0), torch.arange(4.0) + 10]


@pytest.mark.parametrize(
    "op, args, expected",
    [
        (c10d.all_reduce, ("sum", "tp"), [[10, 12, 14, 16]] * 2),
        (c10d.all_reduce, ("avg", "tp"), [[5, 6, 7, 8]] * 2),
        (c10d.all_reduce, ("max", "tp"), [[10, 11, 12, 13]] * 2),
        (c10d.all_reduce, ("min", "tp"), [[0, 1, 2, 3]] * 2),
        (c10d.all_gather_into_tensor, (2, "tp"), [[0, 1, 2, 3, 10, 11, 12, 13]] * 2),
        (c10d.reduce_scatter_tensor, ("sum", 2, "tp"), [[10, 12], [14, 16]]),
        (c10d.all_to_all_single, ([2, 2], [2, 2], "tp"), [[0, 1, 10, 11], [2, 3, 12, 13]]),
        (c10d.wait_tensor, (), [[0, 1, 2, 3], [10, 11, 12, 13]]),
    ],
)
def test_collectives(op: Any, args: tuple[Any, ...], expected: list[list[float]]) -> None:
    found = simulate(traced(op.default, *args), [[x] for x in X])
    assert [r[0].tolist() for r in found] == expected


def test_coalesced_collectives() -> None:
    made = fx.Graph()
    x = made.placeholder("x")
    both = made.call_function(c10d.all_reduce_coalesced.default, ([x, x], "sum", "tp"))
    parts = [made.call_function(operator.getitem, (both, i)) for i in range(2)]
    made.output(tuple(made.call_function(c10d.wait_tensor.default, (p,)) for p in parts))
    found = simulate(fx.GraphModule(torch.nn.Module(), made), [[x] for x in X])
    assert [[y.tolist() for y in r] for r in found] == [[[10, 12, 14, 16]] * 2] * 2


def test_a_collective_that_it_does_not_know_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"does not know the collective _c10d_functional\.broadcast"):
        simulate(traced(c10d.broadcast.default, 0, "tp"), [[x] for x in X])


def test_collectives_send_memory_as_it_lies() -> None:
    """Real ranks send the memory of their operand, whatever its strides say."""
    turned = [[torch.arange(6.0).view(2, 3).t()] for _ in range(2)]
    with pytest.raises(PlacementError, match="sends the memory of"):
        simulate(traced(c10d.all_reduce.default, "sum", "tp"), turned)


def test_ranks_that_call_a_collective_differently_are_found() -> None:
    with pytest.raises(PlacementError, match=r"rank 1 calls it with \(3,\)"):
        simulate(traced(c10d.all_reduce.default, "sum", "tp"), [[torch.zeros(4)], [torch.zeros(3)]])


def test_ops_run_as_their_rank() -> None:
    found = simulate(traced(lambda x: x + 100 * axis_rank("tp")), [[x] for x in X])
    assert [r[0][0].item() for r in found] == [0, 110]


def test_values_are_freed_after_their_last_use() -> None:
    import weakref

    made = fx.Graph()
    x = made.placeholder("x")
    one = made.call_function(aten.mul.Tensor, (x, 2.0))
    two = made.call_function(aten.mul.Tensor, (one, 2.0))
    three = made.call_function(aten.mul.Tensor, (two, 2.0))
    made.output((three,))
    alive: dict[str, Any] = {}

    def watch(node: fx.Node, value: list[Any]) -> None:
        if node is three:
            assert alive[one.name]() is None and alive[two.name]() is not None
        alive[node.name] = weakref.ref(value[0])

    simulate(fx.GraphModule(torch.nn.Module(), made), [[x] for x in X], watch=watch)


def test_in_lockstep_without_autograd() -> None:
    x = torch.zeros(2, requires_grad=True)
    ((y,),) = simulate(traced(aten.exp.default), [[x]])
    assert not y.requires_grad


def test_errors_are_relative_but_true_zeros_may_be_noise() -> None:
    assert relative_error(torch.ones(4) * 1.5, torch.ones(4)) == 0.5
    assert relative_error(torch.full((4,), 1e-17), torch.zeros(4)) < 1
    assert relative_error(torch.full((4,), 1e-3), torch.zeros(4)) > 1e6
    assert replica_error([torch.ones(2)] * 3) == 0.0
    assert replica_error([torch.ones(2), torch.ones(2), torch.zeros(2)]) == 1.0


def row_parallel(local: bool = True) -> Program:
    return graph(
        lambda x, w, b: aten.tanh(aten.add(transition(aten.mm(x, w), "I", src="P"), b)),
        x="f64[t=4 k=5] S1@tp",
        w="param f64[k=5 n=6] S0@tp",
        b="param f64[n=6] I@tp",
        local=local,
    )


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"x": (4, 5), "w": (5, 6), "b": (6,)}
    return {k: torch.randn(s, dtype=torch.float64, generator=generator) for k, s in shapes.items()}


PLACED = {"x": S(1, Layout.contiguous(5, 2)), "w": S(0, Layout.contiguous(5, 2))}


def test_logical_values_in_and_out() -> None:
    program = with_backward(row_parallel())
    v = values()
    wanted = {k: x.clone().requires_grad_() for k, x in v.items()}
    y = torch.tanh(wanted["x"] @ wanted["w"] + wanted["b"])
    tangent = torch.linspace(0, 1, 24, dtype=torch.float64).view(4, 6)
    y.backward(tangent)
    found = run_logical(program, {**v, "0": tangent}, PLACED, 2)
    torch.testing.assert_close(found.outputs["0"], y.detach())
    for name, leaf in wanted.items():
        torch.testing.assert_close(found.gradients[name], leaf.grad)


def test_a_partial_gradient_of_an_invariant_parameter_is_found() -> None:
    """The fault that forgets an I -> R edge."""
    program = with_backward(
        graph(lambda x, w: aten.mul(x, w), x="f64[6] S0@tp", w="param f64[3] I@tp", out="S0@tp", local=True)
    )
    v = {"x": torch.arange(6.0), "w": torch.ones(3), "0": torch.ones(6)}
    with pytest.raises(PlacementError, match=r"the gradient of 'w' differs between ranks by .*, but is I"):
        run_logical(program, v, {"x": S(0, Layout.contiguous(6, 2))}, 2)


def test_a_gradient_in_the_padding_is_found() -> None:
    program = with_backward(graph(lambda x: aten.add(x, 1.0), x="f64[5] S0@tp", out="S0/5@tp", local=True))
    shard = S(0, Layout.contiguous(5, 2))
    v = {"x": torch.ones(5), "0": torch.ones(5)}
    assert run_logical(program, v, {"x": shard}, 2).gradients["x"].tolist() == [1.0] * 5  # type: ignore[union-attr]
    value, gradient = program.output_node().args[0]  # type: ignore[misc]
    with program.graph.inserting_before(program.output_node()):
        wrong = program.graph.call_function(aten.add.Tensor, (gradient, 1.0))  # type: ignore[has-type]
    program.output_node().args = ((value, wrong),)  # type: ignore[has-type]
    with pytest.raises(PlacementError, match="not zero in the padding of rank 1"):
        run_logical(program, v, {"x": shard}, 2)


def test_summands_differ_and_sum_up() -> None:
    program = graph(lambda x: transition(x, "I"), x="f64[4] P@tp", local=True)
    x = torch.arange(4.0, dtype=torch.float64)
    first, second = (r[0] for r in local_inputs(program, {"x": x}, {"x": P}, 2))
    assert not torch.equal(first, second) and first.count_nonzero() == second.count_nonzero() == 3
    torch.testing.assert_close(first + second, x)


def test_first_divergence() -> None:
    whole, local = row_parallel(local=False), row_parallel()
    assert whole.phase == Phase.PLACED and local.phase == Phase.LOCAL
    for node in local.graph.nodes:
        if node.target is aten.add.Tensor:
            node.meta[PLACEMENT] = I
    v = values()
    inputs = local_inputs(local, v, PLACED, 2)
    assert first_divergence(local, inputs, whole, list(v.values())) is None
    (add,) = local.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    add.kwargs = {"alpha": 2}
    local.gm.recompile()
    found = first_divergence(local, inputs, whole, list(v.values()))
    assert found is not None and found.node == add.name and 0.1 < found.error < 10
    assert str(found).startswith(f"%{add.name} at I: differs from one process by ")


def test_first_divergence_between_ranks_and_in_shape() -> None:
    whole, local = row_parallel(local=False), row_parallel()
    v = values()
    inputs = local_inputs(local, v, PLACED, 2)
    inputs[1][2] = inputs[1][2] + 1
    found = first_divergence(local, inputs, whole, list(v.values()))
    assert found is not None and found.node == "b" and "ranks that should hold the same differ" in str(found)
    (moved,) = local.graph.find_nodes(op="call_function", target=mfx.transition.default)
    moved.meta[PLACEMENT] = S(0, Layout.contiguous(4, 2))
    found = first_divergence(local, local_inputs(local, v, PLACED, 2), whole, list(v.values()))
    assert found is not None and found.error == float("inf") and "it must be 2" in found.found


# -- megafx.testing


def test_before_and_after_localizing_are_the_same() -> None:
    assert_same(row_parallel(local=False), row_parallel())


def test_a_wrong_result_and_a_wrong_gradient_are_told_apart() -> None:
    def program(dst: str, scale: float) -> Program:
        return graph(
            lambda x, w: aten.mul(transition(aten.mm(transition(x, dst), w), "I", src="P"), scale),
            x="f64[4 6] I@tp",
            w="f64[6 8] S0@tp",
            local=True,
        )

    def column(src: str) -> Program:
        return graph(
            lambda x, w: aten.mm(transition(x, "R", src=src), w),
            x="f64[4 6] I@tp",
            w="f64[6 8] S1@tp",
            out="S1@tp",
            local=True,
        )

    assert_same(program("S1", 1.0), program("S1", 1.0))
    with pytest.raises(AssertionError, match=r"output 0 differs by 1\.0e\+00"):
        assert_same(program("S1", 1.0), program("S1", 2.0))
    with pytest.raises(PlacementError, match="gradient of 'x' differs between ranks"):
        assert_same(column("I"), column("R"))  # R -> R: no all-reduce in backward


def test_expect_shows_what_is_there() -> None:
    program = graph(lambda x: aten.mul(x, 2.0), x="bf16[b k=4] I@tp")
    expect(
        program,
        "%0 = x            # bf16[b 4] I@tp\n%1 = mul(%0, 2.0)  # bf16[b 4] I@tp\nreturn %1".replace("x   ", "x    "),
    )
    with pytest.raises(AssertionError, match=r"%1 = mul\(%0, 2\.0\)"):
        expect(program, "return %0")


def test_run_pass_leaves_its_input_alone_and_checks_the_contract() -> None:
    program = graph(lambda x: aten.mul(x, 2.0), x="f32[4] I@tp", local=True)

    def in_place(program: Program, context: Any) -> int:
        (node,) = program.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
        node.target = aten.mul_.Tensor
        return 1

    before = str(program.graph)
    with pytest.raises(PlacementError, match="writes to its operand"):
        run_pass(in_place, program)
    assert str(program.graph) == before


@pytest.mark.parametrize(
    "values, message",
    [
        ({"x": "f32(4)"}, "is no value"),
        ({"x": "f32[4] T@tp"}, "'T' is no placement"),
        ({"y": "f32[4]"}, "the function takes x, but values are given for y"),
    ],
)
def test_mistakes_are_named(values: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        graph(lambda x: aten.mul(x, 2.0), **values)


def test_a_transition_needs_a_start() -> None:
    with pytest.raises(UsageError, match="say src="):
        graph(lambda x: transition(aten.mul(x, 2.0), "I"), x="f32[4] R@tp")
    with pytest.raises(UsageError, match="only inside a function"):
        transition(torch.zeros(2), "I")
