"""The solver against exhaustive enumeration and against a MILP."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from milp import milp_optimum

from megafx.planner import solver
from megafx.planner.solver import InfeasibleError, Table, TooWideError, elimination_order, solve


def evaluate(assignment, tables):
    return sum(float(t.cost[tuple(assignment[v] for v in t.scope)]) for t in tables)


def enumerate_all(domains, tables):
    best = np.inf
    for values in itertools.product(*(range(n) for n in domains.values())):
        best = min(best, evaluate(dict(zip(domains, values, strict=True)), tables))
    return best


def random_graph(rng, forbidden):
    """<= 6 variables of <= 4 values, tables of arity 0 to 4, several over one scope, some entries forbidden."""
    domains = {f"v{i}": int(rng.integers(1, 5)) for i in range(rng.integers(1, 7))}
    names = list(domains)
    tables = []
    for _ in range(rng.integers(0, 9)):
        scope = tuple(rng.permutation(names)[: rng.integers(0, min(4, len(names)) + 1)])
        cost = np.array(rng.integers(0, 20, [domains[v] for v in scope]) * 1e-4)
        if scope:
            cost[rng.random(cost.shape) < forbidden] = np.inf
        tables.append(Table(scope, cost))
    return domains, tables


@pytest.mark.parametrize("forbidden", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("seed", range(40))
def test_equals_exhaustive_enumeration(seed, forbidden):
    domains, tables = random_graph(np.random.default_rng(seed), forbidden)
    best = enumerate_all(domains, tables)
    if np.isinf(best):
        with pytest.raises(InfeasibleError) as error:
            solve(domains, tables)
        # what it names conflicts by itself, and nothing of it can be left out
        named = error.value.variables
        among = [t for t in tables if set(t.scope) <= set(named)]
        assert error.value.minimal
        assert np.isinf(enumerate_all({v: domains[v] for v in named}, among))
        for v in named:
            rest = {u: domains[u] for u in named if u != v}
            assert np.isfinite(enumerate_all(rest, [t for t in among if v not in t.scope]))
        return
    solution = solve(domains, tables)
    assert solution.cost == pytest.approx(best, abs=1e-12)
    assert evaluate(solution.assignment, tables) == pytest.approx(best, abs=1e-12)
    assert set(solution.assignment) == set(domains) and solution.eliminated == len(domains)


def layered(rng, layers, hub=False):
    """What planners make: a chain of equal layers with skip edges, hard compatibility tables, perhaps one hub."""
    sizes = [int(n) for n in rng.integers(2, 7, 8)]
    domains: dict = {"hub": 5} if hub else {}
    tables = []
    shared: dict = {}

    def table(scope, key, hard=False):
        shape = [domains[v] for v in scope]
        if key not in shared:
            cost = rng.random(shape) * 1e-3
            if hard:
                cost = np.where(rng.random(shape) < 0.35, np.inf, 0.0)
                cost[:, 0] = cost[0, :] = 0.0
            shared[key] = cost
        tables.append(Table(scope, shared[key]))

    for layer in range(layers):
        for i, n in enumerate(sizes):
            domains[layer, i] = n
            table(((layer, i),), ("unary", i))
            if i:
                table(((layer, i - 1), (layer, i)), ("edge", i), hard=i % 3 == 0)
            elif layer:
                table(((layer - 1, len(sizes) - 1), (layer, i)), "next")
        table(((layer, 1), (layer, 4)), "skip")
        table(((layer, 2), (layer, 5), (layer, 7)), "triple")
        if hub:
            table(("hub", (layer, 3)), "hub")
    return domains, tables


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_equals_milp(seed, hub):
    domains, tables = layered(np.random.default_rng(seed), layers=4, hub=hub)
    solution = solve(domains, tables)
    assert solution.cost == pytest.approx(milp_optimum(domains, tables), abs=1e-9)


def test_milp_oracle_knows_infeasible_and_enumeration():
    for seed in range(12):
        domains, tables = random_graph(np.random.default_rng(seed), 0.4)
        best = enumerate_all(domains, tables)
        assert milp_optimum(domains, tables) == (None if np.isinf(best) else pytest.approx(best, abs=1e-9))


def test_disconnected_components_and_free_variables():
    tables = [Table(("a", "b"), np.array([[3.0, 1.0], [2.0, 5.0]])), Table(("c",), np.array([4.0, 2.0, 2.0]))]
    solution = solve({"a": 2, "b": 2, "c": 3, "alone": 4}, tables)
    assert solution.assignment == {"a": 0, "b": 1, "c": 1, "alone": 0}
    assert solution.cost == 3.0


def test_no_variables():
    assert solve({}, []).cost == 0.0
    assert solve({}, [Table((), np.array(2.5))]).cost == 2.5


def test_ties_are_deterministic():
    flat = np.zeros((3, 3))
    tables = [Table((i, i + 1), flat) for i in range(5)]
    assert solve({i: 3 for i in range(6)}, tables).assignment == {i: 0 for i in range(6)}


def test_repeated_layers_are_memo_hits():
    domains, tables = layered(np.random.default_rng(1), layers=60)
    solution = solve(domains, tables)
    assert solution.eliminated == 480 and solution.memo_hits > 430
    # and equal tables in arrays of their own are recognised by content
    copies = [Table(t.scope, t.cost.copy()) for t in tables]
    again = solve(domains, copies)
    assert (again.assignment, again.memo_hits) == (solution.assignment, solution.memo_hits)


def test_order_is_by_table_size_not_degree():
    # 'small' has three neighbours of 2 values, 'big' one neighbour but 100 values: small goes first
    sizes = [2, 2, 2, 2, 100, 100]
    scopes = [(0, 1), (0, 2), (0, 3), (4, 5)]
    order, width, largest, _ = elimination_order(sizes, scopes)
    assert order.index(0) < order.index(4)
    assert largest == 10_000 and width == 1


def mixed_graph():
    """Few variables of 12 values among those of 2 and 3: the smallest table first joins 62208 entries, the least fill 1152."""
    rng = np.random.default_rng(1912)
    sizes = [int(n) for n in rng.choice([2, 3, 12], 14)]
    scopes = [tuple(int(v) for v in rng.permutation(14)[:2]) for _ in range(22)]
    return sizes, scopes, [Table(scope, rng.random([sizes[v] for v in scope])) for scope in scopes]


def test_where_tables_grow_another_order_is_tried(monkeypatch):
    sizes, scopes, tables = mixed_graph()
    order, width, largest, _ = elimination_order(sizes, scopes, least_fill=True)
    assert sorted(order) == list(range(14)) and largest == 1152 < elimination_order(sizes, scopes).largest
    plain = solve(dict(enumerate(sizes)), tables)
    monkeypatch.setattr(solver, "LARGE", 10_000)
    other = solve(dict(enumerate(sizes)), tables)
    assert (plain.largest_table, other.largest_table, other.width) == (62208, 1152, width)
    assert other.cost == pytest.approx(plain.cost, abs=1e-12) and other.assignment == plain.assignment


def _cliques() -> tuple[dict[str, int], list[Table]]:
    """14 variables, each in a table with each other one: 28^14 combinations. Equal values cost nothing, but for those of v0."""
    domains = {f"v{i}": 28 for i in range(14)} | {"apart": 2}
    tables = [Table(pair, 1e-6 * (1 - np.eye(28))) for pair in itertools.combinations(list(domains)[:14], 2)]
    return domains, [*tables, Table(("v0",), np.array([0.0, *[2e-6] * 27])), Table(("apart",), np.array([3e-6, 0.0]))]


def test_what_is_too_wide_is_searched():
    domains, tables = _cliques()
    found = solve(domains, tables)
    assert found.searched and found.largest_table == 28**14
    assert found.assignment == {v: 0 for v in domains} | {"apart": 1}
    assert abs(found.cost) < 1e-12 and abs(found.bound) < 1e-9


def test_search_and_elimination_agree(monkeypatch):
    domains, tables = layered(np.random.default_rng(3), layers=2)
    exact = solve(domains, tables)
    monkeypatch.setattr("megafx.planner.solver.LARGEST", 1)
    found = solve(domains, tables)
    assert found.searched and not exact.searched and exact.bound == exact.cost
    assert abs(found.cost - exact.cost) < 1e-9 and found.bound <= found.cost


def test_search_that_is_too_short(monkeypatch):
    monkeypatch.setattr("megafx.planner.solver.SECONDS", 0.0)
    monkeypatch.setattr("megafx.planner.solver.PATIENCE", 0)
    monkeypatch.setattr("megafx.planner.solver.search", lambda *_, **__: None)
    with pytest.raises(TooWideError) as error:
        solve(*_cliques())
    assert set(error.value.variables) == {f"v{i}" for i in range(14)}


def test_search_of_what_cannot_be(monkeypatch):
    monkeypatch.setattr("megafx.planner.solver.LARGEST", 1)
    with pytest.raises(InfeasibleError):
        solve({"a": 2, "b": 2}, [Table(("a", "b"), np.full((2, 2), np.inf))])


def test_conflict_names_only_what_conflicts():
    same, different = np.where(np.eye(2), 0.0, np.inf), np.where(np.eye(2), np.inf, 0.0)
    tables = [Table((i, i + 1), same) for i in range(200)]  # a long satisfiable chain
    tables += [Table((f"t{i}", f"t{(i + 1) % 3}"), different) for i in range(3)]  # an odd cycle in two colours
    tables += [Table((50, "t0"), np.zeros((2, 2)))]
    domains = {**{i: 2 for i in range(201)}, **{f"t{i}": 2 for i in range(3)}}
    with pytest.raises(InfeasibleError, match="no choice satisfies every constraint on: t0, t1, t2\n") as error:
        solve(domains, tables)
    assert error.value.variables == ("t0", "t1", "t2") and error.value.minimal


def test_what_has_no_choice_has_no_dim():
    """A value that 100 ops read, all of them with one choice: an ndarray has at most 64 dims."""
    domains = {"hub": 1, **{i: 1 for i in range(100)}, "free": 2}
    tables = [Table(("hub", i), np.ones((1, 1))) for i in range(100)] + [Table((7, "free"), np.array([[3.0, 2.0]]))]
    found = solve(domains, tables)
    assert (found.cost, found.width, found.assignment["free"]) == (102.0, 0, 1)
    no = [Table(("hub", 3), np.full((1, 1), np.inf))]
    with pytest.raises(InfeasibleError) as error:
        solve(domains, tables + no)
    assert error.value.variables == ("hub", 3) and error.value.minimal


def test_bad_input():
    with pytest.raises(InfeasibleError):
        solve({"a": 0}, [])
    with pytest.raises(ValueError, match="mentions 'b', which has no domain"):
        solve({"a": 2}, [Table(("a", "b"), np.zeros((2, 2)))])
    with pytest.raises(ValueError, match=r"shape \(2, 2\), its domains are \(2,\)"):
        solve({"a": 2}, [Table(("a",), np.zeros((2, 2)))])
    with pytest.raises(ValueError, match="holds nan"):
        solve({"a": 2}, [Table(("a",), np.array([0.0, np.nan]))])


def test_speed_at_405b_scale():
    """9,500 variables, 20,000 tables, as 126 layers of a 405B model have: budget 0.7 s on one core."""
    domains, tables = layered(np.random.default_rng(7), layers=1188)
    assert len(domains) > 9_500 and len(tables) > 20_000
    solve(*layered(np.random.default_rng(7), layers=2))  # warm-up
    start = time.process_time()
    solution = solve(domains, tables)
    assert time.process_time() - start < 0.7
    assert solution.memo_hits > 9_000
