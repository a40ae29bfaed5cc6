"""Which shards a gather of a region has to have."""

from __future__ import annotations

from torch import fx

from megafx.analysis.communication import is_region_gather
from megafx.ir.program import VAL
from megafx.ops.gather_region import starts


def gather_what_is_read(graph: fx.Graph) -> int:
    """Leave out of each gather the shards that the graph does not read; returns their number."""
    dropped = 0
    for node in graph.nodes:
        if not is_region_gather(node):
            continue
        shards, ranks, axis = node.args
        places = starts([s.meta[VAL].shape for s in shards], ranks)
        (wait,) = node.users
        parts = [*wait.users]
        pairs = zip(shards, places, strict=False)
        kept = [(s, at) for s, at in pairs if any(p.args[2] <= at < p.args[3] for p in parts)]
        if len(kept) == len(shards):
            continue
        dropped += len(shards) - len(kept)
        moved = starts([s.meta[VAL].shape for s, _ in kept], ranks)
        place = {at: to for (_, at), to in zip(kept, moved, strict=False)}
        for part in parts:
            _, _, at, end = part.args
            part.args = (wait, 0, place[at], place[at] + end - at)
        node.args = ([s for s, _ in kept], ranks, axis)
        for made in (node, wait):
            made.meta[VAL] = made.meta[VAL].narrow(0, 0, moved[-1])
    return dropped
