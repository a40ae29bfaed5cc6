"""Rotary embedding of q and k, Llama's layout: [b, n, s, d] as a transpose of [b, s, n, d]; each read and written once."""

from __future__ import annotations

from typing import Any

import torch
from kernel_cases.case import BF16, DEVICE, Case, randn
from torch import Tensor

import megafx.kernels.attention.rope  # noqa: F401  registers the ops


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1] // 2
    head, rest = x[..., : 2 * half], x[..., 2 * half :]
    y = head * cos + torch.cat((-head[..., half:], head[..., :half]), -1) * sin
    return torch.cat((y, rest), -1) if rest.shape[-1] else y


def _eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _ours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.megafx.rope_qk(q.transpose(1, 2), k.transpose(1, 2), cos, sin, False, False)


def _liger() -> Any:
    from liger_kernel.transformers.functional import liger_rope

    return lambda q, k, cos, sin: liger_rope(q.transpose(1, 2), k.transpose(1, 2), cos[:, 0], sin[:, 0])


def _tables(s: int, d: int) -> tuple[Tensor, Tensor]:
    angle = torch.outer(torch.arange(s, device=DEVICE), 1e4 ** -torch.linspace(0, 1, d // 2, device=DEVICE))
    both = torch.cat((angle, angle), -1)[None, None]
    return both.cos().to(BF16), both.sin().to(BF16)


def _case(b: int, s: int, n: int, m: int, d: int, rotated: int, headline: bool = False) -> Case:
    size = 2 * b * s * (n + m) * d
    return Case(
        f"rope b{b} s{s} heads {n}/{m} d{d}" + (f" of {rotated}" if rotated != d else ""),
        lambda: (randn(b, s, n, d), randn(b, s, m, d), *_tables(s, rotated)),
        _ours,
        _eager,
        2 * size,
        2 * size,
        {"liger": _liger} if headline else {},
        headline=headline,
    )


def cases() -> list[Case]:
    return [
        _case(4, 2048, 32, 32, 128, 128, True),
        _case(4, 2048, 32, 8, 128, 128),
        _case(4, 2048, 64, 8, 64, 64),
        _case(4, 2048, 32, 32, 80, 32),
        _case(4, 2048, 16, 16, 256, 64),
        _case(8, 2048, 32, 1, 96, 96),
        _case(64, 1, 32, 8, 128, 128),
    ]
