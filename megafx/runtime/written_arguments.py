"""Tensors of a call that forward writes into in place: `ids[:, 0] = bos`, `x.mul_(2)`, `cache[:, pos] = k`.

A graph returns their new values, which are copied into the caller's tensors after the call (`give_back` of
capture/libraries/caches.py). So a write into one is seen in another that shares its memory in eager mode, and would not be seen
by a graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megafx.errors import UsageError
from megafx.ir.call_spec import user_name
from megafx.ir.program import Input
from megafx.runtime.keys import Call


def written_arguments(
    written: Sequence[str], call: Call, inputs: Sequence[Input], values: Sequence[Any]
) -> Mapping[str, torch.Tensor]:
    """The caller's tensors of these names. inputs, values: of the graph that serves the call.

    Raises UsageError where one of them shares memory with another input.
    """
    if not written:
        return {}
    given = dict(zip(call.names(), call.leaves, strict=True))
    given |= {f"state[{name}]": value for name, value in (call.state or {}).items()}
    stored = {spec.name: x for spec, x in zip(inputs, values, strict=True) if spec.kind in ("param", "buffer")}
    plain = {n: x for n, x in {**stored, **given}.items() if type(x) in (torch.Tensor, nn.Parameter)}
    spans = {name: _span(x) for name, x in plain.items()}
    for name in written:
        memory, first, last = spans[name]
        for other, (theirs, begin, end) in spans.items():
            if other != name and theirs == memory and begin < last and first < end:
                own = user_name(name)
                raise UsageError(
                    f"forward writes into its argument '{own}', which shares memory with '{user_name(other)}'",
                    fix=f"pass a copy of it ('{own}' = tensor.clone()), or tensors that share no memory",
                )
    return {name: given[name] for name in written}


def _span(x: torch.Tensor) -> tuple[int, int, int]:
    """(the memory that a tensor is in, the first byte of it there, the byte behind its last one)."""
    extent = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    size, first = x.element_size(), int(x.storage_offset())
    return x.untyped_storage().data_ptr(), first * size, (first + extent) * size
