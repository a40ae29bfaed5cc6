"""FP8: the largest magnitude of a matrix, its cast with scales, and the transposed copy that products along the other dim need.

    amax(x [m, k], kept)   largest |x|: of all (kept -1) -> [], of each row (0) -> [m], of each column (1) -> [k]
    scale                  s = amax / top, top = 448 (e4m3) or 57344 (e5m2); a power of two: the next one, from s on
    restored(q, s)         q s in another dtype
    quantize(x, amax)      q = fp8(clamp(x * (1 / s), -top, top)); x is about q s

x bf16, fp16, fp32 or fp64; amax and scales are fp32 (fp64 of fp64). q is uint8 in the graph, the bytes of float8_e4m3fn or
float8_e5m2: every backend gathers, copies and compares bytes. Products read them as FP8 (scaled_mm.py).

An all-zero tensor (row, column) has scale 1; an amax below 2^-100 counts as that. Numbers that are not finite are never lost.
A NaN has the code of NaN, and makes its amax NaN, by which every product of the tensor (row, column) is NaN. An amax of
infinity makes zeros of finite elements and a scale of infinity, so that the products are NaN too.

amax and q are two ops, so that the largest over ranks can be taken between them: a factor that is cut gives M, which a
transition M -> R makes whole. Scales are then the same on any number of ranks, and so is q, to the bit.
cut, layout: the dim of x that ranks of `axis` share, with pads that hold anything (`Layout.flat()`); -1: no pads, or zeros.

CPU and fp64: the plain torch below. CUDA: quantize_triton.py, the same bits. Micikevicius et al. 2022 (2209.05433).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megafx.ir.facts import SampleTensor, ids, real
from megafx.kernels.common.op import define_op, wide
from megafx.ops.axes import axis_context
from megafx.placements.types import Layout
from megafx.rules.families import OpCall, RuleText

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
TOP = {"e4m3": 448.0, "e5m2": 57344.0}
LEAST = 2.0**-100  # an amax below it counts as this: 1 / s stays finite

# -- amax


def real_parts(x: Tensor, cut: int, layout: Sequence[int], axis: str) -> list[Tensor]:
    """The parts of this rank's x that are no pads."""
    if cut < 0:
        return [x]
    context = axis_context(axis)
    pieces = Layout.from_flat(layout).pieces(context.rank, context.size)
    return [x.narrow(cut, piece.local_start, piece.length) for piece in pieces]


def amax_shape(x: Tensor, kept: int) -> list[Any]:
    return [] if kept < 0 else [x.shape[kept]]


def amax_reference(x: Tensor, kept: int, cut: int, layout: Sequence[int], axis: str) -> Tensor:
    _check(x, "fp8_amax")
    dims = [d for d in (0, 1) if d != kept]
    found = x.new_zeros(amax_shape(x, kept))
    for part in real_parts(x, cut, layout, axis):
        if part.numel():
            found = torch.maximum(found, part.abs().amax(dims))
    return found.to(wide(x.dtype))


def _check(x: Tensor, name: str) -> None:
    if x.dim() != 2 or not x.is_floating_point():
        raise TypeError(f"{name} needs a floating-point matrix, got {x.dtype} {tuple(x.shape)}")


def _amax_rule(call: OpCall) -> str:
    return f"max: m k -> {('', 'm', 'k')[call.get('kept') + 1]}"


amax = define_op(
    "fp8_amax(Tensor x, int kept, int cut, SymInt[] layout, str axis) -> Tensor",
    rule=_amax_rule,
    samples=[(real(4, 6), kept, -1, [], "tp") for kept in (-1, 0, 1)],
    reference=amax_reference,
    triton="fp8.quantize_triton:amax",
    ends=True,
    fake=lambda x, kept, cut, layout, axis: x.new_empty(amax_shape(x, kept), dtype=wide(x.dtype)),
)

# -- quantize


def scales(largest: Tensor, format: str, power_of_two: bool) -> Tensor:
    """amax -> s, elementwise."""
    # by a number, CUDA multiplies
    s = torch.where(largest < LEAST, LEAST, largest) / torch.full_like(largest, TOP[format])
    if power_of_two:
        mantissa, exponent = torch.frexp(s)  # in [0.5, 1)
        above = torch.ldexp(torch.ones_like(s), torch.where(mantissa == 0.5, exponent - 1, exponent))
        s = torch.where(s.isfinite(), above, s)
    return torch.where(largest == 0, 1.0, s)


def quantize_reference(
    x: Tensor, largest: Tensor, kept: int, format: str, power_of_two: bool, plain: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, "fp8_quantize")
    s = scales(largest.to(wide(x.dtype)), format, power_of_two)
    inverse = (1.0 / s)[:, None] if kept == 0 else 1.0 / s
    q = (x.to(wide(x.dtype)) * inverse).clamp(-TOP[format], TOP[format]).to(FORMATS[format]).view(torch.uint8)
    none = q.new_empty((0, 0))
    return q if plain else none, q.t().contiguous() if transposed else none, s


def _quantize_fake(
    x: Tensor, largest: Tensor, kept: int, format: str, power_of_two: bool, plain: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    m, k = x.shape
    q = x.new_empty((m, k) if plain else (0, 0), dtype=torch.uint8)
    qt = x.new_empty((k, m) if transposed else (0, 0), dtype=torch.uint8)
    return q, qt, largest.new_empty(largest.shape)


def _quantize_rule(call: OpCall) -> RuleText:
    of = ("", "m", "k")[call.get("kept") + 1]
    results = "m k" if call.get("plain") else "*", "k m" if call.get("transposed") else "*"
    return RuleText(f"nl: m k, ~{of} -> {results[0]}; {results[1]}; {of}", reads={2: (1,)})


_LARGEST = functools.partial(SampleTensor, kind="n", low=1)
quantize = define_op(
    "fp8_quantize(Tensor x, Tensor largest, int kept, str format, bool power_of_two, bool plain, bool transposed)"
    " -> (Tensor q, Tensor qt, Tensor scale)",
    rule=_quantize_rule,
    samples=[
        (real(4, 6), _LARGEST(()), -1, "e4m3", False, True, True),
        (real(4, 6), _LARGEST((4,)), 0, "e4m3", True, True, False),
        (real(4, 6), _LARGEST((6,)), 1, "e5m2", False, False, True),
    ],
    reference=quantize_reference,
    triton="fp8.quantize_triton:quantize",
    ends=True,
    fake=_quantize_fake,
)

# -- both: of each row and of each column, in one pass over x


def amax_both_reference(x: Tensor, cut: int, layout: Sequence[int], axis: str) -> tuple[Tensor, Tensor]:
    """cut, layout, axis: of the largest of each column, as above; rows have no pads, or zeros."""
    return amax_reference(x, 0, -1, [], axis), amax_reference(x, 1, cut, layout, axis)


amax_both = define_op(
    "fp8_amax_both(Tensor x, int cut, SymInt[] layout, str axis) -> (Tensor rows, Tensor columns)",
    rule="max: m k -> m; k",
    samples=[(real(4, 6), -1, [], "tp")],
    reference=amax_both_reference,
    triton="fp8.quantize_triton:amax_both",
    ends=True,
    fake=lambda x, cut, layout, axis: tuple(x.new_empty(n, dtype=wide(x.dtype)) for n in x.shape),
)


def quantize_both_reference(
    x: Tensor, rows: Tensor, columns: Tensor, format: str, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q by the scales of rows, qt [k, m] by those of columns, and these."""
    q, _, scale = quantize_reference(x, rows, 0, format, power_of_two, True, False)
    _, qt, column_scale = quantize_reference(x, columns, 1, format, power_of_two, False, True)
    return q, qt, scale, column_scale


def _both_fake(x: Tensor, rows: Tensor, columns: Tensor, format: str, power_of_two: bool) -> tuple[Tensor, ...]:
    q, qt, scale = _quantize_fake(x, rows, 0, format, power_of_two, True, True)
    return q, qt, scale, columns.new_empty(columns.shape)


quantize_both = define_op(
    "fp8_quantize_both(Tensor x, Tensor rows, Tensor columns, str format, bool power_of_two)"
    " -> (Tensor q, Tensor qt, Tensor scale, Tensor column_scale)",
    rule=lambda call: RuleText("nl: m k, ~m, ~k -> m k; k m; m; k", reads={2: (1,), 3: (2,)}),
    samples=[(real(4, 6), _LARGEST((4,)), _LARGEST((6,)), "e4m3", False)],
    reference=quantize_both_reference,
    triton="fp8.quantize_triton:quantize_both",
    ends=True,
    fake=_both_fake,
)

# -- back


def restored_reference(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    numbers = q.view(FORMATS["e4m3"]) if q.dtype == torch.uint8 else q  # a matrix of numbers is itself (`check_rules`)
    return (numbers.to(wide(dtype)) * scale.to(wide(dtype))).to(dtype)


restored = define_op(
    "fp8_restored(Tensor q, Tensor scale, ScalarType dtype) -> Tensor",  # q: e4m3; scale: []
    rule="lin[0]: m k, ~ -> m k",
    samples=[(real(4, 6), _LARGEST(()), torch.float64)],
    reference=restored_reference,
    triton="fp8.quantize_triton:restored",
    ends=True,
    fake=lambda q, scale, dtype: q.new_empty(q.shape, dtype=dtype),
)

# -- transposed

transposed = define_op(
    "fp8_transposed(Tensor q) -> Tensor",  # [m, k] -> [k, m], bytes
    rule="lin: m k -> k m",
    samples=[(ids(255, 4, 6),)],
    reference=lambda q: q.t().contiguous(),
    triton="fp8.quantize_triton:transposed",
    ends=True,
    fake=lambda q: q.new_empty((q.shape[1], q.shape[0])),
)
