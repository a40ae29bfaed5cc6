"""Largest magnitudes that a kernel leaves of what it writes, for casts to FP8 (fp8/quantize.py).

A launcher asks whether the largest of a result is wanted (`asked`), and gives its kernel a place for each program: the kernel
takes the maximum of what it has in registers (`magnitude`, `leave`), so that no pass over memory is added. `asking` joins them.

Magnitudes are the bits of fp32 without their sign, as integers: in the order of numbers, with NaN above infinity, so that no
NaN is lost. The order of maxima does not matter: the same bits each run. Rounding keeps the order too: the largest of rounded
values is the largest value, rounded (`join`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafx.kernels.common.op import launch
from megafx.kernels.common.tiles_triton import cdiv

JOINED = 1024  # partial maxima that one program joins at a time
_ROUND = {torch.float32: "", torch.bfloat16: "bf16", torch.float16: "fp16"}
_local = threading.local()


@triton.jit
def magnitude(value, inside):
    """Bits of |value| as int32, 0 outside. value fp32."""
    return tl.where(inside, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@triton.jit
def leave(largest, program, found):
    """largest: [programs] int32 OUT. found: [R, C] int32."""
    tl.store(largest + program, tl.max(tl.max(found, axis=1), axis=0))


@triton.jit
def _join(
    partial,  # [count, n] int32 IN
    out,  # [n] fp32 OUT
    count, n, ROUND: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * C + tl.arange(0, C)
    found = tl.zeros([R, C], tl.int32)
    for start in tl.range(0, count, R):
        row = start + tl.arange(0, R)[:, None]
        inside = (row < count) & (column[None, :] < n)
        found = tl.maximum(found, tl.load(partial + row.to(tl.int64) * n + column[None, :], mask=inside, other=0))
    value = tl.max(found, axis=0).to(tl.float32, bitcast=True)
    if ROUND == "bf16":
        value = value.to(tl.bfloat16).to(tl.float32)
    elif ROUND == "fp16":
        value = value.to(tl.float16).to(tl.float32)
    tl.store(out + column, value, mask=column < n)


def join(partial: Tensor, out: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """partial: [count, n] int32, or [count] -> out: [n] fp32, or []. dtype: to which the values are rounded."""
    count, n = partial.shape[0], out.numel()
    R, C = (8, 256) if partial.dim() > 1 else (JOINED, 1)
    launch(_join, (cdiv(n, C),), partial, partial, out, count, n, ROUND=_ROUND[dtype], R=R, C=C)
    return out


class Wanted:
    """The largest magnitude of one result, by number. partial: of each program, once a kernel leaves it."""

    def __init__(self, result: int) -> None:
        self.result, self.partial = result, None

    def joined(self, like: Tensor) -> Tensor | None:
        """[] fp32 of what was left, of values of the dtype of `like`; None if nothing was."""
        if self.partial is None:
            return None
        return join(self.partial, torch.empty((), dtype=torch.float32, device=like.device), like.dtype)


@contextmanager
def asking(result: int) -> Iterator[Wanted]:
    """Launchers that are called in it are asked for the largest magnitude of this result."""
    before, _local.wanted = getattr(_local, "wanted", None), Wanted(result)
    try:
        yield _local.wanted
    finally:
        _local.wanted = before


def asked(result: int, programs: int | torch.SymInt, like: Tensor) -> Tensor | None:
    """Where a launcher's kernel leaves what each program found of this result; None if nobody asks for it."""
    wanted = getattr(_local, "wanted", None)
    if wanted is None or wanted.result != result:
        return None
    wanted.partial = torch.empty((programs,), dtype=torch.int32, device=like.device)
    return wanted.partial
