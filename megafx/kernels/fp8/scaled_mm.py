"""megafx::scaled_mm: the product of two matrices of FP8 with their scales.

    a [m, k], b [n, k] uint8: bytes of FP8 (quantize.py);  scale_a [] or [m], scale_b [] or [n]: fp32 (fp64)
    y[i, j] = scale_a[i] scale_b[j] sum over l of a[i, l] b[j, l]        [m, n] in `dtype`

Both operands have the summed dim innermost, which is what Hopper's FP8 instructions read. Products of two FP8 numbers are exact
in fp32, sums are fp32 (fp64 where the result is), and the result is rounded once. A bias is added after that.

Elsewhere than on CUDA: the plain torch below. CUDA: torch._scaled_mm, without fast accumulation, which is no faster (H100,
torch 2.11, 2026-11-24). It takes k and n that 16 divides: others are padded with zeros at each call, which changes nothing but
time. A scale for each row or column has results in bf16 there: for other dtypes the product is made in fp32 with scale 1, and
scaled then.
Needs an NVIDIA GPU of compute capability 8.9 or higher.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megafx.errors import UsageError
from megafx.ir.facts import MATMUL, SampleTensor, real
from megafx.kernels.common.op import define_op, wide
from megafx.kernels.fp8.quantize import FORMATS
from megafx.rules.families import OpCall

MULTIPLE = 16  # of elements that the library's operands have
CAPABILITY = (8, 9)


def reference(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, format_a: str, format_b: str, dtype: torch.dtype
) -> Tensor:
    """The emulation: exact products of the FP8 numbers."""
    total = _numbers(a, format_a, wide(dtype)) @ _numbers(b, format_b, wide(dtype)).t()
    return _scaled(total, scale_a, scale_b).to(dtype)


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, format_a: str, format_b: str, dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The op. out: memory for the result."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"scaled_mm needs [m, k] and [n, k], got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.device.type != "cuda" or dtype == torch.float64 or not a.numel() or not b.numel():
        return _into(out, reference(a, b, scale_a, scale_b, format_a, format_b, dtype))
    _check_device(a.device)
    n, beyond = b.shape[0], -a.shape[1] % MULTIPLE
    if beyond:
        a, b = F.pad(a, (0, beyond)), F.pad(b, (0, beyond))
    if n % MULTIPLE:
        b = F.pad(b, (0, 0, 0, -n % MULTIPLE))
        scale_b = F.pad(scale_b, (0, -n % MULTIPLE), value=1.0) if scale_b.dim() else scale_b
    left, right = a.view(FORMATS[format_a]), b.view(FORMATS[format_b]).t()
    each = scale_a.dim() > 0 or scale_b.dim() > 0
    if each and dtype != torch.bfloat16:
        one = torch.ones((), device=a.device)
        total = torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=False)
        y = _scaled(total, scale_a, scale_b).to(dtype)
    else:
        if each:
            scale_a, scale_b = scale_a.expand(a.shape[0])[:, None], scale_b.expand(b.shape[0])[None, :]
            scale_a, scale_b = scale_a.contiguous(), scale_b.contiguous()
        options: dict[str, Any] = {"scale_a": scale_a, "scale_b": scale_b, "out_dtype": dtype, "use_fast_accum": False}
        if out is not None and b.shape[0] == n:
            return torch._scaled_mm(left, right, **options, out=out)
        y = torch._scaled_mm(left, right, **options)
    return _into(out, y if y.shape[1] == n else y[:, :n].contiguous())


def _into(out: Tensor | None, y: Tensor) -> Tensor:
    return y if out is None else out.copy_(y)


def _numbers(q: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """The FP8 numbers of bytes. A matrix of numbers is itself (`check_rules`)."""
    return (q.view(FORMATS[format]) if q.dtype == torch.uint8 else q).to(dtype)


def _scaled(total: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    scale_a = scale_a[:, None] if scale_a.dim() else scale_a
    return total * scale_a.to(total.dtype) * scale_b.to(total.dtype)


@functools.cache
def _check_device(device: torch.device) -> None:
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        name = f"{torch.cuda.get_device_name(device)}, of compute capability {'.'.join(map(str, found))}"
        needed = ".".join(map(str, CAPABILITY))
        raise UsageError(f"fp8 on {name}: its products need {needed}", fix="leave Config(fp8=None), or use another GPU")


def _rule(call: OpCall) -> str:
    rows, columns = ("m" if len(call.get("scale_a").shape) else ""), ("n" if len(call.get("scale_b").shape) else "")
    return f"lin[0,1]: m k, n k, ~{rows}, ~{columns} -> m n"


_SCALE = functools.partial(SampleTensor, kind="n", low=1)
mm = define_op(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, str format_a, str format_b, ScalarType dtype) -> Tensor",
    rule=_rule,
    samples=[
        (real(4, 6), real(6, 6), _SCALE(()), _SCALE(()), "e4m3", "e4m3", torch.float64),
        (real(4, 6), real(6, 6), _SCALE((4,)), _SCALE((6,)), "e5m2", "e4m3", torch.float64),
    ],
    cost=MATMUL,
    terms=lambda a, b, *_: a[1],
    reference=scaled_mm,
    ends=True,
    fake=lambda a, b, scale_a, scale_b, format_a, format_b, dtype: a.new_empty((a.shape[0], b.shape[0]), dtype=dtype),
)
