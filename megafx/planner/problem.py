"""The planning problem of one graph as variables and cost tables, and back from an assignment to a Plan.

Variables: one per op (its strategy), one per parameter (its storage), and one per value with several uses: (the placement it
is produced at, the set of further placements that are materialised), priced by the cheapest way to make each of them once.
That last variable is what lets q, k and v share one gather. Source: Zheng et al. 2022 (Alpa) for the factor-graph view;
bucket elimination solves it exactly (solver.py).
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from megafx.ir.facts import ATTENTION, facts_of
from megafx.ir.nodes import op_name
from megafx.ir.program import VAL, Program, fqn_of
from megafx.placements.types import I, P, Placement, R, S
from megafx.planner.context import Accepts, CompileContext, accepts, output_placement
from megafx.planner.cost import (
    PARTIAL_GRADIENT_TIE_SECONDS,
    PARTIAL_TIE_SECONDS,
    cost_kind,
    in_pieces,
    op_seconds,
    optimizer_seconds,
    padding,
    share,
    transition_seconds,
)
from megafx.planner.hardware import FLOAT8
from megafx.planner.plan import OpChoice, Plan, Removal, Transition
from megafx.planner.policy import Policy
from megafx.planner.solver import InfeasibleError, Solution, Table, solve
from megafx.rules.candidates import results_of
from megafx.rules.strategies import OpRule, Strategy

MAX_EXTRA_PLACEMENTS = 2  # measured on 6 instances: the optimum with 2 equals that with 3 (planner experiment)


@dataclass(frozen=True)
class Use:
    """Operand `index` of `consumer`."""

    consumer: fx.Node
    index: int


@dataclass
class Problem:
    """domains: the strategies of each op and parameter."""

    program: Program
    context: CompileContext
    domains: dict[fx.Node, list[Strategy]]
    policy: Policy
    params: set[fx.Node] = field(default_factory=set)
    uses: dict[fx.Node, list[Use]] = field(default_factory=dict)
    values: dict[fx.Node, list[tuple[Placement, tuple[Placement, ...]]]] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    removed: list[Removal] = field(default_factory=list)
    _numel: dict[fx.Node, int] = field(default_factory=dict)
    _memo: dict[Any, Any] = field(default_factory=dict)
    _domain_ids: dict[tuple[Strategy, ...], int] = field(default_factory=dict)
    _domain_id_of: dict[fx.Node, int] = field(default_factory=dict)

    # -- what is priced

    def numel(self, node: fx.Node) -> int:
        """Elements of the value at the workload."""
        if node not in self._numel:
            self._numel[node] = self.program.sizes.numel(node.meta[VAL])
        return self._numel[node]

    def transition_seconds(self, node: fx.Node, src: Placement, dst: Placement) -> float:
        """Time of one transition of this value, forward and backward; inf where a policy forbids it."""
        if src == dst:
            return 0.0
        if not self.policy.allows_transition(node, src, dst):
            return math.inf
        value = node.meta[VAL]
        grad = node in self.context.differentiable
        is_param = node in self.params
        pieces = self.in_pieces(node, src) or self.in_pieces(node, dst)
        key: Any = (src, dst, pieces)
        if key not in self._memo:
            t, same_dim = self.context.t, src.is_shard and src.dim == dst.dim
            self._memo[key] = (src.kind, dst.kind, same_dim, padding(src, t), padding(dst, t), pieces)
        key = (self.numel(node), value.dtype.itemsize, self._memo[key], grad, is_param)
        if key not in self._memo:
            sizes = (self.numel(node), value.dtype.itemsize, self.context.hardware, self.context.t)
            known = {"needs_grad": grad, "is_param": is_param, "in_pieces": pieces}
            self._memo[key] = transition_seconds(src, dst, *sizes, **known)
        return self._memo[key]

    def in_pieces(self, node: fx.Node, placement: Placement) -> bool:
        """True if gathers and scatters of the value's shards copy it: at some batch size, if not at the workload's."""
        return placement.is_shard and in_pieces(placement, self.program.sizes.shape(node.meta[VAL]))

    def tree(
        self, node: fx.Node, src: Placement, wanted: tuple[Placement, ...]
    ) -> tuple[float, tuple[Transition, ...]]:
        """The cheapest sequence of transitions that makes each placement of `wanted` once, starting at `src`."""
        best: tuple[float, tuple[Transition, ...]] = (math.inf, ())
        for order in itertools.permutations(wanted):
            have, cost, moves = [src], 0.0, []
            for dst in order:
                prices = [self.transition_seconds(node, h, dst) for h in have]
                cheapest = min(range(len(have)), key=prices.__getitem__)
                cost += prices[cheapest]
                moves.append(Transition(have[cheapest], dst))
                have.append(dst)
            if cost < best[0] - 1e-15 or not best[1]:
                best = (cost, tuple(moves))
        return best if wanted else (0.0, ())

    # -- variables and tables

    def build(self) -> None:
        """Fill params, uses, values and tables from the domains."""
        self.params = {n for n, spec in self.program.input_nodes() if spec.kind == "param"}
        uses: dict[fx.Node, list[Use]] = defaultdict(list)
        for node, rule in self.context.rules.items():
            for index, operand in enumerate(rule.operands):
                if operand.active:
                    uses[operand.node].append(Use(node, index))
        self.uses = dict(uses)
        for node in self.domains:
            self._add((("op", node),), self._unary(node))
            self._add_uses(node)
            if node.target is operator.getitem:
                self._add_element(node)

    def _domain_id(self, node: fx.Node) -> int:
        if node not in self._domain_id_of:
            key = tuple(self.domains[node])
            self._domain_id_of[node] = self._domain_ids.setdefault(key, len(self._domain_ids))
        return self._domain_id_of[node]

    def _add(self, scope: tuple[Any, ...], cost: np.ndarray) -> None:
        self.tables.append(Table(scope, cost))

    def _cached(self, key: Any, make: Any) -> np.ndarray:
        """Repeated layers share one array, which the solver recognises by identity."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def _unary(self, node: fx.Node) -> np.ndarray:
        if node.op == "placeholder":
            key: Any = ("input", self._domain_id(node), self.numel(node), node in self.params)
            paid = node in self.params and self.context.training
            price = optimizer_seconds(self.numel(node), self.context.hardware) if paid else 0.0
            shares = [share(s.out, self.context.t) for s in self.domains[node]]
            return self._cached(key, lambda: price * np.array(shares))
        rule = self.context.rules[node]
        operands = tuple((self.numel(o.node), o.node.meta[VAL].dtype) for o in rule.operands)
        size = sum(map(self.numel, self._made(node, rule)))
        in_fp8 = node in self.context.in_fp8
        key = ("op", str(node.target), self._domain_id(node), operands, size, contraction(self.program, rule), in_fp8)
        return self._cached(key, lambda: self._op_costs(node, rule))

    def _op_costs(self, node: fx.Node, rule: OpRule) -> np.ndarray:
        made = self._made(node, rule)
        if not made:
            return np.zeros(len(self.domains[node]))
        operand_bytes = [self.numel(o.node) * o.node.meta[VAL].dtype.itemsize for o in rule.operands]
        seconds = op_seconds(
            op_name(node),
            out_numel=sum(map(self.numel, made)),
            out_itemsize=made[0].meta[VAL].dtype.itemsize,
            operand_bytes=operand_bytes,
            contraction=contraction(self.program, rule),
            hardware=self.context.hardware,
            training=self.context.training,
            dtype=FLOAT8 if node in self.context.in_fp8 else None,
        )
        shares = np.array([share_of_op(s, op_name(node), self.context.t) for s in self.domains[node]])
        ties = {P: PARTIAL_TIE_SECONDS, R: PARTIAL_GRADIENT_TIE_SECONDS}
        return seconds * shares + np.array([ties.get(s.out, 0.0) for s in self.domains[node]])

    def _made(self, node: fx.Node, rule: OpRule) -> list[fx.Node]:
        """The values that an op makes, as far as its rule places them."""
        if node.target is operator.getitem:
            return []
        return [n for n in results_of(node, rule) if n is not None and isinstance(n.meta[VAL], torch.Tensor)]

    def _add_uses(self, node: fx.Node) -> None:
        uses, leaves = self.uses.get(node, []), self.context.accepts.get(node)
        if not uses and leaves is None:
            return
        produced = [s.out for s in self.domains[node]]
        if not uses:
            self._add((("op", node),), np.array([self._leaving_seconds(node, p, ()) for p in produced]))
        elif len(uses) == 1 and leaves is None:
            self._add_edge(node, uses[0])
        else:
            self._add_value(node, uses, leaves)

    def _add_element(self, node: fx.Node) -> None:
        """An element has the placement its op made it at: tuples have no transitions."""
        source = node.args[0]
        if isinstance(source, fx.Node) and source in self.domains:
            index = node.args[1]
            made = [a.result(index) for a in self.domains[source]]
            same = [[0.0 if p == b.out else math.inf for b in self.domains[node]] for p in made]
            key = ("element", self._domain_id(source), self._domain_id(node), index)
            self._add((("op", source), ("op", node)), self._cached(key, lambda: np.array(same)))

    def _leaving_seconds(self, node: fx.Node, src: Placement, others: tuple[Placement, ...]) -> float:
        """Price of leaving the graph: 0 if the output may have one of these placements, else a transition to such a one."""
        wanted = self.context.accepts[node]
        if any(accepts(wanted, p) for p in (src, *others)):
            return 0.0
        return min(self.transition_seconds(node, p, output_placement(wanted)) for p in (src, *others))

    def _value_key(self, node: fx.Node) -> tuple[Any, ...]:
        return (
            self.program.sizes.shape(node.meta[VAL]),
            node.meta[VAL].dtype,
            self.policy.stays(node),
            node in self.params,
        )

    def _add_edge(self, node: fx.Node, use: Use) -> None:
        key = ("edge", self._domain_id(node), self._domain_id(use.consumer), use.index, self._value_key(node))

        def costs() -> np.ndarray:
            wanted = [s.ins[use.index] for s in self.domains[use.consumer]]
            return np.array([[self.transition_seconds(node, s.out, w) for w in wanted] for s in self.domains[node]])

        self._add((("op", node), ("op", use.consumer)), self._cached(key, costs))

    def _add_value(self, node: fx.Node, uses: list[Use], wanted: Accepts | None) -> None:
        consumers: dict[fx.Node, list[int]] = defaultdict(list)
        for use in uses:
            consumers[use.consumer].append(use.index)
        own = self._domain_id(node)
        users = tuple((self._domain_id(c), tuple(i)) for c, i in consumers.items())
        key = ("value", own, tuple(sorted(set(users))), min(len(uses), 3), self._value_key(node), wanted)
        domain, prices = self._cached((*key, "domain"), lambda: self._value_domain(node, uses, wanted))
        self.values[node] = domain
        variable = ("val", node)
        self._add((variable,), prices)

        def made() -> np.ndarray:
            return np.array([[0.0 if s.out == src else math.inf for src, _ in domain] for s in self.domains[node]])

        self._add((("op", node), variable), self._cached((*key, "made"), made))
        for consumer, indices in consumers.items():
            used = (*key, "used", self._domain_id(consumer), tuple(indices))
            table = self._cached(used, lambda c=consumer, i=indices: self._served(c, i, domain))
            self._add((variable, ("op", consumer)), table)

    def _value_domain(
        self, node: fx.Node, uses: list[Use], leaves: Accepts | None
    ) -> tuple[list[tuple[Placement, tuple[Placement, ...]]], np.ndarray]:
        produced = _distinct(s.out for s in self.domains[node])
        asked = _distinct(s.ins[u.index] for u in uses for s in self.domains[u.consumer])
        if leaves is not None and output_placement(leaves) not in asked:
            asked.append(output_placement(leaves))
        domain, prices = [], []
        for src in produced:
            others = [p for p in asked if p != src]
            for extra in range(min(MAX_EXTRA_PLACEMENTS, len(others)) + 1):
                for wanted in itertools.combinations(others, extra):
                    price = self.tree(node, src, wanted)[0]
                    if leaves is not None:
                        price += self._leaving_seconds(node, src, wanted)
                    if math.isfinite(price):
                        domain.append((src, wanted))
                        prices.append(price)
        return domain, np.array(prices)

    def _served(self, consumer: fx.Node, indices: list[int], domain: list[Any]) -> np.ndarray:
        wanted = [[s.ins[i] for i in indices] for s in self.domains[consumer]]
        return np.array(
            [[0.0 if all(w == src or w in extra for w in ws) else math.inf for ws in wanted] for src, extra in domain]
        )

    @property
    def sizes_of_domains(self) -> dict[Any, int]:
        """Variable -> number of choices, as the solver wants them."""
        ops = {("op", n): len(d) for n, d in self.domains.items()}
        return ops | {("val", n): len(d) for n, d in self.values.items()}

    # -- back to a plan

    def plan_of(self, assignment: dict[Any, int]) -> Plan:
        """The Plan that an assignment of all op variables means (value variables are used where assigned)."""
        plan = Plan(t=self.context.t, axis=self.context.axis)
        chosen = {n: d[assignment["op", n]] for n, d in self.domains.items()}
        for node, strategy in chosen.items():
            if node.op == "call_function":
                plan.ops[node.name] = OpChoice(strategy.ins, strategy.out, strategy.factor, fqn_of(node), strategy.note)
            moves = self._moves(node, chosen, assignment)
            if moves:
                plan.transitions[node.name] = moves
        for node, spec in self.program.input_nodes():
            if spec.kind == "param":
                plan.params[spec.name] = chosen[node].out if node in chosen else I
        return plan

    def _moves(
        self, node: fx.Node, chosen: dict[fx.Node, Strategy], assignment: dict[Any, int]
    ) -> tuple[Transition, ...]:
        src = chosen[node].out
        wanted = _distinct(chosen[u.consumer].ins[u.index] for u in self.uses.get(node, []))
        wanted = [p for p in wanted if p != src]
        if node in self.values and ("val", node) in assignment:
            wanted = list(self.values[node][assignment["val", node]][1])
        leaves = self.context.accepts.get(node)
        if leaves is not None and not any(accepts(leaves, p) for p in (src, *wanted)):
            wanted.append(output_placement(leaves))
        return self.tree(node, src, tuple(wanted))[1]


def _distinct(items: Any) -> list[Any]:
    return list(dict.fromkeys(items))


def storage(placements: list[Placement]) -> list[Strategy]:
    """A parameter's domain: the placements that it may be stored at."""
    return [Strategy((), p, "", "") for p in placements]


def shard_candidates(cuts: Any) -> list[Placement]:
    """(dim, Layout) pairs -> S placements in a fixed order."""
    return [S(dim, layout) for dim, layout in sorted(cuts, key=lambda c: (c[0], c[1].flat()))]


def removals(node: fx.Node, gone: dict[str, int]) -> list[Removal]:
    return [Removal(node.name, fqn_of(node), count, reason) for reason, count in gone.items()]


def contraction(program: Program, rule: OpRule) -> int:
    """Elements along the factors that a matmul sums over (both operands have them); the keys of attention; 1 for others."""
    sizes = program.sizes
    if cost_kind(op_name(rule.node)) == ATTENTION:
        return sizes.workload(sizes.of(rule.operands[1].node.meta[VAL].shape[-2]))
    terms = known_terms(rule.node)
    if terms is not None:
        return terms
    multiplied = [o for o in rule.operands if o.role == "x"]
    found: dict[str, int] = {}
    for operand in multiplied:
        for factor, size in zip(operand.factors, operand.node.meta[VAL].shape, strict=True):
            if factor and factor not in rule.result and sum(factor in o.factors for o in multiplied) > 1:
                found[factor] = sizes.workload(sizes.of(size))
    return math.prod(found.values())


def share_of_op(chosen: Strategy | OpChoice, name: str, t: int) -> float:
    """The part of an op that each rank computes, padding included."""
    if not chosen.factor:
        return 1.0
    cut = next((p for p in (chosen.out, *chosen.ins) if p.is_shard), None)
    part = 1 / t if cut is None else share(cut, t)
    weights_whole = cost_kind(name) == ATTENTION and not chosen.ins[0].is_shard  # only the width of v is cut
    return (1 + part) / 2 if weights_whole else part


def known_terms(node: fx.Node) -> int | None:
    """Terms summed for each element of an op's result, if its file says it (`OpFacts.terms`)."""
    terms = facts_of(node.target).terms
    return None if terms is None else int(terms(*fx.map_arg(node.args, lambda n: tuple(n.meta[VAL].shape))))


# -- what the planner could have done instead


def alternatives(problem: Problem, plan: Plan, solution: Solution) -> Iterator[str]:
    """Lines of text (MEGAFX_DEBUG=3): an op with a weight, and below it its strategies, the cheapest first.

    Each is priced by what the best plan that uses it adds to a step. Layers that differ in their index alone are priced once.
    """
    seen: set[tuple[str, str]] = set()
    for node, rule in problem.context.rules.items():
        kind = re.sub(r"\.\d+(?=\.|$)", ".*", fqn_of(node)), str(node.target)
        if kind in seen or not any(o.node in problem.policy.weights for o in rule.operands):
            continue
        seen.add(kind)
        chosen, total = solution.assignment["op", node], len(problem.domains[node])
        yield f"alternatives of %{node.name} [{fqn_of(node)}] {node.target}: {total} strategies"
        priced = [(0.0, chosen), *((_added_us(problem, solution, node, i), i) for i in range(total) if i != chosen)]
        for added_us, index in sorted(priced):
            strategy = problem.domains[node][index]
            text = f"{', '.join(map(plan.text_of, strategy.ins))} -> {plan.text_of(strategy.out)}"
            price = "chosen" if index == chosen else "impossible" if added_us == np.inf else f"+{added_us:.1f} us"
            yield f"  {text:60s} {price}"


def _added_us(problem: Problem, solution: Solution, node: fx.Node, index: int) -> float:
    """What the best plan in which `node` uses strategy `index` costs more than the best plan."""
    only = np.full(len(problem.domains[node]), np.inf)
    only[index] = 0.0
    forced = Table((("op", node),), only)
    try:
        return 1e6 * (solve(problem.sizes_of_domains, [*problem.tables, forced]).cost - solution.cost)
    except InfeasibleError:
        return float("inf")


class Neighbourhood:
    """What one op costs with a strategy of its own while every other op stays as a plan has it: the op, and the transitions
    of its operands and of its result. Parameters are stored the cheapest way for it."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.plan = problem, plan

    def cost(self, node: fx.Node, index: int) -> tuple[float, list[tuple[fx.Node, Transition]]]:
        """(seconds, transitions) with strategy `index` of the op's domain."""
        strategy, problem = self.problem.domains[node][index], self.problem
        rule = problem.context.rules[node]
        seconds, moves = float(problem._unary(node)[index]), []
        for value in dict.fromkeys([*(o.node for o in rule.operands if o.active), node]):
            wanted = _distinct(self._wanted(use, node, strategy) for use in problem.uses.get(value, []))
            if value is node:
                choices = [(0.0, strategy.out)]
            elif value.op == "placeholder":
                choices = list(zip(problem._unary(value), [s.out for s in problem.domains[value]], strict=True))
            else:
                choices = [(0.0, self.plan.ops[value.name].out)]
            best: tuple[float, tuple[Transition, ...]] = (math.inf, ())
            for price, src in choices:
                for others in self._made_of(value, src, wanted):
                    spent, made = problem.tree(value, src, others)
                    if value in problem.context.accepts:
                        spent += problem._leaving_seconds(value, src, others)
                    if price + spent < best[0]:
                        best = (price + spent, made)
            seconds += best[0]
            moves += [(value, move) for move in best[1]]
        return seconds, moves

    def _made_of(self, value: fx.Node, src: Placement, wanted: list[Placement]) -> Iterator[tuple[Placement, ...]]:
        """Sets of placements to make of a value so that those wanted are there: the solver's, with others on the way."""
        if value not in self.problem.values:
            yield tuple(p for p in wanted if p != src)
            return
        for produced, others in self.problem.values[value]:
            if produced == src and all(p == src or p in others for p in wanted):
                yield others

    def _wanted(self, use: Use, node: fx.Node, strategy: Strategy) -> Placement:
        ins = strategy.ins if use.consumer is node else self.plan.ops[use.consumer.name].ins
        return ins[use.index]
