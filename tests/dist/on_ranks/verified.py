"""Covers: equivalence.py (`verify_on_ranks`): real ranks against eager, or against one rank where there is dropout."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from ranks import check, raises
from torch import Tensor, nn
from torch.nn import functional as F

import megafx
from megafx.errors import UsageError
from megafx.ir.program import Phase, Program
from megafx.planner.context import CompileContext

REQUIRES = (Phase.CANONICAL,)


class Net(nn.Module):
    """7 heads' worth of nothing: sizes that 2 ranks do not divide."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.p = nn.LayerNorm(6), nn.Linear(6, 7), nn.Linear(7, 6), p

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.p, self.training)
        return {"loss": y.square().mean(), "y": y}


def doubled(program: Program, context: CompileContext) -> int:
    """A wrong pass: gelu becomes twice gelu."""
    (gelu,) = [n for n in program.graph.nodes if "gelu" in str(n.target)]
    with program.graph.inserting_after(gelu):
        twice = program.graph.call_function(torch.ops.aten.mul.Tensor, (gelu, 2))
    twice.meta.update(gelu.meta)
    gelu.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)
    return 1


@check(2, slow=True)
def real_ranks_are_compared_with_eager() -> None:
    """Weights and inputs differ between the ranks at first: those of rank 0 count. The model stays as it was."""
    for p, reference in ((0.0, "eager"), (0.5, "megafx at t=1")):
        model, x = Net(p).double(), torch.randn(3, 5, 6, dtype=torch.float64)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        verdict = megafx.verify(model, megafx.Config(), example_inputs=x, on_ranks=True)
        assert verdict and verdict.reference == reference and verdict.tolerance == 1e-10, str(verdict)
        assert set(verdict.outputs) == {"loss", "y"} and len(verdict.gradients) == 6
        assert "2 real ranks (gloo on cpu)" in str(verdict)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters()) and type(model) is Net
        texts: list[str] = [""] * 2
        dist.all_gather_object(texts, str(verdict))
        assert texts[0] == texts[1]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Net() for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)["y"]
        return {"loss": x.square().mean(), "y": x}


@check(2)
def fp8_on_real_ranks_is_that_of_one() -> None:
    """Scales are the largest over the ranks: with those of a rank alone the numbers would be 1% off."""
    for recipe in ("tensorwise", "rowwise"):
        config = megafx.Config(fp8="hybrid", first_last_layers_bf16=False, tp_comm_overlap=True).replace(
            fp8_recipe=recipe
        )
        x = torch.randn(3, 5, 6, dtype=torch.float64)
        verdict = megafx.verify(Layers().double(), config, example_inputs=x, on_ranks=True)
        assert verdict and verdict.reference == "megafx at t=1" and verdict.tolerance == 1e-10, str(verdict)


@check(2, seed=0)
def a_wrong_graph_on_real_ranks_is_found() -> None:
    config = megafx.Config(passes=[("after canonicalize", doubled)], bias_activation_fusion=False)
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    verdict = megafx.verify(Net().double(), config, example_inputs=x, on_ranks=True)
    assert not verdict and verdict.outputs["loss"] > 1e-3 and "DIFFERENT: 2 real ranks" in str(verdict)
    config = megafx.Config(data_parallel_size=2)
    call = partial(megafx.verify, Net().double(), config, example_inputs=x, on_ranks=True)
    raises(UsageError, "for tensor parallelism alone", call)
