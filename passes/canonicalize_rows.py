"""Leading dims that were flattened come back, so that what works on rows sees the shapes of the residual stream.

Before:  %f = reshape(%x, [b*s, h]); %n = layer_norm(%f, ...); %z = add(%f, %y)              # OPT, mixtures of experts
After:   %n = layer_norm(%x, ...); users see reshape(%n, [b*s, h]), and %z likewise where %y was flattened the same way
Legal because: these ops treat each row for itself (dropout by the element's linear index, which a reshape keeps).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.ir import VAL
from megafx.passes.canonicalize_common import Editor, is_tensor, replace

aten = torch.ops.aten

# Of one tensor, and vectors of the last dim.
_NORMS = frozenset({aten.layer_norm.default, aten.rms_norm.default})
_ELEMENTWISE = frozenset(
    {
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.relu.default,
        aten.gelu.default,
        aten.silu.default,
        aten.sigmoid.default,
        aten.tanh.default,
        aten.dropout.default,
    }
)


def unflatten_rows(editor: Editor, node: fx.Node) -> bool:
    """op(reshape(x), vectors) -> reshape(op(x, vectors))."""
    if node.target in _NORMS:
        if len(node.args[1]) != 1:  # type: ignore[arg-type]
            return False
    elif node.target not in _ELEMENTWISE:
        return False
    flat = node.meta[VAL]
    if not isinstance(flat, torch.Tensor) or flat.dim() != 2:
        return False
    sources: dict[fx.Node, fx.Node] = {}
    for operand in node.all_input_nodes:
        if not is_tensor(operand) or operand.meta[VAL].dim() < 2:
            continue
        source = _source(editor, operand)
        if source is None or operand.meta[VAL].dim() != 2:
            return False
        sources[operand] = source
    shapes = [s.meta[VAL] for s in sources.values()]
    if not shapes or not all(editor.same_shape(shapes[0], s) for s in shapes):
        return False
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: sources.get(n, n))
    new = editor.at(node)(node.target, *args, **kwargs)
    return replace(node, editor.at(node)(aten.reshape.default, new, editor.shape(flat)))


def _source(editor: Editor, operand: fx.Node) -> Any:
    """What the rows of a reshape were before their leading dims became one; None for anything else."""
    if operand.target is not aten.reshape.default:
        return None
    source: Any = operand.args[0]
    before, after = source.meta[VAL], operand.meta[VAL]
    if before.dim() <= after.dim() or not editor.same(before.shape[-1], after.shape[-1]):
        return None
    return source
