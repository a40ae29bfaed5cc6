"""Gated linear units: Y = [T, F] bf16; forward moves 3 Y, backward 5 Y, with gate and up apart or in one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from kernel_cases.case import DECODE_ROWS, HIDDEN, Case, randn, rows_for

import megafx.kernels.activation.activation  # noqa: F401  registers the ops

PLAIN: dict[str, Callable[..., Any]] = {"silu": F.silu, "gelu_tanh": lambda u: F.gelu(u, approximate="tanh")}


def _liger(act: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        if act == "silu":
            from liger_kernel.ops.swiglu import LigerSiLUMulFunction as function
        else:
            from liger_kernel.ops.geglu import LigerGELUMulFunction as function
        # Its backward writes the gradients over gate and up: values of repeated calls are wrong, times are not.
        return function.apply

    return load


def _megatron() -> Callable[..., Any]:
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    return lambda x: bias_swiglu_impl(x, None)


def _apart(act: str, rows: int, width: int, headline: bool = False) -> Case:
    size = 2 * rows * width
    return Case(
        f"glu_{act} {rows}x{width}",
        lambda: (randn(rows, width), randn(rows, width)),
        lambda gate, up: torch.ops.megafx.glu(gate, up, act),
        lambda gate, up: PLAIN[act](gate) * up,
        3 * size,
        5 * size,
        {"liger": _liger(act)},
        headline=headline,
    )


def _packed(act: str, rows: int, width: int, bias: bool, headline: bool = False) -> Case:
    size = 2 * rows * width

    def eager(x: Any, b: Any = None) -> Any:
        gate, up = (x if b is None else x + b).chunk(2, -1)
        return PLAIN[act](gate) * up

    return Case(
        f"glu_packed_{act}{'_bias' if bias else ''} {rows}x{width}",
        lambda: (randn(rows, 2 * width), randn(2 * width)) if bias else (randn(rows, 2 * width),),
        lambda x, b=None: torch.ops.megafx.glu_packed(x, b, act),
        eager,
        3 * size + (4 * width if bias else 0),
        5 * size + (8 * width if bias else 0),
        {"megatron": _megatron} if act == "silu" and not bias else {},
        headline=headline,
    )


def cases() -> list[Case]:
    found = [_apart("silu", 8192, 14336, True), _packed("silu", 8192, 14336, False, True)]
    found += [_apart("gelu_tanh", 8192, 14336), _packed("silu", 8192, 14336, True)]
    found += [_apart("silu", rows_for(h), h) for h in HIDDEN]
    return found + [_packed("silu", rows, 14336, False) for rows in DECODE_ROWS]
