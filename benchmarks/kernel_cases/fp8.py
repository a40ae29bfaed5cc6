"""FP8: the largest magnitude, casts with and without the transposed copy, and products, of bf16 [tokens, width].

Bytes of an element: amax reads 2; a cast reads 2 and writes 1, with the transpose 2. Products are compared with bf16's.
"""

from __future__ import annotations

from typing import Any

import torch
from kernel_cases.case import BF16, Case, randn
from torch import Tensor

import megafx.kernels.fp8.scaled_mm  # noqa: F401  registers the ops

ops = torch.ops.megafx
WHOLE = (-1, [], "tp")
KEPT = {"tensorwise": -1, "rows": 0, "columns": 1}
TOP = 448.0


def _eager_amax(x: Tensor, kept: int) -> Tensor:
    return x.abs().amax([d for d in (0, 1) if d != kept]).float()


def _amax(rows: int, width: int, kind: str, headline: bool) -> Case:
    kept = KEPT[kind]
    return Case(
        f"amax {kind} {rows}x{width}",
        lambda: (randn(rows, width, grad=False),),
        lambda x: ops.fp8_amax(x, kept, *WHOLE),
        lambda x: _eager_amax(x, kept),
        2 * rows * width,
        0,
        headline=headline,
    )


def _cast(rows: int, width: int, kind: str, plain: bool, turned: bool, headline: bool) -> Case:
    kept = KEPT[kind]

    def inputs() -> tuple[Any, ...]:
        x = randn(rows, width, grad=False)
        return x, _eager_amax(x, kept)

    def ours(x: Tensor, largest: Tensor) -> Any:
        q, qt, scale = ops.fp8_quantize(x, largest, kept, "e4m3", False, plain, turned)
        return tuple(y for y, wanted in ((q, plain), (qt, turned), (scale, True)) if wanted)

    def eager(x: Tensor, largest: Tensor) -> Any:
        scale = largest / TOP
        q = (x.float() / (scale[:, None] if kept == 0 else scale)).to(torch.float8_e4m3fn).view(torch.uint8)
        return tuple(y for y, wanted in ((q, plain), (q.t().contiguous(), turned), (scale, True)) if wanted)

    copies = " and transpose" if plain and turned else " transpose" if turned else ""
    size = (2 + plain + turned) * rows * width
    # Bytes are codes, whose difference is no error of the numbers: tests compare those.
    return Case(f"cast{copies} {kind} {rows}x{width}", inputs, ours, eager, size, 0, random=True, headline=headline)


def _product(m: int, n: int, k: int, kind: str, headline: bool) -> Case:
    def inputs() -> tuple[Any, ...]:
        made: list[Any] = []
        for rows in (m, n):
            x = randn(rows, k, grad=False)
            q, _, scale = ops.fp8_quantize(x, _eager_amax(x, KEPT[kind]), KEPT[kind], "e4m3", False, True, False)
            made += [x, q, scale]
        return tuple(made)

    def ours(a: Tensor, qa: Tensor, sa: Tensor, b: Tensor, qb: Tensor, sb: Tensor) -> Tensor:
        found: Tensor = ops.scaled_mm(qa, qb, sa, sb, "e4m3", "e4m3", BF16)
        return found

    def eager(a: Tensor, qa: Tensor, sa: Tensor, b: Tensor, qb: Tensor, sb: Tensor) -> Tensor:
        return a @ b.t()

    size, flops = m * k + n * k + 2 * m * n, 2 * m * n * k
    name = f"product {kind} {m}x{n}x{k}"
    return Case(name, inputs, ours, eager, size, 0, random=True, forward_flops=flops, headline=headline)


def cases() -> list[Case]:
    found = []
    for rows, width in ((8192, 4096), (8192, 14336), (16384, 4096), (28672, 4096)):
        first = (rows, width) == (8192, 4096)
        found += [_amax(rows, width, kind, first) for kind in KEPT]
        found += [_cast(rows, width, "tensorwise", True, True, first), _cast(rows, width, "rows", True, False, first)]
        found.append(_cast(rows, width, "columns", False, True, first))
    for m, n, k in ((8192, 6144, 4096), (8192, 28672, 4096), (8192, 4096, 14336), (28672, 4096, 8192)):
        found += [_product(m, n, k, kind, n == 28672) for kind in ("tensorwise", "rows")]
    return found
