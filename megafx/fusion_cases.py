"""Chains of ops as models have them, one for each family of patterns, that `megafx profile-fusions` measures fused and not.

Each is a module on [batch, seq, ...] inputs, so that it is captured, fused and differentiated as any model is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafx.config import FUSIONS
from megafx.fusion_profile import MERGE_GATE_UP, MERGE_LINEARS

P = 0.1  # of dropout
EPS = 1e-5


@dataclass(frozen=True)
class Widths:
    """Sizes that do not vary: hidden size, columns of a head, vocabulary."""

    hidden: int = 4096
    head: int = 64
    vocab: int = 65536

    @property
    def heads(self) -> int:
        return self.hidden // self.head


@dataclass(frozen=True)
class FusionCase:
    """One chain. build(widths) -> (module, last dims of its inputs [batch, seq, last]); patterns, needs: as in `Measured`.

    scores: its largest value has seq x seq elements a head, so that its sequences are shorter. ids: it takes targets too.
    off: knobs that are off where it is measured unfused.
    """

    patterns: tuple[str, ...]
    build: Callable[[Widths], tuple[nn.Module, list[int]]]
    needs: tuple[str, ...] = ()
    scores: bool = False
    ids: bool = False
    off: tuple[str, ...] = FUSIONS


class Chain(nn.Module):
    """function(*parameters, *inputs), the parameters being vectors and matrices of these shapes."""

    def __init__(self, function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        scale = [n[-1] ** -0.5 if len(n) == 2 else 1.0 for n in shapes]
        self.weights = nn.ParameterList(torch.randn(n) * s for n, s in zip(shapes, scale, strict=True))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*self.weights, *inputs)


def _chain(inputs: int, function: Callable[..., Any], *shapes: str) -> Callable[[Widths], tuple[nn.Module, list[int]]]:
    """shapes: 'h' a vector of the hidden size, 'hh' a square matrix."""

    def build(w: Widths) -> tuple[nn.Module, list[int]]:
        return Chain(function, *[(w.hidden,) * len(s) for s in shapes]), [w.hidden] * inputs

    return build


def _new_gelu(u: Tensor) -> Tensor:
    return 0.5 * u * (1.0 + torch.tanh(0.7978845608028654 * (u + 0.044715 * torch.pow(u, 3.0))))


def _written_rms(w: Tensor, x: Tensor) -> Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _library_rms(w: Tensor, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, EPS)


def _layer(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b, EPS)


def _add_rms(w: Tensor, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    h = residual + x
    return h, _written_rms(w, h)


def _linear_add_norm(m: Tensor, c: Tensor, w: Tensor, b: Tensor, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    h = residual + F.linear(x, m, c)
    return h, _layer(w, b, h)


def _dropout_add_norm(m: Tensor, c: Tensor, w: Tensor, b: Tensor, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    h = residual + F.dropout(F.linear(x, m, c), P, True)
    return h, _layer(w, b, h)


def _heads(x: Tensor, d: int) -> Tensor:
    return x.view(x.shape[0], x.shape[1], -1, d).transpose(1, 2)


def _causal(scores: Tensor) -> Tensor:
    s = scores.shape[-1]
    hidden = torch.ones(s, s, dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min)


def _weights(q: Tensor, k: Tensor, d: int) -> Tensor:
    scores = torch.matmul(_heads(q, d), _heads(k, d).transpose(2, 3)) * d**-0.5
    return F.dropout(torch.softmax(_causal(scores), -1, dtype=torch.float32).to(q.dtype), P, True)


def _softmax(w: Widths) -> tuple[nn.Module, list[int]]:
    return Chain(lambda q, k: _weights(q, k, w.head)), [w.hidden // 4] * 2


def _attention(w: Widths) -> tuple[nn.Module, list[int]]:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(_weights(q, k, w.head), _heads(v, w.head))

    return Chain(function), [w.hidden // 4] * 3


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    h = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., h:], x[..., :h]), -1) * sin


def _rope(w: Widths) -> tuple[nn.Module, list[int]]:
    d = w.head

    return Chain(lambda q, k: _turned(q, k, d)), [w.hidden, w.hidden // 4]


def _turned(q: Tensor, k: Tensor, d: int) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** (torch.arange(0, d, 2, device=q.device).float() / -d)
    angles = torch.arange(q.shape[1], device=q.device).float()[None, :, None] * frequencies
    angles = torch.cat((angles, angles), -1)
    cos, sin = (t.to(q.dtype).unsqueeze(1) for t in (angles.cos(), angles.sin()))
    return _turn(_heads(q, d), cos, sin), _turn(_heads(k, d), cos, sin)


def _projections(w: Widths) -> tuple[nn.Module, list[int]]:
    """Queries, keys and values, grouped 4 to 1, of half the hidden size."""
    n, d = w.hidden // 2, w.head

    def function(wq: Tensor, wk: Tensor, wv: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return *_turned(F.linear(x, wq), F.linear(x, wk), d), _heads(F.linear(x, wv), d)

    return Chain(function, (n, n), (n // 4, n), (n // 4, n)), [n]


def _gate_and_up(w: Widths) -> tuple[nn.Module, list[int]]:
    n = w.hidden // 2

    def function(gate: Tensor, up: Tensor, x: Tensor) -> Tensor:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    return Chain(function, (4 * n, n), (4 * n, n)), [n]


def _loss(w: Widths) -> tuple[nn.Module, list[int]]:
    def function(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), target.view(-1))

    return Chain(function), [w.vocab]


_NORMS = ("layer_norm", "rms_norm", "written_rms_norm")

CASES: dict[str, FusionCase] = {
    "bias_activation": FusionCase(
        ("linear_bias_activation", "bias_activation"),
        _chain(1, lambda m, b, x: F.gelu(F.linear(x, m, b), approximate="tanh"), "hh", "h"),
    ),
    "written_activation": FusionCase(("written_activation",), _chain(1, _new_gelu)),
    "glu": FusionCase(("glu",), _chain(2, lambda gate, up: F.silu(gate) * up)),
    "glu_packed": FusionCase(
        ("glu_packed", "linear_bias_glu"), _chain(1, lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1])
    ),
    "bias_dropout_add": FusionCase(
        ("linear_bias_dropout_add", "bias_dropout_add"),
        _chain(2, lambda m, b, x, residual: residual + F.dropout(F.linear(x, m, b), P, True), "hh", "h"),
    ),
    "layer_norm": FusionCase(("layer_norm",), _chain(1, _layer, "h", "h")),
    "rms_norm": FusionCase(("rms_norm",), _chain(1, _library_rms, "h")),
    "written_rms_norm": FusionCase(("written_rms_norm",), _chain(1, _written_rms, "h")),
    "add_norm": FusionCase(("add_norm",), _chain(2, _add_rms, "h"), _NORMS),
    "linear_add_norm": FusionCase(("linear_add_norm",), _chain(2, _linear_add_norm, "hh", "h", "h", "h"), _NORMS),
    "dropout_add_norm": FusionCase(
        ("dropout_add_norm",),
        _chain(2, _dropout_add_norm, "hh", "h", "h", "h"),
        (*_NORMS, "linear_bias_dropout_add", "bias_dropout_add"),
    ),
    "masked_softmax": FusionCase(("scale_mask_softmax", "scale_softmax"), _softmax, scores=True),
    "attention": FusionCase(("attention",), _attention, ("scale_mask_softmax", "scale_softmax"), scores=True),
    "rope": FusionCase(("rope", "rope_partial", "rope_pairs", "rope_qk"), _rope),
    "cross_entropy": FusionCase(("cross_entropy_of_cast",), _loss, ids=True),
    "merge_gate_up": FusionCase((MERGE_GATE_UP,), _gate_and_up, off=("merge_linears",)),
    "merge_linears": FusionCase((MERGE_LINEARS,), _projections, off=("merge_linears",)),
}
