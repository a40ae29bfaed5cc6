"""Mixtures whose experts are not plain gated units, split over experts, against one process at fp64.

Covers: passes/experts/join_experts.py and what it reads a mixture with (passes/experts/expert_units.py): biases, units
that alternate gate and up, weights of gate and up apart, no gate, weights looked up for each row; what cannot be joined, with
its reason.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from mixtures import EXPERTS, FFN, HIDDEN, TOP, floats
from torch import Tensor, nn
from torch.nn import functional as F

import megafx
from megafx.config import Config
from megafx.errors import MegafxError
from megafx.ir import dump
from megafx.passes.experts.join_experts import join_experts
from megafx.testing import assert_same, canonical, expect, make_context, run_pass

ops = torch.ops.megafx


class Experts(nn.Module):
    """Stacks of weights [E, ..]; forward is on sorted rows."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


class Mixture(nn.Module):
    def __init__(self, experts: type[Experts], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = experts(**shapes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).softmax(-1)
        top, chosen = probabilities.topk(TOP, dim=-1)
        ids, order = chosen.flatten().sort(stable=True)
        ends = F.one_hot(ids, EXPERTS).sum(0).cumsum(0)
        y = self.experts(tokens[order // TOP], ends, ids, top.flatten()[order, None])
        y = torch.zeros_like(tokens).index_add(0, order // TOP, y)
        share = F.one_hot(chosen, EXPERTS).to(x.dtype).mean((0, 1))
        return y.square().mean() + 0.1 * (share * probabilities.mean(0)).sum()


UP, GATED, DOWN = (EXPERTS, HIDDEN, FFN), (EXPERTS, HIDDEN, 2 * FFN), (EXPERTS, FFN, HIDDEN)
UP_BIAS, GATED_BIAS, DOWN_BIAS = (EXPERTS, FFN), (EXPERTS, 2 * FFN), (EXPERTS, HIDDEN)


class Alternating(Experts):
    def forward(self, rows: Tensor, ends: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        """As GPT-OSS."""
        hidden = ops.grouped_mm(rows, self.up, ends) + self.up_bias[ids]
        gate, up = hidden[..., ::2].clamp(max=1.5), hidden[..., 1::2].clamp(-1.5, 1.5)
        return (
            ops.grouped_mm((up + 1) * gate * torch.sigmoid(1.3 * gate), self.down, ends) + self.down_bias[ids]
        ) * weight


class WithoutGate(Experts):
    def forward(self, rows: Tensor, ends: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        hidden = F.relu(self.up_bias[ids] + ops.grouped_mm(rows, self.up, ends)).square()
        return (self.down_bias[ids] + ops.grouped_mm(hidden, self.down, ends)) * weight


class GateApart(Experts):
    def forward(self, rows: Tensor, ends: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        """The weight of a row is multiplied before the second product."""
        hidden = F.gelu(ops.grouped_mm(rows, self.gate, ends)) * ops.grouped_mm(rows, self.up, ends)
        return ops.grouped_mm(hidden * weight, self.down, ends)


class InPairs(Experts):
    def forward(self, rows: Tensor, ends: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        gate, up = ops.grouped_mm(rows, self.up, ends).unflatten(-1, (FFN, 2)).unbind(-1)
        return ops.grouped_mm(torch.tanh(gate) * up, self.down, ends) * weight


class Scaled(Experts):
    def forward(self, rows: Tensor, ends: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        """By weights that all experts share, and one that each expert has."""
        hidden = F.silu(ops.grouped_mm(rows, self.up, ends)) * self.scale + self.shift
        return ops.grouped_mm(hidden.softmax(-1) * self.each[ids], self.down, ends) * weight


class LookedUp(Experts):
    """A weight for each row, in the order of the tokens; those of the second product with their dims turned."""

    def forward(self, rows: Tensor, ends: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        back = torch.arange(rows.shape[0] - 1, -1, -1)
        rows, ids = rows[back], ids[back]
        hidden = torch.bmm(rows[:, None], self.up[ids])[:, 0] + self.up_bias[ids]
        gate, up = hidden[..., ::2], hidden[..., 1::2]
        y = (self.down[ids] @ (F.gelu(gate) * up * weight[back]).unsqueeze(-1)).squeeze(-1) + self.down_bias[ids]
        return y[back]


UNITS: dict[str, tuple[type[Experts], dict[str, tuple[int, ...]]]] = {
    "alternating": (Alternating, dict(up=GATED, up_bias=GATED_BIAS, down=DOWN, down_bias=DOWN_BIAS)),
    "without gate": (WithoutGate, dict(up=UP, up_bias=UP_BIAS, down=DOWN, down_bias=DOWN_BIAS)),
    "gate apart": (GateApart, dict(gate=UP, up=UP, down=DOWN)),
    "in pairs": (InPairs, dict(up=GATED, down=DOWN)),
    "looked up": (LookedUp, dict(up=GATED, up_bias=GATED_BIAS, down=(EXPERTS, HIDDEN, FFN), down_bias=DOWN_BIAS)),
    "scaled": (Scaled, dict(up=UP, down=DOWN, scale=(FFN,), shift=(), each=(EXPERTS, 1))),
}
SHARED = {"experts.scale", "experts.shift"}  # of all experts


def made(name: str) -> nn.Module:
    experts, shapes = UNITS[name]
    return Mixture(experts, **shapes).double()


def check(model: nn.Module, t: int, overrides: dict[str, str], **config: Any) -> megafx.Plan:
    """Equal to eager, with the router whole; the plan."""
    settings = Config(tensor_model_parallel_size=t, overrides=overrides, **config)
    inputs = (floats(3, 5, HIDDEN),)
    found = megafx.verify(model, settings, example_inputs=inputs)
    assert found.ok, str(found)
    plan = megafx.plan(model, settings, example_inputs=inputs)
    assert not plan.params["router.weight"].is_shard
    return plan


@pytest.mark.parametrize(
    ("name", "t", "sequence_parallel"),
    [
        ("alternating", 2, "auto"),
        ("alternating", 3, False),
        ("alternating", 4, "auto"),
        ("without gate", 3, "auto"),
        ("without gate", 4, False),
        ("gate apart", 3, False),
        ("in pairs", 2, False),
        ("looked up", 2, False),
        ("looked up", 3, "auto"),
        ("scaled", 3, "auto"),
    ],
)
def test_whole_experts_on_each_rank(name: str, t: int, sequence_parallel: Any) -> None:
    """Biases and what else experts have of their own are split as the weights are, five over t ranks."""
    plan = check(made(name), t, {"experts": "expert"}, sequence_parallel=sequence_parallel)
    own = {n: str(p) for n, p in plan.params.items() if n.startswith("experts.") and n not in SHARED}
    assert own == dict.fromkeys(own, "S0") and len(own) >= 2
    assert not any(plan.params[n].is_shard for n in SHARED & set(plan.params))


def test_naming_the_weights_is_enough_and_naming_biases_is_right() -> None:
    weights = {"experts.up": "expert", "experts.down": "expert"}
    for overrides in (weights, {**weights, "*.up_bias": "expert", "*.down_bias": "expert"}):
        plan = megafx.plan(
            made("alternating"),
            Config(tensor_model_parallel_size=2, overrides=overrides),
            example_inputs=(floats(3, 5, HIDDEN),),
        )
        assert {str(p) for n, p in plan.params.items() if n.startswith("experts.")} == {"S0"}


@pytest.mark.parametrize(("name", "split"), [("alternating", "S0"), ("scaled", "S0"), ("without gate", "S2")])
def test_units_that_cannot_be_cut_in_the_ffn_are_split_over_experts(name: str, split: str) -> None:
    """Without anybody asking: where gate and up alternate, each rank would need the results of all others."""
    experts, shapes = UNITS[name]
    shapes = {n: tuple(12 if d == FFN else 24 if d == 2 * FFN else d for d in s) for n, s in shapes.items()}
    model = Mixture(experts, **shapes).double()
    plan = megafx.plan(model, Config(tensor_model_parallel_size=2), example_inputs=(floats(3, 5, HIDDEN),))
    assert str(plan.params["experts.up"]) == split


# -- every expert computes every token


class Batched(nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gated, wide = gated, (2 if gated else 1) * FFN
        self.up, self.up_bias = (
            nn.Parameter(torch.randn(EXPERTS, HIDDEN, wide)),
            nn.Parameter(torch.randn(EXPERTS, wide)),
        )
        self.down, self.down_bias = nn.Parameter(torch.randn(DOWN)), nn.Parameter(torch.randn(DOWN_BIAS))

    def forward(self, tokens: Tensor, weight: Tensor) -> Tensor:
        x = tokens.expand(EXPERTS, *tokens.shape)
        hidden = torch.bmm(x, self.up) + self.up_bias[:, None]
        if self.gated:
            hidden = (hidden[..., 1::2] + 1) * hidden[..., ::2].clamp(max=1.5)
        y = torch.bmm(F.gelu(hidden), self.down) + self.down_bias[:, None]
        return torch.einsum("eth,te->th", y, weight)


class Dense(nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS), Batched(gated)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).softmax(-1)
        top, chosen = probabilities.topk(TOP, dim=-1)
        weight = (F.one_hot(chosen, EXPERTS).to(x.dtype) * top[..., None]).sum(1)
        return self.experts(tokens, weight).square().mean()


@pytest.mark.parametrize(("gated", "t"), [(True, 2), (True, 3), (False, 4)])
def test_experts_that_see_all_tokens(gated: bool, t: int) -> None:
    plan = check(Dense(gated).double(), t, {"experts": "expert"})
    assert {str(p) for n, p in plan.params.items() if n.startswith("experts.")} == {"S0"}


# -- what is not joined


class NormedRows(Experts):
    def forward(self, rows: Tensor, ends: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        hidden = ops.grouped_mm(rows, self.up, ends)
        return ops.grouped_mm(hidden / hidden.norm(dim=0), self.down, ends) * weight


class ReadTwice(Experts):
    def forward(self, rows: Tensor, ends: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        hidden = F.relu(ops.grouped_mm(rows, self.up, ends))
        return ops.grouped_mm(hidden, self.down, ends) * weight + hidden.mean()


class OtherIds(Experts):
    def forward(self, rows: Tensor, ends: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        hidden = ops.grouped_mm(rows, self.up, ends) + self.up_bias[ids.flip(0)]
        return ops.grouped_mm(F.relu(hidden), self.down, ends) * weight


class OtherBias(Experts):
    def forward(self, rows: Tensor, ends: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        hidden = (rows[:, None] @ self.up[ids])[:, 0] + self.up_bias[ids.flip(0)]
        return (hidden.relu()[:, None] @ self.down[ids])[:, 0] * weight


class Dropped(Experts):
    def forward(self, rows: Tensor, ends: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        hidden = F.dropout(ops.grouped_mm(rows, self.up, ends).relu(), 0.5)
        return ops.grouped_mm(hidden, self.down, ends) * weight


@pytest.mark.parametrize(
    ("experts", "why", "line"),
    [
        (NormedRows, r"aten.\S*norm\S*, which does not keep the rows", "hidden / hidden.norm"),
        (ReadTwice, r"aten.relu.default, whose result aten.mean.default reads too", "hidden = F.relu"),
        (OtherIds, r"a lookup in experts.up_bias by ids that are not sorted as the rows are", "ids.flip"),
        (OtherBias, r"a lookup in experts.up_bias by other ids than those of the weights", "ids.flip"),
        (Dropped, r"megafx.dropout.default, which draws by the number of a row", "F.dropout"),
    ],
)
def test_what_cannot_be_joined_is_an_error_that_says_where_and_why(experts: type[Experts], why: str, line: str) -> None:
    model = Mixture(experts, up=UP, down=DOWN, up_bias=UP_BIAS).double()
    inputs = (floats(3, 5, HIDDEN),)
    with pytest.raises(MegafxError, match=why) as error:
        megafx.plan(model, Config(tensor_model_parallel_size=2, overrides={"experts": "expert"}), example_inputs=inputs)
    assert error.value.module == "experts" and line in str(error.value.source)


def test_a_note_says_what_keeps_experts_from_being_split() -> None:
    """Five experts on 5 ranks, 7 rows of ffn: whole experts would be less work."""
    model = Mixture(ReadTwice, up=UP, down=DOWN).double()
    plan = megafx.plan(model, Config(tensor_model_parallel_size=5), example_inputs=(floats(3, 5, HIDDEN),))
    assert str(plan.params["experts.up"]) != "S0"
    notes = [str(n) for n in plan.report.notes if "whole experts" in str(n)]
    assert len(notes) == 1 and "whose result aten.mean.default reads too" in notes[0] and "F.relu" in notes[0]


# -- the graph

SHAPES = {
    "x": "f64[s k=6]",
    "up": "f64[e=5 k=6 f=7]",
    "bias": "f64[e=5 f=7]",
    "down": "f64[e=5 f=7 k=6]",
    "last": "f64[e=5 k=6]",
    "scores": "f64[s e=5]",
}


def mixture(x: Tensor, up: Tensor, bias: Tensor, down: Tensor, last: Tensor, scores: Tensor) -> Tensor:
    ids, order = scores.argmax(-1).sort(stable=True)
    ends = torch.histc(ids.float(), 5, 0, 4).cumsum(0)
    hidden = ops.grouped_mm(x[order], up, ends) + bias[ids]
    return ops.grouped_mm(torch.tanh(hidden), down, ends) + last[ids]


def test_golden() -> None:
    """What is left of it finds nothing more to join."""
    before = canonical(mixture, **SHAPES)
    before.inputs = [replace(i, kind="user" if i.name in ("x", "scores") else "param") for i in before.inputs]
    context = make_context(2, Config(overrides={"*": "expert"}))
    after = run_pass(join_experts, before, context)
    expect(
        after,
        """\
        %0 = x                                 # f64[s 6]
        %1 = up                                # f64[5 6 7] param
        %2 = bias                              # f64[5 7] param
        %3 = down                              # f64[5 7 6] param
        %4 = last                              # f64[5 6] param
        %5 = scores                            # f64[s 5]
        %6 = argmax(%5, -1)                    # i64[s]
        %7 = sort.stable(%6, stable=True)      # (i64[s], i64[s])
        %8 = operator.getitem(%7, 0)           # i64[s]
        %9 = operator.getitem(%7, 1)           # i64[s]
        %10 = to.dtype(%8, f32)                # f32[s]
        %11 = histc(%10, 5, 0, 4)              # f32[5]
        %12 = cumsum(%11, 0)                   # f32[5]
        %13 = index(%0, [%9])                  # f64[s 6]
        %14 = slice(%12, 0, 0, 4)              # f32[4]
        %15 = constant_pad_nd(%14, [1, 0], 0)  # f32[5]
        %16 = grouped_mlp(%13, %15, %12, [%1], %3, %4, [%2], [], 'v0 = add.Tensor(h0, e0); v1 = tanh(v0); v1')  # f64[s 6]
        return %16""",
    )
    assert_same(before, after)
    assert dump.text(run_pass(join_experts, after, context)) == dump.text(after)
