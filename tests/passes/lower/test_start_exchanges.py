"""Covers: passes/lower/start_exchanges.py: a shared expert runs while tokens travel, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sorted_mixtures import EXPERTS, HIDDEN, Mixture, a_call, as_transformers
from torch import Tensor, fx, nn
from torch.nn import functional as F

import megafx
from megafx.api import _compiled
from megafx.example_call import ExampleCall
from megafx.ir.nodes import op_name
from megafx.kernels.experts.dispatch_rows import begin_combine, begin_dispatch, end_combine, end_dispatch
from megafx.ops.axes import Mesh
from megafx.placements.data_axis import TENSOR_AXIS

aten = torch.ops.aten
WIDTH = 9  # of the shared expert, and of nothing else


class Shared(nn.Module):
    """first: the shared expert is written before the others, or after them."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.mixture = first, nn.LayerNorm(HIDDEN), Mixture()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def shared(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        y = self.norm(x)
        if self.first:
            also = self.shared(y)
            z, loss = self.mixture(y, as_transformers)
        else:
            z, loss = self.mixture(y, as_transformers)
            also = self.shared(y)
        return F.mse_loss(x + z + also, wanted) + 0.1 * loss


class Stack(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.embed, self.layer = nn.Linear(HIDDEN, HIDDEN), Shared(first)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return self.layer(self.embed(x), wanted)


def graphs(first: bool, **options: Any) -> tuple[fx.Graph, fx.Graph]:
    config = megafx.Config(tensor_model_parallel_size=1, data_parallel_size=2, expert_model_parallel_size=2, **options)
    made = _compiled(ExampleCall.of(Stack(first).double(), config, (a_call(4), {}), None, runs=False))
    mesh = Mesh({**made.context.data.mesh, TENSOR_AXIS: 1})
    parts = made.for_rank(mesh.ranks[0]).partition
    assert parts is not None and parts.last_backward is not None
    return parts.forward.graph, parts.last_backward.graph


def meanwhile(graph: fx.Graph, begin: Any, end: Any) -> int:
    """Products of the shared expert between the starts of such exchanges and their waits."""
    order, inside = [*graph.nodes], set[fx.Node]()
    for start in [n for n in order if n.target is begin]:
        (wait,) = start.users
        assert wait.target is end
        inside.update(order[order.index(start) + 1 : order.index(wait)])
    return sum(map(_is_of_shared, inside))


def _is_of_shared(node: fx.Node) -> bool:
    products = (torch.mm, torch.addmm, aten.mm.default, aten.addmm.default)
    shapes = [n.meta["val"].shape for n in (node, *node.all_input_nodes)] if node.target in products else []
    return any(WIDTH in shape for shape in shapes)


@pytest.mark.parametrize("first", [False, True])
def test_the_shared_expert_runs_while_tokens_travel(first: bool) -> None:
    """Written before the others, beside the tokens that go; else beside the sums that come back."""
    forward, backward = graphs(first)
    go, back = (begin_dispatch, end_dispatch), (begin_combine, end_combine)
    beside, other = (go, back) if first else (back, go)
    assert meanwhile(forward, *beside) == 2 and meanwhile(forward, *other) == 0
    assert sum(map(_is_of_shared, forward.nodes)) == 2
    # gradients of sums go where tokens went, and gradients of tokens come back
    assert max(meanwhile(backward, *go), meanwhile(backward, *back)) >= 3, "of 4: one may have run before its start"
    assert sum(map(_is_of_shared, backward.nodes)) == 4


def test_backward_knows_where_rows_are() -> None:
    """What the moves have in common is computed once, in forward."""
    found = [[*map(op_name, graph.nodes)] for graph in graphs(True)]
    common = ("places_of", "tokens_sent", "counts_sent", "room", "rows_of_tokens")
    assert [[names.count(name) for name in common] for names in found] == [[1] * 5, [0] * 5], found


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"dp": 4}])
def test_as_one_process(first: bool, mesh: dict[str, int]) -> None:
    config = megafx.Config(expert_model_parallel_size=2, data_parallel="fsdp" if mesh["dp"] == 4 else "ddp")
    verdict = megafx.verify(
        Stack(first).double(), config, example_inputs=a_call(2 * mesh["dp"]), mesh=mesh, tolerance=1e-10
    )
    assert verdict, str(verdict)


def test_without_such_exchanges_nothing_changes() -> None:
    config = megafx.Config(tensor_model_parallel_size=1)
    made = _compiled(ExampleCall.of(Stack(True).double(), config, (a_call(4), {}), None, runs=False))
    assert EXPERTS > 2 and made.for_rank(None).partition is not None
    targets = {n.target for n in made.for_rank(None).partition.forward.graph.nodes}
    assert not targets & {begin_dispatch, end_dispatch, begin_combine, end_combine}
