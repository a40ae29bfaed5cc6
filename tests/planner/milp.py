"""An oracle for megafx.planner.solver: the same problem as a mixed-integer program, solved by HiGHS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import scipy.sparse
from scipy.optimize import Bounds, LinearConstraint, milp

MICROSECONDS = 1e6  # the unit in which HiGHS sees costs: its tolerances are absolute


def milp_optimum(
    domains: Mapping[Any, int], tables: Iterable[tuple[tuple[Any, ...], np.ndarray]], limit_seconds: float = 120.0
) -> float | None:
    """Minimum cost by HiGHS with gap 0, an oracle for megafx.planner.solver; None if infeasible.

    x[v, i] binary: v takes value i. A finite table has y[entry] >= 0 for each allowed entry, whose marginals are the x
    of its variables; a 0/inf table over two variables has x[w, j] <= sum of the x[v, i] compatible with it, both ways.
    """
    first: dict[Any, int] = {}
    columns = 0
    for v, size in domains.items():
        first[v], columns = columns, columns + size
    binaries = columns
    cost = list(np.zeros(binaries))
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
    matrix = scipy.sparse.csr_matrix((weights, (rows, cols)), shape=(len(lower), columns))
    result = milp(
        np.array(cost),
        constraints=LinearConstraint(matrix, lower, upper),
        integrality=(np.arange(columns) < binaries).astype(int),
        bounds=Bounds(0, 1),
        options={"time_limit": limit_seconds, "mip_rel_gap": 0},
    )
    if result.status == 2:
        return None
    assert result.status == 0, f"HiGHS did not prove an optimum: {result.message}"
    return float(result.fun) / MICROSECONDS + constant
