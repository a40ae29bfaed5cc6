"""LayerNorm and RMSNorm, alone and after bias + dropout + add or a plain add, [T, H] bf16.

Bytes in tensors of [T, H]: a norm reads x and writes y, and reads x and dy and writes dx; with the sum x, residual, h, y
forward, and h, dh, dy, dresidual backward (dx too, where there is dropout).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from kernel_cases.case import DECODE_ROWS, DEVICE, HIDDEN, Case, randn, rows_for
from torch import Tensor

import megafx.kernels.norm.add_norm
import megafx.kernels.norm.norms  # noqa: F401  registers the ops

EPS, P = 1e-5, 0.1
ops = torch.ops.megafx


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _liger(name: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return {
            "layer_norm": lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, EPS),
            "rms_norm": lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False),
            "add_rms_norm": lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, EPS, 0.0, "llama", False)[::-1],
        }[name]

    return load


def _case(kind: str, rows: int, hidden: int, headline: bool = False) -> Case:
    def big() -> Tensor:
        return randn(rows, hidden)

    def small() -> Tensor:
        return randn(hidden)

    peers = {"liger": _liger(kind)} if headline and kind != "bias_dropout_add_layer_norm" else {}
    inputs: Callable[[], tuple[Any, ...]]
    ours, eager, forward, backward = {
        "layer_norm": (
            lambda x, w, b: ops.layer_norm(x, w, b, EPS),
            lambda x, w, b: F.layer_norm(x, (hidden,), w, b, EPS),
            2,
            3,
        ),
        "rms_norm": (lambda x, w: ops.rms_norm(x, w, EPS, 0.0), _rms, 2, 3),
        "add_rms_norm": (
            lambda x, r, w: ops.bias_dropout_add_rms_norm(x, None, r, w, EPS, 0.0, None, 0.0, 0, -1, [], "tp")[:2],
            lambda x, r, w: (x + r, _rms(x + r, w)),
            4,
            4,
        ),
        "bias_dropout_add_layer_norm": (
            lambda x, bias, r, w, b, seed: ops.bias_dropout_add_layer_norm(
                x, bias, r, w, b, EPS, seed, P, 0, -1, [], "tp"
            )[:2],
            lambda x, bias, r, w, b, _: (h := r + F.dropout(x + bias, P, True), F.layer_norm(h, (hidden,), w, b, EPS)),
            4,
            5,
        ),
    }[kind]
    inputs = {
        "layer_norm": lambda: (big(), small(), small()),
        "rms_norm": lambda: (big(), small()),
        "add_rms_norm": lambda: (big(), big(), small()),
        "bias_dropout_add_layer_norm": lambda: (
            *(big(), small(), big(), small(), small()),
            torch.tensor(1234, device=DEVICE),
        ),
    }[kind]
    size, random = 2 * rows * hidden, kind.startswith("bias_dropout")
    name = f"{kind} {rows}x{hidden}"
    return Case(name, inputs, ours, eager, forward * size, backward * size, peers, random, headline=headline)


def cases() -> list[Case]:
    kinds = ("layer_norm", "rms_norm", "add_rms_norm", "bias_dropout_add_layer_norm")
    found = [_case(kind, 8192, 8192, True) for kind in kinds]
    found += [_case(kind, rows_for(h), h) for kind in kinds for h in HIDDEN if h != 8192]
    return found + [_case(kind, rows, 8192) for kind in kinds for rows in DECODE_ROWS]
