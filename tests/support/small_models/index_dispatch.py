"""Mixtures of experts as module lists that take their tokens by index: the forms in which they are written by hand.

`Model(form)` is a small one with the router's balancing loss; FORMS has the forms, BRANCHING those that skip experts without
tokens. `turn_off(model, experts)` lets the router choose none of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from calls import captured, compiled, eager, simulated, wanted_gradients
from harness import errors
from torch import Tensor, nn
from torch.nn import functional as F

from megafx.compiler.compiled import Compiled
from megafx.ir.program import PHASE, Program

HIDDEN, FFN, EXPERTS, TOP = 6, 7, 4, 2
Form = Callable[[Tensor, Tensor, Tensor, Tensor, int, nn.Module], Tensor]


class Expert(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(HIDDEN, FFN, bias=bias)
        self.down = nn.Linear(FFN, HIDDEN, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """form(out, x, weights, chosen, e, expert) -> out with what expert e adds to it."""

    def __init__(self, form: Form, bias: bool = False) -> None:
        super().__init__()
        self.form = form
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(Expert(bias) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, HIDDEN)
        probabilities = self.router(tokens).softmax(-1)
        weights, chosen = probabilities.topk(TOP, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            out = self.form(out, tokens, weights, chosen, e, expert)
        share = F.one_hot(chosen, EXPERTS).to(x.dtype).mean((0, 1))
        return out.view_as(x), EXPERTS * (share * probabilities.mean(0)).sum()


class Model(nn.Module):
    def __init__(self, form: Form, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.moe = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN), Mixture(form, bias)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        y, balance = self.moe(self.norm(x))
        return {"loss": (x + y).square().mean() + 0.1 * balance, "hidden": x + y}


def turn_off(model: nn.Module, experts: Sequence[int]) -> None:
    with torch.no_grad():
        model.moe.router.bias[list(experts)] = -1e3  # type: ignore[union-attr,index,operator]


def where_add_in_place(out, x, weights, chosen, e, expert):
    rows, which = torch.where(chosen == e)
    out[rows] += weights[rows, which, None] * expert(x[rows])
    return out


def nonzero_index_add_in_place(out, x, weights, chosen, e, expert):
    rows, which = (chosen == e).nonzero(as_tuple=True)
    out.index_add_(0, rows, weights[rows, which, None] * expert(x[rows]))
    return out


def squeezed_index_add(out, x, weights, chosen, e, expert):
    mask = chosen == e
    rows = mask.any(-1).nonzero().squeeze(-1)
    return out.index_add(0, rows, (weights * mask).sum(-1)[rows].unsqueeze(-1) * expert(x[rows]))


def index_put_accumulate(out, x, weights, chosen, e, expert):
    rows = torch.argwhere(chosen == e)
    y = expert(x[rows[:, 0]]) * weights[rows[:, 0], rows[:, 1]].unsqueeze(1)
    return out.index_put((rows[:, 0],), y, accumulate=True)


def boolean_of_own(out, x, weights, chosen, e, expert):
    mask = (chosen == e).any(-1)
    weight = (weights * (chosen == e)).sum(-1)
    own = torch.zeros_like(x)
    own[mask] = expert(x[mask]) * weight[mask][:, None]
    return out + own


def boolean_add_in_place(out, x, weights, chosen, e, expert):
    mask = (chosen == e).any(-1)
    out[mask] += expert(x[mask]) * torch.masked_select((weights * (chosen == e)).sum(-1), mask).unsqueeze(-1)
    return out


def one_hot_of_hugging_face(out, x, weights, chosen, e, expert):
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    which, rows = torch.where(mask[e])
    y = expert(x[None, rows].reshape(-1, HIDDEN)) * weights[rows, which, None]
    out.index_add_(0, rows, y.to(x.dtype))
    return out


def two_masks(out, x, weights, chosen, e, expert):
    """Two masks that are equal have rows of one number."""
    weight = ((chosen == e) * weights).sum(-1)
    y = expert(x[(chosen == e).any(-1)])
    return out.index_add(0, (chosen == e).any(-1).nonzero()[:, 0], y * weight[(chosen == e).any(-1), None])


def skip_if_empty(out, x, weights, chosen, e, expert):
    rows, which = torch.where(chosen == e)
    if rows.numel() == 0:
        return out
    return out.index_add(0, rows, weights[rows, which, None] * expert(x[rows]))


def only_if_some(out, x, weights, chosen, e, expert):
    rows, which = torch.where(chosen == e)
    if rows.shape[0] > 0:
        out[rows] += weights[rows, which, None] * expert(x[rows])
    return out


BRANCHING: dict[str, Form] = {f.__name__: f for f in (skip_if_empty, only_if_some)}
FORMS: dict[str, Form] = {
    f.__name__: f
    for f in (
        where_add_in_place,
        nonzero_index_add_in_place,
        squeezed_index_add,
        index_put_accumulate,
        boolean_of_own,
        boolean_add_in_place,
        one_hot_of_hugging_face,
        two_masks,
        *BRANCHING.values(),
    )
}


RTOL = 1e-10


def tokens(batch: int, seq: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch * seq)
    return torch.randn(batch, seq, HIDDEN, generator=generator, dtype=torch.float64)


def made_for(model: nn.Module, t: int, **config: Any) -> tuple[Program, Compiled]:
    """Experts one by one, but where `config` says otherwise."""
    config = {"moe_grouped_gemm": False} | config
    call = {"x": tokens(3, 5)}
    program = captured(model, call)
    return program, compiled(program, t, wanted_gradients(model, program, call), **config)


def assert_as_eager(model: nn.Module, program: Program, made: Compiled, x: Tensor) -> set[str]:
    """-> parameters whose gradient eager leaves None; ours are zero there."""
    names = [made.program.outputs[i].name for i in made.differentiated]
    wanted, tangents = eager(model, program, {"x": x}, names)
    found = simulated(made, model, {"x": x}, tangents)
    off = errors(found, wanted)
    assert {"output loss", "output hidden", "moe.router.weight"} <= off.keys()
    worst = max(off, key=lambda name: off[name])
    assert off[worst] <= RTOL, f"{worst} is off by {off[worst]:.1e}"
    none = found.gradients.keys() - wanted.gradients.keys()
    assert all(not found.gradients[n].any() for n in none)  # type: ignore[union-attr]
    return none


def collectives(made: Compiled) -> Counter[str]:
    """Of the mixture: phase and kind of each collective of activations."""
    found = [n for n in made.program.graph.nodes if "c10d" in str(n.target) and "wait" not in str(n.target)]
    return Counter(f"{n.meta.get(PHASE, 'forward')} {str(n.target).split('.')[1]}" for n in found)
