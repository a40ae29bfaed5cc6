"""Choose a placement for every value: the cheapest plan that the rules, the policies and the overrides allow.

Before:  a canonical graph on global shapes
After:   the same graph; `context.plan` says for every op which strategy of its rule it uses, and for every value which
         transitions serve its users
Legal because: strategies are rows of sharding rules, and every pair of placements has a transition; the graph is unchanged.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from megafx.analysis.fp8 import linears_in_fp8
from megafx.debugging import current, say
from megafx.errors import PlanError, or_leave_eager
from megafx.ir.nodes import draw_of, is_draw
from megafx.ir.program import (
    TOKENS,
    VAL,
    Phase,
    Program,
    active_nodes,
    differentiable_nodes,
    fqn_of,
    located,
    number_nodes,
)
from megafx.ops.owners import EXPERT, OWNER_OUTPUT, OWNER_PARAMETER, owners_of
from megafx.placements.types import I, P, R, owned
from megafx.planner.context import CompileContext, accepted_outputs, price_workload
from megafx.planner.overrides import Overrides
from megafx.planner.plan import Plan
from megafx.planner.policy import WEIGHTS_STAY, Policy, Yields, normalised_places
from megafx.planner.problem import Problem, alternatives, removals, shard_candidates, storage
from megafx.planner.solver import PATIENCE, SECONDS, InfeasibleError, Solution, TooWideError, solve
from megafx.rules.candidates import HEADS, find_candidates, results_of, strategies
from megafx.rules.strategies import OpRule, Strategy, rule_for

REQUIRES, ENSURES = Phase.CANONICAL, Phase.PLANNED


def plan_sharding(program: Program, context: CompileContext) -> int:
    """Fill `context`; returns the number of ops and parameters placed. Raises PlanError where nothing is allowed."""
    start = time.perf_counter()
    active, order = ask(program, context)
    if context.given is not None:
        context.plan = context.given.bind(program.sizes)
        _check_given(program, context, context.plan, order)
        context.weights = Policy(program, context.rules, active, context.t, sequence_parallel="auto").weights
    else:
        context.plan = _solve(program, context, active, order)
        context.plan.statistics["planning_seconds"] = time.perf_counter() - start
    context.plan.sizes = program.sizes
    if context.given is None:
        context.plan.experts = context.experts if context.fixed_experts is None else context.fixed_experts
    if context.agree is not None:
        context.plan = context.agree(context.plan)
    program.phase = Phase.PLANNED
    return len(context.plan.ops) + len(context.plan.params)


def ask(program: Program, context: CompileContext) -> tuple[set[fx.Node], list[fx.Node]]:
    """Name the nodes, price the workload and find every op's rule; (active nodes, the same in graph order)."""
    number_nodes(program.graph)
    price_workload(program, context.config)
    active = active_nodes(program)
    order = [n for n in program.graph.nodes if n in active]
    context.rules = {n: rule_for(n, program, active, context.axis) for n in order if n.op == "call_function"}
    context.differentiable = differentiable_nodes(program, context.wants_grad)
    context.owners = owners_of(program)
    context.accepts = accepted_outputs(program, active, context.config, context.caches)
    return active, order


def _solve(program: Program, context: CompileContext, active: set[fx.Node], order: list[fx.Node]) -> Plan:
    problem, plan, solution = _optimum(program, context, active, order)
    plan.hardware = context.hardware.name
    plan.flat_tokens = any(TOKENS in n.meta for n in order)
    plan.cost_us = solution.cost * 1e6
    plan.sequence_parallel = any(
        problem.policy.shards_sequence(n, problem.domains[n][solution.assignment["op", n]])
        for n in problem.context.rules
    )
    plan.workload = {name: program.sizes.workload_of.get(s, 0) for name, s in program.sizes.symbols.items()}
    plan.statistics = {
        "variables": len(problem.sizes_of_domains),
        "tables": len(problem.tables),
        "width": solution.width,
        "largest_table": solution.largest_table,
        "solver_seconds": solution.seconds,
        "bound_us": solution.bound * 1e6,
    }
    if solution.searched:
        above = (solution.cost - solution.bound) / solution.cost if solution.cost else 0.0
        found = "is the cheapest" if above < 0.0005 else f"may take up to {above:.1%} more time than the cheapest"
        program.note(
            "plan", f"too many values depend on one another for all plans to be compared: the one found {found}"
        )
    _say_what_is_replicated(program, context, problem, plan)
    _say_what_gave_way(program, problem.policy, plan)
    if context.config.sequence_parallel is True and context.t > 1 and context.config.planner_policy != "free":
        _say_where_the_sequence_is_whole(program, problem, solution)
    context.weights = problem.policy.weights
    if context.keeps_problem:  # what policies and overrides took away has a price too
        context.problem = make_problem(program, context, active, order, free=True, styles={})[0]
    if current().level >= 3 and not solution.searched:  # another search for each would take minutes
        plan.sizes = program.sizes
        for line in alternatives(problem, plan, solution):
            say(line)
    return plan


def make_problem(
    program: Program,
    context: CompileContext,
    active: set[fx.Node],
    order: list[fx.Node],
    *,
    free: bool | None = None,
    styles: Mapping[str, str] | None = None,
    yields: Yields | None = None,
) -> tuple[Problem, Overrides]:
    """Domains after policies and overrides, and the cost tables. styles: by default those of the config."""
    config = context.config
    free = config.planner_policy == "free" if free is None else free
    sequence_parallel = config.sequence_parallel
    given: Any = {"sequence_parallel": sequence_parallel, "free": free, "yields": yields}
    policy = Policy(program, context.rules, active, context.t, **given)
    placeholders = [n for n in order if n.op == "placeholder"]
    candidates = find_candidates(
        context.rules, placeholders, program.sizes, context.t, context.cuts, context.head_tail, context.by_heads
    )
    overrides = Overrides(program, config.overrides if styles is None else styles, policy.weights, context.t)
    domains: dict[fx.Node, list[Strategy]] = {}
    taken: list[Any] = []
    whose = {n.args[0]: n.args[1] for n in program.graph.find_nodes(op="call_function", target=OWNER_PARAMETER)}
    inputs = dict(program.input_nodes())
    for node in order:
        if node.op == "placeholder":
            spec = inputs[node]
            if spec.kind != "param":
                domains[node] = storage([context.fixed.get(spec.name, I)])
            elif node in whose:
                domains[node] = storage([owned(int(node.meta[VAL].shape[0]), whose[node])])
                overrides.note_expert(spec)
            elif spec.name in context.fixed:
                domains[node] = storage([context.fixed[spec.name]])
            else:
                domains[node] = storage([I, *shard_candidates(candidates.of(node))] if context.t > 1 else [I])
            domains[node], gone = overrides.filter_parameter(spec, domains[node])
        elif node in context.owners:
            domains[node], gone = _strategies(context.rules[node], candidates, program, context), {}
        elif context.rules[node].kind == "element":
            domains[node], gone = _element(node, domains[node.all_input_nodes[0]]), {}
        else:
            rule = context.rules[node]
            every = _strategies(rule, candidates, program, context)
            if context.cuts:
                every = _where_it_can_be_cut(node, rule, every, program, context, policy.weights)
            follow, by_override = overrides.filter_op(node, rule, every, partial(policy.shards_sequence, node))
            domains[node], gone = policy.filter(node, rule, follow, overridden=bool(by_override))
            gone = by_override | gone
        taken += removals(node, gone)
    context.in_fp8 = linears_in_fp8(program, config) if context.training else set()
    problem = Problem(program, context, domains, policy)
    problem.removed = taken
    problem.build()
    return problem, overrides


def _check_given(program: Program, context: CompileContext, plan: Plan, order: list[fx.Node]) -> None:
    """Raise PlanError where a plan that was loaded (and perhaps edited) does not fit the graph."""
    if plan.t != context.t:
        raise PlanError(f"the plan is for {plan.t} ranks, not for {context.t}", fix="plan again for this many")
    wanted = [n.name for n in context.rules if n.name not in plan.ops]
    wanted += [spec.name for spec in program.inputs if spec.kind == "param" and spec.name not in plan.params]
    if wanted:
        more = f" and {len(wanted) - 1} more" if len(wanted) > 1 else ""
        raise PlanError(f"the plan is for another graph: it does not place '{wanted[0]}'{more}", fix="plan again")
    candidates = find_candidates(context.rules, [n for n in order if n.op == "placeholder"], program.sizes, plan.t)
    chosen: dict[fx.Node, list[Strategy]] = {}
    for node, rule in context.rules.items():
        choice = plan.ops[node.name]
        element = rule.kind == "element"
        rows = (
            _element(node, chosen[node.all_input_nodes[0]])
            if element
            else _strategies(rule, candidates, program, context)
        )
        chosen[node] = [s for s in rows if (choice.ins, choice.out) == (s.ins, s.out)]
        if not chosen[node]:
            ins = ", ".join(map(plan.text_of, choice.ins))
            raise PlanError(
                f"the plan places %{node.name} ({node.target}) as {ins} -> {plan.text_of(choice.out)}, "
                "which is no row of its sharding rule",
                fix="choose a row of the rule, or plan again",
                **located(node),
            )


def _where_it_can_be_cut(
    node: fx.Node, rule: OpRule, every: list[Strategy], program: Program, context: CompileContext, weights: set[fx.Node]
) -> list[Strategy]:
    """Of an axis that cuts some sizes, wherever a rule lets it: the strategies that do. Where none does, all ranks have the
    values and their gradients whole; parameters, and what has no such size, as it comes."""
    cut = [s for s in every if any(p.is_shard for p in (*s.ins, s.out))]
    if node in context.by_heads and context.always_by_heads:
        return [s for s in cut if s.out.is_shard and s.out.dim == HEADS]
    if cut:
        return cut
    values = [*(o.node for o in rule.operands), *(n for n in results_of(node, rule) if n is not None)]
    shapes = [program.sizes.shape(v.meta[VAL]) for v in values if isinstance(v.meta[VAL], torch.Tensor)]
    has_it = any(program.sizes.mentions(n, name) for shape in shapes for n in shape for name in context.cuts)
    return every[:1] if has_it and node not in weights else every


def _element(node: fx.Node, of_op: list[Strategy]) -> list[Strategy]:
    """The placements at which the strategies of a user's op leave one of its results."""
    index = node.args[1]
    return storage([*dict.fromkeys(s.result(index) for s in of_op)])


def _strategies(rule: OpRule, candidates: Any, program: Program, context: CompileContext) -> list[Strategy]:
    if context.t == 1:
        return [Strategy((I,) * len(rule.operands), I, "", "")]
    if rule.node in context.owners:  # expert values have one strategy
        if rule.node.target is OWNER_PARAMETER:
            stored = owned(int(rule.node.meta[VAL].shape[0]), context.owners[rule.node])
            return [Strategy((stored,), R, EXPERT)]
        ins = tuple(R if o.active else I for o in rule.operands)
        return [Strategy(ins, P if rule.node.target is OWNER_OUTPUT else R, EXPERT)]
    found = strategies(rule, candidates, context.t)
    if is_draw(rule.node) and (drop := draw_of(rule.node)).shard_dim >= 0:
        # An outer axis cuts it. The op can say no second cut of what it draws, nor of the dim that it counts.
        once = drop.p and drop.seed is not None
        found = [s for s in found if not s.out.is_shard or not (once or s.out.dim == drop.shard_dim)]
    return found


def _optimum(
    program: Program, context: CompileContext, active: set[fx.Node], order: list[fx.Node]
) -> tuple[Problem, Plan, Solution]:
    """The cheapest plan. Where the policies alone leave none, they give way; what overrides ask for beside them is refused."""
    yields, asked = Yields(), context.config.overrides
    conflict: InfeasibleError | None = None
    turns = [asked, {}, asked] if asked else [{}]  # after a conflict: is there a plan without the overrides?
    while turns:
        problem, overrides = make_problem(program, context, active, order, styles=turns[0], yields=yields)
        try:
            solution = _solution(problem)
        except InfeasibleError as error:
            conflict = error
            among = [v[1] for v in error.variables if isinstance(v, tuple)]
            if turns[0] or problem.policy.free or not yields.further(among):
                del turns[0]
            continue
        if turns[0] == asked:
            overrides.check_used()
            plan = problem.plan_of(solution.assignment)
            plan.removals = problem.removed
            return problem, plan, solution
        del turns[0]
    assert conflict is not None
    names = ", ".join(sorted({v[1].name for v in conflict.variables if isinstance(v, tuple)}))
    raise PlanError(
        f"no plan satisfies every policy and override: the conflict is among {names}",
        fix="lift an override on these, or use Config(planner_policy='free')",
    ) from conflict


def _solution(problem: Problem) -> Solution:
    try:
        return solve(problem.sizes_of_domains, problem.tables)
    except TooWideError as error:
        node = next(v[1] for v in error.variables if isinstance(v, tuple))
        raise PlanError(
            f"no plan was found in {SECONDS * PATIENCE:.0f} s: {len(error.variables)} choices round %{node.name} "
            f"({node.target}) depend on one another",
            fix=or_leave_eager("write the module with fewer steps (a loop over a sequence has many)", fqn_of(node)),
            **located(node),
        ) from error


def _say_what_is_replicated(program: Program, context: CompileContext, problem: Problem, plan: Plan) -> None:
    """Every parameter stored whole and every op without a rule, with the reason."""
    if context.t == 1:
        return
    for node, rule in context.rules.items():
        if rule.kind == "none" and node not in context.owners:
            plan.replicated[node.name] = rule.reason
            op = node.all_input_nodes[0] if node.target is operator.getitem else node
            program.note("replicated", f"{op.target}: {rule.reason}; computed whole on every rank", node)
    for node, spec in program.input_nodes():
        if spec.kind == "param" and not plan.params[spec.name].is_shard:
            plan.replicated[spec.name] = _why_whole(node, problem, plan)


def _say_what_gave_way(program: Program, policy: Policy, plan: Plan) -> None:
    """One note for each policy that does not hold everywhere, since nothing would have been left."""
    for node in () if policy.free else program.graph.nodes:
        moved = [c for c in plan.transitions.get(node.name, ()) if c.src.is_shard or c.dst.is_shard]
        if moved and node in policy.weights:
            policy.gave_way[WEIGHTS_STAY][node] = None
    for text, nodes in policy.gave_way.items():
        if nodes:
            first = next(iter(nodes))
            spec = dict(program.input_nodes()).get(first)
            name = str(first.target) if spec is None else spec.name
            others = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
            program.note("policy", f"{text}: not so at {name}{others}, where no plan would be left", first)


def _say_where_the_sequence_is_whole(program: Program, problem: Problem, solution: Solution) -> None:
    """sequence_parallel=True, and norms of the residual stream run on all tokens all the same: one note for each reason."""
    found: dict[str, list[fx.Node]] = {}
    for node, rule in problem.context.rules.items():
        chosen = problem.domains[node][solution.assignment["op", node]]
        if normalised_places(node, rule) and not problem.policy.shards_sequence(node, chosen):
            found.setdefault(_why_sequence_is_whole(node, rule, problem), []).append(node)
    for reason, nodes in found.items():
        others = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        program.note(
            "sequence parallel",
            f"sequence_parallel=True has no effect on {nodes[0].target}{others}: {reason}",
            nodes[0],
        )


def _why_sequence_is_whole(node: fx.Node, rule: OpRule, problem: Problem) -> str:
    shape = ", ".join(map(str, rule.operands[0].node.meta[VAL].shape))
    if rule.kind == "none":
        return rule.reason
    if any(problem.policy.shards_sequence(node, s) for s in problem.domains[node]):
        return "running it on a shard of the sequence costs more than it saves"
    if len(normalised_places(node, rule)) > 1:
        return f"it normalises over more than the last dim of its input [{shape}], so that tokens are not computed one by one"
    seq = problem.program.sizes.symbols.get("seq")
    if seq is not None and problem.program.sizes.traced_of.get(seq, problem.context.t + 1) <= problem.context.t:
        return "the sequences that the model takes are so short that a rank would hold one token or none"
    return (
        f"the tokens of its input [{shape}] were not made one dim, since it is beside no product with a weight; and no dim is "
        "known to be a sequence: that is a dim of dynamic size, or the second one of token ids or a mask [batch, sequence]"
    )


def _why_whole(node: fx.Node, problem: Problem, plan: Plan) -> str:
    uses = problem.uses.get(node, [])
    if not uses:
        return "the graph does not use it"
    without_rule = [u.consumer for u in uses if problem.context.rules[u.consumer].kind == "none"]
    if without_rule:
        return f"used by {without_rule[0].target}, which has no sharding rule"
    if len(problem.domains[node]) == 1:
        return "none of its dims can be sharded"
    if any(c.dst == P for c in plan.transitions.get(node.name, ())):
        return "added once, on rank 0, to the partial result of a row-parallel op"
    forbidden = {reason for u in uses for reason in problem.context.rules[u.consumer].forbidden.values()}
    if forbidden:
        return "; ".join(sorted(forbidden))
    read = [problem.context.rules[u.consumer].operands[u.index].node for u in uses]
    reasons = {r: None for value in read for r in problem.policy.kept_whole.get(value, ())}
    return "; ".join(reasons) or "storing it whole costs less than the transitions of its shards"
