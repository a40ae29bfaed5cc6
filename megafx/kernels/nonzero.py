"""megafx::rows: where a mask is true; the one op of a graph whose result has a size that data decides.

    mask bool [A, B, ...] -> int64 [n, dims of the mask], in row-major order; n = number of true elements

nonzero, where(mask), x[mask] and masked_select become it (passes/canonicalize/sizes.py), with indexing by its columns.
size: the name of n among the sizes of the graph (ir/data_sizes.py). The host waits for n, as it does in eager mode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafx.ir.data_sizes import size_named
from megafx.ir.facts import mask
from megafx.kernels.common.op import define_op


def rows(mask: Tensor, size: str) -> Tensor:
    return mask.nonzero()


def _fake(mask: Tensor, size: str) -> Tensor:
    return torch.empty((size_named(mask, size), mask.dim()), dtype=torch.int64, device=mask.device)


define_op(
    "rows(Tensor mask, str size) -> Tensor",
    rule="nl: ~...! -> ~r! d!",
    samples=[(mask(4, 6), "u0")],
    reference=rows,
    fake=_fake,
)
