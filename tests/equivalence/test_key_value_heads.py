"""Fewer key-value heads than ranks, and heads that ranks do not divide: every rank has query heads, and numbers are eager's.

Covers: shards of query heads that end inside of groups, ops/shared_heads.py, prices of padding, what the report says of it.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
from harness import Case, assert_equal
from torch import nn
from torch.nn import functional as F

from megafx.capture.export import capture_call
from megafx.planner.plan import Plan

HEADS = ((32, 2), (28, 4), (25, 5), (8, 1), (14, 2), (40, 10))
FORMS = ("library", "merged", "interleave", "expand", "eager", "weights")
LARGE: dict[str, Any] = {"hardware": "h100-nvlink", "micro_batch_size": 64, "seq_length": 8192}  # what is priced
HIDDEN, WIDTH = 10, 2


class Attention(nn.Module):
    """Grouped attention as models write it. form: how keys and values come to all query heads, and who makes them.

    library     scaled_dot_product_attention with enable_gqa            merged      the same behind one linear for q, k, v
    interleave  repeat_interleave of k and v before it                  expand      expand and reshape, as Hugging Face does
    eager       the chain of products and a softmax, behind expand      weights     the same, its weights used further on
    """

    def __init__(self, heads: int, groups: int, form: str, p: float) -> None:
        super().__init__()
        self.form, self.p, self.sizes = form, p, [heads * WIDTH, groups * WIDTH, groups * WIDTH]
        parts = [sum(self.sizes)] if form == "merged" else self.sizes
        self.projections = nn.ModuleList(nn.Linear(HIDDEN, size) for size in parts)
        self.out = nn.Linear(heads * WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        made = [projection(x) for projection in self.projections]
        parts = made[0].split(self.sizes, -1) if self.form == "merged" else made
        q, k, v = (part.view(b, s, -1, WIDTH).transpose(1, 2) for part in parts)
        n, groups = q.shape[1], k.shape[1]
        if self.form == "interleave":
            k, v = (y.repeat_interleave(n // groups, dim=1) for y in (k, v))
        elif self.form not in ("library", "merged"):
            wide = (b, groups, n // groups, s, WIDTH)
            k, v = (y[:, :, None].expand(wide).reshape(b, n, s, WIDTH) for y in (k, v))
        if self.form in ("eager", "weights"):
            weights = F.softmax(q @ k.transpose(2, 3) / math.sqrt(WIDTH), dim=-1)
            y = weights @ v
            y = y * weights.sum((2, 3))[..., None, None] if self.form == "weights" else y
        else:
            gqa = self.form in ("library", "merged")
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True, enable_gqa=gqa)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class Block(nn.Module):
    def __init__(self, heads: int, groups: int, form: str, p: float) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(11, HIDDEN), nn.LayerNorm(HIDDEN)
        self.norm, self.attention = nn.LayerNorm(HIDDEN), Attention(heads, groups, form, p)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        return torch.sin(3 * self.last(x + self.attention(self.norm(x)))).mean()


def inputs(batch: int, seq: int) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(11, (batch, seq), generator=torch.Generator().manual_seed(0))}


@cache
def case(heads: int, groups: int, form: str = "library", p: float = 0.0) -> Case:
    torch.manual_seed(0)
    model = Block(heads, groups, form, p).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return Case(model, inputs, capture_call(model, (), inputs(2, 16)))


def busiest(plan: Plan) -> Fraction:
    """The share of the rank that has most, as attention, its projections and their weights are cut.

    By query heads; without a causal mask also by rows of queries, which any number of ranks divide: then no rank has more.
    """
    cuts = [o.out for name, o in plan.ops.items() if "attention" in name or "softmax" in name]
    cuts.append(plan.params["attention.out.weight"])
    return max(Fraction(p.cut.local_size(plan.t), p.cut.size) if p.is_shard else Fraction(1) for p in cuts)


QUICK = {
    ("library", (25, 5), 8, False), ("merged", (28, 4), 8, True), ("interleave", (40, 10), 3, False),
    ("expand", (14, 2), 4, True), ("eager", (32, 2), 8, True), ("weights", (8, 1), 5, False),
    ("merged", (25, 5), 2, False), ("weights", (40, 10), 7, True),
}  # fmt: skip


def rounds() -> list[Any]:
    every = itertools.product(FORMS, HEADS, range(2, 9), (False, True))
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=() if case in QUICK else pytest.mark.slow)
        for case in every
    ]


@pytest.mark.parametrize(("form", "pair", "t", "sequence_parallel"), rounds())
def test_every_rank_has_query_heads_and_numbers_are_eagers(
    form: str, pair: tuple[int, int], t: int, sequence_parallel: bool
) -> None:
    made = case(*pair, form)
    call = inputs(3, 5)
    compiled = made.compile(t, sequence_parallel=sequence_parallel, **LARGE)
    found, by_heads = busiest(compiled.plan), Fraction(-(-pair[0] // t), pair[0])
    assert found == by_heads or (form == "eager" and sequence_parallel and found < by_heads)
    assert not [n for n in compiled.program.notes if n.topic == "types"]
    assert_equal(made.run(compiled, call), made.reference(call))
