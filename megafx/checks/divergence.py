"""Where a run makes NaN, and where two runs part: the first node, by values of all ranks (simulate.py).

first_nan(program, inputs)                    the first value of one process that holds NaN
first_divergence(program, ..., reference)     the first node at which t ranks part from one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from megafx.checks.simulate import TOLERANCE, Values, at_run_time, relative_error, replica_error, simulate
from megafx.errors import PlacementError, SourceLine
from megafx.ir.program import PLACEMENT, Program, fqn_of, source_of
from megafx.placements.tensors import unshard_tensors
from megafx.placements.types import Placement


def first_nan(program: Program, inputs: Sequence[Any]) -> str:
    """The first value of one process that holds NaN, in words: its node, module and line."""
    found: list[str] = []

    def look(node: fx.Node, value: Values) -> None:
        if not found and isinstance(value[0], Tensor) and bool(value[0].isnan().any()):
            where = f" in '{fqn_of(node)}'" if fqn_of(node) else ""
            source = source_of(node)
            found.append(f"%{node.name}{where}" + (f" ({source})" if source else ""))

    for (_, spec), value in zip(program.input_nodes(), inputs, strict=True):
        if isinstance(value, Tensor) and bool(value.isnan().any()):
            return f"{spec.kind} '{spec.name}', before the call"
    simulate(program, [inputs], watch=look)
    return found[0] if found else ""


@dataclass(frozen=True)
class Divergence:
    """The first node at which ranks part from the reference. error: relative; inf for another shape."""

    node: str
    placement: Placement
    error: float
    found: str
    fqn: str
    source: SourceLine | None

    def __str__(self) -> str:
        where = f" in '{self.fqn}'" if self.fqn else ""
        return f"%{self.node}{where} at {self.placement}: {self.found}" + (f" ({self.source})" if self.source else "")


def first_divergence(
    program: Program, per_rank_inputs: Sequence[Sequence[Any]], reference: Program, reference_inputs: Sequence[Any], *,
    tolerance: float | None = None,
) -> Divergence | None:  # fmt: skip
    """Run `program` on all ranks and `reference` (the same graph before it was localized, or for t = 1) on one.

    Nodes correspond by name. A node's value is put together by its placement; nodes without one are not compared.
    tolerance: relative; None: by dtype (TOLERANCE).
    """
    t = len(per_rank_inputs)
    names = {n.name for n in program.graph.nodes if PLACEMENT in n.meta}
    expected: dict[str, Any] = {}

    def keep(node: fx.Node, value: Values) -> None:
        if node.name in names:
            expected[node.name] = value[0]

    simulate(reference, [reference_inputs], watch=keep)
    found: list[Divergence] = []

    def compare(node: fx.Node, value: Values) -> None:
        if found or not isinstance(value[0], Tensor) or not isinstance(expected.get(node.name), Tensor):
            return
        placement, wanted = node.meta.get(PLACEMENT), expected.pop(node.name)
        if placement is None:
            return
        placement = at_run_time(program, placement, per_rank_inputs[0])
        error, text = _difference(value, wanted, placement, t)
        if error > (TOLERANCE.get(wanted.dtype, 0.0) if tolerance is None else tolerance):
            found.append(Divergence(node.name, placement, error, text, fqn_of(node), source_of(node)))

    simulate(program, per_rank_inputs, watch=compare)
    return found[0] if found else None


def _difference(value: Values, wanted: Tensor, placement: Placement, t: int) -> tuple[float, str]:
    if placement.kind in ("I", "R") and (error := replica_error(value)) > 0.0:
        return error, f"ranks that should hold the same differ by {error:.1e}"
    try:
        whole = unshard_tensors(value, placement, t)
    except PlacementError as error:
        return float("inf"), str(error)
    if whole.shape != wanted.shape:
        return float("inf"), f"ranks hold {tuple(whole.shape)} together, one process {tuple(wanted.shape)}"
    off = relative_error(whole, wanted)
    return off, f"differs from one process by {off:.1e}"
