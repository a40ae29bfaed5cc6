"""The problem of solver.py as a mixed-integer program, for graphs too wide for variable elimination. HiGHS (scipy) solves it.

Its time is bounded: the best assignment found by then is taken, together with a bound that no assignment is below. One process
searches for all ranks (rank 0's plan is taken), as what is found by a time may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MICROSECONDS = 1e6  # the unit in which HiGHS sees costs: its tolerances are absolute
SECONDS = 30.0  # a recurrence of 6 steps is proven in 3 s; 8 layers that read all before them are within 1% after 5 s
PATIENCE = 10  # times as long, where nothing was found by then


class Found(NamedTuple):
    """The best assignment that was found. cost: its; bound: no assignment is cheaper."""

    assignment: dict[Any, int]
    cost: float
    bound: float


def search(
    domains: Mapping[Any, int],
    tables: Sequence[tuple[Sequence[Any], NDArray[np.float64]]],
    seconds: float = SECONDS,
    gap: float = 0.0,
) -> Found | None:
    """None where nothing was found: no assignment is allowed, if `seconds` were enough. gap: relative, at which it ends.

    x[v, i] binary: v takes value i. A finite table has y[entry] >= 0 for each allowed entry, whose marginals are the x
    of its variables; a 0/inf table over two variables has x[w, j] <= sum of the x[v, i] compatible with it, both ways.
    """
    import scipy.sparse  # half a second, and most plans need none
    from scipy.optimize import Bounds, LinearConstraint, milp

    first: dict[Any, int] = {}
    columns = 0
    for v, size in domains.items():
        first[v], columns = columns, columns + size
    binaries = columns
    cost = [0.0] * binaries
    constant = 0.0
    rows: list[int] = []
    cols: list[int] = []
    weights: list[float] = []
    lower: list[float] = []
    upper: list[float] = []

    def row(terms: Iterable[tuple[int, float]], low: float, high: float) -> None:
        for column, weight in terms:
            rows.append(len(lower))
            cols.append(column)
            weights.append(weight)
        lower.append(low)
        upper.append(high)

    for v, size in domains.items():
        row([(first[v] + i, 1.0) for i in range(size)], 1.0, 1.0)
    for scope, table in tables:
        allowed = np.isfinite(table)
        if not scope:
            constant += float(table)
        elif len(scope) == 1:
            for i, c in enumerate(table):
                if allowed[i]:
                    cost[first[scope[0]] + i] += float(c) * MICROSECONDS
                else:
                    row([(first[scope[0]] + i, 1.0)], 0.0, 0.0)
        elif len(scope) == 2 and not allowed.all() and not table[allowed].any():
            for matrix, (v, w) in ((allowed, scope), (allowed.T, scope[::-1])):
                for j in range(matrix.shape[1]):
                    some = [(first[v] + int(i), 1.0) for i in np.flatnonzero(matrix[:, j])]
                    row([*some, (first[w] + j, -1.0)], 0.0, np.inf)
        else:
            entries = np.argwhere(allowed)
            for axis, v in enumerate(scope):
                for i in range(table.shape[axis]):
                    mine = [(columns + int(k), 1.0) for k in np.flatnonzero(entries[:, axis] == i)]
                    row([*mine, (first[v] + i, -1.0)], 0.0, 0.0)
            cost += [float(table[tuple(e)]) * MICROSECONDS for e in entries]
            columns += len(entries)
    if not np.isfinite(constant):
        return None
    if not columns:
        return Found({}, constant, constant)
    matrix = scipy.sparse.csr_matrix((weights, (rows, cols)), shape=(len(lower), columns))
    result = milp(
        np.array(cost),
        constraints=LinearConstraint(matrix, lower, upper),
        integrality=(np.arange(columns) < binaries).astype(int),
        bounds=Bounds(0, 1),
        options={"time_limit": seconds, "mip_rel_gap": gap},
    )
    if result.x is None:
        return None
    assignment = {v: int(np.argmax(result.x[at : at + domains[v]])) for v, at in first.items()}
    total = constant + sum(float(t[tuple(assignment[v] for v in scope)]) for scope, t in tables if scope)
    bound = result.mip_dual_bound if result.mip_dual_bound is not None else result.fun
    return Found(assignment, total, min(total, float(bound) / MICROSECONDS + constant))
