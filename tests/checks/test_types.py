"""The type checker accepts right joint graphs and rejects every broken collective, forward and backward."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from local_programs import local_program
from torch import nn
from torch.nn import functional as F

import megafx.kernels.dropout.dropout
import megafx.kernels.loss.cross_entropy
import megafx.ops.collectives  # noqa: F401  registers the ops
from megafx.checks.types import check_types
from megafx.errors import PlacementError
from megafx.ir.contracts import is_transition, verify
from megafx.ir.program import FQN, PLACEMENT
from megafx.passes.backward.build_joint_graph import differentiate
from megafx.placements.types import I, Layout, P, R, S

aten, mfx = torch.ops.aten, torch.ops.megafx
T, H, SEQ = 2, 8, 6
SEQUENCE = S(1, Layout.contiguous(SEQ, T))


def move(x, src, dst, t=T):
    return mfx.transition(x, src.tag, dst.tag, list(src.flat_layout), list(dst.flat_layout), "tp", t)


def weight(*shape):
    return nn.Parameter(torch.randn(shape))


def whole(dim, n):
    return S(dim, Layout.contiguous(n, T))


# One rank's forward graphs, as localize_shapes leaves them: (function, inputs by name, storage of the parameters).


def mlp(ln, up, bias, down, out_bias, x, y):
    """Megatron's tensor parallelism: copy to the region, column, row, reduce."""
    h = move(F.layer_norm(x, (H,), ln), I, R)
    h = F.linear(F.gelu(F.linear(h, up, bias)), down)
    h = move(h + move(out_bias, I, P), P, I)
    return (F.mse_loss(x + h, y, reduction="none").sum() / y.numel(),)


def mlp_sequence(ln, up, bias, down, out_bias, x, y):
    """Megatron's sequence parallelism."""
    x = move(x, I, SEQUENCE)
    h = move(F.layer_norm(x, (H,), move(ln, I, R)), SEQUENCE, R)
    h = F.linear(F.gelu(F.linear(h, up, bias)), down)
    x = x + move(h, P, SEQUENCE) + move(out_bias, I, R)
    difference = x - move(y, I, SEQUENCE)
    return (move((difference * difference).sum() / y.numel(), P, I),)


MLP = {"ln": weight(H), "up": weight(16, H), "bias": weight(16), "down": weight(H, 16), "out_bias": weight(H)}
MLP_STORAGE = {"ln": I, "up": whole(0, 32), "bias": whole(0, 32), "down": whole(1, 32), "out_bias": I}
BATCH = {"x": torch.randn(3, SEQ, H), "y": torch.randn(3, SEQ, H)}


def attention(scale, qkv, proj, x):
    """Fused q|k|v in three blocks, sliced; 4 heads of 4, of which a rank has 2."""
    y = F.linear(move(x * scale, I, R), qkv)
    q, k, v = (part.reshape(3, SEQ, 2, 4).transpose(1, 2) for part in (y[..., 8 * i : 8 * i + 8] for i in range(3)))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(3, SEQ, 8)
    y = move(F.linear(y, proj), P, I)
    return ((y * y).sum(),)


BLOCKED = S(0, Layout.of([(4, 4)], T, rep=3))
ATTENTION = {"scale": weight(H), "qkv": weight(24, H), "proj": weight(H, 8)}
ATTENTION_STORAGE = {"scale": I, "qkv": BLOCKED, "proj": whole(1, 16)}

VOCAB = 14


def lookup(table, ids):
    """Vocabulary-parallel embedding as localize_embedding writes it."""
    return mfx.embedding_of_rank(table, ids, -1, list(Layout.contiguous(VOCAB, T).flat()), "tp", T)


def language_model(table, ids, target):
    """Tied vocabulary-parallel embedding, head and loss."""
    x = torch.tanh(move(lookup(table, ids), P, I))
    logits = F.linear(move(x, I, R), table).reshape(3 * SEQ, VOCAB // T)
    layout, one_each = list(Layout.contiguous(VOCAB, T).flat()), S(0, Layout.contiguous(T, T))
    with torch.no_grad():
        stats = mfx.ce_stats(logits, target, layout, T, "tp")
    everyone = move(stats.unsqueeze(0), one_each, I)
    loss = mfx.ce_loss(logits, target, everyone, -100, 0.1, False, layout, T, "tp")
    return (loss.sum() / (target != -100).sum(),)


TOKENS = {"ids": torch.randint(0, VOCAB, (3, SEQ)), "target": torch.randint(0, VOCAB, (3 * SEQ,))}
LM_STORAGE = {"table": whole(0, VOCAB)}


def sequence_dropout(scale, x, seed):
    x = move(x, I, SEQUENCE)
    x = mfx.dropout(x * move(scale, I, R), seed, 0.1, 3, 1, list(SEQUENCE.flat_layout), "tp")
    return (move(x.sum(), P, I),)


DROPOUT = {"scale": weight(H), "x": BATCH["x"], "seed": torch.tensor(7)}

CASES = {
    "mlp": (mlp, MLP | BATCH, MLP_STORAGE),
    "mlp_sequence": (mlp_sequence, MLP | BATCH, MLP_STORAGE),
    "attention": (attention, ATTENTION | {"x": BATCH["x"]}, ATTENTION_STORAGE),
    "language_model": (language_model, {"table": weight(VOCAB // T, H)} | TOKENS, LM_STORAGE),
    "sequence_dropout": (sequence_dropout, DROPOUT, {"scale": I}),
}


@pytest.fixture
def joint():
    """joint(case) -> (program, storage): forward and backward of a case."""

    def make(name):
        function, inputs, storage = CASES[name]
        program = local_program(function, inputs, loss=True)
        for node in program.graph.nodes:
            node.meta[FQN] = f"layers.0.{name}"
        wrt = [i for i, spec in enumerate(program.inputs) if spec.kind == "param"]
        differentiate(program, wrt, [0])
        return program, storage

    return make


_kept = {}  # of tests that leave the graph as it was


@pytest.fixture
def kept(joint):
    def make(name):
        if name not in _kept:
            _kept[name] = joint(name)
        return _kept[name]

    return make


def transitions(program):
    return [n for n in program.graph.nodes if is_transition(n)]


def rejected(program, storage):
    with pytest.raises(PlacementError) as error:
        check_types(program, storage, T)
    return error.value


@pytest.mark.parametrize("name", CASES)
def test_right_graphs_are_accepted(kept, name):
    program, storage = kept(name)
    verify(program)
    check_types(program, storage, T)
    assert sum(n.meta.get("phase") == "backward" for n in transitions(program)) > 0


@contextlib.contextmanager
def put_in_place_of(node, other):
    """The graph with `other` wherever `node` is read."""
    users = [(user, user.args, user.kwargs) for user in node.users]
    node.replace_all_uses_with(other)
    yield
    for user, args, kwargs in users:
        user.args, user.kwargs = args, kwargs


@contextlib.contextmanager
def changed_to(node, **ends):
    """The transition with another src or dst, as the same shapes allow."""
    args = node.args
    src, dst = ends.get("src", args[1]), ends.get("dst", args[2])
    layouts = [[] if tag[0] != "S" else layout for tag, layout in ((src, args[3]), (dst, args[4]))]
    node.args = (args[0], src, dst, *layouts, *args[5:])
    yield
    node.args = args


MOVES_NO_DATA = {"I", "R"}  # I -> R only says what the gradient is, and its backward is a node of its own here


@pytest.mark.parametrize("name", CASES)
def test_each_deleted_transition_is_found(kept, name):
    program, storage = kept(name)
    found = {None: 0, "backward": 0}
    for node in transitions(program):
        if not {node.args[1], node.args[2]} <= MOVES_NO_DATA:
            with put_in_place_of(node, node.args[0]):
                rejected(program, storage)
            found[node.meta.get("phase")] += 1
    check_types(program, storage, T)  # all repaired again
    assert all(found.values())


@pytest.mark.parametrize("name", CASES)
def test_each_swapped_transition_is_found(kept, name):
    """P -> I by S -> I, I -> S by P -> S, and so on: every wrong src, and dst P for what is whole."""
    program, storage = kept(name)
    for node in transitions(program):
        src, dst = node.args[1:3]
        for other in {"I", "P"} - {src.replace("R", "I")}:
            with changed_to(node, src=other):
                rejected(program, storage)
        if dst in MOVES_NO_DATA:
            with changed_to(node, dst="P"):
                rejected(program, storage)
    check_types(program, storage, T)


def test_gradient_that_stays_partial(joint):
    """The all-reduce of the layer norm's gradient under sequence parallelism: with a perfect loss, only this tells."""
    program, storage = joint("mlp_sequence")
    last = program.output_node().args[0][1]  # the gradient of ln
    assert is_transition(last) and last.args[1:3] == ("P", "I")
    with put_in_place_of(last, last.args[0]):
        error = rejected(program, storage)
    assert "is the gradient of 'ln', which must be whole; it is partial" in str(error)
    assert error.module == "layers.0.mlp_sequence" and error.fix


def test_gradient_at_another_shard_than_its_parameter(joint):
    program, storage = joint("attention")
    error = rejected(program, {**storage, "qkv": whole(0, 48)})  # in one block instead of three
    assert "must be shard" in str(error) or "slice" in str(error) or "view" in str(error)


def test_doubled_all_reduce(joint):
    program, storage = joint("mlp")
    node = next(n for n in transitions(program) if n.args[1:3] == ("P", "I"))
    with program.graph.inserting_after(node):
        again = program.graph.call_function(node.target, (node, *node.args[1:]))
    again.meta = dict(node.meta)
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    assert "the transition starts from P" in str(rejected(program, storage))


def test_bias_added_by_every_rank(joint):
    """A row-parallel bias must be added once: whole beside a partial product it is refused."""
    program, storage = joint("mlp")
    node = next(n for n in transitions(program) if n.args[1:3] == ("I", "P"))
    with put_in_place_of(node, node.args[0]):
        assert "add" in str(rejected(program, storage))


def test_transition_for_another_number_of_ranks(joint):
    program, storage = joint("mlp")
    transitions(program)[0].update_arg(6, 3)
    assert "is for 3 ranks, the axis has 2" in str(rejected(program, storage))


def forward(function, inputs):
    return local_program(function, inputs, loss=True)


def test_partial_into_a_nonlinear_op():
    program = forward(lambda w, x: (F.gelu(F.linear(x, w)).sum(),), {"w": weight(H, 4), "x": torch.ones(3, 4)})
    program.inputs[1] = dataclasses.replace(program.inputs[1], kind="param")
    error = rejected(program, {"w": whole(1, 8), "x": whole(1, 8)})
    assert "aten.gelu.default" in str(error) and "not linear" in str(error)


def test_mean_over_a_shard_divides_by_the_local_count():
    inputs = {"w": weight(4, H), "x": torch.ones(3, H)}
    for function, message in (
        (lambda w, x: (move(F.linear(move(x, I, R), w).mean(), P, I),), "a mean over it divides by the local count"),
        (lambda w, x: (move(F.linear(move(x, I, R), w).mean(0).sum(), P, I),), None),
    ):
        program = forward(function, inputs)
        if message is None:
            check_types(program, {"w": whole(0, 8)}, T)
        else:
            assert message in str(rejected(program, {"w": whole(0, 8)}))


@pytest.mark.parametrize("dim, flat", [(-1, []), (1, [1, 3, 2, 1, 1]), (0, list(SEQUENCE.flat_layout))])
def test_dropout_must_know_how_its_operand_is_cut(joint, dim, flat):
    program, storage = joint("sequence_dropout")
    for node in program.graph.find_nodes(op="call_function", target=mfx.dropout.default):
        node.args = (*node.args[:4], dim, flat, *node.args[6:])
    assert "draws the mask of a value that is" in str(rejected(program, storage))


# -- lookups in a sharded vocabulary


def find(program, target, index=0):
    return program.graph.find_nodes(op="call_function", target=target)[index]


def test_lookup_of_all_ids(joint):
    program, storage = joint("language_model")
    found = find(program, mfx.embedding_of_rank.default)
    found.target, found.args = aten.embedding.default, found.args[:2]
    assert "looks up all ids" in str(rejected(program, storage))


@pytest.mark.parametrize(
    ("op", "found"),
    [(mfx.embedding_of_rank.default, "must be S0"), (mfx.embedding_of_rank_gradient.default, "is sharded by 2x7")],
)
def test_lookup_with_bounds_of_another_table(joint, op, found):
    program, storage = joint("language_model")
    find(program, op).update_arg(3, list(Layout.contiguous(VOCAB + 4, T).flat()))
    assert found in str(rejected(program, storage))


def test_a_lookup_gives_summands(joint):
    program, storage = joint("language_model")
    found = find(program, mfx.embedding_of_rank.default)
    (summed,) = found.users
    with put_in_place_of(summed, found):
        assert "not linear in the operands that are partial" in str(rejected(program, storage))


def test_a_gradient_of_a_lookup_is_whole(joint):
    program, storage = joint("language_model")
    backward = find(program, mfx.embedding_of_rank_gradient.default)
    with put_in_place_of(backward.args[0], find(program, mfx.embedding_of_rank.default)):
        assert "its operand 'x' must be the same on every rank" in str(rejected(program, storage))


def test_loss_with_statistics_of_one_rank(joint):
    program, storage = joint("language_model")
    loss = find(program, mfx.ce_loss.default)
    with put_in_place_of(loss.args[2], loss.args[2].args[0]):
        assert "they are not gathered" in str(rejected(program, storage))


def test_ambiguous_views_of_local_shapes():
    """A rank's [1, 4] may be one head of two or half of a head: both readings are tried, forward and backward."""

    def heads(w, u, x):
        y = F.linear(move(x, I, R), w).reshape(3, 1, 4)  # 2 heads of 4
        return (move(F.linear(torch.tanh(y).reshape(3, 4), u), P, I).sum(),)

    def half(w, u, x):
        y = F.linear(move(x, I, R), w).reshape(3, 1, 4)  # 1 head of 8
        scale = move(torch.ones(1, 8), I, whole(1, 8))
        return (move(F.linear((y * scale).reshape(3, 4), u), P, I).sum(),)

    storage = {"w": whole(0, 8), "u": whole(1, 8)}
    for function in (heads, half):
        program = forward(function, {"w": weight(4, H), "u": weight(5, 4), "x": torch.ones(3, H)})
        differentiate(program, [0, 1], [0])
        check_types(program, storage, T)


def test_copies_of_a_key_head():
    """Each rank expands a whole K to its copy: 1 of 2 for each of 3 heads. The expand moves nothing locally, and so does
    its backward, whose result is summands all the same."""
    spread, joined = S(1, Layout.contiguous(2, T)), S(0, Layout.of([(2, 1)], T, rep=3))

    def repeat_heads(k, w):
        copies = move(k, I, R).reshape(3, 1, 4).expand(3, 1, 4)
        y = (copies.reshape(3, 4) * move(w, I, joined)).tanh()
        return (move(y.sum(), P, I),)

    program = forward(repeat_heads, {"k": weight(3, 4), "w": weight(6, 4)})
    find(program, aten.expand.default).meta[PLACEMENT] = spread
    differentiate(program, [0, 1], [0])
    storage = {"k": I, "w": I}
    check_types(program, storage, T)
    gradient = program.output_node().args[0][1]
    while not is_transition(gradient):
        gradient = gradient.args[0]
    assert gradient.args[1:3] == ("P", "I")
    with put_in_place_of(gradient, gradient.args[0]):
        rejected(program, storage)
