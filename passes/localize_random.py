"""What draws on a shard draws its slice of the one-process bits: the op is told how its result is cut."""

from __future__ import annotations

from torch import fx

from megafx.collectives import with_axis
from megafx.draws import drawn, redraw
from megafx.passes.localize_common import Localizer
from megafx.plan import OpChoice


def localize_draw(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """dropout(x, seed, p, op_id, -1, [], tp) -> dropout(x, seed, p, op_id, dim, layout, tp); so any op of draws.py."""
    if choice.out.is_shard:
        redraw(
            node,
            shard_dim=choice.out.dim,
            layout=local.layout(choice.out),
            axis=with_axis(drawn(node)["axis"], local.axis),
        )
