"""Each phase contract accepts a right graph and names what breaks a wrong one."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

import megafx.ops.collectives  # noqa: F401  registers megafx::transition
from megafx.errors import PlacementError, SourceLine
from megafx.ir.contracts import verify
from megafx.ir.program import FQN, PLACEMENT, SOURCE, VAL, Input, Output, Phase, Program, recompute_val
from megafx.ir.sizes import SizeEmitter, Sizes
from megafx.placements.types import I, Layout, P, Placement, R, S

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
TRANSITION = torch.ops.megafx.transition.default


class Graph:
    """Writes a program by hand; the first dim of inputs is dynamic where `dynamic`."""

    def __init__(self, *shapes, phase=Phase.CANONICAL, dynamic=False, kinds=None):
        nodes, self.mode = fx.Graph(), FakeTensorMode(shape_env=ShapeEnv())
        self.inputs = [nodes.placeholder(f"x{i}") for i in range(len(shapes))]
        for node, shape in zip(self.inputs, shapes, strict=True):
            sizes = [DimDynamic.DYNAMIC if dynamic and d == 0 else DimDynamic.STATIC for d in range(len(shape))]
            context = StatelessSymbolicContext(dynamic_sizes=sizes)
            node.meta[VAL] = self.mode.from_tensor(torch.empty(shape), symbolic_context=context)
        nodes.output(())
        inputs = [Input((kinds or {}).get(i, "user"), f"x{i}") for i in range(len(shapes))]
        gm = fx.GraphModule({}, nodes)
        self.program = Program(gm, inputs, [], Sizes(), self.mode, pytree.tree_structure(()), phase=phase)

    def add(self, target, *args, placement=None, val=True, **kwargs):
        graph = self.program.graph
        with graph.inserting_before(self.program.output_node()):
            node = graph.call_function(target, args, kwargs)
        if val:
            recompute_val(self.program, node)
        node.meta[FQN], node.meta[SOURCE] = "layers.0.mlp", SourceLine("model.py", 7, "return up(x)")
        if placement is not None:
            node.meta[PLACEMENT] = placement
        return node

    def done(self, *results, outputs=None):
        self.program.output_node().args = (tuple(results),)
        self.program.outputs = outputs or [Output("user", f"out{i}") for i in range(len(results))]
        return self.program


def refused(program, message):
    with pytest.raises(PlacementError) as error:
        verify(program)
    assert message in str(error.value), str(error.value)
    return error.value


# -- every phase


def test_right_graph_is_accepted():
    g = Graph((4, 8))
    verify(g.done(g.add(aten.relu.default, g.inputs[0])))


def test_interface():
    g = Graph((4, 8))
    y = g.add(aten.relu.default, g.inputs[0])
    program = g.done(y, outputs=[Output("user", "a"), Output("user", "b")])
    refused(program, "the graph returns 1 results for 2 outputs")
    program.outputs.pop()
    program.inputs.append(Input("user", "y"))
    refused(program, "the graph has 1 placeholders for 2 inputs")


def test_missing_value_names_module_and_line():
    g = Graph((4, 8))
    error = refused(g.done(g.add(aten.relu.default, g.inputs[0], val=False)), "has no meta['val']")
    assert error.module == "layers.0.mlp" and error.source.line == 7
    assert "in module 'layers.0.mlp' at model.py:7 `return up(x)`" in str(error)


# -- CANONICAL


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda g, x: g.add(aten.relu_.default, x), "writes to its operand"),
        (lambda g, x: g.add(torch.relu, x), "is no operator overload"),
        (lambda g, x: g.add(aten._assert_tensor_metadata.default, x, None, None, torch.float32), "is an assertion"),
    ],
    ids=["in place", "torch function", "assert"],
)
def test_canonical_refuses(make, message):
    g = Graph((4, 8))
    make(g, g.inputs[0])
    program = g.done(g.inputs[0])
    refused(program, message)
    program.phase = Phase.CAPTURED
    verify(program)  # as exported, such nodes are legal


@pytest.mark.filterwarnings("ignore:Raw SymInt value")
def test_sizes_come_from_inputs():
    g = Graph((4, 8), dynamic=True)
    x = g.inputs[0]
    n = g.add(aten.sym_size.int, x, 0)
    twice = g.add(operator.mul, n, 2)
    verify(g.done(g.add(aten.expand.default, x, [n, 8]), twice))

    g = Graph((4, 8), dynamic=True)
    y = g.add(aten.relu.default, g.inputs[0])
    refused(g.done(g.add(aten.sym_size.int, y, 0)), "reads the size of an intermediate value")

    g = Graph((4, 8), dynamic=True)
    x = g.inputs[0]
    refused(
        g.done(g.add(aten.expand.default, x, [x.meta[VAL].shape[0], 8])), "has a symbolic size that no node computes"
    )


def test_symbol_of_no_input():
    g = Graph((4, 8), (6, 8), dynamic=True)
    y = g.add(aten.relu.default, g.inputs[1])
    g.inputs[1].meta[VAL] = g.inputs[0].meta[VAL]
    refused(g.done(y), "which is the size of no graph input")


# -- PLACED


def placed(src: Placement, dst: Placement, shape=(4, 8), size=1, phase=Phase.PLACED, **options):
    g = Graph(shape, phase=phase, **options)
    x = g.inputs[0]
    x.meta[PLACEMENT] = src
    args = (x, src.tag, dst.tag, list(src.flat_layout), list(dst.flat_layout), "tp", size)
    return g, x, g.add(TRANSITION, *args, placement=dst)


S0, S1 = S(0, Layout.contiguous(4, 2)), S(1, Layout.contiguous(8, 2))


@pytest.mark.parametrize("src, dst", [(I, R), (P, I), (S1, R), (P, S0), (I, S1), (S0, S1)], ids=str)
def test_transitions_accepted(src, dst):
    g, _, y = placed(src, dst)
    verify(g.done(y))


def test_transition_that_starts_elsewhere():
    g, x, y = placed(I, R)
    x.meta[PLACEMENT] = P
    refused(g.done(y), "starts from I, but %x0 is P")


def test_transition_that_ends_elsewhere():
    g, _, y = placed(P, I)
    y.meta[PLACEMENT] = R
    refused(g.done(y), "goes to I, but is marked R")


def test_transition_that_cannot_be_read():
    g, _, y = placed(I, R)
    y.update_arg(2, "Q")
    refused(g.done(y), "'Q' is no placement")


def test_layouts_of_one_dim_must_have_its_size():
    g, _, y = placed(S1, S(1, Layout.of([(5, 2)], 2)))
    refused(g.done(y), "its layouts are of dims of 8 and 10 elements")


def test_invariant_operands_do_not_mix():
    g, x, y = placed(I, R)
    z = g.add(aten.add.Tensor, x, y, placement=R)
    refused(g.done(z), "is R, but its operand %x0 is I")
    z.args = (y, y)
    verify(g.program)
    z.meta[PLACEMENT] = I
    refused(g.program, "is I, but its operand %transition_default is R")


def test_shard_must_fit_its_dim():
    g, _, y = placed(I, S(1, Layout.contiguous(6, 2)))
    refused(g.done(y), "which makes dim 1 6 long whole; it is 8")
    g, _, y = placed(I, S(2, Layout.contiguous(8, 2)))
    refused(g.done(y), "%transition_default is S2, but has 2 dims")


# -- LOCAL


@pytest.mark.parametrize("n", [8, 7])
def test_local_shapes(n):
    placement = S(1, Layout.contiguous(n, 2))
    g, _, y = placed(I, placement, (4, n), 2, Phase.LOCAL)
    verify(g.done(y))
    z = g.add(aten.slice.Tensor, y, 1, 0, 2, placement=placement)
    g.program.output_node().args = ((z,),)
    refused(g.program, "which makes dim 1 4 long on each of 2 ranks; it is 2")


def test_local_shapes_with_symbols():
    g = Graph((5, 8), phase=Phase.LOCAL, dynamic=True)
    x = g.inputs[0]
    anchor = g.add(aten.relu.default, x, placement=I)
    emit = SizeEmitter(g.program.graph, g.program.sizes)
    n = g.program.sizes.of(x.meta[VAL].shape[0])
    layout = Layout.contiguous(n, 3)
    flat = [emit(k) for k in layout.flat()]
    y = g.add(TRANSITION, anchor, "I", "S0", [], flat, "tp", 3, placement=S(0, layout))
    up = emit.local_size(layout, 3)
    verify(g.done(g.add(aten.expand.default, y, [up, 8], placement=S(0, layout))))
    y.meta[PLACEMENT] = S(0, Layout.contiguous(n * 2, 3))
    refused(g.program, "goes to S0 by ")


# -- JOINT


def test_gradients_are_shaped_like_their_inputs():
    g = Graph((4, 8), (4, 8), phase=Phase.JOINT, kinds={1: "tangent"})
    x, tangent = g.inputs
    g.program.inputs[1] = Input("tangent", "out")
    y = g.add(aten.relu.default, x)
    dx = g.add(aten.threshold_backward.default, tangent, y, 0)
    outputs = [Output("user", "out"), Output("gradient", "x0")]
    verify(g.done(y, dx, outputs=outputs))
    part = g.add(aten.slice.Tensor, dx, 0, 0, 2)
    g.program.output_node().args = ((y, part),)
    refused(g.program, "the gradient of 'x0' is (2, 8), its input (4, 8)")
    g.program.output_node().args = ((y, dx),)
    g.program.outputs[1] = Output("gradient", "x9")
    refused(g.program, "is returned as the gradient of 'x9', which is no input")
    g.program.outputs[1] = Output("gradient", "x0")
    g.program.inputs[1] = Input("tangent", "elsewhere")
    refused(g.program, "takes a tangent of 'elsewhere', which is no output")


# -- LOWERED


def lowered():
    g = Graph((4, 8), phase=Phase.LOWERED)
    start = g.add(c10d.all_reduce.default, g.inputs[0], "sum", "tp", val=False)
    start.meta[VAL] = g.inputs[0].meta[VAL]
    wait = g.add(c10d.wait_tensor.default, start, val=False)
    wait.meta[VAL] = start.meta[VAL]
    return g, start, wait


def test_started_and_waited_for():
    g, _, wait = lowered()
    verify(g.done(g.add(aten.relu.default, wait)))


def test_collective_without_wait():
    g, start, wait = lowered()
    program = g.done(start)
    g.program.graph.erase_node(wait)
    refused(program, "is waited for 0 times")


def test_collective_with_two_waits():
    g, start, wait = lowered()
    again = g.add(c10d.wait_tensor.default, start, val=False)
    again.meta[VAL] = start.meta[VAL]
    refused(g.done(wait, again), "is waited for 2 times")


def test_collective_read_before_it_arrives():
    g, start, wait = lowered()
    refused(g.done(wait, g.add(aten.relu.default, start)), "reads it before it has arrived")


def test_wait_for_nothing():
    g = Graph((4, 8), phase=Phase.LOWERED)
    wait = g.add(c10d.wait_tensor.default, g.inputs[0], val=False)
    wait.meta[VAL] = g.inputs[0].meta[VAL]
    refused(g.done(wait), "waits for %x0, which starts no collective")


def test_coalesced_collective():
    g = Graph((4, 8), (2, 2), phase=Phase.LOWERED)
    values = [x.meta[VAL] for x in g.inputs]
    both = g.add(c10d.all_reduce_coalesced.default, g.inputs, "sum", "tp", val=False)
    both.meta[VAL] = values
    parts = [g.add(operator.getitem, both, i) for i in range(2)]
    waits = [g.add(c10d.wait_tensor.default, p, val=False) for p in parts]
    for wait, value in zip(waits, values, strict=True):
        wait.meta[VAL] = value
    verify(g.done(*waits))
    waits[1].replace_all_uses_with(parts[1])
    g.program.graph.erase_node(waits[1])
    refused(g.program, "is waited for 0 times")


def test_transition_left_over():
    g, _, y = placed(I, R, phase=Phase.LOWERED, size=2)
    refused(g.done(y), "is still whole")
