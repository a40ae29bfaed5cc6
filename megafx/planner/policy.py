"""Policies: strategies that the planner may not use, each removed with a reason that the report shows.

Costs alone find cheaper and stranger plans than Megatron's: hidden-sharded residuals, tensor parallelism turned into data
parallelism, weights gathered at every use. The default policy forbids them:

    batch        the batch dim is not sharded on the tensor-parallel axis (that is data parallelism)
    sequence     with sequence_parallel=False no dim of the sequence is sharded; with True, norms run on a sequence shard.
                 Tokens that are one dim (`flatten_tokens`, packed tokens) are a sequence, whatever dims they come from
    normalised   a dim that a norm normalises over, followed through ops that keep it, stays whole on activations; but the
                 result of a matmul may be gathered where its weight cannot be sharded otherwise
    weights      matmul weights are sharded wherever a strategy can, and are never gathered
    router       a weight whose result is ranked (topk, sort, argmax, the indices of max) along the weight's own dim is
                 whole: every rank needs every score, and a gather a layer costs more than the few columns of a router save

Where nothing is left, policies give way in the order of `YIELDING`, only at the ops and weights that conflict, and the report
says so. `planner_policy="free"` lifts them all.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from megafx.ir.facts import MATMUL
from megafx.ir.groups import Groups
from megafx.ir.nodes import op_name
from megafx.ir.program import TOKENS, VAL, Program, fqn_of, source_of
from megafx.placements.types import P, Placement
from megafx.placements.views import dim_groups
from megafx.planner.cost import cost_kind
from megafx.rules.candidates import results_of
from megafx.rules.strategies import OpRule, Strategy

BATCH = "the batch is not sharded on the tensor-parallel axis"
SEQUENCE = "sequence_parallel=False: the sequence is not sharded"
NORMALISED = "a norm normalises over this dim, so the activation keeps it whole"
SHARD_WEIGHTS = "a matmul weight is sharded where it can be"
ROUTER = "a router: its scores are ranked (topk, sort, argmax) over this dim, which every rank needs whole"
SEQUENCE_WANTED = "sequence_parallel=True: norms, dropouts and residuals run on a shard of the sequence"
WEIGHTS_STAY = "a weight is neither gathered nor stored whole and used in slices"
# The other policies only forbid strategies that shard something, so computing on whole values stays legal.
YIELDING = (WEIGHTS_STAY, SHARD_WEIGHTS, SEQUENCE_WANTED, ROUTER)

VIEWS = ("reshape", "view")
Place = tuple[fx.Node, int]  # a dim of a value


def _aten(ops: str) -> frozenset[str]:
    return frozenset(f"aten.{op}" for op in ops.split())


RANKINGS = _aten("topk.default sort.default sort.stable argsort.default argsort.stable argmax.default argmin.default")
EXTREMES = _aten("max.dim min.dim")  # they rank only if asked for indices
VIEWS_OF_WEIGHTS = _aten(
    "t.default transpose.int permute.default numpy_T.default to.dtype view.default reshape.default slice.Tensor select.int "
    "unsqueeze.default squeeze.dim contiguous.default clone.default _to_copy.default"
)


def dim_classes(rules: dict[fx.Node, OpRule], weights: set[fx.Node], program: Program) -> Groups[Place]:
    """Union-find over (node, dim) of activations: dims joined by a shared factor or by a view that keeps them.

    Where the first dim of a value represents several (`flatten_tokens`), (node, -1), (node, -2), ... are these.
    """
    classes: Groups[Place] = Groups()
    for node in program.graph.nodes:
        if reshapes_tokens(node):
            whole, flat = (node.args[0], node) if TOKENS in node.meta else (node, node.args[0])
            for d in range(len(flat.meta[TOKENS])):
                classes.join((whole, d), (flat, -1 - d))
    for node, rule in rules.items():
        if rule.kind == "view":
            source = rule.operands[0].node
            before, after = program.sizes.shape(source.meta[VAL]), program.sizes.shape(node.meta[VAL])
            for dims_in, dims_out in dim_groups(before, after):
                kept_in = [d for d in dims_in if before[d] != 1]
                kept_out = [d for d in dims_out if after[d] != 1]
                if len(kept_in) == len(kept_out) == 1:
                    classes.join((source, kept_in[0]), (node, kept_out[0]))
            continue
        places: dict[str, list[Place]] = defaultdict(list)
        results = [(n, rule.template.results[k]) for k, n in enumerate(results_of(node, rule)) if n is not None]
        for owner, factors in [*((o.node, o.factors) for o in rule.operands), *results]:
            for dim, factor in enumerate(factors if owner not in weights else ()):
                if isinstance(factor, str):
                    places[factor].append((owner, dim))
        for same in places.values():
            classes.join(*same)
            flat = [owner for owner, dim in same if dim == 0 and TOKENS in owner.meta]
            for d in range(len(flat[0].meta[TOKENS]) if len(flat) > 1 else 0):
                classes.join(*((owner, -1 - d) for owner in flat))
    return classes


def reshapes_tokens(node: fx.Node) -> bool:
    """True if this reshapes into or out of values that have their tokens in one dim."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    return isinstance(source, fx.Node) and op_name(node) in VIEWS and (TOKENS in node.meta) != (TOKENS in source.meta)


def token_places(program: Program, rules: dict[fx.Node, OpRule]) -> list[Place]:
    """The dims that are tokens, nothing else: those that `flatten_tokens` made; else, in a model on [tokens, features] from the
    start, the rows that norms work on."""
    flat = [(node, 0) for node in program.graph.nodes if TOKENS in node.meta]
    if flat:
        return flat
    found = [place for node, rule in rules.items() for place in normalised_places(node, rule)]
    packed = all(node.meta[VAL].ndim == 2 and dim == 1 for node, dim in found)
    return [(node, 0) for node, _ in found] if packed else []


def cuts_rows(placement: Placement, t: int) -> bool:
    """True if tokens are cut by whole rows of the batch whose number t does not divide; any other cut is one of tokens."""
    return any(unit != 1 and count % t for count, unit in placement.cut.blocks)


def weight_values(program: Program, active: set[fx.Node]) -> set[fx.Node]:
    """Parameters and the views and casts of them: values whose gathering would gather a weight."""
    weights = {n for n, spec in program.input_nodes() if spec.kind == "param"}
    for node in program.graph.nodes:
        if node.op == "call_function" and str(node.target) in VIEWS_OF_WEIGHTS and node in active:
            operands = [a for a in node.all_input_nodes if a in active]
            if operands and all(a in weights for a in operands):
                weights.add(node)
    return weights


def normalised_places(node: fx.Node, rule: OpRule) -> list[Place]:
    """The (value, dim) that a norm normalises over: the dims of layer_norm, or of the mean inside a hand-written norm."""
    name = str(node.target)
    if not rule.operands:
        return []
    source = rule.operands[0]
    if "_norm" in name and rule.forbidden:
        return [(source.node, d) for d, f in enumerate(source.factors) if f in rule.forbidden]
    if name in ("aten.mean.dim", "aten.var.correction", "aten.var.dim"):
        keepdim = (len(node.args) > 2 and node.args[2]) or node.kwargs.get("keepdim", False)
        last = len(source.factors) - 1
        if keepdim and source.factors[last] is not None and source.factors[last] not in rule.result:
            return [(source.node, last)]
    return []


def _ranked_places(node: fx.Node, rule: OpRule) -> list[Place]:
    """The (value, dim) that topk, sort, argmax or the indices of a max rank."""
    name = str(node.target)
    indexed = name in EXTREMES and any(u.args[1:] == (1,) and u.users for u in node.users)  # of (values, indices)
    if (name not in RANKINGS and not indexed) or not rule.operands:
        return []
    source = rule.operands[0]
    return [(source.node, d) for d, f in enumerate(source.factors) if f in rule.forbidden]


class Yields:
    """Which policies have given way, and where: at the same place of all layers that are alike."""

    def __init__(self) -> None:
        self._levels: dict[tuple[Any, ...], int] = {}  # how many of YIELDING

    def holds(self, policy: str, node: fx.Node) -> bool:
        return not self._levels or YIELDING.index(policy) >= self._levels.get(_kind(node), 0)

    def further(self, nodes: Iterable[fx.Node]) -> bool:
        """Let one more policy give way among these nodes; False where all have."""
        kinds = {_kind(n) for n in nodes}
        level = 1 + min((self._levels.get(k, 0) for k in kinds), default=len(YIELDING))
        if level > len(YIELDING):
            return False
        self._levels |= {k: max(level, self._levels.get(k, 0)) for k in kinds}
        return True


def _kind(node: fx.Node) -> tuple[Any, ...]:
    return re.sub(r"\d+", "*", f"{fqn_of(node)} {node.target}"), source_of(node)


class Policy:
    """Says for each strategy whether it may be used, and if not, why."""

    def __init__(
        self,
        program: Program,
        rules: dict[fx.Node, OpRule],
        active: set[fx.Node],
        t: int,
        *,
        sequence_parallel: bool | str,
        free: bool = False,
        yields: Yields | None = None,
    ) -> None:
        self.program, self.t, self.free, self.sequence_parallel = program, t, free, sequence_parallel
        self.yields = yields or Yields()
        # where it would have forbidden
        self.gave_way: dict[str, dict[fx.Node, None]] = {policy: {} for policy in YIELDING}
        self.weights = weight_values(program, active)
        # weight -> reasons for which strategies that shard it were taken away, in order
        self.kept_whole: dict[fx.Node, dict[str, None]] = defaultdict(dict)
        self._axis_of: dict[Placement, str] = {}
        self._class_of = dim_classes(rules, self.weights, program)
        self._normalised = self._classes(p for n, r in rules.items() for p in normalised_places(n, r))
        self._ranked = self._classes(p for n, r in rules.items() for p in _ranked_places(n, r))
        batch, seq = [], []
        for node, spec in program.input_nodes():
            value = node.meta.get(VAL)
            if spec.kind == "user" and isinstance(value, torch.Tensor) and value.ndim >= 1:
                batch.append((node, 0))
                if value.ndim == 2 and not value.dtype.is_floating_point:  # token ids, masks, labels: [batch, seq]
                    seq.append((node, 1))
        self._batch, self._seq = self._classes(batch), self._classes(seq)
        self._tokens = self._classes(token_places(program, rules))

    def _classes(self, places: Iterable[Place]) -> set[Place]:
        return {self._class_of[p] for p in places}

    def axis_of(self, node: fx.Node, placement: Placement) -> str:
        """'batch', 'seq' or '': which axis of the data a shard of this value cuts."""
        if not placement.is_shard:
            return ""
        if self._class_of[node, placement.dim] in self._tokens:
            return "batch" if cuts_rows(placement, self.t) else "seq"
        if placement not in self._axis_of:
            sizes, cut = self.program.sizes, [n for block in placement.cut.blocks for n in block]
            symbolic = not all(sizes.is_static(n) for n in cut)
            of_batch = symbolic and any(sizes.mentions(n, "batch") for n in cut)
            self._axis_of[placement] = "batch" if of_batch else "seq" if symbolic else ""
        if self._axis_of[placement]:
            return self._axis_of[placement]
        root = self._class_of[node, placement.dim]
        return "batch" if root in self._batch else "seq" if root in self._seq else ""

    def reason(self, node: fx.Node, rule: OpRule, strategy: Strategy) -> str:
        """Why this strategy may not be used, or ''."""
        if self.free:
            return ""
        values = [(o.node, p) for o, p in zip(rule.operands, strategy.ins, strict=True)]
        values += [(n, strategy.result(k)) for k, n in enumerate(results_of(node, rule)) if n is not None]
        for value, placement in values:
            if not placement.is_shard or value in self.weights:
                continue
            axis = self.axis_of(value, placement)
            if axis == "batch":
                return BATCH
            if axis == "seq" and self.sequence_parallel is False:
                return SEQUENCE
            if self._class_of[value, placement.dim] in self._normalised:
                return NORMALISED
        return ""

    def shards_sequence(self, node: fx.Node, strategy: Strategy) -> bool:
        return self.axis_of(node, strategy.out) == "seq"

    def filter(
        self, node: fx.Node, rule: OpRule, strategies: list[Strategy], *, overridden: bool = False
    ) -> tuple[list[Strategy], dict[str, int]]:
        """The strategies left, and {reason: how many it took}.

        overridden: an override chose these strategies, so it holds where the policies would leave none of them.
        """
        if self.free:
            return strategies, {}
        left: list[Strategy] = []
        gone: dict[str, int] = defaultdict(int)
        reasons = [self.reason(node, rule, s) for s in strategies]
        yielding = overridden and all(reasons)
        for strategy, reason in zip(strategies, reasons, strict=True):
            if reason and not (yielding and reason != BATCH):
                gone[reason] += 1
                self._remember_whole(rule, strategy, reason)
            else:
                left.append(strategy)
        if self.sequence_parallel is True:
            left = self._prefer_sequence(node, rule, left, gone)
        weights = rule.weights(self.weights)
        if cost_kind(op_name(node)) == MATMUL and weights and node not in self.weights and not overridden:
            sharded = [s for s in left if any(s.ins[i].is_shard for i in weights)]
            if any(self._is_router(node, rule, i) for i in weights):
                kept = [s for s in left if s not in sharded]
                for strategy in sharded if kept else ():
                    self._remember_whole(rule, strategy, ROUTER)
                return self._prefer(node, left, kept, ROUTER, gone), {r: n for r, n in gone.items() if n}
            left = self._prefer(node, left, sharded, SHARD_WEIGHTS, gone)
            if not sharded and (back := _column_parallel(strategies, reasons, weights)):
                left, gone[NORMALISED] = [*left, *back], gone[NORMALISED] - len(back)
        return left, {reason: count for reason, count in gone.items() if count}

    def _is_router(self, node: fx.Node, rule: OpRule, weight: int) -> bool:
        """Whether the result is ranked along a dim that the weight alone gives it (a stack of experts' weights shares its first
        dim with the tokens), which is no longer than the summed dim (a vocabulary is longer)."""
        factors = rule.operands[weight].factors
        shared = {f for i, o in enumerate(rule.operands) if i != weight and o.role == "x" for f in o.factors}
        own = {f: d for d, f in enumerate(rule.result) if isinstance(f, str) and f in factors and f not in shared}
        summed = [rule.sizes[f] for f in factors if isinstance(f, str) and f not in rule.result]
        ranked = [f for f, d in own.items() if self._class_of[node, d] in self._ranked]
        return bool(summed) and any(rule.sizes[f] <= max(summed) for f in ranked)

    def _remember_whole(self, rule: OpRule, strategy: Strategy, reason: str) -> None:
        for operand, placement in zip(rule.operands, strategy.ins, strict=True):
            if placement.is_shard and operand.node in self.weights:
                self.kept_whole[operand.node].setdefault(reason)

    def _prefer_sequence(
        self, node: fx.Node, rule: OpRule, left: list[Strategy], gone: dict[str, int]
    ) -> list[Strategy]:
        """Norms on a shard of the sequence; the rest of the residual stream there too, or still partial."""
        on_shard = [s for s in left if self.shards_sequence(node, s)]
        if normalised_places(node, rule):
            return self._prefer(node, left, on_shard, SEQUENCE_WANTED, gone)
        if reshapes_tokens(node):
            return left
        # a value with a normalised dim is in the residual stream, not in a parallel region
        dims = range(getattr(node.meta[VAL], "ndim", 0))
        residual = node not in self.weights and any(self._class_of[node, d] in self._normalised for d in dims)
        if on_shard and residual:
            on_shard += [s for s in left if s.out == P]
            return self._prefer(node, left, on_shard, SEQUENCE_WANTED, gone)
        return left

    def _prefer(
        self, node: fx.Node, left: list[Strategy], wanted: list[Strategy], policy: str, gone: dict[str, int]
    ) -> list[Strategy]:
        """The wanted strategies where there are any, unless the policy gives way here; counts the others as removed for it."""
        if not wanted or len(wanted) == len(left):
            return left
        if not self.yields.holds(policy, node):
            self.gave_way[policy][node] = None
            return left
        gone[policy] += len(left) - len(wanted)
        return wanted

    def stays(self, node: fx.Node) -> bool:
        """True if this is a weight that is neither gathered nor cut where it is used."""
        return not self.free and node in self.weights and self.yields.holds(WEIGHTS_STAY, node)

    def allows_transition(self, node: fx.Node, src: Placement, dst: Placement) -> bool:
        """Weights are neither gathered nor stored whole and used in slices."""
        return src == dst or not (src.is_shard or dst.is_shard) or not self.stays(node)


def _column_parallel(strategies: list[Strategy], reasons: list[str], weights: list[int]) -> list[Strategy]:
    """Strategies that shard a weight and the result, which a norm needs whole (a norm over all of q, a low-rank q): where a
    matmul has no other that shards its weight, cost decides between these plus a gather, and the whole weight."""
    found = [s for s, why in zip(strategies, reasons, strict=True) if why == NORMALISED and s.out.is_shard]
    sharded = [(s, {i for i, p in enumerate(s.ins) if p.is_shard}) for s in found]
    return [s for s, operands in sharded if operands and operands <= {*weights}]
