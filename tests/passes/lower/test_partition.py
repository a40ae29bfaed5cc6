"""Covers: passes/lower/partition.py, megafx/ir/nodes.py."""

from __future__ import annotations

from typing import Any

import torch
from local_programs import local_program
from lowered import parts_of, saved_bytes
from torch import nn
from torch.nn import functional as F

from megafx.ir.program import FQN, PHASE, RECOMPUTE, Partition, Program
from megafx.passes.backward.build_joint_graph import differentiate


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=dtype))


def joint(function: Any, inputs: dict[str, Any], varying: tuple[str, ...] = ()) -> Program:
    program = local_program(function, inputs, varying=varying)
    wrt = [i for i, spec in enumerate(program.inputs) if spec.kind == "param"]
    differentiate(program, wrt, [0])
    return program


def saved(parts: Partition) -> list[str]:
    return [f"{s.kind} {s.name}" for s in parts.saved]


def ops(gm: torch.fx.GraphModule | None) -> list[str]:
    assert gm is not None
    return [str(n.target).split(".")[1] for n in gm.graph.nodes if "." in str(n.target) and n.op == "call_function"]


def check(parts: Partition, function: Any, inputs: dict[str, Any]) -> None:
    """The two graphs, run one after the other, compute what autograd computes."""
    values = list(inputs.values())
    expected = function(*values)[0]
    tangent = torch.randn_like(expected)
    weights = [w for w in values if isinstance(w, nn.Parameter)]
    want = torch.autograd.grad(expected, weights, tangent)
    with torch.no_grad():
        output, *kept = parts.forward(*values)
        arguments = [*(values[s.index] for s in parts.saved if s.kind == "input"), *kept, tangent]
        assert parts.backward is not None
        got = parts.backward(arguments)
    assert arguments == [], "backward frees its arguments as it goes"
    assert torch.equal(output, expected)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def mlp(w: Any, v: Any, x: Any) -> tuple[Any, ...]:
    return (F.linear(F.gelu(F.linear(x, w)), v),)


def test_an_mlp_keeps_the_two_activations_and_refers_to_inputs() -> None:
    inputs = {"w": parameter(6, 4), "v": parameter(4, 6), "x": torch.randn(2, 3, 4)}
    program = joint(mlp, inputs)
    parts = parts_of(program)
    # the input and the output of gelu: not their views, not the transposed weights, not x again
    assert [k for k in saved(parts) if not k.startswith("value")] == ["input v", "input x"]
    assert [n.split()[1] for n in saved(parts) if n.startswith("value")] == ["mm", "gelu"]
    assert sum(saved_bytes(parts, program.sizes).values()) == 4 * 2 * (2 * 3 * 6)
    check(parts, mlp, inputs)


def test_saved_bytes_name_the_module() -> None:
    inputs = {"w": parameter(6, 4), "v": parameter(4, 6), "x": torch.randn(2, 3, 4)}
    program = local_program(mlp, inputs, varying=("x",))
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.meta[FQN] = "act" if "gelu" in str(node.target) else "fc"
    differentiate(program, [0, 1], [0])
    assert saved_bytes(parts_of(program), program.sizes) == {"fc": 144, "act": 144}


def test_sizes_are_kept_as_integers() -> None:
    def function(w: Any, x: Any) -> tuple[Any, ...]:
        return ((x * w).sum(0, keepdim=True).expand(x.shape[0], 4).reshape(-1).sum() * w,)

    inputs = {"w": parameter(4), "x": torch.randn(3, 4)}
    program = joint(function, inputs, varying=("x",))
    parts = parts_of(program)
    assert [s.kind for s in parts.saved].count("size") == 1
    for b in (3, 5):
        check(parts, function, {**inputs, "x": torch.randn(b, 4)})


def test_q_k_and_v_are_kept_as_one_value() -> None:
    def function(w: Any, x: Any) -> tuple[Any, ...]:
        q, k, v = F.linear(x, w).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        return (F.scaled_dot_product_attention(q, k, v, is_causal=True),)

    inputs = {"w": parameter(24, 8), "x": torch.randn(2, 5, 8)}
    parts = parts_of(joint(function, inputs))
    values = [s for s in parts.saved if s.kind == "value"]
    assert [s.numel for s in values] == [2 * 5 * 24, 2 * 2 * 5 * 4, 2 * 2 * 5]  # qkv, output, log-sum-exp
    assert "unbind" in ops(parts.backward)
    check(parts, function, inputs)


def test_low_precision_copies_of_parameters_are_made_again() -> None:
    def function(w: Any, v: Any, x: Any) -> tuple[Any, ...]:
        hidden = F.linear(x, w.to(torch.bfloat16))
        return (F.linear(hidden.float(), v),)

    inputs = {"w": parameter(6, 4), "v": parameter(4, 6), "x": parameter(3, 4, dtype=torch.bfloat16)}
    parts = parts_of(joint(function, inputs))
    assert saved(parts) == ["input w", "input v", "input x", "value _to_copy_1"]
    assert ops(parts.backward).count("_to_copy") == 3  # w again; and the gradients of w and of hidden
    check(parts, function, inputs)


def test_tagged_nodes_are_computed_again() -> None:
    inputs = {"w": parameter(6, 4), "v": parameter(4, 6), "x": torch.randn(2, 3, 4)}
    program = joint(mlp, inputs)
    for node in program.graph.nodes:
        if "gelu.default" in str(node.target):
            node.meta[RECOMPUTE] = True
    parts = parts_of(program)
    assert [n for n in saved(parts) if n.startswith("value")] == ["value mm"]
    assert ops(parts.backward).count("gelu") == 1 and ops(parts.forward).count("gelu") == 1
    check(parts, mlp, inputs)


def test_forward_computes_nothing_that_only_backward_needs() -> None:
    def function(w: Any, x: Any) -> tuple[Any, ...]:
        return (torch.special.expit(x @ w).pow(3).sum(),)

    inputs = {"w": parameter(4, 6), "x": torch.randn(3, 4)}
    parts = parts_of(joint(function, inputs))
    assert ops(parts.forward) == ["mm", "sigmoid", "pow", "sum"]
    assert "pow" in ops(parts.backward)
    check(parts, function, inputs)


def test_what_the_user_can_change_is_marked() -> None:
    def function(w: Any, x: Any) -> tuple[Any, ...]:
        y = torch.tanh(x * w)
        return (y, (y * y).view(-1))

    inputs = {"w": parameter(4), "x": torch.randn(3, 4)}
    parts = parts_of(joint(function, inputs))
    assert {s.name: s.shared for s in parts.saved} == {"x": True, "tanh": True}


def test_program_without_gradients_has_a_forward_only() -> None:
    program = local_program(mlp, {"w": parameter(6, 4), "v": parameter(4, 6), "x": torch.randn(2, 3, 4)})
    parts = parts_of(program)
    assert parts.backward is None and parts.saved == ()


def test_collectives_that_nobody_reads_stay() -> None:
    """They are for other ranks: one that left them out would meet the others at its next collective."""
    program = joint(mlp, {"w": parameter(6, 4), "v": parameter(4, 6), "x": torch.randn(2, 3, 4)})
    for source, phase in ((program.results()[0], None), (program.results()[-1], "backward")):
        with program.graph.inserting_before(program.output_node()):
            start = program.graph.call_function(torch.ops._c10d_functional.all_reduce.default, (source, "sum", "tp"))
            done = program.graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (start,))
        for node in (start, done):
            node.meta = {**source.meta, PHASE: phase}
    parts = parts_of(program)
    assert "wait_tensor" in ops(parts.forward) and "wait_tensor" in ops(parts.backward)
