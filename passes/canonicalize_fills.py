"""New tensors say size and dtype themselves: not by the example of a value that may come to be sharded, nor of the process.

Before:  %o = ones_like(%x); %m = full([], -1e308)
After:   %o = full([batch, 8], 1, dtype=...); %m = full([], -1e308, dtype=float64)
Legal because: nothing but shape, dtype and device of %x is read; torch.get_default_dtype() when the graph runs is no part of
the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.ir import VAL
from megafx.passes.canonicalize_common import Editor, argument, respell

aten = torch.ops.aten
_FILLS: dict[Any, int] = {aten.zeros_like.default: 0, aten.ones_like.default: 1}


def like_to_full(editor: Editor, node: fx.Node) -> bool:
    """zeros_like, ones_like and full_like -> full."""
    if node.target not in _FILLS and node.target is not aten.full_like.default:
        return False
    value = node.meta[VAL]
    if value.layout != torch.strided:
        return False
    number = argument(node, "fill_value") if node.target is aten.full_like.default else _FILLS[node.target]
    options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    return respell(node, aten.full.default, (editor.shape(value), number), options)


_MADE = frozenset({aten.full, aten.zeros, aten.ones, aten.arange, aten.linspace, aten.scalar_tensor, aten.eye})


def dtype_of_the_capture(editor: Editor, node: fx.Node) -> bool:
    """full, zeros, arange, ... of the default dtype name it."""
    if getattr(node.target, "overloadpacket", None) not in _MADE or node.kwargs.get("dtype") is not None:
        return False
    value = node.meta[VAL]
    if not value.is_floating_point():
        return False
    return respell(node, node.target, node.args, {**node.kwargs, "dtype": value.dtype})
