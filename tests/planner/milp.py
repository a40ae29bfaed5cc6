"""An oracle for megafx.planner.solver: the search that stands in for it on wide graphs, here until its optimum is proven."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from megafx.planner.solver import search


def milp_optimum(
    domains: Mapping[Any, int], tables: Iterable[tuple[tuple[Any, ...], np.ndarray]], limit_seconds: float = 120.0
) -> float | None:
    """Minimum cost by HiGHS with gap 0, an oracle for megafx.planner.solver; None if infeasible."""
    found = search(domains, list(tables), limit_seconds)
    if found is None:
        return None
    assert found.cost - found.bound < 1e-9, f"HiGHS did not prove an optimum: {found.cost} and {found.bound}"
    return found.bound
