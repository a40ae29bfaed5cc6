"""Dropout on a shard draws its slice of the one-process mask: the op is told how its dim is cut."""

from __future__ import annotations

from megafx.passes.localize_shapes import Localizer, localizes
from torch import fx

from megafx.plan import OpChoice


@localizes("megafx.dropout.default")
def localize_dropout(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """dropout(x, seed, p, op_id, -1, [], tp) -> dropout(x, seed, p, op_id, dim, layout, tp)."""
    if choice.out.is_shard:
        node.args = (*node.args[:4], choice.out.dim, local.layout(choice.out), local.axis)
