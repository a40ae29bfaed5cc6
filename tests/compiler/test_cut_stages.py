"""Covers: compiler/cut_stages.py: stages of micro-batches together are the whole graph; what a stage takes; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from advice import refused
from harness import promote_casts
from stage_graphs import cut, run_stages, run_whole
from torch import Tensor, nn
from torch.nn import functional as F

from megafx.errors import UsageError

PROMOTED = {"passes": (("after canonicalize", promote_casts),)}


def assert_exact(model: nn.Module, call: dict[str, Any], stages: Any, microbatches: int) -> list[Any]:
    whole, graphs = cut(model, call, stages, microbatches, **PROMOTED)
    (loss, gradients), (wanted, theirs) = run_stages(whole, graphs, model, call, microbatches), run_whole(model, call)
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=0, check_dtype=False)
    assert gradients.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-10, atol=1e-14)
    return graphs


def test_stages_of_a_tied_model_with_dropout_are_the_whole() -> None:
    """Labels that count are uneven over micro-batches, and dropout draws one mask for all of them."""
    model, inputs = zoo.build("nanogpt", dropout=0.3, layers=3)
    call = inputs(6, 10)
    call["targets"][0, 2:], call["targets"][4:] = -100, -100
    graphs = assert_exact(model.train(), call, 4, 3)
    sizes = graphs[0].program.sizes
    assert sizes.of_call[sizes.symbols["batch"]] == 2  # memory is that of a micro-batch
    assert [len(g.sends) for g in graphs] == [1, 1, 1, 0]
    tied = [any(spec.aliases for spec in g.program.inputs) for g in graphs]
    assert tied == [True, False, False, True]
    assert [sorted(g.takes.values())[-2:] for g in graphs][3] == ["total[0]", f"value:{graphs[2].sends[0].name}"]


class Odd(nn.Module):
    """A mean in the middle of each row; a penalty; a bias that all layers read; a last layer that reads the first."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.first = nn.Parameter(torch.randn(5)), nn.Linear(5, 5)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5)) for _ in range(3))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        begun = z = self.first(x)
        bias = self.bias.tanh()
        for layer in self.layers:
            z = layer(z) + bias * z.mean(1, keepdim=True)
        z = self.frozen(z) + begun
        return (z - y).square().mean() + 0.1 * self.bias.square().sum()


def test_means_penalties_and_values_that_skip_stages() -> None:
    torch.manual_seed(0)
    call = {"x": torch.randn(4, 3, 5).double(), "y": torch.randn(4, 3, 5).double()}
    graphs = assert_exact(Odd().double(), call, ["layers.1", "layers.2"], 2)
    assert [len(g.sends) for g in graphs] == [
        4,
        3,
        0,
    ]  # of the layer, of the first one, the bias, a product with a mean
    assert all(crossing.differentiable for g in graphs for crossing in g.sends)


def test_each_micro_batch_has_its_own_loss_with_average() -> None:
    """As gradient accumulation over micro-batches."""
    model, inputs = zoo.build("nanogpt", layers=2)
    call = inputs(4, 8)
    call["targets"][0, 1:] = -100
    whole, graphs = cut(model, call, 2, 2, data_parallel_loss="average", **PROMOTED)
    assert 2 in whole.program.sizes.of_call.values()
    loss, gradients = run_stages(whole, graphs, model, call, 2)
    parts = [run_whole(model, {n: x.chunk(2)[i] for n, x in call.items()}) for i in range(2)]
    torch.testing.assert_close(loss, sum(part[0] for part in parts) / 2, rtol=1e-10, atol=0, check_dtype=False)
    for name, value in gradients.items():
        torch.testing.assert_close(value, sum(part[1][name] for part in parts) / 2, rtol=1e-10, atol=1e-14)


class Two(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.ReLU()) for _ in range(2))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.between(self.layers[0](x))).square().mean()


def over_the_batch(x: Tensor) -> Tensor:
    return x - torch.special.expit(x.sum(0, keepdim=True))


def test_what_needs_all_micro_batches_is_refused() -> None:
    x = {"x": torch.randn(4, 5).double()}
    with refused("a pipeline computes one micro-batch after the ot") as raised:
        cut(Two(over_the_batch).double(), x, 2, 2)
    assert "test_cut_stages.py" in str(raised[0])  # the line
    with refused("each micro-batch would change buffer"):
        cut(Two(nn.BatchNorm1d(5)).double(), x, 2, 2)
    for between in (over_the_batch, nn.BatchNorm1d(5)):  # the advice
        assert len(cut(Two(between).double(), x, 2, 2, data_parallel_loss="average")[1]) == 2


def test_calls_that_cannot_be_cut() -> None:
    x = {"x": torch.randn(4, 5).double()}
    with refused("a pipeline needs one loss in the graph, and this"):
        cut(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double(), {"input": x["x"]}, 2, 2)
    with refused("the batch of this call is no size that may vary, so it cannot be cut into micro-batches"):
        cut(Two(lambda z: z.reshape(4, 5)).double(), x, 2, 2)
    with refused("code that is not captured runs in the graph of a"):
        cut(Two(Branch()).double(), x, 2, 2)
    with refused("%<name> (<node>) has a size that data decides, w"):
        cut(Two(lambda z: z[z[:, 0] > 0]).double(), x, 2, 2, data_parallel_loss="average")


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if x.sum() > 0 else x


def test_cuts_that_do_not_fit_the_model() -> None:
    x = {"x": torch.randn(4, 5).double()}
    with pytest.raises(UsageError, match="3 stages for a model of 2 parts"):
        cut(Two(F.gelu).double(), x, 3, 2)
    with refused("no stage can begin with '") as raised:
        cut(Two(F.gelu).double(), x, ["layers.7"], 2)
    assert "layers.1" in raised[0].fix
    assert len(cut(Two(F.gelu).double(), x, ["layers.1"], 2)[1]) == 2
