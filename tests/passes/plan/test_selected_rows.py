"""Rows that a mask selects, under data parallelism: tokens of an expert, labels that count. Against eager at fp64.

Covers: rules/selected_rows.py, and passes/plan/place_axes.py where ranks have unequal numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import index_dispatch as moe
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megafx
from megafx.checks.sabotage import without_transition
from megafx.checks.types import check_batch_types
from megafx.config import Config
from megafx.errors import PlacementError, PlanError
from megafx.ir.contracts import is_transition
from megafx.ir.nodes import op_name
from megafx.ir.program import Program
from megafx.planner.context import CompileContext

SLOW = pytest.mark.slow
NAMES = tuple(moe.FORMS)


class Mixtures(nn.Module):
    """One after the other, each with its router's loss."""

    def __init__(self, forms: Sequence[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(moe.Mixture(moe.FORMS[name], bias=True) for name in forms)

    def forward(self, x: Tensor) -> Tensor:
        loss = x.new_zeros(())
        for layer in self.layers:
            y, balance = layer(x)
            x, loss = x + y, loss + balance
        return loss + x.square().mean()


@pytest.mark.parametrize(
    ("forms", "mesh", "options"),
    [
        (NAMES[::3], {"dp": 2, "tp": 2}, {}),
        (NAMES[1::3], {"dp": 2}, {"data_parallel": "fsdp"}),
        pytest.param(NAMES[2::3], {"dp": 4}, {"moe_grouped_gemm": True}, marks=SLOW),
        pytest.param(NAMES[:3], {"dp": 2, "cp": 2}, {}, marks=SLOW),
        pytest.param(NAMES[4:7], {"dp": 2, "tp": 3}, {"data_parallel": "zero1"}, marks=SLOW),
    ],
)
def test_each_rank_gives_experts_its_own_tokens(
    forms: Sequence[str], mesh: dict[str, int], options: dict[str, Any]
) -> None:
    """One expert gets none, and on four ranks of one row some more have none."""
    model = Mixtures(forms).double()
    for layer in model.layers:
        with torch.no_grad():
            layer.router.bias[1] = -1e3
    with megafx.debug(check=1):
        verdict = megafx.verify(
            model, Config(**options), example_inputs=(moe.tokens(4, 5),), mesh=mesh, tolerance=1e-10
        )
    assert verdict, str(verdict)


Terms = Callable[["Masked", Tensor, Tensor, Tensor], Tensor]


class Masked(nn.Module):
    """Labels of -100 do not count: the head computes the others alone. terms: (of, x, mask, labels) -> a loss."""

    def __init__(self, *terms: Terms) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.terms = terms
        self.embed, self.up, self.head = nn.Embedding(11, 6), nn.Linear(6, 8), nn.Linear(8, 11, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, mask = self.up(self.embed(ids)).tanh(), labels != -100
        return torch.stack([term(self, x, mask, labels) for term in self.terms]).sum()


def put_back(of: Masked, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[mask] = F.gelu(x[mask])
    return of.head(out).square().mean()


def by_their_number(of: Masked, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    y = of.head(x[mask])
    return y.square().sum() / y.shape[0] - y.shape[0] * y.mean()


EXACT: tuple[Terms, ...] = (
    lambda of, x, mask, labels: F.cross_entropy(of.head(x[mask]), labels[mask]),
    lambda of, x, mask, labels: of.head(x[mask]).square().mean() + of.head(x[mask]).mean(0, keepdim=True).cos().sum(),
    lambda of, x, mask, labels: torch.masked_select(of.head(x).logsumexp(-1), mask).mean(),
    lambda of, x, mask, labels: (x[mask] @ of.head.weight.T)[:, 0].mul(of.head.weight[labels[mask], 0]).square().sum(),
    put_back,
    by_their_number,
)


def a_call() -> dict[str, Tensor]:
    """The second rank of two has more labels that count than the first."""
    ids = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :4] = labels[1, 2] = -100
    return {"ids": ids, "labels": labels}


def verified(model: nn.Module, mesh: dict[str, int], *passes: Any) -> Any:
    return megafx.verify(
        model.double(), Config(passes=passes), example_inputs=a_call(), mesh=mesh, tolerance=1e-10, types=bool(passes)
    )


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, pytest.param({"dp": 4}, marks=SLOW)])
def test_means_are_over_the_rows_of_all_ranks(mesh: dict[str, int]) -> None:
    verdict = verified(Masked(*EXACT), mesh)
    assert verdict, str(verdict)


def test_types_find_each_lost_sum_and_rows_of_other_ranks() -> None:
    kept: list[Program] = []

    def keep(program: Program, context: CompileContext) -> int:
        kept.append(program.copy())
        return 0

    assert verified(Masked(put_back, by_their_number), {"dp": 2}, ("after scaled_products", keep))
    (joint,) = kept
    check_batch_types(joint)
    outer = [n for n in joint.graph.nodes if is_transition(n, "dp")]
    assert len(outer) >= 3
    for node in outer:
        with without_transition(joint.graph, node), pytest.raises(PlacementError):
            check_batch_types(joint)
    take = next(n for n in joint.graph.nodes if op_name(n) == "index")
    table = next(n for n in joint.graph.nodes if "head" in n.name or n.op == "placeholder")
    take.replace_input_with(take.args[0], table)  # numbers of a rank's own rows, of a parameter that is whole
    with pytest.raises(PlacementError, match="numbers of rows that a mask selects on one rank"):
        check_batch_types(joint)


def numbers(of: Masked, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return (mask.nonzero()[:, 0] * x.sum()).sum()


def by_place(of: Masked, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    y = x[mask]
    return (y * torch.arange(y.shape[0])[:, None]).sum()


def other_mask(of: Masked, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """As many rows, of another mask."""
    return (x[mask] * x[mask.flip(0)]).sum()


@pytest.mark.parametrize(
    ("term", "found"),
    [
        (numbers, r"takes numbers of rows that a mask selects, of which each rank has its own: mul of them"),
        (by_place, r"takes a number from that of the rows that a mask selects on one rank"),
        (lambda of, x, mask, labels: x[mask].cumsum(0).sum(), r"cumsum\.default\) has operands that are cut"),
        (lambda of, x, mask, labels: F.dropout(x[mask]).sum(), r"draws random numbers [\s\S]*fix: use Config\("),
        (other_mask, r"flip|as many of them are taken as another mask selects"),
    ],
)
def test_what_asks_for_the_place_of_a_row_is_refused(term: Terms, found: str) -> None:
    with pytest.raises(PlanError, match=found):
        verified(Masked(term), {"dp": 2})


def test_selected_rows_do_not_leave_the_graph() -> None:
    class Selected(Masked):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return self.head(self.up(self.embed(ids))[labels != -100])

    with pytest.raises(PlanError, match="is an output of rows that a mask selects"):
        megafx.verify(Selected().double(), example_inputs=a_call(), loss_fn=lambda y: y.square().mean(), mesh={"dp": 2})
