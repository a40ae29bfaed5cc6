"""Exact minimum of a sum of small cost tables, by variable elimination. Knows nothing of tensors. No torch import.

    minimise over assignments a:   sum over tables of  table.cost[a[v] for v in table.scope]

Variables are eliminated one by one: the tables that mention v are added up over the union of their scopes, minimised
over v, and the result (a *message*) is a new table over v's neighbours. The smallest joined table goes first: on transformer
graphs this keeps tables near 1e6 entries, where an unweighted minimum degree makes 4e7. If a table becomes large, the order
that joins the fewest (weighted) new pairs is tried too: 6e6 entries instead of 2e10 on Funnel's graph. If both orders make
tables too large for memory and patience, the problem is searched in bounded time instead: as a mixed-integer program, which
HiGHS (scipy) solves. The best assignment found by then is taken, together with a bound that no assignment is below. One process
searches for all ranks (rank 0's plan is taken), as what is found by a time may differ.

Repeated layers cost one dictionary lookup each: a message is shifted by its minimum, rounded and interned by content,
and the work of an elimination is memoised on which interned tables meet in which pattern of axes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megafx.errors import PlanError

# -- search in bounded time

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


# -- elimination

Costs = NDArray[np.float64]

# Messages are rounded to this many decimals so that equal layers give equal bytes. Costs are seconds: 1e4 eliminations
# err by at most 5e-11 s together, below the tie-breaks of cost.py (1e-9 s).
DECIMALS = 14
LARGE = 10**7  # entries of a joined table from which on another order is tried: 80 MB
LARGEST = 10**8  # 800 MB, and about as long as a search takes
CONFLICT_VARIABLES = 64  # a conflicting set up to this size is shrunk to a minimal one


class Table(NamedTuple):
    """cost[i, j, ...] of giving the variables of `scope` the values i, j, ...; np.inf forbids a combination."""

    scope: tuple[Hashable, ...]
    cost: Costs


@dataclass(frozen=True)
class Solution:
    """The optimum, or (cost > bound) what a search found."""

    assignment: dict[Any, int]
    cost: float
    width: int  # most neighbours of a variable when eliminated
    largest_table: int  # entries of a joined table, which is not made where the problem is searched
    eliminated: int
    memo_hits: int
    seconds: float
    bound: float  # no assignment is cheaper
    searched: bool = False


class InfeasibleError(PlanError):
    """No assignment is allowed. variables: a small set that cannot be satisfied together."""

    def __init__(self, variables: Sequence[Hashable], minimal: bool) -> None:
        self.variables, self.minimal = tuple(variables), minimal
        names = ", ".join(str(v) for v in self.variables[:8]) + (", ..." if len(self.variables) > 8 else "")
        super().__init__(f"no choice satisfies every constraint on: {names}", fix="lift one of the constraints on them")


class TooWideError(PlanError):
    """Too many variables depend on one another, and a search found nothing. variables: those of the largest table."""

    def __init__(self, variables: Sequence[Hashable]) -> None:
        self.variables = tuple(variables)
        super().__init__(f"a search over {len(variables)} variables that depend on one another found nothing")


class _DeadEndError(Exception):
    """Every value of `variable` (an index) is forbidden given its neighbours."""

    def __init__(self, variable: int) -> None:
        self.variable = variable


def solve(domains: Mapping[Any, int], tables: Iterable[Table]) -> Solution:
    """The cheapest assignment of a value in range(domains[v]) to each variable v; ties go to the first value.

    Where tables would have more than LARGEST entries: the best assignment that a search finds. Raises InfeasibleError where
    every assignment is forbidden, TooWideError where the search finds none. Share one ndarray object between equal tables:
    arrays are recognised by identity first, by content otherwise.
    """
    start = time.perf_counter()
    problem = _Problem(domains, tables)
    order = elimination_order(problem.sizes, problem.scopes)
    if order.largest > LARGE:
        other = elimination_order(problem.sizes, problem.scopes, least_fill=True)
        order = min(order, other, key=lambda found: found.largest)
    if order.largest > LARGEST:
        return _searched(problem, order, start)
    try:
        values, hits = _eliminate(problem, order.variables)
    except _DeadEndError as dead:
        raise InfeasibleError(*_conflict(problem, dead.variable)) from None
    places = zip(problem.scopes, problem.ids, strict=True)
    cost = math.fsum(problem.arrays[k].item(tuple([values[v] for v in scope])) for scope, k in places)
    assignment = dict(zip(problem.names, values, strict=True))
    seconds = time.perf_counter() - start
    return Solution(assignment, cost, order.width, order.largest, len(values), hits, seconds, cost)


def _searched(problem: _Problem, order: Order, start: float) -> Solution:
    """What `search` finds, by a longer search if need be."""
    sizes = dict(enumerate(problem.sizes))
    tables = [(scope, problem.arrays[k]) for scope, k in problem.tables]
    began = time.perf_counter()
    found = search(sizes, tables)
    if found is None and time.perf_counter() - began >= SECONDS:
        found = search(sizes, tables, PATIENCE * SECONDS, gap=1.0)  # anything
    if found is None:
        widest = [problem.names[v] for v in order.widest]
        if time.perf_counter() - began >= PATIENCE * SECONDS:
            raise TooWideError(widest)
        raise InfeasibleError(widest, minimal=False)
    assignment = {problem.names[v]: value for v, value in found.assignment.items()}
    seconds = time.perf_counter() - start
    return Solution(assignment, found.cost, order.width, order.largest, 0, 0, seconds, found.bound, searched=True)


class _Problem:
    """Variables as indices 0..n-1 in the order of `domains`; tables as (scope, id of an interned array)."""

    def __init__(self, domains: Mapping[Any, int], tables: Iterable[Table]) -> None:
        self.names = list(domains)
        self.sizes = [int(n) for n in domains.values()]
        self.arrays: list[Costs] = []
        self._by_content: dict[tuple[tuple[int, ...], bytes], int] = {}
        self.tables: list[tuple[tuple[int, ...], int]] = []  # as given; below, without variables that have no choice
        self.scopes: list[tuple[int, ...]] = []
        self.ids: list[int] = []
        empty = [v for v, n in domains.items() if n < 1]
        if empty:
            raise InfeasibleError(empty[:1], minimal=True)
        index = {v: i for i, v in enumerate(self.names)}
        by_identity: dict[int, tuple[int, Costs]] = {}  # holds the array, so that its id stays its own
        for names, cost in tables:
            try:
                scope = tuple([index[v] for v in names])
            except KeyError as unknown:
                raise ValueError(f"table over {names} mentions {unknown}, which has no domain") from None
            if id(cost) not in by_identity:
                array = np.ascontiguousarray(cost, dtype=np.float64)
                array = array.reshape(np.shape(cost))  # ascontiguousarray makes a 0-d array 1-d
                if np.isnan(array).any() or np.isneginf(array).any():
                    raise ValueError(f"table over {names} holds nan or -inf")
                by_identity[id(cost)] = (self.intern(array), cost)
            k = by_identity[id(cost)][0]
            want = tuple([self.sizes[v] for v in scope])
            if self.arrays[k].shape != want or len(set(scope)) != len(scope):
                raise ValueError(f"table over {names} has shape {self.arrays[k].shape}, its domains are {want}")
            self.tables.append((scope, k))
        smaller: dict[int, int] = {}
        for scope, k in self.tables:
            if k not in smaller:
                array = self.arrays[k]
                smaller[k] = self.intern(array.reshape([n for n in array.shape if n != 1])) if 1 in array.shape else k
            self.scopes.append(tuple([v for v in scope if self.sizes[v] != 1]))
            self.ids.append(smaller[k])

    def intern(self, array: Costs) -> int:
        key = (array.shape, array.tobytes())
        if key not in self._by_content:
            self._by_content[key] = len(self.arrays)
            self.arrays.append(array)
        return self._by_content[key]


class Order(NamedTuple):
    """In which order variables are eliminated. width, largest: see Solution; widest: the variables of the largest table."""

    variables: list[int]
    width: int
    largest: int
    widest: list[int]


def elimination_order(sizes: Sequence[int], scopes: Iterable[tuple[int, ...]], *, least_fill: bool = False) -> Order:
    """Greedily the variable with the smallest joined table, ties by index.

    least_fill: the one with the fewest pairs of neighbours that no table joins yet, a pair weighted by the logarithms of its
    sizes. Slower to find, and often narrower if a few variables have most of the values.

    By hand: networkx's treewidth heuristics do not know the sizes (a 32-layer Llama: 840 entries against 336, in 25 ms
    against 14 ms), and the import of networkx takes 0.2 s.
    """
    graph = _interaction(range(len(sizes)), scopes)
    weight = [math.log(max(n, 1)) for n in sizes]

    def entries(v: int) -> int:
        return math.prod([sizes[u] for u in graph[v]], start=sizes[v])

    def fill(v: int) -> float:
        pairs = itertools.combinations(sorted(graph[v]), 2)
        return sum(weight[a] * weight[b] for a, b in pairs if b not in graph[a])

    score: Callable[[int], float] = fill if least_fill else entries
    current = {v: score(v) for v in graph}
    heap = [(value, v) for v, value in current.items()]
    heapq.heapify(heap)
    order: list[int] = []
    width, largest, widest = 0, 0, []
    while heap:
        value, v = heapq.heappop(heap)
        if current.get(v) != value:
            continue  # an outdated entry
        del current[v]
        order.append(v)
        around, joined = sorted(graph[v]), entries(v)
        width = max(width, len(around))
        if joined > largest:
            largest, widest = joined, [v, *around]
        del graph[v]
        for u in around:
            graph[u] |= {*around}
            graph[u] -= {u, v}
        stale = set(around).union(*(graph[u] for u in around)) if least_fill else around
        for u in stale:
            value = score(u)
            if value != current[u]:
                current[u] = value
                heapq.heappush(heap, (value, u))
    return Order(order, width, largest, widest)


def _interaction(variables: Iterable[int], scopes: Iterable[tuple[int, ...]]) -> dict[int, set[int]]:
    """Variable -> those with which it shares a table."""
    graph: dict[int, set[int]] = {v: set() for v in variables}
    for scope in scopes:
        for v in scope:
            graph.setdefault(v, set()).update(scope)
    for v, around in graph.items():
        around.discard(v)
    return graph


class _Step(NamedTuple):
    """One memoised elimination. best: v's value for each assignment of its neighbours; message: interned, or -1."""

    best: NDArray[np.intp]
    message: int


def _eliminate(problem: _Problem, order: list[int]) -> tuple[list[int], int]:
    """(value of each variable, memo hits)."""
    position = [0] * len(order)
    for i, v in enumerate(order):
        position[v] = i
    buckets: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in order]  # tables, at their first variable to go
    for scope, k, (whole, _) in zip(problem.scopes, problem.ids, problem.tables, strict=True):
        if scope:
            buckets[min(scope, key=position.__getitem__)].append((scope, k))
        elif not np.isfinite(problem.arrays[k]):
            if not whole:
                raise InfeasibleError((), minimal=True)
            raise _DeadEndError(whole[0])
    memo: dict[tuple[Any, ...], _Step | None] = {}
    steps: list[tuple[int, list[int], NDArray[np.intp]]] = []
    hits = 0
    for v in order:
        bucket = buckets[v]
        around = sorted({u for scope, _ in bucket for u in scope if u != v}, key=position.__getitem__)
        axis = {u: i for i, u in enumerate(around, 1)}
        axis[v] = 0
        pattern = sorted([(tuple([axis[u] for u in scope]), k) for scope, k in bucket])
        key = (problem.sizes[v], *pattern)
        if key in memo:
            hits += 1
        else:
            memo[key] = _join(problem, [problem.sizes[u] for u in (v, *around)], pattern)
        step = memo[key]
        if step is None:
            raise _DeadEndError(v)
        if around:
            buckets[around[0]].append((tuple(around), step.message))
        steps.append((v, around, step.best))
        buckets[v] = []
    values = [0] * len(order)
    for v, around, best in reversed(steps):
        values[v] = best.item(tuple([values[u] for u in around]))
    return values, hits


def _join(problem: _Problem, shape: list[int], pattern: list[tuple[tuple[int, ...], int]]) -> _Step | None:
    """Add the tables up and minimise over axis 0; None if nothing is allowed."""
    total = np.zeros(shape)
    for axes, k in pattern:
        by_axis = sorted(range(len(axes)), key=axes.__getitem__)
        spread = [1] * len(shape)
        for a in axes:
            spread[a] = shape[a]
        total += problem.arrays[k].transpose(by_axis).reshape(spread)
    best, least = total.argmin(0), total.min(0)
    lowest = least.min()
    if not np.isfinite(lowest):
        return None
    message = problem.intern(np.round(least - lowest, DECIMALS)) if len(shape) > 1 else -1
    return _Step(best, message)


# -- infeasible problems: which variables conflict


def _layers(graph: Mapping[int, set[int]], start: int) -> Iterator[set[int]]:
    """The variables at distance 0, 1, ..."""
    layer, seen = {start}, {start}
    while layer:
        yield layer
        layer = set().union(*(graph[v] for v in layer)) - seen
        seen |= layer


def _conflict(problem: _Problem, dead: int) -> tuple[list[Hashable], bool]:
    """(variables that cannot be satisfied together, whether none of them can be left out).

    The conflict lies around the variable where elimination stopped: the smallest ball around it that is infeasible by
    itself is found by doubling the radius, then variables are left out one by one, the farthest first.
    """
    forbids = [bool(np.isinf(a).any()) for a in problem.arrays]
    tables = [(s, k) for s, k in problem.tables if forbids[k]]
    ball: list[int] = []  # in order of distance
    radius = 0
    for distance, layer in enumerate(_layers(_interaction([dead], (scope for scope, _ in tables)), dead)):
        ball += sorted(layer)
        if distance == radius:
            if _conflicts(problem, tables, set(ball)):
                break
            radius = 2 * radius + 1
    if len(ball) > CONFLICT_VARIABLES:
        return [problem.names[v] for v in ball], False
    inside = set(ball)
    for v in reversed(ball):
        if _conflicts(problem, tables, inside - {v}):
            inside.remove(v)
    return [problem.names[v] for v in sorted(inside)], True


def _conflicts(problem: _Problem, tables: list[tuple[tuple[int, ...], int]], inside: set[int]) -> bool:
    """True if the tables within these variables alone allow no assignment."""
    part = {v: problem.sizes[v] for v in sorted(inside)}
    among = [Table(s, problem.arrays[k]) for s, k in tables if inside.issuperset(s)]
    small = _Problem(part, among)
    try:
        _eliminate(small, elimination_order(small.sizes, small.scopes).variables)
    except _DeadEndError:
        return True
    return False
