"""Covers: patterns/masked_softmax.py, patterns/attention.py, passes/fuse/describe_masks.py: random spellings of masks.

A graph has many attentions, each with its own spelling of the mask: padding and causality in one step or two, filled or added,
with every fill, beside a bias before, between or behind them. One sequence of the batch is padding alone, one is padded on the
left: so rows are masked in part, and throughout. Outputs and gradients are those of eager mode, its NaN included.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megafx

FILLS = {"-1e4": -1e4, "-1e9": -1e9, "finfo.min": None, "-inf": -math.inf}
FIRST = (
    "masked_fill",
    "masked_fill by a tensor",
    "where",
    "where tensor",
    "add where",
    "add product",
    "add filled zeros",
)
SECOND = (None, None, "masked_fill", "where", "add where")
BIASES = ((2, 5, 5), (1, 2, 5, 5), (4, 1, 1, 5), (1, 2, 1, 5), (5, 5))
KEEP = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()


class Spelling:
    """How one attention spells its mask. softmax_in_fp32: of fp64 scores, too."""

    def __init__(self, rng: random.Random, fills: tuple[str, ...], softmax_in_fp32: bool = True) -> None:
        self.first, self.second = rng.choice(FIRST), rng.choice(SECOND)
        self.fill = rng.choice(fills)
        self.other = rng.choice([self.fill] * 3 + [*fills])
        self.joined = rng.choice(["expand", "unsqueeze", "not or", "product"])
        self.scale = rng.choice(["query", "div", "mul", "behind", "none"])
        self.bias, self.shape = rng.choice([None, None, "before", "between", "behind"]), rng.choice(BIASES)
        self.wide = rng.choice(["no", "no", "float", "dtype"]) if softmax_in_fp32 else "no"
        self.causal, self.padding_first = rng.choice([True, True, False]), rng.choice([True, False])

    def __repr__(self) -> str:
        return str(vars(self))

    def masked(self, z: Tensor, shown: Tensor, how: str, fill: str) -> Tensor:
        value = FILLS[fill]
        number: float = torch.finfo(z.dtype).min if value is None else value
        if how == "masked_fill":
            return z.masked_fill(~shown, number)
        if how == "masked_fill by a tensor":
            return z.masked_fill(shown == 0, torch.tensor(number, dtype=z.dtype))
        if how == "where":
            return torch.where(shown, z, number)
        if how == "where tensor":
            return torch.where(shown, z, torch.full_like(z, number))
        if how == "add where":
            return z + torch.where(shown, 0.0, number).to(z.dtype)
        if how == "add product" and number > -math.inf:
            return z + (1.0 - shown.to(z.dtype)) * number
        return z + torch.zeros_like(z).masked_fill(~shown, number)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keep: Tensor) -> Tensor:
        b, t = keep.shape
        tokens, past = keep[:, None, None, :], torch.ones(t, t, dtype=torch.bool, device=q.device).tril()
        tokens = tokens.expand(b, 1, t, t) if self.joined == "expand" else tokens
        past = past[None, None] if self.joined == "unsqueeze" else past
        q = q * 0.5 if self.scale == "query" else q
        z = q @ k.transpose(-1, -2)
        z = z / 2.0 if self.scale == "div" else z * 0.5 if self.scale == "mul" else z
        z = z + bias if self.bias == "before" else z
        if self.second is None:
            both = {"not or": ~(~tokens | ~past), "product": (tokens.to(z.dtype) * past.to(z.dtype)) != 0}
            shown = both.get(self.joined, tokens & past) if self.causal else tokens
            z = self.masked(z, shown, self.first, self.fill)
            z = z + bias if self.bias == "between" else z
        else:
            one, two = (tokens, past) if self.padding_first else (past, tokens)
            z = self.masked(z, one, self.first, self.fill)
            z = z + bias if self.bias == "between" else z
            z = self.masked(z, two, self.second, self.other)
        z = z + bias if self.bias == "behind" else z
        z = z * 0.5 if self.scale == "behind" else z
        if self.wide == "float":
            return torch.softmax(z.float(), -1).to(v.dtype) @ v
        return torch.softmax(z, -1, dtype=torch.float32 if self.wide == "dtype" else None).to(v.dtype) @ v

    def tolerance(self, dtype: torch.dtype) -> dict[str, float]:
        """Where eager mode rounds sums with a large fill, a row that is masked throughout has no more digits than these."""
        if dtype == torch.bfloat16:
            return {"rtol": 0.05, "atol": 0.1}
        large = max(1e4 if f == "-1e4" else 1e9 if f == "-1e9" else 1.0 for f in (self.fill, self.other))
        if self.wide == "no":
            return {"rtol": 1e-9, "atol": max(1e-11, large * 1e-15)}
        return {"rtol": 1e-4, "atol": 1e-5 if large != 1e4 else 1e-3}


class Net(nn.Module):
    """Attentions of random spellings. Every other bias is a parameter, the others are inputs."""

    def __init__(self, spellings: list[Spelling], biases: list[Tensor]) -> None:
        super().__init__()
        self.spellings, self.biases = spellings, nn.ParameterList([b.clone() for b in biases])
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, qkv: list[list[Tensor]], biases: list[Tensor], keep: Tensor) -> list[Tensor]:
        own = [b if i % 2 else mine for i, (b, mine) in enumerate(zip(biases, self.biases, strict=True))]
        rows = zip(self.spellings, qkv, own, strict=True)
        return [spelling(q * self.factor, k, v, bias, keep) for spelling, (q, k, v), bias in rows]


def differences(spellings: list[Spelling], dtype: torch.dtype) -> list[str]:
    """What differs from eager mode."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    qkv = [[normal(4, 2, 5, 4) for _ in range(3)] for _ in spellings]
    biases, tangents = [normal(*s.shape) for s in spellings], [normal(4, 2, 5, 4) for _ in spellings]

    def results(parallel: bool) -> list[dict[str, Any]]:
        net: Any = Net(spellings, biases).to(dtype)
        net = megafx.parallelize(net, megafx.Config(tensor_model_parallel_size=1)) if parallel else net
        inputs = [[x.clone().requires_grad_() for x in each] for each in qkv]
        given = [b.clone().requires_grad_() for b in biases]
        outputs = net(inputs, given, KEEP)
        torch.autograd.backward(outputs, tangents)
        found = []
        for i, (out, (q, k, v)) in enumerate(zip(outputs, inputs, strict=True)):
            bias = (given[i] if i % 2 else net.biases[i]).grad
            found.append({"output": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad, "bias": bias})
        return found

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        pairs = zip(spellings, results(False), results(True), strict=True)
    finally:
        torch.set_default_dtype(before)
    texts = []
    for spelling, wanted, found in pairs:
        for name, value in wanted.items():
            zeros = torch.zeros(()) if value is None and found[name] is None else None
            a, b = (zeros if zeros is not None else torch.zeros_like(y) if x is None else x for x, y in
                    ((value, found[name]), (found[name], value)))  # fmt: skip
            if not torch.allclose(a, b, equal_nan=True, **spelling.tolerance(dtype)):
                texts.append(f"{name} of {spelling}: {int(b.isnan().sum())} NaN, eager has {int(a.isnan().sum())}")
    return texts


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 12))])
def test_random_masks_are_as_in_eager_mode(seed: int) -> None:
    rng = random.Random(seed)
    count = 24 if seed else 4
    assert not differences([Spelling(rng, tuple(FILLS)) for _ in range(count)], torch.float64)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.slow) for s in range(6)])
def test_minus_infinity_and_biases(seed: int) -> None:
    """NaN in the gradients of rows that are masked throughout: of what is added there, not of what is filled."""
    rng = random.Random(100 + seed)
    spellings = [Spelling(rng, ("-inf", "-inf", "finfo.min", "-1e4"), softmax_in_fp32=False) for _ in range(24)]
    for each in spellings[::2]:
        each.bias = rng.choice(["before", "between", "behind"])
    assert not differences(spellings, torch.float64)


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 4))])
def test_bfloat16(seed: int) -> None:
    """-1e4 absorbs scores of bf16, as in eager mode."""
    rng = random.Random(200 + seed)
    fills = ("-1e4", "-1e4", "finfo.min", "-inf")
    assert not differences([Spelling(rng, fills) for _ in range(24 if seed else 2)], torch.bfloat16)


def test_rows_of_nan_that_were_wrong() -> None:
    rows = []
    for more in (
        {"first": "masked_fill", "bias": "between", "second": None},
        {"first": "add filled zeros", "second": "where", "padding_first": True},
        {"first": "masked_fill", "bias": "before", "second": "add where", "padding_first": True},
        {"first": "add where", "bias": "before", "second": "add where", "padding_first": True},
    ):
        each = Spelling(random.Random(0), ("-inf",), softmax_in_fp32=False)
        vars(each).update({"bias": None, "shape": (5, 5), "scale": "div", "joined": "expand", "causal": True} | more)
        rows.append(each)
    assert not differences(rows, torch.float64)


class Padded(nn.Module):
    """Padding is added to scores, then later keys are filled: a row of padding has gradients where it was added."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        z, least = q @ k.transpose(-1, -2) / 2.0, torch.finfo(q.dtype).min
        hidden = keep if self.kind == "added" else (1.0 - keep.to(z.dtype)) * least
        later = ~torch.ones(z.shape[-2:], dtype=torch.bool).tril()[(None,) * (z.dim() - 2)]
        if self.kind == "baddbmm":
            z = torch.baddbmm(hidden[:, None], q, k.transpose(1, 2))
            return torch.bmm(torch.softmax(z.masked_fill(later, least), -1), v)
        return torch.softmax((z + hidden[:, None, None]).masked_fill(later, least), -1) @ v


@pytest.mark.parametrize("kind", ["bool", "int", "added", "baddbmm"])
def test_padding_is_added_before_later_keys_are_filled(kind: str) -> None:
    torch.manual_seed(0)
    added = torch.zeros(KEEP.shape, dtype=torch.float64).masked_fill(~KEEP, torch.finfo(torch.float64).min)
    keep = {"int": KEEP.long(), "added": added}.get(kind, KEEP)
    heads = () if kind == "baddbmm" else (2,)
    qkv = [torch.randn(4, *heads, 5, 4, dtype=torch.float64) for _ in range(3)]
    runs = []
    for net in (Padded(kind), megafx.parallelize(Padded(kind), megafx.Config(tensor_model_parallel_size=1))):
        given = [x.clone().requires_grad_() for x in qkv]
        net(*given, keep).square().sum().backward()
        runs.append([x.grad for x in given])
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(*runs, strict=True))  # type: ignore[arg-type]
