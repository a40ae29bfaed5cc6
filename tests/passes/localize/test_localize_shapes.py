"""Covers passes/localize/localize_shapes.py and its families: one rank's graph as text, and what all ranks compute,
with gradients.

Sizes that two ranks do not divide are padded: numbers come from the simulator, which fills forward pads with what the ops
leave there and refuses gradients that are not zero in theirs.
"""

from __future__ import annotations

import pytest
import small_plans
import torch

import megafx.kernels.dropout.dropout
import megafx.kernels.loss.cross_entropy  # noqa: F401  registers the ops
from megafx.errors import PlacementError
from megafx.ir.contracts import verify
from megafx.ir.program import VAL, Phase, Program
from megafx.passes.localize.localize_shapes import localize_shapes
from megafx.passes.localize.rewrites import POLES
from megafx.placements.types import P
from megafx.testing import assert_same, expect

aten, mfx = torch.ops.aten, torch.ops.megafx


def check(programs: tuple[Program, Program], text: str, t: int = 2) -> None:
    before, after = programs
    assert after.phase == Phase.LOCAL
    verify(after)
    expect(after, text, t=t)
    for sizes in (9, 12):  # of dynamic dims: odd, even
        assert_same(before, after, t, sizes=sizes)


def test_row_parallel_product() -> None:
    check(
        small_plans.local(
            lambda x, w: aten.linear(x, w), {"linear": "S1, S1 -> P", "w": "S1"}, x="f32[b k=8]", w="param f32[n=6 k=8]"
        ),
        """
        %0 = x                        # f32[b 8] I@tp
        %1 = w                        # f32[6 8/2] S1@tp param
        %2 = transition(%0, I -> S1)  # f32[b 8/2] S1@tp
        %3 = linear(%2, %1)           # f32[b 6] P@tp
        %4 = transition(%3, P -> I)   # f32[b 6] I@tp
        return %4
        """,
    )


def test_reshape_to_heads_takes_local_sizes() -> None:
    check(
        small_plans.local(
            lambda x, w: aten.relu(aten.view(aten.linear(x, w), [4, 2, 3])),
            {"linear": "R, S0 -> S1", "relu": "S1 -> S1"},
            x="f32[t=4 k=8]",
            w="param f32[n=6 k=8]",
        ),
        """
        %0 = x                        # f32[4 8] I@tp
        %1 = w                        # f32[6/2 8] S0@tp param
        %2 = transition(%0, I -> R)   # f32[4 8] R@tp
        %3 = linear(%2, %1)           # f32[4 6/2] S1@tp
        %4 = view(%3, [4, 1, 3])      # f32[4 2/2 3] S1@tp
        %5 = relu(%4)                 # f32[4 2/2 3] S1@tp
        %6 = transition(%5, S1 -> I)  # f32[4 2 3] I@tp
        return %6
        """,
    )


def test_slices_of_a_fused_projection_take_their_parts() -> None:
    """q|k|v of 4 columns each, every part cut in two: a rank's local columns are q, k and v of 2."""
    check(
        small_plans.local(
            lambda x, w: _gated(aten.linear(x, w)), {"mul": "S1, S1 -> S1"}, x="f32[t=4 k=8]", w="param f32[n=12 k=8]"
        ),
        """
        %0 = x                        # f32[4 8] I@tp
        %1 = w                        # f32[12/2 8] S0/3*(2x2)@tp param
        %2 = transition(%0, I -> R)   # f32[4 8] R@tp
        %3 = linear(%2, %1)           # f32[4 12/2] S1/3*(2x2)@tp
        %4 = slice(%3, 1, 0, 2)       # f32[4 4/2] S1@tp
        %5 = slice(%3, 1, 2, 4)       # f32[4 4/2] S1@tp
        %6 = slice(%3, 1, 4, 6)       # f32[4 4/2] S1@tp
        %7 = mul(%4, %5)              # f32[4 4/2] S1@tp
        %8 = add(%7, %6)              # f32[4 4/2] S1@tp
        %9 = transition(%8, S1 -> I)  # f32[4 4] I@tp
        return %9
        """,
    )


def _gated(y: torch.Tensor) -> torch.Tensor:
    q, k, v = (aten.slice(y, 1, 4 * i, 4 * i + 4) for i in range(3))
    return aten.add(aten.mul(q, k), v)


def test_slices_of_unequal_padded_parts() -> None:
    """Parts of 5 and 3 columns on 2 ranks: 3 and 2 local ones, pads in both."""
    before, after = small_plans.local(
        lambda x, w: _unequal(aten.linear(x, w)),
        {"linear": "R, S0/5+3 -> S1/5+3"},
        x="f32[t=4 k=8]",
        w="param f32[n=8 k=8]",
    )
    linear = next(n for n in after.graph.nodes if n.name == "linear")
    assert tuple(linear.meta[VAL].shape) == (4, 5)
    assert_same(before, after)


def _unequal(y: torch.Tensor) -> torch.Tensor:
    a, b = aten.slice(y, 1, 0, 5), aten.slice(y, 1, 5, 8)
    return aten.mul(aten.sum(aten.relu(a), [1], True), aten.relu(b))


def test_embedding_of_a_sharded_vocabulary() -> None:
    """Ids are global, rows local: 7 rows are 4 and 3. The padding row is read, but gets no gradient."""
    check(
        small_plans.local(
            lambda w, ids: aten.embedding(w, ids, 1),
            {"embedding": "S0, I -> P"},
            w="param f32[v=7 h=4]",
            ids="i64[b s=3]",
        ),
        """
        %0 = w                                                 # f32[7/2 4] S0@tp param
        %1 = ids                                               # i64[b 3]
        %2 = embedding_of_rank(%0, %1, 1, [1, 7, 1], 'tp', 2)  # f32[b 3 4] P@tp
        %3 = transition(%2, P -> I)                            # f32[b 3 4] I@tp
        return %3
        """,
    )


def grouped_attention(heads: int, groups: int, t: int) -> tuple[Program, Program]:
    """Query heads cut wherever their groups end; k and v are whole."""
    return small_plans.local(
        lambda q, k, v: aten.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        {"scaled_dot_product_attention": "S1, R, R -> S1"},
        mesh=f"tp={t}",
        q=f"f32[b n={heads} s=3 e=2]",
        k=f"f32[b g={groups} s=3 e=2]",
        v=f"f32[b g={groups} s=3 e=2]",
    )


def test_ranks_take_the_key_value_heads_of_their_query_heads() -> None:
    """8 query heads in 2 groups are 2 on each of 4 ranks: each key-value head stands twice, and a rank has one of the 4."""
    check(
        grouped_attention(8, 2, 4),
        """
        %0 = q                                                          # f32[b 8 3 2] I@tp
        %1 = k                                                          # f32[b 2 3 2] I@tp
        %2 = v                                                          # f32[b 2 3 2] I@tp
        %3 = transition(%0, I -> S1)                                    # f32[b 8/4 3 2] S1@tp
        %4 = transition(%1, I -> R)                                     # f32[b 2 3 2] R@tp
        %5 = transition(%2, I -> R)                                     # f32[b 2 3 2] R@tp
        %6 = heads_of_rank(%4, 2, [1, 4, 1], 'tp', 4)                   # f32[b 4/4 3 2] S1@tp
        %7 = heads_of_rank(%5, 2, [1, 4, 1], 'tp', 4)                   # f32[b 4/4 3 2] S1@tp
        %8 = scaled_dot_product_attention(%3, %6, %7, enable_gqa=True)  # f32[b 8/4 3 2] S1@tp
        %9 = transition(%8, S1 -> I)                                    # f32[b 8 3 2] I@tp
        return %9
        """,
        t=4,
    )


@pytest.mark.parametrize(("heads", "groups", "t"), [(6, 2, 4), (10, 5, 4), (9, 3, 2), (14, 2, 5)])
def test_query_heads_that_ranks_do_not_divide(heads: int, groups: int, t: int) -> None:
    """Each query head has a key-value head of its own; some ranks have fewer heads, or none."""
    before, after = grouped_attention(heads, groups, t)
    (taken, _) = after.graph.find_nodes(op="call_function", target=mfx.heads_of_rank.default)
    assert taken.meta[VAL].shape[1] == -(-heads // t)
    assert_same(before, after, t)


def test_mean_divides_by_the_count_of_the_whole_dim() -> None:
    """The pad of the dynamic dim is masked, and the sum divided by b, not by what a rank holds."""
    check(
        small_plans.local(
            lambda x: aten.mean(aten.relu(x), [0]), {"relu": "S0 -> S0", "mean": "S0 -> P"}, x="f32[b k=4]"
        ),
        """
        %0 = x                                              # f32[b 4] I@tp
        %1 = sym_size.int(%0, 0)                            # int b
        %2 = operator.add(%1, 1)                            # int b+1
        %3 = operator.floordiv(%2, 2)                       # int ((b+1)//2)
        %4 = transition(%0, I -> S0)                        # f32[b/2 4] S0@tp
        %5 = relu(%4)                                       # f32[b/2 4] S0@tp
        %6 = ones([%1], dtype=bool, device=cpu)             # bool[b]
        %7 = transition(%6, I -> S0)                        # bool[b/2] S0@tp
        %8 = reshape(%7, [%3, 1])                           # bool[b/2 1] S0@tp
        %9 = scalar_tensor(0, dtype=f32, device=cpu)        # f32[]
        %10 = where.self(%8, %5, %9)                        # f32[b/2 4] S0@tp
        %11 = sum.dim_IntList(%10, [0], False, dtype=None)  # f32[4] P@tp
        %12 = div.Scalar(%11, %1)                           # f32[4] P@tp
        %13 = transition(%12, P -> I)                       # f32[4] I@tp
        return %13
        """,
    )


def test_mean_of_everything_and_with_kept_dims() -> None:
    for fn in (lambda x: aten.mean(aten.exp(x)), lambda x: aten.mean(aten.exp(x), [-1], True)):
        dim = "S1 -> S1"
        before, after = small_plans.local(fn, {"exp": dim, "mean": "S1 -> P"}, x="f32[t=4 k=5]")
        assert_same(before, after)


def test_a_padded_sum_is_masked() -> None:
    """exp(0) = 1 in the pad of 5 rows on 2 ranks."""
    check(
        small_plans.local(
            lambda x: aten.sum(aten.exp(x), [0]), {"exp": "S0 -> S0", "sum_1": "S0 -> P"}, x="f32[t=5 k=4]"
        ),
        """
        %0 = x                                        # f32[5 4] I@tp
        %1 = transition(%0, I -> S0)                  # f32[5/2 4] S0@tp
        %2 = exp(%1)                                  # f32[5/2 4] S0@tp
        %3 = ones([5], dtype=bool, device=cpu)        # bool[5]
        %4 = transition(%3, I -> S0)                  # bool[5/2] S0@tp
        %5 = reshape(%4, [3, 1])                      # bool[5/2 1] S0@tp
        %6 = scalar_tensor(0, dtype=f32, device=cpu)  # f32[]
        %7 = where.self(%5, %2, %6)                   # f32[5/2 4] S0@tp
        %8 = sum.dim_IntList(%7, [0])                 # f32[4] P@tp
        %9 = transition(%8, P -> I)                   # f32[4] I@tp
        return %9
        """,
    )


def test_an_even_sum_is_not_masked() -> None:
    _, after = small_plans.local(
        lambda x: aten.sum(aten.exp(x), [0]), {"exp": "S0 -> S0", "sum_1": "S0 -> P"}, x="f32[t=6 k=4]"
    )
    assert not after.graph.find_nodes(op="call_function", target=aten.where.self)


def test_a_padded_contraction_is_masked_on_its_activation_alone() -> None:
    """Pads of weights are zero, but zero times inf is none: the activation's pads are zeroed too."""
    before, after = small_plans.local(
        lambda x, w: aten.linear(aten.exp(x), w),
        {"exp": "S1 -> S1", "linear": "S1, S1 -> P", "w": "S1"},
        x="f32[t=4 k=5]",
        w="param f32[n=6 k=5]",
    )
    assert len(after.graph.find_nodes(op="call_function", target=aten.where.self)) == 1
    assert_same(before, after)


def test_dropout_is_told_how_its_operand_is_cut() -> None:
    """It draws its slice of the one mask, pads included: the numbers equal the whole op's."""
    check(
        small_plans.local(
            lambda x, seed: mfx.dropout(x, seed, 0.5, 3, -1, [], "tp"),
            {"dropout": "S1, I -> S1"},
            x="f32[b s k=4]",
            seed="i64[]",
        ),
        """
        %0 = x                                             # f32[b s 4] I@tp
        %1 = seed                                          # i64[]
        %2 = sym_size.int(%0, 1)                           # int s
        %3 = transition(%0, I -> S1)                       # f32[b s/2 4] S1@tp
        %4 = dropout(%3, %1, 0.5, 3, 1, [1, %2, 1], 'tp')  # f32[b s/2 4] S1@tp
        %5 = transition(%4, S1 -> I)                       # f32[b s 4] I@tp
        return %5
        """,
    )


@pytest.mark.parametrize("t", [2, 3])
def test_cross_entropy_of_a_sharded_vocabulary(t: int) -> None:
    """Statistics, one all-gather, a local loss: invariant. Ids of one rank, pads, smoothing."""
    before, after = small_plans.local(
        lambda x, w, y: mfx.cross_entropy(aten.linear(x, w), y, -100, 0.1, False),
        {"linear": "R, S0 -> S1"},
        mesh=f"tp={t}",
        x="f32[b k=4]",
        w="param f32[v=7 k=4]",
        y="i64[b]",
    )
    verify(after)
    names = [str(n.target).split(".")[1] for n in after.graph.nodes if str(n.target).startswith("megafx")]
    assert names == ["transition", "ce_stats", "transition", "ce_loss"], "x made R; the statistics gathered"
    assert_same(before, after, t)


def test_nothing_to_do() -> None:
    before, program, context = small_plans.placed(
        lambda x, w: aten.linear(x, w), {"linear": "I, I -> I"}, x="f32[t=4 k=8]", w="param f32[n=6 k=8]"
    )
    assert localize_shapes(program, context) == 0
    expect(
        program,
        """
        %0 = x               # f32[4 8] I@tp
        %1 = w               # f32[6 8] I@tp param
        %2 = linear(%0, %1)  # f32[4 6] I@tp
        return %2
        """,
        t=2,
    )
    assert_same(before, program)


def test_a_value_of_another_shape_than_its_placement_is_refused() -> None:
    _, program, context = small_plans.placed(
        lambda x, w: aten.linear(x, w), {"linear": "R, S0 -> S1"}, x="f32[t=4 k=8]", w="param f32[n=6 k=8]"
    )
    choice = context.solved.ops["linear"]
    context.solved.ops["linear"] = type(choice)(choice.ins, P)
    with pytest.raises(PlacementError) as raised:
        localize_shapes(program, context)
    assert str(raised.value) == (
        "aten.linear.default gives a local shape (4, 3) where its placement P on 2 ranks means (4, 6)\n"
        "  in module '<root>'\n"
        "  fix: a size in the op's arguments is not localized, or its sharding rule is wrong; run `megafx check-rules`"
    )


AT_ONE = ("acos", "acosh", "asin", "atanh", "erfinv")


def _through_a_pole(name: str) -> tuple[Program, Program]:
    """Three rows on two ranks, whose pad is at the op's pole: 0 where y is 0, for some ops 1 or -1."""
    packet, overload = name.removeprefix("aten.").rsplit(".", 1)
    op = getattr(getattr(aten, packet), overload)
    start, direction = (1.0, 1.0 if packet == "acosh" else -1.0) if packet in AT_ONE else (0.0, 1.0)
    start = -1.0 if packet == "log1p" else start
    given = {"aten.pow.Tensor_Scalar": (0.5,)}.get(name, ())
    options = {"rounding_mode": "floor"} if overload == "Tensor_mode" else {}

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = aten.linear(x, w)
        z = aten.add(aten.mul(aten.tanh(aten.mul(y, y)), 0.5 * direction), start)
        tensors = [a for a in op._schema.arguments if str(a.type) == "Tensor"]
        operands = [z, aten.add(z, 0.5)] if packet == "pow" and len(tensors) == 2 else [z] * len(tensors)
        return aten.linear(aten.mul(op(*operands, *given, **options), z), w)

    placed = {"linear": "S0, R -> S0", "linear_1": "S0, R -> S0"}
    return small_plans.local(fn, placed, x="f64[t=3 k=4]", w="param f64[n=4 k=4]")


@pytest.mark.parametrize("name", sorted(POLES))
def test_pads_stay_off_poles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pad's infinite slope, times its zero gradient, must not reach the gradient of w."""
    assert_same(*_through_a_pole(name), 2)
    monkeypatch.delitem(POLES, name)
    with pytest.raises((AssertionError, PlacementError)):
        assert_same(*_through_a_pole(name), 2)


def _through_a_norm(name: str, eps: float = 0.0) -> tuple[Program, Program]:
    """Three rows on two ranks, whose pads have neither a variance nor a mean square."""
    norm = {
        "layer_norm": lambda y, w: aten.layer_norm(y, [4], w, None, eps),
        "rms_norm": lambda y, w: aten.rms_norm(y, [4], w, eps),
        "megafx": lambda y, w: mfx.rms_norm(y, w, eps, 0.0),
        "group_norm": lambda y, w: aten.group_norm(y, 2, w, None, eps),
    }[name]
    placed = {"linear": "S0, R -> S0", "linear_1": "S0, R -> S0"}
    return small_plans.local(
        lambda x, w, g: aten.linear(norm(aten.linear(x, w), g), w),
        placed, x="f64[t=3 k=4]", w="param f64[n=4 k=4]", g="param f64[k=4]",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "megafx", "group_norm"])
def test_pads_of_a_norm_without_an_eps_are_no_zeros(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(*_through_a_norm(name), 2)
    _, after = _through_a_norm(name, 1e-6)
    assert not [n for n in after.graph.nodes if n.target is aten.where.self], "with an eps nothing is filled"
    monkeypatch.setattr("megafx.passes.localize.rewrites.SMALL_EPS", -1.0)
    with pytest.raises((AssertionError, PlacementError)):
        assert_same(*_through_a_norm(name), 2)


def test_powers_without_a_pole_are_left_alone() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return aten.pow(aten.linear(x, w), 2)

    _, after = small_plans.local(fn, {"linear": "S0, R -> S0"}, x="f64[t=3 k=4]", w="param f64[n=4 k=4]")
    assert not [n for n in after.graph.nodes if n.target is aten.where.self]
