"""Which parameters can be read as one tensor (`megafx.join_parameters`), and how that is placed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from megafx.ir.program import PLACEMENT, VAL, Input, Program
from megafx.ops.gather_region import ALIGNED
from megafx.ops.owners import OWNER_PARAMETER
from megafx.placements.data_axis import DataAxis, rows_of
from megafx.placements.types import Placement, S
from megafx.placements.views import concat_layouts


def stored_parameters(program: Program) -> dict[fx.Node, Input]:
    """Values of a local graph that are parameters as they are stored. Those of an expert are its owner's."""
    found = {node: spec for node, spec in program.input_nodes() if spec.kind == "param"}
    held = program.graph.find_nodes(op="call_function", target=OWNER_PARAMETER)
    return found | {node: found[node.args[0]] for node in held if node.args[0] in found}


def why_not_one(
    values: Sequence[fx.Node], parameters: dict[fx.Node, Input], trains: Callable[[Input], bool] | None
) -> str:
    """Why these values cannot be given as one memory, or ''. trains: whether a parameter's gradient is wanted."""
    for n in values:
        if n not in parameters:
            return f"%{n.name} is no parameter as it is stored: it is cast, moved or computed first"
        spec, what = parameters[n], parameters[n].name
        if spec.aliases or len(n.users) > 1 or list(values).count(n) > 1:
            return f"{what} is tied or used elsewhere too"
        if trains is not None and not trains(spec):
            return f"{what} is frozen"
    return ""


def leaves_gaps(values: Sequence[fx.Node], data: DataAxis | None, t: int) -> bool:
    """True if parameters that data-parallel ranks share do not follow each other in the buffer of their region."""
    if data is None or not data.sharded:
        return False
    for p in values[:-1]:
        rows, cut = int(p.meta[VAL].shape[0]), p.meta[PLACEMENT].is_shard if PLACEMENT in p.meta else False
        _, ranks, _ = rows_of(rows, data, t, cut)
        if rows % ranks or p.meta[VAL].numel() % ALIGNED:
            return True
    return False


def placed_together(values: Sequence[fx.Node], dim: int, t: int) -> Placement | str | None:
    """Placement of values side by side along `dim` ('': they are not marked); None where there is none."""
    marked = [v.meta[PLACEMENT] for v in values if PLACEMENT in v.meta]
    if len(marked) < len(values):
        return None if marked else ""
    if all(p.is_shard and p.dim == dim for p in marked):
        cut = concat_layouts((p.cut for p in marked), t)
        return None if cut is None else S(dim, cut)
    return marked[0] if all(p == marked[0] for p in marked) else None
