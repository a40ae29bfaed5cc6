"""megafx::sum_rows: sums of a few rows each, in a fixed order.

    y [U, ..], table int64 [Q, m] -> [Q, ..]: row q is the sum of the rows table_(q, 0), .., table_(q, m-1); -1 names none

Sums in fp32 (fp64 of fp64), rounded once. No gradient: what combines rows (dispatch_rows.py) has its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafx.kernels.common.op import define_op, direct, wide


def sum_rows(y: Tensor, table: Tensor) -> Tensor:
    none = y.new_zeros(1, *y.shape[1:])
    return torch.cat([y, none])[table].to(wide(y.dtype)).sum(1).to(y.dtype)


_op = define_op(  # without a rule: no graph has it
    "sum_rows(Tensor y, Tensor table) -> Tensor",
    reference=sum_rows,
    triton="experts.sum_rows_triton:sum_rows",
    fake=lambda y, table: y.new_empty(table.shape[0], *y.shape[1:]),
    ends=True,
)
_called = direct(_op)
assert _called is not None
sum_of_rows = _called
