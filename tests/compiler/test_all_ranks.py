"""Covers: megafx/compiler/all_ranks.py. That it agrees with eager is what every equivalence test shows."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import fx, nn

import megafx
from megafx.capture.export import capture_call
from megafx.compiler import stages
from megafx.compiler.all_ranks import _Meeting, run_ranks
from megafx.compiler.compiled import Compiled
from megafx.compiler.pipeline import compile_program
from megafx.equivalence import input_values
from megafx.errors import PlacementError
from megafx.ir.program import Program
from megafx.ops.axes import Mesh
from megafx.passes.lower.reuse_buffers import reuse_buffers
from megafx.placements.data_axis import TENSOR_AXIS
from megafx.planner.context import CompileContext
from megafx.testing import make_context

F64 = torch.float64
all_reduce = torch.ops._c10d_functional.all_reduce.default


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12, dtype=F64), nn.Linear(12, 6, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(torch.tanh(self.up(x)))).square().mean()


X = torch.randn(4, 3, 6, dtype=F64)


def compiled(t: int) -> tuple[Compiled, dict[str, Any]]:
    torch.manual_seed(0)
    model = Net()
    made = compile_program(capture_call(model, (X,), {}), make_context(t))
    values = {n: v.detach() for n, v in input_values(made.program, model, (X,), {}).items()}
    return made, values


def broken(after: Any) -> Any:
    """`reuse_buffers` that leaves each backward graph with a fault."""

    def reuse_buffers_broken(program: Program, context: CompileContext) -> int:
        changes = reuse_buffers(program, context)
        assert program.partition is not None
        for gm in (program.partition.backward, program.partition.last_backward):
            assert gm is not None
            after(gm)
            gm.recompile()
        return changes

    reuse_buffers_broken.__module__ = reuse_buffers.__module__
    return reuse_buffers_broken


def test_verify_sees_what_the_last_passes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that only the cut graphs have."""

    def write_early(gm: fx.GraphModule) -> None:
        node = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)[-1]
        with gm.graph.inserting_before(node):
            gm.graph.call_function(torch.ops.aten.mul_.Scalar, (node.args[0], 2.0))

    config, model = megafx.Config(tensor_model_parallel_size=2), Net()
    assert megafx.verify(model, config, example_inputs=(X,))
    stage = tuple(broken(write_early) if p is reuse_buffers else p for p in stages.RANK)
    monkeypatch.setitem(stages.STAGES, "rank", stage)
    verdict = megafx.verify(model, config, example_inputs=(X,))
    assert not verdict and verdict.divergence is None
    assert "the passes of stage 'rank' change numbers" in str(verdict)


@pytest.mark.parametrize("t", [1, 2, 3])
def test_gradients_of_all_ranks(t: int) -> None:
    made, values = compiled(t)
    found = run_ranks(made, values)
    torch.manual_seed(0)
    model = Net()
    loss = model(X)
    loss.backward()
    torch.testing.assert_close(*found.outputs.values(), loss.detach(), rtol=1e-10, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], p.grad, rtol=1e-10, atol=1e-14)


def test_ranks_that_part_at_a_collective() -> None:
    made, _ = compiled(2)
    (first, *_) = made.program.graph.find_nodes(op="call_function", target=all_reduce)

    def meet(rank: int, *calls: Any) -> list[Any]:
        return [meeting.meet(rank, (first, all_reduce, call)) for call in calls]

    two = functools.partial(_Meeting, Mesh({TENSOR_AXIS: 2}), torch.device("cpu"))
    meeting = two()
    x, y = torch.ones(2), torch.ones(3)
    assert [r[0].tolist() for r in meeting.run(lambda rank: meet(rank, (x, "sum", "tp")))] == [[2, 2]] * 2
    meeting = two()
    with pytest.raises(PlacementError, match=r"calls .*all_reduce.* with \(3,\).* where rank 0 .* with \(2,\)"):
        meeting.run(lambda rank: meet(rank, (y if rank else x, "sum", "tp")))
    for late in (0, 1):
        meeting = two()
        with pytest.raises(PlacementError, match="waits at .*all_reduce.* for ranks that call nothing"):
            meeting.run(lambda rank, late=late: meet(rank, *([(x, "sum", "tp")] if rank == late else [])))
    meeting = two()
    with pytest.raises(ZeroDivisionError):
        meeting.run(lambda rank: [1 / 0] if rank else meet(rank, (x, "sum", "tp")))
