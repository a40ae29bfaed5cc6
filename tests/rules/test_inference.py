"""Covers: inference.py. Every row of every rule is inferred from its operands' placements on local shapes, nothing false is."""

from typing import Any

import pytest
import torch
from torch import fx

from megafx.checks.rule_samples import SAMPLES, samples_of
from megafx.checks.rules import Trial, text
from megafx.errors import PlacementError
from megafx.ir.facts import SampleTensor, declared
from megafx.ir.program import PLACEMENT, VAL
from megafx.ir.sizes import Sizes
from megafx.placements.types import I, Layout, P, Placement, R, S
from megafx.placements.views import local_offset, view_options
from megafx.rules.aten import RULES
from megafx.rules.families import VIEWS
from megafx.rules.inference import infer, is_uniform, is_zero

aten, T = torch.ops.aten, 2


def local_node(
    trial: Trial, ins: tuple[Placement, ...], outs: tuple[Any, ...]
) -> tuple[fx.Node, dict[fx.Node, Any]] | None:
    """The sample's op on one rank's shapes, and the facts of its operands; None where the op does not run so."""
    ranks, results, error = trial._forward(ins, outs)
    if error:
        return None
    graph, facts = fx.Graph(), {}
    placements = dict(zip(trial.operands, ins, strict=True))
    nodes = []
    for i, value in enumerate(ranks[0]):
        node = graph.placeholder(f"x{i}")
        node.meta[VAL] = value
        facts[node] = placements.get(i, R)
        nodes.append(node)
    given = iter(nodes)
    args, kwargs = map_tensors((trial.sample.args, trial.sample.kwargs), given)
    slices = trial.sample.op in ("aten.slice.Tensor", "aten.narrow.default", "aten.slice_copy.Tensor")
    if slices and ins[0].is_shard and ins[0].dim == args[1]:
        args = (*args[:2], local_offset(ins[0].cut, args[2], T), *args[3:])
    node = graph.call_function(trial.target, args, kwargs)
    node.meta[VAL] = results[0] if len(results[0]) > 1 else results[0][0]
    return node, facts


def map_tensors(tree: Any, given: Any) -> Any:
    if isinstance(tree, SampleTensor):
        return next(given)
    if isinstance(tree, dict):
        return {k: map_tensors(v, given) for k, v in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(v, given) for v in tree)
    return tree


def inferred(node: fx.Node, facts: dict[fx.Node, Any]) -> tuple[Placement, ...]:
    got = infer(node, facts, T, Sizes())
    return got if isinstance(got, tuple) else (got,)


def trials() -> list[Any]:
    found = []
    for op in sorted({*RULES, *(op for op, facts in declared().items() if facts.rule), *SAMPLES}):
        for k, sample in enumerate(samples_of(op)):
            found.append(pytest.param(sample, id=f"{op.split('.')[1]}-{k}"))
    return found


@pytest.mark.parametrize("sample", trials())
def test_rows_are_inferred_and_nothing_false_is(sample):
    try:
        trial = Trial(sample, None, T)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        pytest.skip(f"check_rules reports it: {str(error)[:60]}")
    for ins, outs in trial.claims():
        vocabulary = trial.rule.template.localized and ins[0] in (S(0, contiguous(12)), S(1, contiguous(6)))
        if vocabulary and outs[0] in (P, I):
            continue  # another op after localize_shapes
        made = local_node(trial, ins, outs)
        assert made is not None, text((ins, outs))
        got, want = inferred(*made), tuple(R if o is None or o == I else o for o in outs)
        spread = got == (R,) and want[0].is_shard and is_uniform(made[0], want[0].dim, Sizes())
        assert got == want or spread or want[0] in readings(sample.op, *made), text((ins, outs))
    for ins, outs in trial.combinations():
        made = local_node(trial, ins, outs)
        if made is None:
            continue
        try:
            (got,) = inferred(*made)
        except PlacementError:
            continue
        if got == outs[0]:
            _, results, _ = trial._forward(ins, outs)
            held = trial.holds([r[0].detach() for r in results], trial.outputs[0].detach(), got)
            assert held, f"{text((ins, outs))} is inferred and is not so"


def readings(op: str, node: fx.Node, facts: dict[fx.Node, Any]) -> list[Placement]:
    """A view on local shapes can be read in several ways; infer takes the outermost dim."""
    fact = facts[node.args[0]] if op in VIEWS else R
    if not fact.is_shard:
        return []
    before, after = tuple(node.args[0].meta[VAL].shape), tuple(node.meta[VAL].shape)
    return [S(d, layout) for d, layout in view_options(before, after, fact.dim, fact.cut, T)]


# -- local graphs by hand


class Graph:
    """Nodes with values, facts of inputs; ops by name."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.facts: dict[fx.Node, Any] = {}

    def given(self, fact: Placement, *shape: int, dtype: Any = torch.float32) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.facts)}")
        node.meta[VAL], self.facts[node] = torch.zeros(shape, dtype=dtype), fact
        return node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        real = fx.node.map_arg((args, kwargs), lambda n: n.meta[VAL])
        node.meta[VAL] = target(*real[0], **real[1])
        self.facts[node] = infer(node, self.facts, T, Sizes())
        return node

    def value(self, node: fx.Node) -> Any:
        return self.facts[node]


def contiguous(n: int) -> Layout:
    return Layout.contiguous(n, T)


def test_a_missing_all_reduce_is_found():
    """Row parallel: the partial result must not reach a norm."""
    g = Graph()
    x, w = g.given(S(1, contiguous(8)), 3, 4), g.given(S(1, contiguous(8)), 6, 4)
    y = g(aten.linear.default, x, w)
    assert g.value(y) == P
    with pytest.raises(PlacementError) as error:
        g(aten.layer_norm.default, y, [6])
    assert str(error.value) == (
        "%layer_norm_default (aten.layer_norm.default) of %linear_default P: "
        "the op is not linear in the operands that are partial\n  in module '<root>'\n"
        "  fix: a collective is missing or wrong before this op, or its rule is (megafx check-rules)"
    )


def test_a_shard_that_meets_a_whole_value_is_found():
    g = Graph()
    x, y = g.given(S(1, contiguous(8)), 3, 4), g.given(R, 3, 4)
    with pytest.raises(PlacementError, match="'_1' is sharded by 2x4, but %x1 is R and should be S1"):
        g(aten.mul.Tensor, x, y)


def test_a_partial_that_meets_a_whole_value_is_found():
    g = Graph()
    x, y = g.given(P, 3, 4), g.given(R, 3, 4)
    with pytest.raises(PlacementError, match="not linear in the operands that are partial"):
        g(aten.add.Tensor, x, y)
    assert g.value(g(aten.mul.Tensor, x, y)) == P
    assert g.value(g(aten.add.Tensor, x, g(aten.zeros_like.default, x))) == P, "zeros may be on all ranks"


def test_different_cuts_of_one_dim_do_not_mix():
    g = Graph()
    x, y = g.given(S(0, contiguous(8)), 4), g.given(S(0, Layout.of([(2, 2)], T, rep=2)), 4)
    with pytest.raises(PlacementError, match=r"is S0/2\*\(2x2\) and should be S0"):
        g(aten.add.Tensor, x, y)


def test_the_gradient_of_a_sum_is_the_same_on_every_rank_and_serves_as_a_shard():
    g = Graph()
    grad = g.given(R)
    spread = g(aten.mul.Tensor, g(aten.expand.default, grad, [3, 4]), 0.5)
    assert g.value(spread) == R and is_uniform(spread, 1, Sizes()) and not is_uniform(g.given(R, 3), 0, Sizes())
    assert g.value(g(aten.mul.Tensor, g.given(S(1, contiguous(8)), 3, 4), spread)) == S(1, contiguous(8))
    columns = g(aten.expand.default, g.given(R, 3, 1), [3, 4])
    assert is_uniform(columns, 1, Sizes()) and not is_uniform(columns, 0, Sizes())


def test_zeros():
    g = Graph()
    assert is_zero(g(aten.full.default, [3], 0)) and not is_zero(g(aten.full.default, [3], 1))
    assert is_zero(g(aten.expand.default, g(aten.zeros.default, [1]), [3])) and not is_zero(g.given(R, 3))


def test_parts_of_a_fused_projection():
    layout = Layout.of([(4, 3), (2, 3), (2, 3)], T)
    g = Graph()
    y = g.given(S(1, layout), 5, 12)
    k = g(aten.slice.Tensor, y, 1, 6, 9)
    assert g.value(k) == S(1, Layout.of([(2, 3)], T))
    assert g.value(g(aten.cat.default, [y, k], 1)) == S(1, Layout.of([(4, 3), (2, 3), (2, 3), (2, 3)], T))
    with pytest.raises(PlacementError, match="dim 1 cannot be sharded"):
        g(aten.slice.Tensor, y, 1, 5, 9)


def test_one_head_on_each_rank_is_read_as_the_plan_says():
    g = Graph()
    x = g.given(S(1, Layout.of([(2, 8)], T)), 3, 8)
    heads = g(aten.view.default, x, [3, 1, 8])
    assert g.value(heads) == S(1, Layout.of([(2, 1)], T))
    halves = g.graph.call_function(aten.view.default, (x, [3, 1, 8]))
    halves.meta[VAL], halves.meta[PLACEMENT] = torch.zeros(3, 1, 8), S(2, contiguous(16))
    assert infer(halves, g.facts, T, Sizes()) == S(2, contiguous(16))
    halves.meta[PLACEMENT] = S(0, contiguous(6))
    assert infer(halves, g.facts, T, Sizes()) == S(1, Layout.of([(2, 1)], T)), "a false mark is not believed"


def test_a_view_through_a_shard_is_refused():
    g = Graph()
    x = g.given(S(1, contiguous(6)), 4, 3)
    assert g.value(g(aten.view.default, x, [12])) == S(0, Layout.of([(2, 3)], T, rep=4))
    with pytest.raises(PlacementError, match="cuts through the shard"):
        g(aten.view.default, x, [3, 4])


def test_heads_of_grouped_attention_on_local_shapes():
    g = Graph()
    query = g.given(S(1, Layout.of([(4, 3)], T)), 2, 6, 5, 4)
    kv = g.given(S(1, Layout.of([(4, 1)], T)), 2, 2, 5, 4)
    out = g(aten.scaled_dot_product_attention.default, query, kv, kv, enable_gqa=True)
    assert g.value(out) == S(1, Layout.of([(4, 3)], T))
    inside = g.given(S(1, Layout.of([(2, 1)], T, rep=4)), 2, 4, 5, 4)
    whole = g.given(R, 2, 4, 5, 4)
    assert g.value(g(aten.scaled_dot_product_attention.default, inside, whole, whole, enable_gqa=True)).dim == 1
    with pytest.raises(PlacementError, match="should be S1"):
        g(aten.scaled_dot_product_attention.default, query, g.given(R, 2, 2, 5, 4), kv, enable_gqa=True)


def test_several_results():
    g = Graph()
    x, w = g.given(S(0, contiguous(6)), 3, 4), g.given(R, 4)
    out = g(aten.native_layer_norm.default, x, [4], w, w, 1e-5)
    assert g.value(out) == (S(0, contiguous(6)),) * 3
    back = g.graph.call_function(aten.native_layer_norm_backward.default, (x, x, [4], x, x, w, w, [True, True, True]))
    stats = g.given(S(0, contiguous(6)), 3, 1)
    back.args = (x, x, [4], stats, stats, w, w, [True, True, True])
    back.meta[VAL] = (torch.zeros(3, 4), torch.zeros(4), torch.zeros(4))
    assert infer(back, g.facts, T, Sizes()) == (S(0, contiguous(6)), P, P), "gradients of weights are partial"


def test_an_op_without_a_rule():
    g = Graph()
    with pytest.raises(PlacementError, match="no rule for aten.cholesky_inverse.default"):
        node = g.graph.call_function(aten.cholesky_inverse.default, (g.given(P, 3, 3),))
        node.meta[VAL] = torch.zeros(3, 3)
        infer(node, g.facts, T, Sizes())
