"""Mixtures of experts, sharded in the experts' ffn or over experts, against one process at fp64.

Covers: kernels/experts/grouped_mlp.py, kernels/experts/row_units.py, passes/experts/join_experts.py, and overrides.py
where it meets experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixtures import EXPERTS, FFN, HIDDEN, TOP, floats
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import megafx
from megafx.capture.export import capture_call
from megafx.compiler.runner import Runner
from megafx.compiler.stages import passes_of
from megafx.errors import MegafxError
from megafx.kernels.experts import grouped_mlp as module
from megafx.kernels.experts import row_units
from megafx.placements.types import Layout, S
from megafx.testing import make_context

ops = torch.ops.megafx


class Mixture(nn.Module):
    """Router, experts and the router's balancing loss. form: how the experts are computed."""

    def __init__(self, form: Callable[..., Tensor], experts: int = EXPERTS, ffn: int = FFN) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.router = form, nn.Linear(HIDDEN, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, HIDDEN, 2 * ffn))
        self.down = nn.Parameter(torch.randn(experts, ffn, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).softmax(-1)
        top, chosen = probabilities.topk(TOP, dim=-1)
        y = self.form(tokens, top, chosen, self.up, self.down)
        share = F.one_hot(chosen, probabilities.shape[1]).to(x.dtype).mean((0, 1))
        return y.square().mean() + 0.1 * (share * probabilities.mean(0)).sum()


def gated(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return F.silu(gate) * up


def grouped(tokens: Tensor, top: Tensor, chosen: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Rows sorted by expert, one product for each group of rows."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    ends = F.one_hot(flat, up.shape[0]).sum(0).cumsum(0)
    rows = tokens[order // TOP]
    y = ops.grouped_mm(gated(ops.grouped_mm(rows, up, ends)), down, ends) * top.flatten()[order, None]
    return torch.zeros_like(tokens).index_add(0, order // TOP, y)


def batched(tokens: Tensor, top: Tensor, chosen: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Every expert computes every token."""
    weight = (F.one_hot(chosen, up.shape[0]).to(top.dtype) * top[..., None]).sum(1)
    y = torch.bmm(gated(torch.matmul(tokens, up)), down)
    return torch.einsum("eth,te->th", y, weight)


def listed(tokens: Tensor, top: Tensor, chosen: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One expert after the other, as module lists are called, each on all tokens with the weight that they give it."""
    y = torch.zeros_like(tokens)
    for e in range(up.shape[0]):
        weight = (top * (chosen == e)).sum(-1, keepdim=True)
        y = y + gated(tokens @ up[e]) @ down[e] * weight
    return y


def check(model: nn.Module, t: int, **overrides: str) -> dict[str, Any]:
    """Equal to eager, with the router whole on every rank; the placements of the parameters."""
    config = megafx.Config(tensor_model_parallel_size=t, overrides=overrides)
    inputs = (floats(3, 5, HIDDEN),)
    found = megafx.verify(model, config, example_inputs=inputs)
    assert found.ok, str(found)
    params = dict(megafx.plan(model, config, example_inputs=inputs).params)
    assert not params["router.weight"].is_shard
    return params


@pytest.mark.parametrize("t", [2, 3, 4])
def test_experts_are_split_in_their_ffn(t: int) -> None:
    """Without anybody asking. The router's loss is of all tokens."""
    params = check(Mixture(grouped, ffn=12).double(), t)
    assert params["up"].tag == "S2" and params["down"].tag == "S1"


def test_experts_that_see_all_tokens_are_split_over_ranks() -> None:
    """Without anybody asking: between their products, gate and up are cut apart."""
    assert check(Mixture(batched).double(), 3)["up"].tag == "S0"


@pytest.mark.parametrize(("form", "t"), [(grouped, 2), (grouped, 3), (grouped, 4), (batched, 2)])
def test_experts_are_split_over_ranks_where_an_override_asks(form: Callable[..., Tensor], t: int) -> None:
    params = check(Mixture(form).double(), t, up="expert", down="expert")
    assert params["up"].tag == params["down"].tag == "S0"


def of_max(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    best = probabilities.max(-1)
    return best.values[:, None], best.indices[:, None]


def of_argmax(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    chosen = probabilities.argmax(-1, keepdim=True)
    return probabilities.gather(-1, chosen), chosen


class Switch(Mixture):
    """Each token goes to one expert, chosen without topk."""

    def __init__(self, choose: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__(listed)
        self.choose = choose

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).softmax(-1)
        top, chosen = self.choose(probabilities)
        y = self.form(tokens, top, chosen, self.up, self.down)
        share = F.one_hot(chosen[:, 0], EXPERTS).to(x.dtype).mean(0)
        return y.square().mean() + 0.1 * (share * probabilities.mean(0)).sum()


@pytest.mark.slow
@pytest.mark.parametrize("t", [2, 3, 4])
@pytest.mark.parametrize("choose", [of_max, of_argmax])
def test_routers_of_one_expert(choose: Callable[[Tensor], tuple[Tensor, Tensor]], t: int) -> None:
    assert check(Switch(choose).double(), t)["down"].is_shard


@pytest.mark.slow
def test_experts_one_after_the_other() -> None:
    params = check(Mixture(listed).double(), 2)
    assert params["down"].is_shard


def test_experts_are_split_over_ranks_where_that_is_cheaper() -> None:
    """Two experts of 3 rows of ffn each on 2 ranks: 1/2 of the products, and some again, against 2/3."""
    few = Mixture(grouped, experts=4, ffn=3).double()
    assert check(few, 2)["up"].tag == "S0"
    many = Mixture(grouped, experts=4, ffn=4).double()
    assert check(many, 2)["up"].tag == "S2"


def test_graphs_without_gradients_split_as_those_with() -> None:
    """Without the product that backward makes again, splitting experts would be cheaper; but weights are stored once."""
    model = Mixture(grouped, experts=6, ffn=23).double()
    config, inputs = megafx.Config(tensor_model_parallel_size=2), (floats(3, 5, HIDDEN),)
    with torch.no_grad():
        assert megafx.plan(model, config, example_inputs=inputs).params["up"].tag == "S2"


@pytest.mark.parametrize(("stored", "joined"), [(0, 1), (2, 0)])
def test_weights_that_an_earlier_graph_has_stored(stored: int, joined: int) -> None:
    model, inputs = Mixture(grouped, ffn=12).double(), (floats(3, 5, HIDDEN),)
    program = capture_call(model, inputs)
    context = make_context(2, training=False)
    context.fixed = {"up": S(stored, Layout.contiguous(4, 2)), "down": S(stored and 1, Layout.contiguous(4, 2))}
    passes = passes_of(context, "planning")
    names = [p.name for p in passes]
    Runner(context).run(program, passes[: names.index("join_experts") + 1])
    found = program.graph.find_nodes(op="call_function", target=ops.grouped_mlp.default)
    assert len(found) == joined


def test_half_of_an_override_is_refused() -> None:
    with pytest.raises(MegafxError, match=r"up is split over experts, but the override does not hold for down"):
        check(Mixture(grouped).double(), 2, up="expert")


BIASED = (  # gate and up of two weights, a bias of the gate, a weight of each row
    "v0 = add.Tensor(h0, e0); v1 = silu(v0); v2 = mul.Tensor(v1, h1); v3 = mul.Tensor(v2, r0); v3"
)


def operands() -> tuple[Any, ...]:
    """x, starts, ends, ups, down and its bias, stacks, rows, unit."""
    starts, ends = torch.tensor([2, 6, 6]), torch.tensor([6, 6, 9])
    x, one, two, down = floats(11, 4), floats(3, 4, 5), floats(3, 4, 5) * 3, floats(3, 5, 6) * 2
    leaves = [a.requires_grad_() for a in (x, one, two, down, floats(3, 6), floats(3, 5), floats(11, 1))]
    x, one, two, down, bias, stack, row = leaves
    return x, starts, ends, [one, two], down, bias, [stack], [row], BIASED


def test_each_row_meets_its_expert() -> None:
    """Rows before the first and after the last range are nobody's."""
    x, _, _, (one, two), down, bias, (stack,), (row,), _ = operands()
    y = ops.grouped_mlp(*operands())
    owner = {s: 0 for s in range(2, 6)} | {s: 2 for s in range(6, 9)}
    for s in range(11):
        wanted = torch.zeros(6, dtype=torch.float64)
        if (e := owner.get(s)) is not None:
            wanted = (F.silu(x[s] @ one[e] + stack[e]) * (x[s] @ two[e]) * row[s]) @ down[e] + bias[e]
        torch.testing.assert_close(y[s], wanted)


def test_gradients_and_the_way_of_the_library() -> None:
    """The way that CUDA takes computes the same, also where padding gives a rank experts without rows."""
    x, starts, ends, ups, down, bias, stacks, rows, unit = operands()

    def flat(x: Tensor, one: Tensor, two: Tensor, down: Tensor, bias: Tensor, stack: Tensor, row: Tensor) -> Tensor:
        return ops.grouped_mlp(x, starts, ends, [one, two], down, bias, [stack], [row], unit)

    assert torch.autograd.gradcheck(flat, (x, *ups, down, bias, *stacks, *rows))
    padded = (torch.tensor([2, 6, 0]), torch.tensor([6, 9, 0]))
    floating = (starts.double(), ends.double())
    for ranges in ((starts, ends), padded, (torch.zeros(3, dtype=torch.int64),) * 2, floating):
        given = [x, *ranges, ups, down, bias, stacks, rows, unit]
        torch.testing.assert_close(module.moved_grouped_mlp(*given), module.grouped_mlp(*given))
        del given[5]
        moved = module.moved_grouped_mlp_backward(floats(11, 6), *given, True)
        plain = module.grouped_mlp_backward(floats(11, 6), *given, True)
        assert len(moved) == len(plain) == 7
        for a, b in zip(moved, plain, strict=True):
            torch.testing.assert_close(a, b)


def test_the_way_of_the_library_reads_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no numbers to read."""
    monkeypatch.setattr(module, "grouped_mm", ops.grouped_mm)
    monkeypatch.setattr(module, "grouped_mm_weight", ops.grouped_mm_weight)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        given = tree_map_only(Tensor, mode.from_tensor, [*operands()])
        assert module.moved_grouped_mlp(*given).shape == (11, 6)
        with pytest.raises(DataDependentOutputException):
            module.grouped_mlp(*given)
        del given[5]
        grad = mode.from_tensor(floats(11, 6))
        assert len(module.moved_grouped_mlp_backward(grad, *given, True)) == 7


def test_no_rows() -> None:
    x, _, _, ups, down, bias, stacks, rows, unit = operands()
    none, where = x[:0], (torch.zeros(3, dtype=torch.int64),) * 2
    for form in (module.grouped_mlp, module.moved_grouped_mlp):
        assert form(none, *where, ups, down, bias, stacks, [rows[0][:0]], unit).shape == (0, 6)
    for form in (module.grouped_mlp_backward, module.moved_grouped_mlp_backward):
        found = form(floats(0, 6), none, *where, ups, down, stacks, [rows[0][:0]], unit, False)
        assert [a.shape for a in found] == [a.shape for a in (none, *ups, down, *stacks, rows[0][:0])]
        assert not any(a.any() for a in found)


def test_units_are_read_as_they_are_written() -> None:
    unit = row_units.read("v0 = clamp(h0, None, -1e-05); v1 = reshape(v0, [-1, 2]); v1")
    x = floats(3, 4)
    torch.testing.assert_close(unit.run({"h0": x}), x.clamp(max=-1e-05).reshape(6, 2), rtol=0, atol=0)
    cast = row_units.read("v0 = to.dtype(h0, torch.float32); v1 = mul.Tensor(v0, -inf); v1")
    assert cast.run({"h0": x}).dtype == torch.float32
    with pytest.raises(ValueError, match="takes operators of aten and megafx, not os.system"):
        row_units.read("v0 = os.system('true'); v0")
    with pytest.raises(ValueError, match="is no step of a row-wise unit"):
        row_units.read("import os; h0")
