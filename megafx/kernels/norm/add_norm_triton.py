"""Residual add and normalisation on CUDA: the kernels of kernels/norm/norms_launch.py with the add; add_norm.py has
the formulas.

A shard of the drawn tensor that is more than one run of rows (blocks along a leading dim) goes through the separate
kernels of bias_dropout_add and the norm: the same results in two passes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafx.kernels.common import philox
from megafx.kernels.dropout import bias_dropout_add_triton as separate
from megafx.kernels.dropout.bias_dropout_add import draws, runs_here
from megafx.kernels.norm import add_norm as reference
from megafx.kernels.norm.add_norm import check_add_norm, empty_gradients
from megafx.kernels.norm.norms_launch import WHOLE, Rows, run_backward, run_forward


def _where(x: Tensor, p: float, shard_dim: int, layout: list[int], axis: str) -> Rows | None:
    """Rows of this rank's x in the whole tensor; None where they are not one run."""
    H = x.shape[-1]
    if not draws(p) or x.numel() == 0:
        return WHOLE
    runs = runs_here(x.shape, shard_dim, layout, axis)
    if len(runs) != 1 or runs[0].length % H:
        return None
    run = runs[0]
    if run.rows == 1:
        return Rows(1, run.global_start // H, 1, H % 8 == 0)
    return Rows(run.length // H, run.global_start // H, run.global_stride // H, H % 8 == 0)


def _drawing(p: float, op_id: int) -> tuple[int, float, int]:
    return philox.threshold(p), separate.factor_of(p), op_id


def _forward(x, bias, residual, vectors, eps, offset, rms, drawing):
    check_add_norm(x, bias, residual, vectors, *drawing[:3])
    if torch.promote_types(x.dtype, residual.dtype) == torch.float64:
        return reference.add_norm_reference(x, bias, residual, vectors, eps, offset, rms, drawing)
    seed, p, op_id, *place = drawing
    where = _where(x, p, *place)
    if where is None:
        h = separate.bias_dropout_add(x, bias, residual, *drawing)
        return run_forward(h, vectors, eps, offset, rms)
    return run_forward(
        x,
        vectors,
        eps,
        offset,
        rms,
        bias=bias,
        residual=residual,
        seed=seed,
        drawing=_drawing(p, op_id),
        where=where,
    )


def _backward(h, grad_y, grad_h, weight, mean, rstd, offset, wanted, dtype, bias_dtype, drawing):
    seed, p, op_id, *place = drawing
    outputs = empty_gradients(h, weight, wanted, dtype, bias_dtype, p)
    where = _where(h, p, *place)
    if where is not None:
        drawn = _drawing(p, op_id)
        run_backward(
            grad_y, h, weight, mean, rstd, offset, outputs, grad_h=grad_h, seed=seed, drawing=drawn, where=where
        )
        return outputs
    d, dx, dweight, dnorm_bias, dbias = outputs
    none = h.new_empty(0)
    run_backward(grad_y, h, weight, mean, rstd, offset, (d, none, dweight, dnorm_bias, none), grad_h=grad_h)
    if bias_dtype is None:
        dx = separate.dropout_add_backward(d, dtype, *drawing)
    else:
        dx, dbias = separate.bias_dropout_add_backward(d, dtype, bias_dtype, *drawing)
    return d, dx, dweight, dnorm_bias, dbias


def bias_dropout_add_layer_norm(x, bias, residual, weight, norm_bias, eps, *drawing):
    return _forward(x, bias, residual, (weight, norm_bias), eps, 0.0, False, drawing)


def bias_dropout_add_layer_norm_backward(
    h, grad_y, grad_h, weight, mean, rstd, want_weight, want_norm_bias, dtype, bias_dtype, *drawing
):
    wanted = want_weight, want_norm_bias
    return _backward(h, grad_y, grad_h, weight, mean, rstd, 0.0, wanted, dtype, bias_dtype, drawing)


def bias_dropout_add_rms_norm(x, bias, residual, weight, eps, offset, *drawing):
    h, y, _, rstd = _forward(x, bias, residual, (weight, None), eps, offset, True, drawing)
    return h, y, rstd


def bias_dropout_add_rms_norm_backward(
    h, grad_y, grad_h, weight, rstd, offset, want_weight, dtype, bias_dtype, *drawing
):
    wanted = want_weight, False
    outputs = _backward(h, grad_y, grad_h, weight, None, rstd, offset, wanted, dtype, bias_dtype, drawing)
    return (*outputs[:3], outputs[4])
