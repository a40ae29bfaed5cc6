"""What export assumed while it traced: of which sizes the graph is valid."""

from __future__ import annotations

from typing import Any

import sympy
from torch.export import ExportedProgram

from megafx.ir import VAL
from megafx.source_lines import current_user_line

_GREATEST = 2**31 - 1  # a dim without an upper bound


def _shape_env(exported: ExportedProgram) -> Any:
    return next(n.meta[VAL] for n in exported.graph.find_nodes(op="placeholder")).fake_mode.shape_env


def conditions(exported: ExportedProgram) -> tuple[sympy.Basic, ...]:
    """What export assumed of the sizes while it traced, over the symbols of the inputs. What it assumed of sizes that data
    decides, ops check when they run."""
    shape_env = _shape_env(exported)
    assumed = [g.expr for g in shape_env.guards]
    assumed += [a.expr for asserts in shape_env.deferred_runtime_asserts.values() for a in asserts]
    known = [e for e in map(shape_env.replace, assumed) if not any(map(shape_env.is_unbacked_symint, e.free_symbols))]
    return tuple(dict.fromkeys(e for e in known if e.free_symbols))


def ranges(exported: ExportedProgram) -> dict[sympy.Symbol, tuple[int, int]]:
    """Sizes that the graph is valid for. A least size of 2 is export's assumption, not the model's: 1 is allowed."""
    found, shape_env = {}, _shape_env(exported)
    for symbol, bounds in exported.range_constraints.items():
        if any(map(shape_env.is_unbacked_symint, symbol.free_symbols)):  # it may be a sum with a number, too
            continue
        least = int(bounds.lower) if bounds.lower.is_Integer else 0
        greatest = int(bounds.upper) if bounds.upper.is_Integer else _GREATEST
        found[symbol] = (least if least > 2 else 0, greatest)
    return found


def taken_for_granted() -> str:
    """The note on a question whether data selects any rows, asked by the user's line that runs now."""
    source = current_user_line()
    where = f"{source}: " if source else ""
    return f"{where}whether there are any rows is taken for granted; where there are none, the graph computes on none"
