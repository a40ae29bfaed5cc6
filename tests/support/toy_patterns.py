"""Patterns that tests of the rewrite engine use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from toy_ops import half_turn

from megafx import Pattern

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
