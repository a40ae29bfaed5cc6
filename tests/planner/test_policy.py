"""Covers policy.py: what each policy takes away, from which ops, and with what reason."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import small_plans
import torch
from torch import fx

from megafx.ir.program import Program
from megafx.passes.plan.plan_sharding import ask
from megafx.placements.types import I, Layout, P, R, S
from megafx.planner.policy import (
    BATCH,
    NORMALISED,
    ROUTER,
    SEQUENCE,
    SEQUENCE_WANTED,
    SHARD_WEIGHTS,
    WEIGHTS_STAY,
    YIELDING,
    Policy,
    Yields,
    weight_values,
)
from megafx.rules.candidates import find_candidates, strategies
from megafx.testing import graph, make_context

aten = torch.ops.aten
T = 2


class Case:
    """A small graph, its rules, all strategies of its ops, and a policy."""

    def __init__(
        self, fn: Callable[..., Any], *, sequence_parallel: bool | str = False, free: bool = False, **values: Any
    ):
        self.program: Program = graph(fn, mesh=f"tp={T}", **values)
        context = make_context(T)
        self.active, self.order = ask(self.program, context)
        self.rules = context.rules
        placeholders = [n for n in self.order if n.op == "placeholder"]
        self.candidates = find_candidates(self.rules, placeholders, self.program.sizes, T)
        self.policy = Policy(self.program, self.rules, self.active, T, sequence_parallel=sequence_parallel, free=free)

    def node(self, name: str) -> fx.Node:
        return next(n for n in self.program.graph.nodes if n.name == name)

    def every(self, name: str) -> list[Any]:
        return strategies(self.rules[self.node(name)], self.candidates, T)

    def left(self, name: str, **options: Any) -> tuple[set[str], dict[str, int]]:
        """(strategies left as text, {reason: count taken})."""
        node = self.node(name)
        left, gone = self.policy.filter(node, self.rules[node], self.every(name), **options)
        assert len(left) + sum(gone.values()) == len(self.every(name)), "each strategy is left, or gone for one reason"
        return {small_plans.text_of(s) for s in left}, gone


def _block(ids: Any, table: Any, norm: Any, up: Any, down: Any) -> Any:
    """Embedding, norm, column-parallel, row-parallel, residual."""
    x = aten.embedding(table, ids)
    y = aten.linear(aten.relu(aten.linear(aten.layer_norm(x, [8], norm), up)), down)
    return aten.add(x, y)


BLOCK: dict[str, Any] = {
    "ids": "i64[batch seq]", "table": "param f32[v=10 h=8]", "norm": "param f32[h=8]", "up": "param f32[f=12 h=8]",
    "down": "param f32[h=8 f=12]",
}  # fmt: skip


def test_without_sequence_parallelism_the_residual_stream_is_whole() -> None:
    case = Case(_block, **BLOCK)
    assert case.left("add") == ({"I, I -> I", "R, R -> R", "P, P -> P"}, {BATCH: 1, SEQUENCE: 1, NORMALISED: 1})
    left, gone = case.left("layer_norm")
    assert left == {"I, I -> I", "R, R -> R", "R, P -> P"}
    assert set(gone) == {BATCH, SEQUENCE}, "the rule itself keeps the normalised dim whole"


def test_weights_of_products_are_sharded() -> None:
    case = Case(_block, **BLOCK)
    left, gone = case.left("linear")
    assert left == {"R, S0 -> S2"}, "row-parallel would shard the norm's result on the normalised dim"
    assert gone[NORMALISED] == 1 and gone[SHARD_WEIGHTS] >= 2
    assert case.left("linear_1")[0] == {"S2, S1 -> P"}


def _scores(x: Any, gate: Any) -> Any:
    return aten.mul(aten.softmax(aten.linear(x, gate), -1), 2.0)


def _router(x: Any, gate: Any) -> Any:
    return aten.topk(_scores(x, gate), 2)[0]


def _top_1_of_max(x: Any, gate: Any) -> Any:
    best = aten.max.dim(_scores(x, gate), -1)
    return best[0], best[1]


def _top_1_of_argmax(x: Any, gate: Any) -> Any:
    scores = _scores(x, gate)
    return aten.argmax(scores, -1), aten.amax(scores, [-1])


def _greatest(x: Any, gate: Any) -> Any:
    return aten.max.dim(_scores(x, gate), -1)[0]


@pytest.mark.parametrize("router", [_router, _top_1_of_max, _top_1_of_argmax])
def test_a_router_is_whole(router: Callable[..., Any]) -> None:
    case = Case(router, x="f32[batch seq h=8]", gate="param f32[e=4 h=8]")
    left, gone = case.left("linear")
    assert "R, R -> R" in left and not any("S" in text for text in left)
    assert gone[ROUTER] == 2, "column- and row-parallel"
    assert ROUTER in case.policy.kept_whole[case.node("gate")]
    assert case.left("linear", overridden=True)[1].keys() == {BATCH, SEQUENCE}, "an override decides"


def test_scores_of_which_the_greatest_is_read_but_not_which_it_is_are_no_router() -> None:
    """As in a softmax that a model writes out."""
    left, gone = Case(_greatest, x="f32[batch seq h=8]", gate="param f32[e=4 h=8]").left("linear")
    assert left == {"R, S0 -> S2", "S2, S1 -> P"} and ROUTER not in gone


def test_a_head_whose_tokens_are_ranked_is_no_router() -> None:
    """A vocabulary is longer than what its scores are sums over."""
    left, gone = Case(_router, x="f32[batch seq h=8]", gate="param f32[v=10 h=8]").left("linear")
    assert left == {"R, S0 -> S2", "S2, S1 -> P"} and ROUTER not in gone


def test_an_embedding_is_cut_on_the_vocabulary_or_not_at_all() -> None:
    left, gone = Case(_block, **BLOCK).left("embedding")
    assert left == {"I, I -> I", "R, I -> R", "P, I -> P", "S0, I -> P"}
    assert gone[NORMALISED] == 1, "hidden-parallel: the residual stream is normalised"


def test_with_sequence_parallelism_norms_and_residuals_are_on_the_sequence() -> None:
    case = Case(_block, sequence_parallel=True, **BLOCK)
    left, gone = case.left("layer_norm")
    assert left == {"S1, R -> S1"} and gone[SEQUENCE_WANTED] == 3
    assert case.left("add")[0] == {"S1, S1 -> S1", "P, P -> P"}, "on the sequence, or still partial"
    assert case.left("linear")[0] == {"R, S0 -> S2"}, "the parallel region is not"
    assert case.left("relu")[0] >= {"I -> I", "R -> R", "S2 -> S2"}


def test_auto_leaves_both() -> None:
    left, gone = Case(_block, sequence_parallel="auto", **BLOCK).left("add")
    assert left == {"I, I -> I", "R, R -> R", "P, P -> P", "S1, S1 -> S1"}
    assert set(gone) == {BATCH, NORMALISED}


def test_free_takes_nothing_away() -> None:
    case = Case(_block, free=True, **BLOCK)
    for name in ("embedding", "layer_norm", "linear", "add"):
        left, gone = case.left(name)
        assert len(left) == len(case.every(name)) and gone == {}
    weight = case.node("up")
    assert case.policy.allows_transition(weight, S(0, Layout.contiguous(12, T)), R)


def test_weights_are_neither_gathered_nor_used_in_slices() -> None:
    case = Case(_block, **BLOCK)
    weight, shard = case.node("up"), S(0, Layout.contiguous(12, T))
    assert not case.policy.allows_transition(weight, shard, R)
    assert not case.policy.allows_transition(weight, I, shard)
    assert case.policy.allows_transition(weight, I, R), "its gradient's all-reduce"
    assert case.policy.allows_transition(weight, I, P) and case.policy.allows_transition(weight, shard, shard)
    assert case.policy.allows_transition(case.node("relu"), shard, R), "activations are"


def test_an_override_beats_policies_except_for_the_batch() -> None:
    case = Case(_block, **BLOCK)
    node = case.node("linear")
    row = [s for s in case.every("linear") if s.out == P and s.ins[1].is_shard]
    whole = [s for s in case.every("linear") if not s.ins[1].is_shard]
    rule = case.rules[node]
    assert case.policy.filter(node, rule, row) == ([], {NORMALISED: 1})
    assert case.policy.filter(node, rule, row, overridden=True) == (row, {})
    left, gone = case.policy.filter(node, rule, whole, overridden=True)
    assert {small_plans.text_of(s) for s in left} >= {"I, I -> I", "R, R -> R"}
    assert BATCH in gone, "those of the rest that the policies allow; the batch is never sharded"


def test_flattened_tokens_are_batch_and_sequence() -> None:
    """[b, s, h] -> [b*s, h]: a cut of the leading dim is one of the batch or one of the sequence, by its layout."""

    def flat(ids: Any, table: Any, w: Any) -> Any:
        x = aten.embedding(table, ids)
        return aten.relu(aten.view(x, [aten.sym_size.int(ids, 0) * aten.sym_size.int(ids, 1), 8]))

    case = Case(flat, ids="i64[batch seq]", table="param f32[v=10 h=8]", w="param f32[n=6 h=8]")
    batch, seq = (case.program.sizes.of_expr(case.program.sizes.symbols[n]) for n in ("batch", "seq"))
    relu = case.node("relu")
    by_sequence = S(0, Layout.of([(seq, 1)], T, rep=batch))
    by_batch = S(0, Layout.of([(batch, seq)], T))
    assert case.policy.axis_of(relu, by_sequence) == "seq"
    assert case.policy.axis_of(relu, by_batch) == "batch"
    assert case.policy.axis_of(relu, S(1, Layout.contiguous(8, T))) == ""
    assert case.policy.axis_of(relu, I) == ""


def test_a_norm_written_out_keeps_its_dim_whole() -> None:
    """Llama's RMSNorm: pow, mean, rsqrt, mul. The dim of the mean is normalised; a mean over tokens is not a norm."""

    def rms(x: Any, w: Any) -> Any:
        return aten.mul(aten.mul(x, aten.rsqrt(aten.mean(aten.pow(x, 2), [-1], True))), w)

    case = Case(rms, x="f32[batch seq h=8]", w="param f32[h=8]")
    assert case.left("mul_1")[1][NORMALISED] == 1
    pooled = Case(lambda x: aten.mean(aten.relu(x), [1]), x="f32[batch seq h=8]")
    assert NORMALISED not in pooled.left("relu")[1]


def test_views_of_weights_are_weights() -> None:
    case = Case(lambda x, w: aten.mm(x, aten.mul(aten.t(w), 1.0)), x="f32[t=4 k=8]", w="param f32[n=6 k=8]")
    found = {n.name for n in weight_values(case.program, case.active)}
    assert found == {"w", "t"}


def test_why_a_weight_stays_whole_is_remembered() -> None:
    case = Case(_block, **BLOCK)
    for name in ("linear", "embedding", "layer_norm"):
        case.left(name)
    assert list(case.policy.kept_whole[case.node("up")]) == [NORMALISED]
    assert case.node("norm") not in case.policy.kept_whole


@pytest.mark.parametrize(("wanted", "taken"), [([1], 2), ([], 0), ([1, 2, 3], 0)])
def test_what_is_preferred_where_there_is_any(wanted: list[Any], taken: int) -> None:
    case = Case(_block, **BLOCK)
    every: list[Any] = [1, 2, 3]
    gone: dict[str, int] = defaultdict(int)
    assert case.policy._prefer(case.node("linear"), every, wanted, SHARD_WEIGHTS, gone) == (wanted or every)
    assert dict(gone) == ({SHARD_WEIGHTS: taken} if taken else {})


def test_policies_give_way_in_order_and_where_they_conflict_only() -> None:
    def layers(x: Any, w0: Any, w1: Any, other: Any) -> Any:
        return aten.linear(aten.linear(aten.linear(x, w0), w1), other)

    case = Case(layers, x="f32[t=4 k=8]", **{name: "param f32[n=8 k=8]" for name in ("w0", "w1", "other")})
    before = case.left("linear")[0]
    yields, shard = Yields(), S(0, Layout.contiguous(8, T))
    case.policy.yields = yields
    for given in range(len(YIELDING)):
        held = [yields.holds(policy, case.node("w0")) for policy in YIELDING]
        assert held == [False] * given + [True] * (len(YIELDING) - given)
        assert yields.further([case.node("w0"), case.node("linear")])
    assert not yields.further([case.node("w0")])
    assert not yields.holds(WEIGHTS_STAY, case.node("w1")), "what differs by a number alone is alike"
    assert yields.holds(WEIGHTS_STAY, case.node("other"))
    assert case.policy.allows_transition(case.node("w0"), shard, R)
    assert not case.policy.allows_transition(case.node("other"), shard, R)
    assert case.left("linear")[0] > before, "a matmul weight need not be sharded"
    assert list(case.policy.gave_way[SHARD_WEIGHTS]) == [case.node("linear")]
