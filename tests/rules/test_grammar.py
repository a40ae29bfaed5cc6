"""Covers: rules/grammar.py (the grammar), rules/families.py and rules/strategies.py (rules on graph nodes, their rows)."""

import pytest
import torch
from torch import fx

from megafx.ir.program import VAL
from megafx.ir.sizes import Sizes
from megafx.rules.candidates import find_candidates, strategies
from megafx.rules.grammar import RuleError, bind, names, op_key, parse, register_rule
from megafx.rules.strategies import OpRule, rule_of

aten = torch.ops.aten


def rule(target, *args, own=None, inactive=(), **kwargs) -> OpRule:
    """The rule of one call; tensors are given by shape tuples, `inactive` are positions of those that need no gradient."""
    graph = fx.Graph()
    active: set[fx.Node] = set()
    count = 0

    def leaf(a):
        nonlocal count
        if not isinstance(a, torch.Tensor):
            return a
        node = graph.placeholder(f"x{count}")
        node.meta[VAL] = a
        if a.is_floating_point() and count not in inactive:
            active.add(node)
        count += 1
        return node

    nodes = torch.utils._pytree.tree_map(leaf, (args, kwargs))
    node = graph.call_function(target, *nodes)
    node.meta[VAL] = target(*args, **kwargs)
    return rule_of(node, Sizes(), active, own)


def rows(r: OpRule, t: int = 2) -> list[str]:
    inputs = [o.node for o in r.operands if o.active]
    found = find_candidates({r.node: r}, dict.fromkeys(inputs), Sizes(), t)
    return [f"{s.factor}: {s}" if s.factor else str(s) for s in strategies(r, found, t)]


def x(*shape: int) -> torch.Tensor:
    return torch.rand(shape)


# -- the grammar


def test_a_rule_on_shapes():
    bound = bind(parse("lin: ...k, n k, +n -> ...n"), [(2, 3, 4), (6, 4), (6,)], [(2, 3, 6)])
    assert bound.operands == (("_2", "_1", "k"), ("n", "k"), ("n",))
    assert bound.results == (("_2", "_1", "n"),)
    assert bound.sizes == {"_2": 2, "_1": 3, "k": 4, "n": 6}
    assert bound.forbidden == {}


def test_groups_of_operands_that_may_be_partial():
    assert parse("lin: a b, b c, +c -> a c").groups == ((0, 2), (1, 2))
    assert parse("lin: +..., +... -> ...").groups == ((0, 1),)
    assert parse("lin: ~..., ... -> ...").groups == ((1,),)
    assert parse("nl[2]: a, a, a -> a").groups == ((2,),)
    assert parse("nl: a, +a -> a").groups == ()


def test_dims_of_length_one_broadcast():
    bound = bind(parse("lin: ..., ... -> ..."), [(4, 1, 6), (5, 1)], [(4, 5, 6)])
    assert bound.operands == (("_3", None, "_1"), ("_2", None))
    assert bound.results == (("_3", "_2", "_1"),)


def test_missing_optional_operands_are_skipped():
    assert bind(parse("lin: ...k, n k, +n -> ...n"), [(3, 4), (6, 4), None], [(3, 6)]).operands[2] is None


def test_merged_dims():
    rule = parse("nl: b (n g) t, b n t -> b (n g) t")
    bound = bind(rule, [(2, 12, 5), (2, 3, 5)], [(2, 12, 5)])
    assert bound.operands[0] == ("b", "(n g)", "t") and bound.sizes["g"] == 4
    assert names("(n g)") == ("n", "g") and names("n") == ("n",) and names(None) == ()
    assert bind(rule, [(2, 12, 5), (2, 1, 5)], [(2, 12, 5)]).operands[0] == ("b", "g", "t"), "one group: MQA"
    assert bind(rule, [(2, 3, 5), (2, 3, 5)], [(2, 3, 5)]).operands[0] == ("b", "n", "t"), "groups of one"
    assert bind(rule, [(2, 7, 5), (2, 3, 5)], [(2, 7, 5)]).forbidden["n"] == "a dim of 7 is not (n g)"


def test_what_is_not_sharded_and_why():
    bound = bind(parse("nl: a! b, b -> a! b"), [(4, 5), (6,)], [(4, 5)])
    assert bound.forbidden == {
        "a": "'a' is marked '!' in the rule 'nl: a! b, b -> a! b'",
        "b": "'b' has two lengths, 5 and 6",
    }
    assert bind(parse("lin: a a -> "), [(4, 4)], [()]).forbidden == {"a": "'a' appears twice in one operand"}


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "linear: a -> a",
            "rule 'linear: a -> a' starts with 'linear'\n  fix: start with 'lin:', 'nl:', 'nl[i]:', 'max:' or 'sum:'",
        ),
        ("lin: a b", "rule 'lin: a b' has no '->'\n  fix: write 'operands -> result'"),
        ("nl[1]: a, ~a -> a", "is linear in operand 1, which is marked '~'"),
        ("nl[3]: a -> a", "is linear in operand 3, which is not there"),
        ("lin: a $b -> a", "cannot read '$b' in 'a $b'"),
        ("lin: (n) -> n", "'(n)' is no merged dim\n  fix: write '(major minor)'"),
        ("lin: ... a ... -> a", "'...' twice in '... a ...'"),
        ("lin: a -> +a", "marks a result with '+'"),
    ],
)
def test_rules_that_do_not_parse(text, message):
    with pytest.raises(RuleError) as error:
        register_rule("megafx_tests.never.default", text)
    assert message in str(error.value)


def test_names_of_ops():
    assert op_key(aten.add.Tensor) == "aten.add.Tensor"
    assert op_key("mylib::op") == "mylib.op.default"
    with pytest.raises(RuleError, match="'sine' names no operator"):
        op_key("sine")


# -- rules of graph nodes


def test_linear():
    r = rule(aten.linear.default, x(2, 3, 4), x(6, 4), x(6))
    assert [o.path for o in r.operands] == [(0,), (1,), (2,)]
    assert r.linear == ((0, 2), (1, 2)) and r.result == ("_2", "_1", "n")
    assert rows(r) == [
        "I I I -> I",
        "R R R -> R",
        "P R P -> P",
        "R P P -> P",
        "_2: S0 R R -> S0",
        "_1: S1 R R -> S1",
        "k: S2 S1 P -> P",
        "n: R S0 S0 -> S2",
    ]


def test_operands_in_kwargs_and_lists_have_paths():
    r = rule(aten.scaled_dot_product_attention.default, x(2, 4, 3, 6), x(2, 4, 5, 6), x(2, 4, 5, 6), attn_mask=x(3, 5))
    assert [o.path for o in r.operands] == [(0,), (1,), (2,), ("attn_mask",)]
    assert [o.path for o in rule(aten.cat.default, [x(2, 3), x(2, 4)], 1).operands] == [(0, 0), (0, 1)]


def test_an_inactive_operand_is_whole_or_sliced_and_never_partial():
    r = rule(aten.add.Tensor, x(4, 6), x(4, 6), inactive=(1,))
    assert rows(r) == ["I I -> I", "R I -> R", "_2: S0 S0 -> S0", "_1: S1 S1 -> S1"]
    r = rule(aten.linear.default, x(2, 4), x(6, 4), x(6), inactive=(2,))
    assert "k: S1 S1 P -> P" not in rows(r), "every rank would add the bias"


def test_scalars_decide_linearity():
    assert "P -> P" in rows(rule(aten.mul.Tensor, x(4), 2.0))
    assert "P -> P" in rows(rule(aten.add.Tensor, x(4), 0))
    assert "P -> P" not in rows(rule(aten.add.Tensor, x(4), 1.0))
    assert "P -> P" not in rows(rule(aten.rsub.Scalar, x(4), 1.0))
    assert "P I -> P" in rows(rule(aten.masked_fill.Scalar, x(4), x(4) > 0, 0))
    assert "P I -> P" not in rows(rule(aten.masked_fill.Scalar, x(4), x(4) > 0, -1e9))


def test_attention_with_a_causal_flag_keeps_queries_whole():
    q = x(2, 4, 6, 8)
    r = rule(aten.scaled_dot_product_attention.default, q, q, q, is_causal=True)
    assert r.forbidden["t"] == "is_causal needs the row index in the whole sequence"
    assert {row.split(":")[0] for row in rows(r) if ":" in row} == {"_1", "h", "f"}
    assert "t: S2 R R -> S2" in rows(rule(aten.scaled_dot_product_attention.default, q, q, q))


def test_grouped_heads_shard_by_group_or_inside_each():
    q, kv = x(2, 12, 6, 8), x(2, 4, 6, 8)
    r = rule(aten.scaled_dot_product_attention.default, q, kv, kv, enable_gqa=True)
    found = rows(r)
    assert "n: S1 S1 S1 -> S1" in found, "whole groups: K and V sharded"
    assert "g: S1/4*(3) R R -> S1/4*(3)" in rows(r, 3), "one query head of each group: K and V whole"
    n = next(s for s in strategies_of(r, 3) if s.factor == "n")
    assert [str(p.cut) for p in n.ins] == ["4x3", "4", "4"], "a group of 3 query heads stays together"


def strategies_of(r: OpRule, t: int):
    inputs = dict.fromkeys(o.node for o in r.operands if o.active)
    return strategies(r, find_candidates({r.node: r}, inputs, Sizes(), t), t)


def test_vocabulary_factors():
    table, ids = x(12, 6), torch.zeros(3, 4, dtype=torch.long)
    assert "v: S0 I -> P" in rows(rule(aten.embedding.default, table, ids))
    torch_ops = pytest.importorskip("megafx.kernels.loss.cross_entropy") and torch.ops.megafx
    found = rows(rule(torch_ops.cross_entropy.default, x(4, 6), torch.zeros(4, dtype=torch.long), -100, 0.0, False))
    assert found == ["I I -> I", "R I -> R", "t: S0 S0 -> S0", "v: S1 I -> I"]


def test_expanded_dims_shard_for_free():
    assert "f1: R -> S1" in rows(rule(aten.expand.default, x(2, 1, 4), [2, 6, 4]))


def test_sums_over_shards_are_partial_and_maxima_are_refused():
    assert rows(rule(aten.mean.dim, x(4, 6), [1])) == ["I -> I", "R -> R", "P -> P", "f0: S0 -> S0", "f1: S1 -> P"]
    r = rule(aten.amax.default, x(4, 6), [1])
    assert r.forbidden == {"f1": "amax over the dim is no sum"} and "f1: S1 -> P" not in rows(r)


def test_a_view_maps_its_dims():
    r = rule(aten.view.default, x(4, 12), [4, 3, 4])
    assert rows(r, 3) == ["I -> I", "R -> R", "P -> P", "dim0: S0 -> S0", "dim1: S1 -> S1", "dim1: S1/3*(4) -> S2"]
    even = [s for s in strategies_of(r, 2) if s.factor == "dim1"]
    assert [str(s.ins[0].cut) for s in even] == ["3x4", "3*(2x2)"], "6 and 6 elements would cut the middle row"


def test_an_op_without_a_rule_has_two_rows_and_a_reason():
    r = rule(aten.cholesky_inverse.default, torch.eye(3))
    assert r.kind == "none" and r.reason == "no rule for aten.cholesky_inverse.default"
    assert rows(r) == ["I -> I", "R -> R"]
    r = rule(aten.baddbmm.default, x(3), x(2, 3, 4), x(2, 4, 3))
    assert r.kind == "none" and "does not fit a tensor of 1 dims" in r.reason


def test_a_registered_rule_is_used_and_can_be_replaced():
    @torch.library.custom_op("megafx_tests::rows_of", mutates_args=())
    def rows_of(a: torch.Tensor) -> torch.Tensor:
        return a.cumsum(1)

    assert rule(torch.ops.megafx_tests.rows_of.default, x(4, 6)).kind == "none"
    register_rule(rows_of, "lin: r c! -> r c!")
    assert rows(rule(torch.ops.megafx_tests.rows_of.default, x(4, 6))) == ["I -> I", "R -> R", "P -> P", "r: S0 -> S0"]
    register_rule("megafx_tests::rows_of", "nl: r c! -> r c!")
    assert rows(rule(torch.ops.megafx_tests.rows_of.default, x(4, 6))) == ["I -> I", "R -> R", "r: S0 -> S0"]


def test_a_registered_rule_must_fit_the_schema():
    @torch.library.custom_op("megafx_tests::gated", mutates_args=())
    def gated(a: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return a * gate

    with pytest.raises(RuleError) as error:
        register_rule(gated, "lin: ... -> ...")
    assert str(error.value) == (
        "rule 'lin: ... -> ...' has 1 operands, megafx_tests.gated.default takes 2 tensors: a, gate\n"
        "  fix: one operand a tensor argument, in the order of the schema; '*' for one whose elements are not read"
    )
    with pytest.raises(RuleError, match="has 2 results, megafx_tests.gated.default returns 1"):
        register_rule(gated, "lin: ..., ... -> ...; ...")


def test_equal_calls_share_one_template():
    a, b = (rule(aten.linear.default, x(2, 4), x(6, 4)) for _ in range(2))
    assert a.template is b.template and a.node is not b.node
