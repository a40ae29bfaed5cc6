"""Bias + dropout + residual add, [T, H] bf16: forward reads x and residual and writes y; backward reads dy and writes dx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from kernel_cases.case import DECODE_ROWS, DEVICE, HIDDEN, Case, randn, rows_for

import megafx.kernels.dropout.bias_dropout_add  # noqa: F401  registers the op

P = 0.1


def _megatron() -> Callable[..., Any]:
    from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train

    return lambda x, bias, residual, _: bias_dropout_add_fused_train((x, bias), residual, P)


def _case(rows: int, hidden: int, headline: bool = False) -> Case:
    size = 2 * rows * hidden
    return Case(
        f"bias_dropout_add {rows}x{hidden}",
        lambda: (randn(rows, hidden), randn(hidden), randn(rows, hidden), torch.tensor(1234, device=DEVICE)),
        lambda x, bias, residual, seed: torch.ops.megafx.bias_dropout_add(x, bias, residual, seed, P, 0, -1, [], "tp"),
        lambda x, bias, residual, _: residual + F.dropout(x + bias, P, True),
        3 * size + 2 * hidden,
        2 * size + 2 * hidden,
        {"megatron": _megatron} if headline else {},
        random=True,
        headline=headline,
    )


def cases() -> list[Case]:
    found = [_case(8192, 8192, True), *(_case(rows_for(h), h) for h in HIDDEN if h != 8192)]
    return found + [_case(rows, 8192) for rows in DECODE_ROWS]
