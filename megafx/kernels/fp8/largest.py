"""A fused op and the largest magnitude of one of its results, in one call: `giving_largest(op, 0)(*args, cut, layout, axis)`.

    (*results of op(*args), amax)        amax []: `fp8_amax` of that result as a matrix, kept -1 (quantize.py)

Kernels that have the values in registers leave their largest (`facts.largest` names the results; common/maxima_triton.py),
which saves a pass over memory. Where they do not, and where the result has pads, it is the op and `fp8_amax`, one after the
other: the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megafx.ir.facts import facts_of
from megafx.kernels.common.op import direct, launcher_of, runs_triton
from megafx.kernels.common.replay import Replay, supported
from megafx.kernels.fp8.quantize import amax, real_parts


@functools.cache
def giving_largest(op: Any, result: int) -> Callable[..., tuple[Any, ...]] | None:
    """The call for an op and the number of a result; None where kernels do not leave its largest magnitude."""
    plain, launcher = direct(op), launcher_of(op)
    if plain is None or launcher is None or result not in facts_of(op).largest:
        return None
    largest = direct(amax)
    assert largest is not None

    def one_after_the_other(*args: Any) -> tuple[Any, ...]:
        *given, cut, layout, axis = args
        results = _several(plain(*given))
        return *results, largest(_matrix(results[result]), -1, cut, layout, axis)

    def launched(*args: Any) -> tuple[Any, ...]:
        from megafx.kernels.common.maxima_triton import asking
        from megafx.kernels.fp8.quantize_triton import amax as run

        *given, cut, layout, axis = args
        with asking(result) as wanted:
            results = _several(launcher(*given))
        found = wanted.joined(results[result]) if _is_whole(results[result], cut, layout, axis) else None
        return *results, run(_matrix(results[result]), -1, cut, layout, axis) if found is None else found

    repeated = Replay(launched, placed=True)

    def call(*args: Any) -> tuple[Any, ...]:
        if torch._C._len_torch_dispatch_stack() or not runs_triton(args[0]):
            return one_after_the_other(*args)
        found: tuple[Any, ...] = repeated(*args) if supported() else launched(*args)
        return found

    call.__name__ = call.__qualname__ = f"{plain.__name__}_largest"
    return call


def _several(found: Any) -> tuple[Any, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def _matrix(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _is_whole(x: Tensor, cut: int, layout: Sequence[int], axis: str) -> bool:
    """True if no rows or columns of this rank are pads."""
    matrix = _matrix(x)
    return sum(part.numel() for part in real_parts(matrix, cut, layout, axis)) == matrix.numel()
