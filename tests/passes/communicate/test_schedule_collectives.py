"""Covers: passes/communicate/schedule_collectives.py, and re-gathering in passes/lower/partition.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_programs import local_program
from lowered import parts_of, saved_bytes, tag_regathers
from torch import nn
from torch.nn import functional as F

from megafx.analysis.communication import is_product, is_start, is_wait
from megafx.checks.simulate import local_inputs, run_logical, simulate
from megafx.ir.program import PHASE, Program
from megafx.passes.backward.build_joint_graph import differentiate
from megafx.passes.communicate.coalesce_gradients import coalesce_gradients
from megafx.passes.communicate.expand_transitions import expand_transitions
from megafx.passes.communicate.schedule_collectives import schedule_collectives
from megafx.placements.types import Layout, Placement, S
from megafx.testing import make_context

T, B, SEQ, H, N, FFN = 2, 2, 4, 8, 4, 16
TOKENS = Layout.contiguous(SEQ, T).flat()
move = torch.ops.megafx.transition


def to_r(x: Any) -> Any:
    return move(x, "I", "R", [], [], "tp", T)


def column(w: Any, x: Any) -> tuple[Any, ...]:
    return (F.linear(to_r(x), w),)


def block(sequence_parallel: bool, fused: bool) -> Any:
    """A pre-norm transformer block's local program, as insert_transitions writes it. fused: one weight for q, k and v."""

    def enter(x: Any) -> Any:
        return move(x, "S1", "R", TOKENS, [], "tp", T) if sequence_parallel else to_r(x)

    def leave(x: Any) -> Any:
        return move(x, "P", "S1", [], TOKENS, "tp", T) if sequence_parallel else move(x, "P", "I", [], [], "tp", T)

    def norm(x: Any, w: Any) -> Any:
        return F.layer_norm(x, (H,), to_r(w) if sequence_parallel else w)

    def function(*args: Any) -> tuple[Any, ...]:
        *weights, x = args
        if sequence_parallel:
            x = move(x, "I", "S1", [], TOKENS, "tp", T)
        for i in range(0, len(weights), 6 if fused else 8):
            n1, *qkv, o, n2, up, down = weights[i : i + (6 if fused else 8)]
            y = enter(norm(x, n1))
            parts = F.linear(y, qkv[0]).chunk(3, -1) if fused else [F.linear(y, w) for w in qkv]
            q, k, v = (p.view(B, SEQ, N // T, H // N).transpose(1, 2) for p in parts)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, SEQ, H // T)
            x = x + leave(F.linear(y, o))
            x = x + leave(F.linear(F.gelu(F.linear(enter(norm(x, n2)), up)), down))
        return (move(x, "S1", "I", TOKENS, [], "tp", T) if sequence_parallel else x,)

    return function


def whole_block(fused: bool) -> Any:
    def function(*args: Any) -> Any:
        *weights, x = args
        for i in range(0, len(weights), 6 if fused else 8):
            n1, *qkv, o, n2, up, down = weights[i : i + (6 if fused else 8)]
            y = F.layer_norm(x, (H,), n1)
            parts = F.linear(y, qkv[0]).chunk(3, -1) if fused else [F.linear(y, w) for w in qkv]
            q, k, v = (p.view(B, SEQ, N, H // N).transpose(1, 2) for p in parts)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, SEQ, H)
            x = x + F.linear(y, o)
            x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (H,), n2), up)), down)
        return x

    return function


def block_weights(layers: int, fused: bool) -> tuple[dict[str, Any], dict[str, Placement]]:
    torch.manual_seed(0)
    rows, columns = S(0, Layout.contiguous(H, T)), S(1, Layout.contiguous(H, T))
    values: dict[str, Any] = {}
    placements: dict[str, Placement] = {}
    for i in range(layers):
        shapes: dict[str, tuple[tuple[int, ...], Placement | None]] = {"n1": ((H,), None)}
        if fused:
            shapes["qkv"] = ((3 * H, H), S(0, Layout.of([(H, 1)] * 3, T)))
        else:
            shapes |= {name: ((H, H), rows) for name in "qkv"}
        shapes |= {"o": ((H, H), columns), "n2": ((H,), None)}
        shapes["up"] = ((FFN, H), S(0, Layout.contiguous(FFN, T)))
        shapes["down"] = ((H, FFN), S(1, Layout.contiguous(FFN, T)))
        for name, (shape, placement) in shapes.items():
            values[f"{i}.{name}"] = nn.Parameter(torch.randn(shape, dtype=torch.float64) / 3)
            if placement is not None:
                placements[f"{i}.{name}"] = placement
    return values, placements


def lowered(
    sequence_parallel: bool, fused: bool, layers: int = 2, regather: bool = False
) -> tuple[Program, dict[str, Any], dict[str, Placement]]:
    values, placements = block_weights(layers, fused)
    local: dict[str, Any] = {}
    for name, w in values.items():
        shape = list(w.shape)
        if name in placements:
            shape[placements[name].dim] //= T
        local[name] = nn.Parameter(torch.empty(shape, dtype=torch.float64))
    values["x"] = torch.randn(B, SEQ, H).double()
    program = local_program(block(sequence_parallel, fused), {**local, "x": nn.Parameter(values["x"])})
    differentiate(program, list(range(len(program.inputs))), [0])
    if regather:
        tag_regathers(program)
    coalesce_gradients(program, make_context())
    expand_transitions(program, make_context())
    return program, values, placements


def starts(program: Program) -> list[Any]:
    return [n for n in program.graph.nodes if is_start(n)]


def overlapped(nodes: list[Any]) -> dict[Any, int]:
    """Backward collectives whose result something waits for -> products between start and wait."""
    counts = {}
    for i, node in enumerate(nodes):
        if is_start(node) and node.meta.get(PHASE) == "backward":
            (wait,) = node.users
            counts[node] = sum(is_product(n) for n in nodes[i : nodes.index(wait)])
    return counts


def text(program: Program) -> list[str]:
    """Backward products, collectives and what uses them."""
    return [
        f"{n.name} = {str(n.target).split('.')[1]}({', '.join(a.name for a in n.all_input_nodes)})"
        for n in program.graph.nodes
        if n.op == "call_function" and n.meta.get(PHASE) == "backward"
    ]


def test_column_parallel_backward() -> None:
    program = local_program(column, {"w": nn.Parameter(torch.randn(6, 4)), "x": nn.Parameter(torch.randn(3, 4))})
    differentiate(program, [0, 1], [0])
    expand_transitions(program, make_context())
    assert text(program) == [
        "t_1 = t(arg2_1)",
        "mm_1 = mm(t_1, arg1_1)",
        "mm_2 = mm(arg2_1, arg0_1)",
        "all_reduce_default = all_reduce(mm_2)",
        "wait_tensor_default = wait_tensor(all_reduce_default)",
    ]
    assert schedule_collectives(program, make_context()) == 3
    assert text(program) == [
        "t_1 = t(arg2_1)",
        "mm_2 = mm(arg2_1, arg0_1)",
        "all_reduce_default = all_reduce(mm_2)",
        "mm_1 = mm(t_1, arg1_1)",
        "wait_tensor_default = wait_tensor(all_reduce_default)",
    ]
    assert schedule_collectives(program, make_context()) == 0


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_blocks(sequence_parallel: bool, fused: bool) -> None:
    program, values, placements = lowered(sequence_parallel, fused)
    names = [n.name for n in starts(program)]
    tangent = torch.randn(B, SEQ, H).double()
    before = run_logical(program, {**values, "0": tangent}, placements, T)
    assert schedule_collectives(program, make_context()) > 0
    assert [n.name for n in starts(program)] == names, "collectives keep their order"
    after = run_logical(program, {**values, "0": tangent}, placements, T)
    want = torch.autograd.grad(whole_block(fused)(*values.values()), [*values.values()][:-1], tangent)
    for (name, got), expected in zip(list(after.gradients.items())[:-1], want, strict=True):
        assert got is not None and torch.equal(got, before.gradients[name])  # type: ignore[arg-type]
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_each_backward_collective_of_a_block_has_a_product_beside_it(sequence_parallel: bool, fused: bool) -> None:
    program, _, _ = lowered(sequence_parallel, fused, layers=3)
    schedule_collectives(program, make_context())
    counts = list(overlapped(list(program.graph.nodes)).values())
    if sequence_parallel:
        # the first gather of backward has nothing before it; after the blocks come x's gather and the norms' sum
        assert counts[0] == 0 and all(counts[1 : 2 * 2 * 3]), counts
    else:
        assert len(counts) == 2 * 3 and all(counts), counts


def test_forward_keeps_its_order() -> None:
    program, _, _ = lowered(True, False)

    def computed() -> list[Any]:
        """Forward nodes that compute: waits and parts of tuples come where they are asked for."""
        forward = [n for n in program.graph.nodes if n.meta.get(PHASE) != "backward"]
        return [n for n in forward if isinstance(n.target, torch._ops.OpOverload) and not (is_start(n) or is_wait(n))]

    before = computed()
    schedule_collectives(program, make_context())
    assert computed() == before


def test_independent_branches_overlap_in_forward() -> None:
    def parallel(a: Any, b: Any, x: Any) -> tuple[Any, ...]:
        y = move(F.linear(x, a), "P", "I", [], [], "tp", T)
        z = F.linear(F.gelu(x), b)
        return (y + z,)

    weights = {n: nn.Parameter(torch.randn(4, 4)) for n in "ab"}
    program = local_program(parallel, {**weights, "x": torch.randn(3, 4)})
    expand_transitions(program, make_context())
    schedule_collectives(program, make_context())
    order = [str(n.target).split(".")[1] for n in program.graph.nodes if n.op == "call_function"]
    assert order == ["linear", "all_reduce", "gelu", "linear", "wait_tensor", "add"]


@pytest.mark.parametrize("fused", [False, True])
def test_regathered_inputs_trade_bytes_for_memory(fused: bool) -> None:
    """Kept, 4 all-gathers and 4 reduce-scatters a layer; re-gathered, 2 more gathers, less memory."""
    layers, found = 2, {}
    for regather in (False, True):
        program, values, placements = lowered(True, fused, layers, regather)
        schedule_collectives(program, make_context())
        parts = parts_of(program)
        assert parts.backward is not None
        gathers = sum("all_gather" in str(n.target) for gm in (parts.forward, parts.backward) for n in gm.graph.nodes)
        found[regather] = gathers, sum(saved_bytes(parts, program.sizes).values())
        # the gathered input of a column-parallel linear is gathered while the product before it runs
        nodes = list(parts.backward.graph.nodes)
        regathers = [n for n in nodes if is_start(n) and n.meta.get(PHASE) != "backward"]
        assert len(regathers) == (2 * layers if regather else 0)
        for node in regathers:
            (wait,) = node.users
            assert any(is_product(n) for n in nodes[nodes.index(node) : nodes.index(wait)])
        check_two_graphs(program, parts, values, placements)
    (kept_gathers, kept_bytes), (gathers, bytes_) = found[False], found[True]
    assert gathers == kept_gathers + 2 * layers
    # 4 s b h (1 - 1/t) at 16 bits: two gathered inputs a layer for their shards, which norms keep anyway in part
    assert kept_bytes - bytes_ == layers * 2 * B * SEQ * H * 8 * (T - 1) // T


def check_two_graphs(program: Program, parts: Any, values: Any, placements: Any) -> None:
    """Forward, then backward, on all ranks: the gradients of the joint graph, to the bit."""
    inputs = local_inputs(program, {**values, "0": torch.randn(B, SEQ, H).double()}, placements, T)
    joint = simulate(program, inputs)
    forward = simulate(parts.forward, [i[:-1] for i in inputs])
    arguments = []
    for mine, results in zip(inputs, forward, strict=True):
        given = [mine[s.index] for s in parts.saved if s.kind == "input"]
        arguments.append([*given, *results[1:], mine[-1]])
    backward = simulate(parts.backward, arguments)
    for whole, one, two in zip(joint, forward, backward, strict=True):
        assert torch.equal(whole[0], one[0])
        assert all(torch.equal(a, b) for a, b in zip(whole[1:], two, strict=True))


def test_every_wait_follows_its_start_and_operands_precede_users() -> None:
    program, _, _ = lowered(True, True, layers=3)
    schedule_collectives(program, make_context())
    seen: set[Any] = set()
    for node in program.graph.nodes:
        assert all(a in seen for a in node.all_input_nodes)
        assert not is_wait(node) or all(is_start(a) for a in node.all_input_nodes)
        seen.add(node)


def test_gathered_parameters_start_one_product_early() -> None:
    def function(*args: Any) -> tuple[Any, ...]:
        *weights, x = args
        cut = Layout.contiguous(4, T).flat()
        for w in weights:
            x = F.relu(x @ move(w, "S0", "R", cut, [], "tp", T))
        return (x,)

    weights = {f"w{i}": nn.Parameter(torch.randn(2, 4)) for i in range(8)}
    program = local_program(function, {**weights, "x": torch.randn(3, 4)})
    differentiate(program, [], [])
    expand_transitions(program, make_context())
    schedule_collectives(program, make_context())
    order = [str(n.target).split(".")[1] for n in program.graph.nodes if is_start(n) or is_product(n)]
    gather, product = "all_gather_into_tensor", "mm"
    # the first starts have few products to pass, so they come at once; the others one product early
    assert order == [*[gather] * 5, product, product, product, *[product, gather] * 3, product, product]
