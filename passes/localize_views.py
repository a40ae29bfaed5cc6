"""Views and slices on local shapes: size arguments become the local sizes of the placed result."""

from __future__ import annotations

from megafx.passes.localize_shapes import Localizer, localizes
from torch import fx

from megafx.plan import OpChoice
from megafx.views import local_offset


@localizes("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.expand.default")
def localize_sizes(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """reshape(x, [b, s, 768]) with dim 2 sharded over 2 -> reshape(x, [b, s, 384])."""
    node.update_arg(1, local.local_dims(local.global_shape[node], choice.out))


@localizes("aten.slice.Tensor")
def localize_slice(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """A slice that takes whole blocks of a blocked layout (one part of a fused q|k|v) takes their local sizes."""
    source = choice.ins[0]
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(local.global_shape[node])  # type: ignore[operator]
    if source.dim != dim:
        return
    n = source.cut.size
    start = _bound(node, 2, 0, n)
    local_start = local_offset(source.cut, start, local.t)
    local_end = local_offset(source.cut, start + local.global_shape[node][dim], local.t)
    node.args = (node.args[0], dim, local_start, local_end)


def _bound(node: fx.Node, index: int, default: int, n: int) -> int:
    value = node.args[index] if len(node.args) > index else None
    if value is None:
        return default
    assert isinstance(value, int), "a sharded dim is sliced at static bounds only (op_rules)"
    return max(value + n, 0) if value < 0 else min(value, n)
