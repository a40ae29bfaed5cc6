"""Covers: passes/backward/node_gradients.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from local_programs import local_program
from torch import Tensor, nn
from torch.nn import functional as F

import megafx
from megafx.ir.program import PHASE, Program
from megafx.passes.backward.build_joint_graph import differentiate
from megafx.passes.backward.node_gradients import NodeGradients

H = 16


def weights(layers: int) -> dict[str, Any]:
    torch.manual_seed(0)
    return {f"w{i}": nn.Parameter(torch.randn(H, H) / 4) for i in range(layers)}


def layer(x: Tensor, w: Tensor) -> Tensor:
    return x + F.silu(F.linear(F.layer_norm(x, (H,)), w)) * x


def stack(*args: Tensor) -> tuple[Tensor]:
    *ws, x = args
    for w in ws:
        x = layer(x, w)
    return (x.square().mean(),)


def joint(function: Callable[..., Any], inputs: dict[str, Any], **options: Any) -> Program:
    program = local_program(function, inputs, **options)
    differentiate(program, [i for i, (_, spec) in enumerate(program.input_nodes()) if spec.kind == "param"], [0])
    return program


def gradients(program: Program, inputs: dict[str, Any], *tangents: Tensor) -> list[Tensor]:
    with torch.no_grad():
        results = program.gm(*inputs.values(), *(tangents or [torch.ones(())]))
    return [r for r, spec in zip(results, program.outputs, strict=True) if spec.kind == "gradient"]


@pytest.mark.parametrize("varying", [(), ("x",)])
def test_layers_that_are_alike_are_traced_once(monkeypatch: pytest.MonkeyPatch, varying: tuple[str, ...]) -> None:
    traced: list[str] = []

    def counted(name: str) -> None:
        real = getattr(NodeGradients, name)
        monkeypatch.setattr(NodeGradients, name, lambda *args: traced.append(name) or real(*args))

    counted("_trace"), counted("_trace_backward")
    found = []
    for layers in (3, 9):
        traced.clear()
        inputs = {**weights(layers), "x": torch.randn(5, H)}
        program = joint(stack, inputs, varying=varying)
        found.append((traced.count("_trace"), traced.count("_trace_backward")))
        for rows in (5, 8) if varying else (5,):
            inputs["x"] = torch.randn(rows, H)
            wanted = torch.autograd.grad(stack(*inputs.values())[0], [*inputs.values()][:-1])
            for got, want in zip(gradients(program, inputs), wanted, strict=True):
                assert torch.equal(got, want)
    assert found[0] == found[1]
    assert found[0][0] < 15


def test_sums_of_gradients_have_the_order_of_autograd() -> None:
    """A value that an op of several functions uses twice, and others before and after it: fp32 tells one order from another."""

    def residual(w: Tensor, x: Tensor) -> tuple[Tensor]:
        for _ in range(4):
            x = x * w
            x = (
                torch.einsum("bh,bh->bh", x, x)
                + F.layer_norm(x, (H,), w)
                + x
                + F.glu(torch.cat([x, x], -1), -1)
                + x.tanh()
            )
        return (x.sum(),)

    inputs = {"w": nn.Parameter(torch.rand(H)), "x": torch.randn(64, H)}
    (got,) = gradients(joint(residual, inputs), inputs)
    (want,) = torch.autograd.grad(residual(*inputs.values())[0], inputs["w"])
    assert torch.equal(got, want)
    (other,) = torch.autograd.grad(residual(inputs["w"], inputs["x"].flip(0))[0], inputs["w"])
    assert not torch.equal(other, want)  # the same sum in another order


def twice(w: Tensor, x: Tensor) -> Tensor:
    """To one silu the gradient of its result and that of its operand come as one value, to the other as two."""
    v = w * x
    a = F.silu(v)
    y = v * 2 + a
    return y + F.silu(y)


OPERANDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a result that is the operand": lambda w, x: (w.contiguous() * x + w) @ w.contiguous().t(),
    "one operand in two places": lambda w, x: torch.addmm(w, w, w) * torch.where(x > 0, w, w),
    "parts without a gradient": lambda w, x: w.chunk(4, 1)[1] * w.unbind(0)[2][:4] + torch.max(w, 1).values[:4],
    "a gradient that is laid out otherwise": lambda w, x: (w.t().exp() * x).t().reshape(-1).view(H, H) @ w.exp().t(),
    "expanded": lambda w, x: (w[:1].expand(H, H) + w.sum()).sum(0, keepdim=True) * w[0],
    "a gradient that comes in two places": twice,
    "no result depends on a part": lambda w, x: (w.detach() * x + w.sign().detach()).mul(w),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_and_results(name: str) -> None:
    def function(w: Tensor, x: Tensor) -> tuple[Tensor]:
        return (OPERANDS[name](w, OPERANDS[name](w, x).sum() + x).square().mean(),)

    inputs = {"w": nn.Parameter(torch.randn(H, H) / 4), "x": torch.randn(H, H)}
    (got,) = gradients(joint(function, inputs), inputs)
    (want,) = torch.autograd.grad(function(*inputs.values())[0], inputs["w"])
    assert torch.equal(got, want)


def test_an_output_that_is_given_twice() -> None:
    inputs = {"w": nn.Parameter(torch.randn(H)), "x": torch.randn(H)}
    program = local_program(lambda w, x: ((y := w.exp() * x), y, w), inputs)
    differentiate(program, [0], [0, 1, 2])
    seeds = [torch.randn(H) for _ in range(3)]
    y = inputs["w"].exp() * inputs["x"]
    (want,) = torch.autograd.grad([y, y, inputs["w"]], [inputs["w"]], seeds)
    assert torch.equal(gradients(program, inputs, *seeds)[0], want)


class Selected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(H, H, dtype=torch.float64)

    def forward(self, x: Tensor, masks: Tensor) -> Tensor:
        return torch.stack([F.silu(self.up(x[mask])).square().sum() for mask in masks]).sum()


def test_sizes_that_data_decides_are_each_traced() -> None:
    """The number of rows that a mask selects is another for each mask, though the masks have one form."""
    net, x = Selected(), torch.randn(7, H, dtype=torch.float64)
    masks = torch.arange(7) < torch.tensor([[3], [7], [1]])
    wanted = torch.autograd.grad(net(x, masks), [*net.parameters()])
    model = megafx.parallelize(net, megafx.Config(tensor_model_parallel_size=1))
    model(x, masks).backward()
    for parameter, want in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, want, rtol=1e-10, atol=1e-10)


def test_backward_is_marked() -> None:
    program = joint(stack, {**weights(3), "x": torch.randn(5, H)})
    silu = [n for n in program.graph.nodes if "silu" in str(n.target)]
    assert [n.meta.get(PHASE) for n in silu] == [None] * 3 + ["backward"] * 3


class _Scores(nn.Module):
    """Scores [b * heads, s, s], as Bloom's, whose rows are s * s apart."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        for _ in range(2):
            q, k = (w(x).unflatten(-1, (2, 4)).transpose(1, 2).reshape(2 * b, s, 4) for w in (self.q, self.k))
            scores = torch.baddbmm(x.new_zeros(()).expand(2 * b, s, s), q, k.mT).view(b, 2, s, s)
            x = x + scores.tanh().sum((1, 3)).unsqueeze(-1)
        return x.square().mean()


def test_rows_that_are_a_square_of_a_size_apart() -> None:
    torch.manual_seed(0)
    model = _Scores().double()
    for t in (1, 2):
        example = (torch.randn(3, 5, 8, dtype=torch.float64),)
        assert (v := megafx.verify(model, megafx.Config(tensor_model_parallel_size=t), example_inputs=example)), v
