"""The parts of cross entropy, in Triton where that runs and else in plain torch. cross_entropy.py has formulas and ops."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megafx.kernels.common.op import runs_triton
from megafx.kernels.loss.cross_entropy_reference import (
    check_shapes,
    check_targets,
    combine,
    ignored_tokens,
    local_stats,
    loss_of,
    norm_of,
    plain_gradient,
)
from megafx.placements.types import Piece


def _kernels() -> Any:
    return importlib.import_module(f"{__package__}.cross_entropy_triton")


def logits_gradient(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    norm: Tensor,
    ignore_index: int,
    label_smoothing: float,
    pieces: Sequence[Piece],
    classes: int,
    out: Tensor | None = None,
    lse_grad: Tensor | None = None,
) -> Tensor:
    """As `plain_gradient`."""
    options = (ignore_index, label_smoothing)
    if runs_triton(logits) and len(pieces) == 1:
        return _kernels().gradient(grad, logits, target, norm, *options, pieces[0], classes, out, lse_grad)
    return plain_gradient(grad, logits, target, norm, *options, pieces, classes, out, lse_grad)


def token_losses(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    check_shapes(logits, target, label_smoothing)
    classes = logits.shape[1]
    if runs_triton(logits):
        return _kernels().forward(logits, target, ignore_index, label_smoothing)
    check_targets(target, ignore_index, classes)
    stats = local_stats(logits, target, [Piece(0, 0, classes)])
    return loss_of(stats, ignored_tokens(target, ignore_index), label_smoothing, classes), norm_of(stats)


def rank_statistics(logits: Tensor, target: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """[T, 4] of this rank's classes."""
    check_shapes(logits, target, 0.0)
    if runs_triton(logits) and len(pieces) == 1:
        return _kernels().stats(logits, target, pieces[0])
    return local_stats(logits, target, pieces)


def loss_of_ranks(target: Tensor, all_stats: Tensor, ignore_index: int, label_smoothing: float, classes: int) -> Tensor:
    """all_stats [t, T, 4] -> loss [T] of the whole vocabulary."""
    if runs_triton(all_stats):
        return _kernels().combine(all_stats, target, ignore_index, label_smoothing, classes, True)[0]
    check_targets(target, ignore_index, classes)
    return loss_of(combine(all_stats), ignored_tokens(target, ignore_index), label_smoothing, classes)


def norm_of_ranks(target: Tensor, all_stats: Tensor, ignore_index: int, label_smoothing: float, classes: int) -> Tensor:
    """all_stats [t, T, 4] -> norm [T, 2] of the whole vocabulary."""
    if runs_triton(all_stats):
        return _kernels().combine(all_stats, target, ignore_index, label_smoothing, classes, False)[1]
    return norm_of(combine(all_stats))
