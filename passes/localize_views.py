"""Views and slices on local shapes: size arguments become the local sizes of the placed result."""

from __future__ import annotations

from torch import fx

from megafx.passes.localize_common import Family, Localizer
from megafx.plan import OpChoice
from megafx.views import local_offset


def localize_sizes(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """reshape(x, [b, s, 768]) with dim 2 sharded over 2 -> reshape(x, [b, s, 384])."""
    node.update_arg(1, local.local_dims(local.global_shape[node], choice.out))


def localize_slice(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """A slice that takes whole blocks of a blocked layout (one part of a fused q|k|v) takes their local sizes."""
    source = choice.ins[0]
    arg = node.args[1] if len(node.args) > 1 else 0
    assert isinstance(arg, int)
    dim = arg % len(local.global_shape[node])
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


VIEWS: dict[str, Family] = {
    "aten.view.default": localize_sizes,
    "aten.reshape.default": localize_sizes,
    "aten._unsafe_view.default": localize_sizes,
    "aten.expand.default": localize_sizes,
    "aten.slice.Tensor": localize_slice,
}
