"""Dropout on a shard draws its slice of the one-process mask: the op is told how its dim is cut."""

from __future__ import annotations

from torch import fx

from megafx.passes.localize_common import Family, Localizer
from megafx.plan import OpChoice


def localize_dropout(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """dropout(x, seed, p, op_id, -1, [], tp) -> dropout(x, seed, p, op_id, dim, layout, tp)."""
    if choice.out.is_shard:
        node.args = (*node.args[:4], choice.out.dim, local.layout(choice.out), local.axis)


FAMILIES: dict[str, Family] = {
    "megafx.dropout.default": localize_dropout,
}
