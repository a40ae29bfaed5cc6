"""Bias + activation: [T, F] bf16 and its bias; forward reads x and writes y, backward reads x and dy and writes dx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from kernel_cases.case import DECODE_ROWS, HIDDEN, Case, randn, rows_for
from torch import Tensor

import megafx.kernels.activation.activation  # noqa: F401  registers the op

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda u: F.gelu(u, approximate="tanh"),
    "relu2": lambda u: F.relu(u).square(),
}


def _megatron() -> Callable[..., Any]:
    from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl

    return bias_gelu_impl


def _case(act: str, rows: int, hidden: int, headline: bool = False) -> Case:
    size = 2 * rows * hidden
    return Case(
        f"bias_{act} {rows}x{hidden}",
        lambda: (randn(rows, hidden), randn(hidden)),
        lambda x, b: torch.ops.megafx.bias_act(x, b, act),
        lambda x, b: PLAIN[act](x + b),
        2 * size + 2 * hidden,
        3 * size + 4 * hidden,
        {"megatron": _megatron} if act == "gelu_tanh" else {},
        headline=headline,
    )


def cases() -> list[Case]:
    found = [_case("gelu_tanh", 8192, 16384, True), _case("gelu", 8192, 16384, True)]
    found += [_case("gelu", rows_for(h), h) for h in HIDDEN]
    found += [_case("relu2", rows_for(4096), 4096), _case("gelu_tanh", rows_for(3072), 3072)]
    return found + [_case("gelu", rows, 16384) for rows in DECODE_ROWS]
