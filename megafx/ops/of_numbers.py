"""megafx::of_numbers: a function of Python's `math` of numbers that are read from tensors.

    of_numbers("log", item(x) + 1) -> a tensor of one number, fp64 (a truth value of `isnan` and its like)

It is in captured graphs alone: where the number only leaves the graph, the call computes it on the host, by `math` itself
(passes/canonicalize/numbers.py). Elsewhere it is an error, as each number of data is that is no size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_TRUTH = ("isnan", "isinf", "isfinite", "isclose")
_library = torch.library.Library("megafx", "FRAGMENT")
_library.define("of_numbers(str function, Scalar a, Scalar? b=None) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _dtype(function: str) -> torch.dtype:
    return torch.bool if function in _TRUTH else torch.float64


def _computed(function: str, a: float, b: float | None = None) -> Tensor:
    return torch.tensor(getattr(math, function)(*([a] if b is None else [a, b])), dtype=_dtype(function))


def _fake(function: str, a: float, b: float | None = None) -> Tensor:
    return torch.empty((), dtype=_dtype(function))


_library.impl("of_numbers", _computed, "CompositeExplicitAutograd")
torch.library.register_fake("megafx::of_numbers", _fake, lib=_library)
OF_NUMBERS = torch.ops.megafx.of_numbers.default
