"""The new value of a parameter that forward writes under no_grad: a leaf's memory has changed, and the gradient of what is
computed of it from there on is the leaf's own.

No sum says so: value + (parameter - parameter) is NaN where the parameter was not finite before.
"""

from __future__ import annotations

from torch import Tensor

from megafx.ir.facts import real
from megafx.kernels.common.op import define_gradient, define_op, new_like


def _reference(parameter: Tensor, value: Tensor) -> Tensor:
    if parameter.shape != value.shape or parameter.dtype != value.dtype:
        what = [f"{x.dtype} {tuple(x.shape)}" for x in (parameter, value)]
        raise ValueError(f"written_over needs a value of the parameter's shape and dtype, got {what[0]} and {what[1]}")
    return value.clone()


written_over = define_op(
    "written_over(Tensor parameter, Tensor value) -> Tensor",  # -> value
    rule="lin: +..., +... -> ...",
    samples=[(real(4, 6), real(4, 6))],
    reference=_reference,
    fake=lambda parameter, value: new_like(value),
)
define_gradient("written_over", lambda ctx, grad: (grad, None), lambda ctx, inputs, output: None)
