"""Attention with dropout, causal, padded, grouped: against scaled_dot_product_attention (eager), which is timed as written.

Floors are bytes of q, k, v, out (and gradients); FLOPs count the pairs that are visible, backward 2.5 times forward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kernel_cases.case import Case, randn
from torch import Tensor

import megafx.kernels.attention.attention  # noqa: F401  registers the op

BF16_BYTES = 2


def _case(
    name: str, b: int, h: int, n: int, s: int, d: int, *, p: float = 0.0, padded: bool = False, headline: bool = False
) -> Case:
    """Causal; padded: a quarter of the first row's keys is padding."""

    def inputs() -> tuple[Tensor | None, ...]:
        q, k, v = (randn(b, x, s, d) for x in (h, n, n))
        mask = torch.ones(b, s, dtype=torch.bool, device=q.device)
        mask[0, -s // 4 :] = False
        return q, k, v, mask if padded else None, torch.tensor(1234, device=q.device)

    def ours(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor) -> Tensor:
        return torch.ops.megafx.attention(
            q, k, v, mask, None, None, None, seed, d**-0.5, True, 0, 0.0, 0, p, 0, -1, [], "tp"
        )

    def library(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor) -> Tensor:
        if mask is None:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=h != n)
        k, v = (x.repeat_interleave(h // n, 1) for x in (k, v))  # with a mask, the fused kernels take no groups
        causal = torch.ones(s, s, dtype=torch.bool, device=q.device).tril()
        return F.scaled_dot_product_attention(q, k, v, causal & mask[:, None, None], dropout_p=p)

    rows = b * s * d * BF16_BYTES
    forward = rows * (2 * h + 2 * n)  # q, out; k, v
    backward = rows * (4 * h + 4 * n)  # q, out, grad, dq; k, v, dk, dv
    flops = 4 * b * h * d * s * (s + 1) // 2
    return Case(
        f"attention {name} [{b},{h}{f'/{n}' if n != h else ''},{s},{d}]", inputs, ours, library, forward, backward,
        random=p > 0, forward_flops=flops, backward_flops=5 * flops // 2, headline=headline,
    )  # fmt: skip


def cases() -> list[Case]:
    return [
        _case("dropout", 4, 32, 32, 2048, 128, p=0.1, headline=True),
        _case("dropout", 32, 16, 16, 1024, 64, p=0.1, headline=True),
        _case("causal", 4, 32, 32, 2048, 128),
        _case("causal", 32, 16, 16, 1024, 64),
        _case("grouped", 4, 32, 8, 2048, 128),
        _case("padded", 4, 32, 8, 2048, 128, padded=True),
        _case("padded, dropout", 32, 16, 16, 1024, 64, p=0.1, padded=True),
        _case("dropout", 16, 12, 12, 512, 64, p=0.1),
        _case("dropout", 2, 16, 16, 4096, 80, p=0.1),
    ]
