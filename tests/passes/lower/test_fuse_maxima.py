"""Covers: passes/lower/fuse_maxima.py, kernels/fp8/largest.py: the largest magnitude of a result comes with the result."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from local_programs import local_program
from torch import Tensor, fx

import megafx
import megafx.kernels.activation.activation
import megafx.kernels.fp8.scaled_mm
import megafx.kernels.norm.add_norm
from megafx.config import Config
from megafx.ir.program import Program
from megafx.kernels.fp8.largest import giving_largest
from megafx.ops.axes import AxisContext, on_mesh
from megafx.passes.lower import fuse_maxima as under_test
from megafx.passes.lower.partition import partition
from megafx.testing import make_context

ops = torch.ops.megafx
WHOLE = (-1, [], "tp")


def forward(function: Any, fp8: str | None = "hybrid", **inputs: Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Its graph before and after the pass."""
    program, context = local_program(function, inputs), make_context(1, Config(fp8=fp8))
    partition(program, context)
    assert program.partition is not None
    before = program.partition.forward
    under_test.fuse_maxima(program, context)
    return before, program.partition.forward


def calls(gm: fx.GraphModule) -> list[str]:
    return [
        getattr(n.target, "__name__", "").removesuffix(".default") for n in gm.graph.nodes if n.op == "call_function"
    ]


def test_one_of_several_results_and_the_only_one() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y, rstd = ops.rms_norm_forward(x, w, 1e-5, 0.0)
        z = ops.bias_act(y, None, "gelu")
        matrix = z.view(6, 8)
        return z, rstd, ops.fp8_amax(y.view(6, 8), -1, *WHOLE), ops.fp8_amax(matrix, -1, *WHOLE), matrix

    inputs = {"x": torch.randn(2, 3, 8).double(), "w": torch.randn(8).double()}
    before, after = forward(function, **inputs)
    assert Counter(c for c in calls(after) if "getitem" not in c and "view" not in c) == {
        "rms_norm_forward_largest": 1,
        "bias_act_largest": 1,
    }
    for a, b in zip(after(*inputs.values()), before(*inputs.values()), strict=True):
        assert torch.equal(a, b)
    assert forward(function, None, **inputs)[1].graph.find_nodes(op="call_function", target=ops.fp8_amax.default)


def test_what_stays() -> None:
    """The largest of each row, of an operand, of what no kernel of ours makes, of rows that are not those of the result."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = ops.bias_act(x, None, "gelu")
        return tuple(
            ops.fp8_amax(value, kept, *WHOLE) for value, kept in ((y, 0), (x, -1), (x.relu(), -1), (y.view(8, 6), -1))
        )

    x = torch.randn(6, 8).double()
    before, after = forward(function, x=x)
    assert calls(after).count("fp8_amax") == calls(before).count("fp8_amax") == 4
    assert str(after.graph) == str(before.graph)


def test_pads_take_no_part() -> None:
    x = torch.tensor([[1.0, -2.0], [3.0, 1.0], [1e9, -1e9]])
    call = giving_largest(ops.bias_act.default, 0)
    assert call is not None and giving_largest(ops.rope.default, 0) is None
    for rank, wanted in ((0, 1e9), (1, 3.0)):
        with on_mesh({"tp": AxisContext(rank, 2)}):  # 5 rows on 2 ranks
            y, largest = call(x, None, "relu", 0, [1, 5, 1], "tp")
        assert torch.equal(y, x.relu()) and float(largest) == wanted


@pytest.mark.parametrize("orientations", [(True, True), (False, True)])
@pytest.mark.parametrize("name", ["bias_act", "glu_packed"])
def test_an_output_that_is_made_again_is_cast_where_it_is_made(name: str, orientations: tuple[bool, bool]) -> None:
    width = 16 if name == "glu_packed" else 8

    def function(grad: Tensor, x: Tensor, largest: Tensor) -> tuple[Tensor, ...]:
        dx, dbias, y = getattr(ops, f"{name}_backward")(grad, x, None, "silu", True)
        q, qt, scale = ops.fp8_quantize(y.view(6, 8), largest, -1, "e4m3", False, *orientations)
        return dx, dbias, *((q,) if orientations[0] else ()), qt, scale, ops.fp8_amax(dx.view(6, width), -1, *WHOLE)

    grad, x = torch.randn(2, 3, 8).double(), torch.randn(2, 3, width).double()
    inputs = {"grad": grad, "x": x, "largest": torch.tensor(3.0).double()}
    before, after = forward(function, **inputs)
    made = {c for c in calls(after) if "fp8" in c or "backward" in c}
    assert made == {f"{name}_backward_cast_largest", "fp8_transposed"}
    for a, b in zip(after(*inputs.values()), before(*inputs.values()), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype


def test_an_output_that_others_read_is_made_as_it_is() -> None:
    """And that of an op with a bias, and one that is cast with scales of rows."""

    def function(grad: Tensor, x: Tensor, bias: Tensor, largest: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        found = []
        for kept, given, scale in ((-1, None, largest), (-1, bias, largest), (0, None, rows)):
            dx, _, y = ops.bias_act_backward(grad, x, given, "silu", True)
            found += [dx, ops.fp8_quantize(y, scale, kept, "e4m3", False, True, False)[0]]
            found += [y.sum()] if kept < 0 and given is None else []
        return tuple(found)

    values = {"grad": torch.randn(6, 8), "x": torch.randn(6, 8), "bias": torch.randn(8), "largest": torch.tensor(3.0)}
    before, after = forward(function, **values, rows=torch.rand(6))
    assert str(after.graph) == str(before.graph)


class Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(16)
        self.gate, self.up, self.down = (torch.nn.Linear(*s, bias=False) for s in ((16, 40), (16, 40), (40, 16)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


@pytest.mark.parametrize("t", [2, 3])
def test_a_model(t: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, gated units and the gradients of both leave their largest; numbers are those of one rank. 7 tokens a row."""
    made: Counter[str] = Counter()
    plain = under_test.change_parts

    def counted(program: Program, *changes: Any) -> int:
        count = plain(program, *changes)
        assert program.partition is not None
        for found in (program.partition.forward, program.partition.backward):
            if found is not None:
                made.update(c for c in calls(found) if "_largest" in c)
        return count

    monkeypatch.setattr(under_test, "change_parts", counted)
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.layers = torch.nn.ModuleList(Gated() for _ in range(2))
    model.forward = lambda x: model.layers[1](model.layers[0](x)).square().mean()  # type: ignore[method-assign]  # as users do
    config = Config(
        tensor_model_parallel_size=t,
        sequence_parallel=True,
        fp8="hybrid",
        first_last_layers_bf16=False,
        hardware="h100-nvlink",
    )
    verdict = megafx.verify(model.double(), config, example_inputs=(torch.randn(2, 7, 16).double(),), tolerance=1e-10)
    assert verdict.reference == "megafx at t=1" and verdict, str(verdict)
    assert {"glu_packed_largest", "glu_packed_backward_cast_largest"} <= {*made} and any(
        "norm" in name for name in made
    ), made
