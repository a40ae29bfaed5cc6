"""Covers: passes/fuse/describe_masks.py, megafx/analysis/masks.py,
megafx/analysis/tables.py."""

import math

import harness
import pytest
import torch
import torch.nn.functional as F
import zoo

import megafx
from megafx.analysis.masks import MaskReader
from megafx.analysis.tables import Band, read_table
from megafx.capture.export import capture_call
from megafx.ir.dump import target_text
from megafx.ir.nodes import argument
from megafx.passes.canonicalize.canonicalize import canonicalize_program
from megafx.passes.fuse.describe_masks import describe_masks
from megafx.patterns import attention, masked_softmax
from megafx.runtime.guards import TableGuard
from megafx.testing import assert_same, fuse_with, make_context

FAMILY = [
    *(attention.AttentionChain, attention.AttentionOfGroups),
    *(masked_softmax.ScaleMaskSoftmax, masked_softmax.ScaleSoftmax, masked_softmax.BiasOfScores),
]
HEADS = {name: "f32[b n=2 s e=4]" for name in "qkv"}
LOWEST = torch.finfo(torch.float32).min


def square(q, make=torch.ones, *args, **options):
    return make(q.shape[2], q.shape[2], *args, **options)


def positions(q):
    i = torch.arange(q.shape[2])
    return i[None, :], i[:, None]  # keys, queries


def described(function, **more):
    """The program with what describe_masks found: (before, after, arguments of the attention after the mask, its mask)."""
    fused = fuse_with(FAMILY, function, **HEADS | more)
    found = fused.program.copy()
    describe_masks(found, make_context())
    nodes = [n for n in found.graph.nodes if n.op == "call_function" and target_text(n.target) in ATTENTION]
    assert len(nodes) == 1, fused.near_misses
    return fused.before, found, nodes[0]


ATTENTION = ("attention", "scale_mask_softmax", "scaled_dot_product_attention")
CAUSAL = {
    "tril of ones, filled": lambda q, z: z.masked_fill(square(q).tril() == 0, -math.inf),
    "tril of booleans": lambda q, z: z.masked_fill(~square(q, dtype=torch.bool).tril(), -math.inf),
    "triu of -inf, added": lambda q, z: z + torch.triu(torch.full((q.shape[2], q.shape[2]), -math.inf), diagonal=1),
    "triu of ones, filled": lambda q, z: z.masked_fill(square(q).triu(1).bool(), -1e9),
    "finfo.min times": lambda q, z: z + (1.0 - square(q).tril())[None, None] * LOWEST,
    "positions": lambda q, z: torch.where(positions(q)[0] <= positions(q)[1], z, -math.inf),
    "positions, difference": lambda q, z: z.masked_fill(positions(q)[0] - positions(q)[1] > 0, LOWEST),
    "positions, expanded": lambda q, z: (
        z + torch.where((positions(q)[1] >= positions(q)[0]).expand(q.shape[0], 1, -1, -1), 0.0, LOWEST)
    ),
    "one of equal triangles": lambda q, z: z.masked_fill(square(q).tril().expand(3, -1, -1)[1] == 0, -math.inf),
    "a dim that comes and goes": lambda q, z: z.masked_fill(square(q).tril()[:, None][:, 0] == 0, -math.inf),
    "detached": lambda q, z: z + q.new_full((q.shape[2], q.shape[2]), -math.inf).triu(1).detach(),
}
WINDOWS = {
    "band of two triangles": (
        lambda q, z: z.masked_fill(~(square(q).bool().tril() & square(q).bool().triu(-2)), -math.inf),
        (True, 3),
    ),
    "positions": (
        lambda q, z: torch.where(
            (positions(q)[0] <= positions(q)[1]) & (positions(q)[0] > positions(q)[1] - 3), z, -1e38
        ),
        (True, 3),
    ),
    "both ways": (
        lambda q, z: z.masked_fill(
            ~((positions(q)[0] - positions(q)[1] < 2) & (positions(q)[1] - positions(q)[0] < 2)), -math.inf
        ),
        (False, 2),
    ),
}


def chain(mask):
    return lambda q, k, v, **more: F.softmax(mask(q, q @ k.transpose(-1, -2) * 0.5, **more), -1) @ v


@pytest.mark.parametrize("form", CAUSAL)
def test_causal_masks_are_flags(form):
    before, after, node = described(chain(CAUSAL[form]))
    assert argument(node, "mask") is None and (argument(node, "causal"), argument(node, "window")) == (True, 0)
    assert not {"tril", "triu", "full", "ones", "where", "arange"} & {target_text(n.target) for n in after.graph.nodes}
    assert_same(before, after)


@pytest.mark.parametrize("form", WINDOWS)
def test_windows_are_numbers(form):
    function, flags = WINDOWS[form]
    before, after, node = described(chain(function))
    assert argument(node, "mask") is None and (argument(node, "causal"), argument(node, "window")) == flags
    assert_same(before, after)


def padded(q, z, m, causal=True, fill=LOWEST):
    """Hugging Face's mask: causal and padding, 0 or finfo.min."""
    seen = m.bool()[:, None, None, :]
    if causal:
        seen = seen & (positions(q)[0] <= positions(q)[1])
    return z + torch.where(seen, 0.0, fill)


@pytest.mark.parametrize("fill", [-math.inf, LOWEST])
@pytest.mark.parametrize("causal", [True, False])
def test_padding_is_a_row_of_keys(causal, fill):
    def function(q, k, v, m):
        return chain(lambda q, z: padded(q, z, m, causal, fill))(q, k, v)

    before, after, node = described(function, m="i64[b s]")
    mask = argument(node, "mask").meta["val"]
    wanted = 2 if causal else 4  # alone it is no larger as it was
    assert (
        mask.dim() == wanted
        and mask.shape[-1] == node.args[1].meta["val"].shape[2]
        and mask[0].numel() == mask.shape[-1]
    )
    assert argument(node, "causal") == causal
    run_with_padding(before, after)


def run_with_padding(before, after, bias=False):
    """Left and right padding, and a row without any key: the same numbers and gradients."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    more = [torch.randn(1, 2, 5, 5, dtype=torch.float64, requires_grad=True)] if bias else []
    m = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    results, weight = [], torch.randn(3, 2, 5, 4, dtype=torch.float64)
    for program in (before, after):
        out = torch.fx.Interpreter(program.gm).run(q, k, v, m, *more)[0]
        results.append((out, *torch.autograd.grad((out * weight).sum(), (q, k, v, *more))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, equal_nan=True)


def test_padding_whose_dims_come_and_go():
    def function(q, k, v, m):
        return chain(lambda q, z: padded(q, z, m.bool()[None, :, None][0, :, 0]))(q, k, v)

    before, after, node = described(function, m="i64[b s]")
    assert argument(node, "mask").meta["val"].dim() == 2 and argument(node, "causal") is True
    run_with_padding(before, after)


def test_one_query_of_a_causal_mask_is_not_causal():
    """All queries see the keys that this one sees."""

    def first(q):
        keys, queries = positions(q)
        return (keys[None] > queries[:, :, None])[0][None, None]

    before, after, node = described(chain(lambda q, z: z.masked_fill(first(q), -math.inf)))
    assert not any(value is True for value in node.args)
    assert_same(before, after)


def test_a_window_with_padding():
    def function(q, k, v, m):
        def mask(q, z):
            seen = m.bool()[:, None, None, :] & (positions(q)[0] <= positions(q)[1])
            return z + torch.where(seen & (positions(q)[1] - positions(q)[0] < 2), 0.0, LOWEST)

        return chain(mask)(q, k, v)

    before, after, node = described(function, m="i64[b s]")
    assert (argument(node, "causal"), argument(node, "window")) == (True, 2) and argument(node, "mask").meta[
        "val"
    ].dim() == 2
    run_with_padding(before, after)


def test_a_bias_under_a_causal_mask_is_what_is_left():
    def function(q, k, v, a):
        bias = a + torch.where(positions(q)[0] <= positions(q)[1], 0.0, LOWEST)
        return chain(lambda q, z: z + bias)(q, k, v)

    before, after, node = described(function, a="param f32[1 n=2 s s]")
    assert argument(node, "mask").op == "placeholder" and argument(node, "causal") is True
    assert_same(before, after)


@pytest.mark.parametrize("stopped", ["bias", "mask"])
def test_a_bias_that_is_detached_gets_no_gradient(stopped):
    """In eager the gradient stops there; attention's mask must be the detached one too."""

    def function(q, k, v, a):
        causal = torch.where(positions(q)[0] <= positions(q)[1], 0.0, LOWEST)
        bias = a.detach() + causal if stopped == "bias" else (a + causal).detach()
        return chain(lambda q, z: z + bias)(q, k, v)

    before, after, node = described(function, a="param f32[1 n=2 s s]")
    assert target_text(argument(node, "mask").target) == "detach" and argument(node, "causal") is (stopped == "bias")
    assert_same(before, after)


def test_a_tensor_that_may_be_a_mask_under_a_causal_one():
    """It may hide all keys of a row; those that the causal mask hides by a finite number then have a weight."""

    def function(q, k, v, a, fill=LOWEST):
        return chain(lambda q, z: z + (a + torch.where(positions(q)[0] <= positions(q)[1], 0.0, fill)))(q, k, v)

    _, _, node = described(function, a="f32[b 1 1 s]")
    assert argument(node, "causal") is False
    _, _, node = described(lambda q, k, v, a: function(q, k, v, a, -math.inf), a="f32[b 1 1 s]")
    assert argument(node, "causal") is True


@pytest.mark.parametrize(("causal", "fill"), [(False, LOWEST), (False, -math.inf)])
def test_a_bias_with_padding_stays_one_for_the_batch(causal, fill):
    """T5's: the bias is the mask, padding the key_mask, and nothing has the size of batch, heads and both sequences."""

    def function(q, k, v, m, a):
        mask = padded(q, torch.zeros(q.shape[0], 1, q.shape[2], q.shape[2]), m, causal, fill)
        return chain(lambda q, z: z + (a + mask))(q, k, v)

    before, after, node = described(function, m="i64[b s]", a="param f32[1 n=2 s s]")
    assert (
        argument(node, "mask").op == "placeholder"
        and argument(node, "key_mask").meta["val"].dim() == 2
        and argument(node, "causal") == causal
    )
    assert argument(node, "key_mask").meta["val"].is_floating_point() == (not causal)
    sizes = [tuple(n.meta["val"].shape) for n in after.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    scores = (*node.args[0].meta["val"].shape[:3], node.args[1].meta["val"].shape[2])
    assert scores not in sizes
    run_with_padding(before, after, bias=True)


def test_a_trained_bias_with_causal_padding_of_minus_infinity():
    """Its gradient is NaN in rows that see no key, so the mask stays a tensor."""

    def function(q, k, v, m, a):
        mask = padded(q, torch.zeros(q.shape[0], 1, q.shape[2], q.shape[2]), m, True, -math.inf)
        return chain(lambda q, z: z + (a + mask))(q, k, v)

    before, after, node = described(function, m="i64[b s]", a="param f32[1 n=2 s s]")
    assert (
        argument(node, "mask").op != "placeholder"
        and argument(node, "key_mask") is None
        and argument(node, "causal") is False
    )
    run_with_padding(before, after, bias=True)


def test_the_library_takes_flags_too():
    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=square(q).tril().bool())

    before, after, node = described(function)
    assert (
        target_text(node.target) == "attention" and argument(node, "mask") is None and argument(node, "causal") is True
    )
    assert_same(before, after)


def test_softmax_that_returns_its_weights():
    def function(q, k, v):
        return F.softmax((q @ k.transpose(-1, -2) * 0.5).masked_fill(square(q).tril() == 0, -1e38), -1)

    before, after, node = described(function)
    assert target_text(node.target) == "scale_mask_softmax" and node.args[1] is None and node.args[3] is True
    assert_same(before, after)


STAY = {
    "the user's mask": (lambda q, z, m: z.masked_fill(m, -math.inf), {"m": "bool[s s]"}),
    "a triangle that reaches further": (lambda q, z: z.masked_fill(~square(q).tril(1).bool(), -math.inf), {}),
    "either of two": (
        lambda q, z: z.masked_fill(~((positions(q)[0] <= positions(q)[1]) | (positions(q)[0] < 2)), -math.inf),
        {},
    ),
    "positions of another step": (lambda q, z: z.masked_fill(positions(q)[0] * 2 > positions(q)[1], -math.inf), {}),
    "queries that are padding": (
        lambda q, z, m: z.masked_fill(m[:, None, :, None] | m[:, None, None, :], -1e38),
        {"m": "bool[b s]"},
    ),
}


@pytest.mark.parametrize("case", STAY)
def test_other_masks_stay_tensors(case):
    function, more = STAY[case]
    _, _, node = described(lambda q, k, v, **m: chain(lambda q, z: function(q, z, **m))(q, k, v), **more)
    assert argument(node, "mask") is not None and (argument(node, "causal"), argument(node, "window")) == (False, 0)


# -- buffers


class Block(torch.nn.Module):
    """nanoGPT's attention: the causal mask is a buffer."""

    def __init__(self, mask):
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)
        self.register_buffer("bias", mask)

    def forward(self, x):
        b, s, c = x.shape
        q, k, v = (y.view(b, s, 2, 4).transpose(1, 2) for y in self.qkv(x).split(c, 2))
        z = (q @ k.transpose(-2, -1)) * 0.5
        z = z.masked_fill(self.bias[:, :, :s, :s] == 0, float("-inf"))
        return (F.softmax(z, -1) @ v).transpose(1, 2).reshape(b, s, c)


def test_buffers_are_read_and_watched():
    torch.manual_seed(0)
    block = Block(torch.ones(8, 8).tril().view(1, 1, 8, 8)).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    wanted = block(x)
    other = block.bias.tril() + block.bias.triu(1).roll(0) + torch.eye(8, dtype=torch.float64).flip(0)
    parallel = megafx.parallelize(block, example_inputs=(x,))
    torch.testing.assert_close(parallel(x), wanted)
    graph = parallel.megafx.graphs
    assert all("tril" not in g.compiled.program.assumed for gs in graph.values() for g in gs)
    assert [g.compiled.program.assumed for gs in graph.values() for g in gs] == [{"bias": Band(1.0, 0.0)}] * len(graph)
    before = parallel.megafx.captures
    parallel.bias.copy_(parallel.bias.clone())  # written, but the same
    torch.testing.assert_close(parallel(x), wanted)
    assert parallel.megafx.captures == before
    parallel.bias.copy_(other)
    plain = Block(other.clone()).double()
    plain.load_state_dict({n: p for n, p in parallel.state_dict().items()})
    torch.testing.assert_close(parallel(x), plain(x))
    assert parallel.megafx.captures == before + 1


@pytest.mark.slow
@pytest.mark.parametrize("t", [1, 3])
def test_padded_batches_of_an_eager_model(t):
    """Left and right padding under a causal mask, whole and sharded: loss and gradients of the canonical graph."""
    model, plain = zoo.build("gpt2", attn="eager")

    def inputs(b, s):
        call = plain(b, s)
        call["attention_mask"] = torch.ones(b, s, dtype=torch.long)
        call["attention_mask"][0, :3] = 0
        call["attention_mask"][1, -4:] = 0
        call["labels"] = call["labels"].masked_fill(call["attention_mask"] == 0, -100)
        call["labels"][0, 3] = -100  # it is told from a row that sees nothing
        return call

    case = harness.Case(model, inputs, capture_call(model, (), inputs(2, 16)))
    compiled = case.compile(t)
    forward = [n for n in compiled.program.graph.nodes if "attention_forward" in str(n.target)]
    assert (
        len(forward) == 1
        and argument(forward[0], "mask").meta["val"].dim() == 2
        and argument(forward[0], "causal") is True
    )
    call = inputs(3, 13)
    harness.assert_equal(case.run(compiled, call), case.reference(call))


TABLES = [
    (torch.ones(5, 5).tril(), Band(1.0, 0.0)),
    (torch.ones(1, 1, 5, 5, dtype=torch.bool).tril(), Band(True, False)),
    (torch.full((5, 5), -math.inf).triu(1), Band(0.0, -math.inf)),
    (torch.ones(5, 5).tril() - torch.ones(5, 5).tril(-2), Band(1.0, 0.0, 2)),
    (torch.tensor(-1e4), -1e4),
    (torch.ones(5, 5).tril(1), None),
    (torch.ones(5, 5), None),
    (torch.ones(2, 5, 5).tril(), None),
    (torch.eye(5).flip(0), None),
    (torch.arange(5), None),
    (torch.ones(5, 5, device="meta").tril(), None),
]


@pytest.mark.parametrize("index", range(len(TABLES)))
def test_tables(index):
    x, wanted = TABLES[index]
    assert read_table(x) == wanted


def test_guard_sees_replaced_buffers():
    block = Block(torch.ones(8, 8).tril().view(1, 1, 8, 8))
    guard = TableGuard(block, {"bias": Band(1.0, 0.0)})
    assert guard.holds()
    block.bias = block.bias.clone()
    assert guard.holds()
    block.bias[0, 0, 3, 4] = 1
    assert not guard.holds()


def test_a_buffer_that_the_graph_changes_is_not_read():
    class Counting(Block):
        def forward(self, x):
            out = super().forward(x)
            self.bias.mul_(1.0)
            return out

    program = capture_call(Counting(torch.ones(8, 8).tril().view(1, 1, 8, 8)), (torch.randn(2, 5, 8),))
    canonicalize_program(program)
    reader = MaskReader(program)
    for node in program.graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            reader.value_of(node)
    assert not reader.used
