"""Types on the data-parallel axis: what becomes of a loss, a mean, a draw; what mixes rows is refused."""

from __future__ import annotations

import re

import pytest
import torch
from advice import refused
from torch import fx, nn
from torch.nn import functional as F

import megafx
from megafx.capture.export import capture_call
from megafx.config import Config
from megafx.errors import PlanError
from megafx.ir.program import Program
from megafx.passes.canonicalize.canonicalize import canonicalize_program
from megafx.passes.plan.place_axes import place_axes
from megafx.placements.data_axis import DataAxis
from megafx.testing import make_context

RANKS = 3
X, Y = torch.randn(4, 5, 6), torch.randn(4, 5, 6)
IDS = torch.arange(20).view(4, 5)


class Of(nn.Module):
    """A model of one function of (its weight, inputs)."""

    def __init__(self, function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.function = function

    def forward(self, *inputs: torch.Tensor):
        return self.function(self.weight, *inputs)


def typed(function, *inputs: torch.Tensor) -> Program:
    program = capture_call(Of(function), inputs, {})
    canonicalize_program(program)
    place_axes(program, make_context(data=DataAxis(RANKS)))
    return program


def ops(program: Program) -> list[str]:
    return [str(n.target).split(".")[1] for n in program.graph.nodes if n.op == "call_function"]


def outputs(program: Program) -> list[str]:
    """Placements; 'P->R' of what is summed last of all."""
    assert program.batch is not None
    summed = [n in sums(program) for n in program.results()]
    return [f"P->{p}" if s else str(p) for p, s in zip(program.batch.outputs, summed, strict=True)]


def sums(program: Program) -> list[fx.Node]:
    found = program.graph.find_nodes(op="call_function", target=torch.ops.megafx.transition.default)
    assert all(n.args[5:] == ("dp", RANKS) for n in found)
    return [n for n in found if n.args[1:3] == ("P", "R")]


def sums_inside(program: Program) -> list[fx.Node]:
    return [n for n in sums(program) if n not in program.results()]


def test_a_mean_becomes_a_summand_and_batches_have_to_be_equal():
    program = typed(lambda w, x, y: F.mse_loss(x * w, y), X, Y)
    assert outputs(program) == ["P->R"] and program.batch.summed and program.batch.equal
    divided = [n for n in program.graph.nodes if n.target is torch.ops.aten.div.Scalar]
    assert [n.args[1] for n in divided] == [RANKS]


def test_a_penalty_on_parameters_is_a_summand_of_a_loss_of_rows():
    program = typed(lambda w, x: (x * w).square().mean() + w.norm(), X)
    assert outputs(program) == ["P->R"] and not sums_inside(program)
    assert [n.args[1] for n in program.graph.nodes if n.target is torch.ops.aten.div.Scalar] == [RANKS]
    moves = program.graph.find_nodes(op="call_function", target=torch.ops.megafx.transition.default)
    assert sorted(n.args[1:3] for n in moves) == [("P", "R"), ("R", "P")]
    assert outputs(typed(lambda w, x: ((x * w).sum(-1), w.norm()), X)) == ["S0", "R"]


def test_a_loss_of_statistics_is_computed_from_those_of_the_whole_batch():
    program = typed(lambda w, x: (x * w).mean((0, 1)).square().sum(), X)
    assert outputs(program) == ["R"] and len(sums_inside(program)) == 1
    assert outputs(typed(lambda w, x: (x * w).norm(), X)) == ["R"]
    assert outputs(typed(lambda w, x: (x * w).std(0), X)) == ["R"]


def test_a_mean_beside_rows_has_the_gradients_of_all_ranks():
    program = typed(lambda w, x: (x * w, (x * w).mean(0)), X)
    assert outputs(program) == ["S0", "P->R"] and not program.batch.summed


def test_numbers_made_of_the_batch_size_are_of_all_rows():
    program = typed(lambda w, x: ((x * w) ** 2).sum() / (x.shape[0] * x.shape[1]), X)
    (divided,) = [n for n in program.graph.nodes if n.target in (torch.ops.aten.div.Tensor, torch.ops.aten.div.Scalar)]
    assert outputs(program) == ["P->R"]
    count = divided.args[1].meta["val"].node.expr
    assert count.subs(dict.fromkeys(count.free_symbols, 7)) == RANKS * 7 * 7


def test_a_mean_over_other_dims_stays_as_it_is():
    program = typed(lambda w, x: (x * w).mean(-1), X)
    assert outputs(program) == ["S0"]
    assert not program.batch.equal and not program.batch.summed
    assert "div" not in ops(program)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 3, "tp": 2}])
def test_a_mean_of_what_was_summed_over_all_rows_is_not_divided(mesh: dict[str, int]):
    """Of counts of experts, say: it was divided by the number of ranks."""

    def centred(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = (x * w).sum((0, 1))
        return (y - y.mean()).tanh().sum()

    program = typed(centred, X)
    assert outputs(program) == ["R"] and "div" not in ops(program) and not program.batch.equal
    x = torch.randn(6, 5, 6, dtype=torch.float64)
    verdict = megafx.verify(Of(centred).double(), Config(), example_inputs=(x,), mesh=mesh, tolerance=1e-10)
    assert verdict, str(verdict)


def test_labels_are_counted_over_all_ranks():
    program = typed(lambda w, x, i: F.cross_entropy((x * w).flatten(0, 1), i.flatten() % 6), X, IDS)
    assert outputs(program) == ["P->R"] and not program.batch.equal
    (total,) = sums_inside(program)
    assert str(total.args[0].target) == "aten.sum.default" and not total.args[0].meta["val"].is_floating_point()


def test_a_product_of_sums_is_a_product_of_totals():
    program = typed(lambda w, x: ((x * w).sum((0, 1)) * x.sum((0, 1))).sum(), X)
    assert len(sums_inside(program)) == 1  # of one of the factors: the product is linear in the other
    assert outputs(program) == ["P->R"]


def test_values_of_no_input_are_alike_for_all_rows():
    program = typed(lambda w, x: torch.cat([w.expand(x.shape[0], 1, 6), x], 1) + torch.zeros(x.shape[0], 1, 1), X)
    assert outputs(program) == ["S0"]


def test_a_draw_is_for_rows_of_the_whole_batch():
    program = typed(lambda w, x: F.dropout(x, 0.5) + F.dropout(w, 0.5), X)
    axes = [n.args[-1] for n in program.graph.nodes if n.target is torch.ops.megafx.dropout.default]
    assert sorted(axes) == ["dp+tp", "tp"]  # the weight is the same on every rank, and so is its mask


def test_a_batch_norm_has_the_statistics_of_the_whole_batch():
    program = typed(lambda w, x: F.batch_norm(x.transpose(1, 2), None, None, w, w, True).sum(), X)
    names = ops(program)
    assert len(sums_inside(program)) == 2 and "batch_norm" not in names  # the mean and the variance
    assert outputs(program) == ["P->R"]
    plain = typed(lambda w, x: F.batch_norm(x * w, torch.zeros(5), torch.ones(5), None, None, False).sum(), X)
    assert not sums_inside(plain) and outputs(plain) == ["P->R"]  # statistics that are given


def test_a_variance_over_the_batch_counts_all_rows():
    program = typed(lambda w, x: (x * w).var((0, 1), correction=1).sum(), X)
    counts = [
        a.meta["val"].node.expr
        for n in program.graph.nodes
        for a in n.all_input_nodes
        if "sym" in str(a.meta["val"].__class__).lower()
    ]
    assert sorted(
        {int(c.subs(dict.fromkeys(c.free_symbols, 7))) for c in counts if c.free_symbols} & {RANKS * 49, RANKS * 49 - 1}
    ) == [RANKS * 49 - 1, RANKS * 49]
    assert outputs(program) == ["P->R"]


REFUSED = {
    "rows numbered": (lambda w, x: x * torch.arange(x.shape[0])[:, None, None] * w, (X,)),
    "rows in another order": (lambda w, x: x.flip(0) * w, (X,)),
    "a softmax over rows": (lambda w, x: x.softmax(0) * w, (X,)),
    "a draw with the sequence first": (lambda w, x: F.dropout(x.transpose(0, 1) * w, 0.5), (X,)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_rows_is_refused(name):
    function, inputs = REFUSED[name]
    with pytest.raises(PlanError, match="data parallelism cannot cut the batch") as error:
        typed(function, *inputs)
    assert re.search(r"test_place_axes\.py:\d+", str(error.value)) and "fix: " in str(error.value)


def test_a_batch_of_one_size_is_refused():
    program = capture_call(Of(lambda w, x: x * w), (X,), {}, dynamic=False)
    canonicalize_program(program)
    with pytest.raises(PlanError, match="no size that may vary"):
        place_axes(program, make_context(data=DataAxis(RANKS)))


def test_a_call_without_rows_is_the_same_on_every_rank():
    program = typed(lambda w: (w * w, F.dropout(w, 0.5)))
    assert outputs(program) == ["R", "R"]
    assert program.batch.inputs == {} and program.batch.whole and not program.batch.summed


def test_a_number_made_of_the_batch_is_refused_with_advice_that_works():
    with refused("the <of> of this call is no size that may vary, "):
        typed(lambda w, x: (x * w).sum() / len(x), X)
    assert outputs(typed(lambda w, x: (x * w).sum() / x.shape[0], X)) == ["P->R"]


def test_averaging_types_nothing():
    program = capture_call(Of(lambda w, x: (x.softmax(0) * w).mean()), (X,), {})
    canonicalize_program(program)
    before = ops(program)
    assert place_axes(program, make_context(1, Config(data_parallel_loss="average"), data=DataAxis(RANKS))) == 0
    assert ops(program) == before and not program.batch.summed and not program.batch.whole
