"""Fixtures shared by test files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest

MICROSECONDS = 1e6  # the unit in which HiGHS sees costs: its tolerances are absolute


def _milp_optimum(
    domains: Mapping[Any, int], tables: Iterable[tuple[tuple[Any, ...], np.ndarray]], limit_seconds: float = 120.0
) -> float | None:
    """Minimum cost by HiGHS with gap 0, an oracle for megafx.planner.solver; None if infeasible.

    x[v, i] binary: v takes value i. A finite table has y[entry] >= 0 for each allowed entry, whose marginals are the x
    of its variables; a 0/inf table over two variables has x[w, j] <= sum of the x[v, i] compatible with it, both ways.
    """
    import scipy.sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

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


@pytest.fixture
def milp_optimum() -> Callable[..., float | None]:
    """milp_optimum(domains, tables, limit_seconds=120) -> minimum cost in seconds, or None if infeasible."""
    return _milp_optimum


def _local_program(
    function: Callable[..., Any], inputs: Mapping[str, Any], varying: Iterable[str] = (), loss: bool = False
) -> Any:
    """A LOCAL program of `function(*inputs.values())`, a tuple of tensors, with placements nowhere.

    inputs: name -> example tensor; a Parameter is of kind 'param', an input named 'seed' of kind 'seed', all else of kind
    'user'. varying: names of inputs whose dim 0 is dynamic (one size for all). loss: the first output is the loss.
    """
    import torch
    from torch.export import Dim, export

    from megafx.ir.program import MADE_BY, SOURCE, Input, Output, Phase, Program
    from megafx.ir.sizes import Sizes

    class Call(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return function(*args)

    batch, names = Dim("batch", min=2), set(varying)
    shapes = tuple({0: batch} if name in names else None for name in inputs)
    examples = tuple(x.detach() for x in inputs.values())
    exported = export(Call(), examples, dynamic_shapes=(shapes,), strict=False)
    graph = exported.graph_module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and "assert" in str(node.target):
            graph.erase_node(node)
        elif node.op == "call_function":
            node.meta[SOURCE], node.meta[MADE_BY] = None, ()
    placeholders = graph.find_nodes(op="placeholder")
    kinds = [
        "param" if isinstance(x, torch.nn.Parameter) else "seed" if n == "seed" else "user" for n, x in inputs.items()
    ]
    sizes = Sizes()
    for node, x in zip(placeholders, examples, strict=True):
        for symbolic, size in zip(node.meta["val"].shape, x.shape, strict=True):
            if isinstance(symbolic, torch.SymInt):
                sizes.workload_of[symbolic.node.expr] = size
    exported.graph_module.recompile()
    return Program(
        exported.graph_module,
        [Input(kind, name) for kind, name in zip(kinds, inputs, strict=True)],  # type: ignore[arg-type]
        [Output("user", str(i), loss and i == 0) for i in range(len(graph.output_node().args[0]))],  # type: ignore[arg-type]
        sizes,
        placeholders[0].meta["val"].fake_mode,
        exported.call_spec.out_spec,
        phase=Phase.LOCAL,
    )


@pytest.fixture
def local_program() -> Callable[..., Any]:
    """local_program(function, inputs, varying=(), loss=False) -> Program in phase LOCAL."""
    return _local_program
