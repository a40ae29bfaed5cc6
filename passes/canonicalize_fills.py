"""Tensors of one number say their size themselves, not by the example of a value that may come to be sharded.

Before:  %o = ones_like(%x)
After:   %o = full([batch, 8], 1, dtype=...)
Legal because: nothing but shape, dtype and device of %x is read.
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
