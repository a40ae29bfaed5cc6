"""Cross entropy from logits [T, V] bf16: forward reads them, backward reads them and writes their gradient; and of a linear
layer, whose floor is its three matrix products: the loss's own work and the gradients' scaling come on top."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from kernel_cases.case import DEVICE, Case, randn
from torch import Tensor

import megafx.kernels.loss.cross_entropy
import megafx.kernels.loss.linear_cross_entropy  # noqa: F401  registers the ops

ops = torch.ops.megafx


def _targets(tokens: int, classes: int) -> Tensor:
    return torch.randint(0, classes, (tokens,), device=DEVICE)


def _synchronises(function: Any) -> Any:
    """Marks what reads values on the host (here: how many targets count): no CUDA graph can hold it."""
    function.synchronises = True
    return function


def _liger() -> Any:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return _synchronises(lambda x, y: liger_cross_entropy(x.clone(), y))  # it writes over its input


def _liger_linear() -> Any:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return _synchronises(lambda x, w, y: liger_fused_linear_cross_entropy(x, w, y))


def _from_logits(tokens: int, classes: int, headline: bool = False) -> Case:
    size = 2 * tokens * classes
    return Case(
        f"cross_entropy {tokens}x{classes}",
        lambda: (randn(tokens, classes), _targets(tokens, classes)),
        lambda x, y: ops.cross_entropy(x, y, -100, 0.0, False).sum() / tokens,
        lambda x, y: F.cross_entropy(x.float(), y),
        size,
        2 * size,
        {"liger": _liger} if headline else {},
        headline=headline,
    )


def _linear(tokens: int, hidden: int, classes: int, headline: bool = False) -> Case:
    flops = 2 * tokens * hidden * classes
    moved = 2 * (tokens * hidden + hidden * classes)
    return Case(
        f"linear_cross_entropy {tokens}x{hidden}x{classes}",
        lambda: (randn(tokens, hidden), randn(classes, hidden, scale=0.02), _targets(tokens, classes)),
        lambda x, w, y: ops.linear_cross_entropy(x, w, None, y, -100, 0.0) / tokens,
        lambda x, w, y: F.cross_entropy(F.linear(x, w).float(), y),
        moved,
        2 * moved,
        {"liger": _liger_linear} if headline else {},
        forward_flops=3 * flops,  # gradients are made with the loss
        headline=headline,
    )


def cases() -> list[Case]:
    return [
        _from_logits(8192, 128256, True),
        _linear(8192, 4096, 128256, True),
        _from_logits(8192, 50257),
        _from_logits(8192, 32000),
        _from_logits(64, 128256),
        _linear(8192, 1024, 50257),
    ]
