"""Scale + mask + softmax of scores [b, n, s, t], bf16.

Bytes: what a row cannot see need not be read (a causal row sees half), everything is written: with N bytes of scores
1.5 N and 2 N (y and dy half, dx whole) under causality, with a key padding of which a share f is visible (1 + f) N and
(1 + 2 f) N.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from kernel_cases.case import DEVICE, Case, randn
from torch import Tensor

import megafx.kernels.attention.masked_softmax  # noqa: F401  registers the ops

SCALE = 1 / math.sqrt(128)
SEED = 1234


def _ours(x: Tensor, mask: Tensor | None, causal: bool, fill: float, p: float) -> Tensor:
    seed = torch.full((), SEED, dtype=torch.int64, device=x.device) if p else None
    return torch.ops.megafx.scale_mask_softmax(x, mask, SCALE, causal, 0, fill, seed, p, 0, -1, [], "tp")


def _eager(x: Tensor, mask: Tensor | None, causal: bool, fill: float, p: float) -> Tensor:
    z = x.float() * SCALE
    if mask is not None:
        z = z.masked_fill(mask, fill)
    if causal:
        z = z.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1), fill)
    return torch.nn.functional.dropout(torch.softmax(z, -1).to(x.dtype), p)


def _megatron(causal: bool) -> Any:
    def load() -> Any:
        from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.utils import attention_mask_func

        kind = AttnMaskType.causal if causal else AttnMaskType.padding
        softmax = FusedScaleMaskSoftmax(False, True, kind, True, attention_mask_func, True, SCALE)
        return lambda x, mask: softmax(x, mask)

    return load


def _case(
    b: int, n: int, s: int, t: int, causal: bool, padded: bool, fill: float, p: float = 0.0, headline: bool = False
) -> Case:
    size = 2 * b * n * s * t
    lengths = [t, t * 3 // 4, t // 2, t - 7][:b] if padded else [t]
    pairs = sum(sum(min(k, q + 1 + t - s) if causal else k for q in range(s)) for k in lengths)
    seen = pairs / (len(lengths) * s * t)

    def inputs() -> tuple[Any, ...]:
        x = randn(b, n, s, t, scale=8.0)
        if not padded:
            return (x, None)
        ends = torch.tensor(lengths * (b // len(lengths)), device=DEVICE)
        return (x, (torch.arange(t, device=DEVICE)[None] >= ends[:, None])[:, None, None])

    kind = ("causal" if causal else "") + ("+" if causal and padded else "") + ("padding" if padded else "")
    return Case(
        f"softmax {kind or 'plain'} {b}x{n}x{s}x{t}" + (f" p={p}" if p else ""),
        inputs,
        lambda x, mask: _ours(x, mask, causal, fill, p),
        lambda x, mask: _eager(x, mask, causal, fill, p),
        int((1 + seen) * size),
        int((1 + 2 * seen) * size),
        {"megatron": _megatron(causal)} if headline and causal != padded else {},
        random=p > 0,
        headline=headline,
    )


def cases() -> list[Case]:
    inf = float("-inf")
    return [
        _case(4, 32, 2048, 2048, True, False, inf, headline=True),
        _case(4, 32, 2048, 2048, False, True, -10000.0, headline=True),
        _case(4, 32, 2048, 2048, True, True, -10000.0),
        _case(4, 32, 2048, 2048, False, False, inf),
        _case(4, 32, 2048, 2048, True, False, inf, 0.1),
        _case(8, 16, 1024, 1024, True, False, inf, 0.1),
        _case(32, 12, 512, 512, False, False, inf, 0.1),
        _case(4, 16, 1000, 1000, True, False, inf),
        _case(4, 16, 1001, 1001, True, False, inf),
        _case(1, 16, 4096, 4096, True, False, inf),
        _case(1, 2, 16384, 16384, True, False, inf),
        _case(64, 32, 1, 2048, False, False, inf),
    ]
