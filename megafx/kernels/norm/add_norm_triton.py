"""Residual add and normalisation on CUDA: the kernels of norms_launch.py with the add; add_norm.py has the formulas.

A shard of the drawn tensor that is more than one run of rows (blocks along a leading dim) goes through the separate
kernels of bias_dropout_add and the norm: the same results in two passes.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megafx.kernels.common.draw import Draw, draws, runs_here
from megafx.kernels.dropout import bias_dropout_add_triton as separate
from megafx.kernels.norm.add_norm import add_norm_reference, call_backward, call_forward, check_add_norm
from megafx.kernels.norm.norms import Norm
from megafx.kernels.norm.norms_launch import WHOLE, Rows, run_backward, run_forward


def _where(x: Tensor, draw: Draw) -> Rows | None:
    """Rows of this rank's x in the whole tensor; None where they are not one run."""
    H = x.shape[-1]
    if not draws(draw.p) or x.numel() == 0:
        return WHOLE
    runs = runs_here(x.shape, draw)
    if len(runs) != 1 or runs[0].length % H:
        return None
    run = runs[0]
    if run.rows == 1:
        return Rows(1, run.global_start // H, 1, H % 8 == 0)
    return Rows(run.length // H, run.global_start // H, run.global_stride // H, H % 8 == 0)


def _forward(
    x: Tensor, bias: Tensor | None, residual: Tensor, norm: Norm, draw: Draw
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    check_add_norm(x, bias, residual, norm, draw)
    if torch.promote_types(x.dtype, residual.dtype) == torch.float64:
        return add_norm_reference(x, bias, residual, norm, draw)
    where = _where(x, draw)
    if where is None:
        return run_forward(separate.bias_dropout_add(x, bias, residual, *draw), norm)
    return run_forward(x, norm, bias, residual, draw, where)


def _backward(
    h: Tensor, grad_y: Tensor, grad_h: Tensor | None, weight: Tensor | None, mean: Tensor | None, rstd: Tensor,
    offset: float, outputs: tuple[Tensor, ...], draw: Draw,
) -> tuple[Tensor, ...]:  # fmt: skip
    where = _where(h, draw)
    if where is not None:
        run_backward(grad_y, h, weight, mean, rstd, offset, outputs, grad_h, draw, where)
        return outputs
    d, dx, dweight, dnorm_bias, dbias = outputs
    none = h.new_empty(0)
    run_backward(grad_y, h, weight, mean, rstd, offset, (d, none, dweight, dnorm_bias, none), grad_h)
    wanted = dbias.numel() > 0
    dx, made = separate.bias_dropout_add_backward(d, dx.dtype, dbias.dtype if wanted else None, *draw)
    return d, dx, dweight, dnorm_bias, made if wanted else dbias


bias_dropout_add_layer_norm = partial(call_forward, False, _forward)
bias_dropout_add_rms_norm = partial(call_forward, True, _forward)
bias_dropout_add_layer_norm_backward = partial(call_backward, False, _backward)
bias_dropout_add_rms_norm_backward = partial(call_backward, True, _backward)
