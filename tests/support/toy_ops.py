"""Small fused ops with sharding rules, for tests of the rewrite engine: plain torch, differentiable, at any rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
