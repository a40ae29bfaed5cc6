"""Small fused ops with sharding rules, and patterns that make them, for tests of the rewrite engine: plain torch,
differentiable, at any rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megafx import Pattern
from megafx.rules.grammar import register_rule

_library = torch.library.Library("toy", "DEF")  # lives as long as the module


def _op(schema: str, function, rule: str | None = None) -> None:
    _library.define(schema)
    name = schema.partition("(")[0]
    _library.impl(name, function, "CompositeImplicitAutograd")
    if rule is not None:
        register_rule(f"toy.{name}", rule)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _drop_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    seed: Tensor | None,
    p: float,
    op_id: int,
    shard_dim: int,
    layout: list[int],
    axis: str,
) -> Tensor:
    x = x if bias is None else x + bias
    if seed is not None:
        x = torch.ops.megafx.dropout(x, seed, p, op_id, shard_dim, layout, axis)
    return residual + x


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, _rms(total, weight, eps)


def half_turn(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), -1)


def _turn_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + half_turn(q) * sin, k * cos + half_turn(k) * sin


_DRAW = "Tensor? seed, float p, int op_id, int shard_dim, SymInt[] layout, str axis"
_op("act(Tensor x, Tensor? bias) -> Tensor", lambda x, b: F.gelu(x if b is None else x + b), "nl: ... h, h -> ... h")
_op("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _rms, "nl[1]: ... h!, h! -> ... h!")
_op(
    f"drop_add(Tensor x, Tensor? bias, Tensor residual, {_DRAW}) -> Tensor",
    _drop_add,
    "lin: +... h, +h, +... h, ~ -> ... h",
)
_op(
    "add_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    _add_norm,
    "nl: ... h!, ... h!, h! -> ... h!; ... h!",
)
_op(
    "turn_both(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
    _turn_both,
    "nl: b n s d!, b n s d!, b n s d!, b n s d! -> b n s d!; b n s d!",
)
_op("without_rule(Tensor x, Tensor y, Tensor w) -> (Tensor, Tensor)", lambda x, y, w: (x + y, (x + y) * w))
_op("scaled(Tensor x, float factor) -> Tensor", lambda x, f: x * f, "lin: ... -> ...")

toy = torch.ops.toy


class BiasGelu(Pattern):
    name = "bias_gelu"
    tensors = {"x": "D[... k]", "weight": "param D[n k]", "bias": "param D[n]?"}
    needs = ("gelu",)

    def match(x, weight, bias):
        return F.gelu(F.linear(x, weight, bias))

    def make(x, weight, bias):
        return toy.act(F.linear(x, weight), bias)


class Rms(Pattern):
    name = "rms"
    tensors = {"x": "D[... h]", "weight": "D[h]"}
    scalars = {"eps": float}
    variants = {"squared": ("pow", "product")}

    def match(x, weight, *, eps, squared):
        square = x.pow(2) if squared == "pow" else x * x
        return weight * (x * torch.rsqrt(square.mean(-1, keepdim=True) + eps))

    def make(x, weight, *, eps):
        return toy.rms_norm(x, weight, eps)


class DropAdd(Pattern):
    name = "drop_add"
    tensors = {"x": "D[... h]", "bias": "param D[h]?", "residual": "D[... h]"}
    variants = {"train": (True, False)}
    scalars = {"p": float}

    def match(x, bias, residual, *, p, train):
        x = x if bias is None else x + bias
        return residual + (F.dropout(x, p, True) if train else x)

    def make(x, bias, residual, *, drop):
        return toy.drop_add(x, bias, residual, *drop.args)

    def where(m):
        if m["bias"] is None and m["drop"].seed is None:
            return "a plain sum needs no kernel"


class TurnBoth(Pattern):
    name = "turn_both"
    local = True
    tensors = {"q": "D[b n s 2d]", "k": "D[b m s 2d]", "cos": "D[1|b 1 s 2d]", "sin": "D[1|b 1 s 2d]"}

    def match(q, k, cos, sin):
        return q * cos + half_turn(q) * sin, k * cos + half_turn(k) * sin

    def make(q, k, cos, sin):
        return toy.turn_both(q, k, cos, sin)


class AddNorm(Pattern):
    name = "add_norm"
    local = True
    tensors = {"x": "D[... h]", "residual": "D[... h]", "weight": "D[h]"}
    scalars = {"eps": float}

    def match(x, residual, weight, *, eps):
        total = x + residual
        return total, toy.rms_norm(total, weight, eps)

    def make(x, residual, weight, *, eps):
        return toy.add_norm(x, residual, weight, eps)
