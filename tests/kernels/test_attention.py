"""Covers: kernels/attention/attention.py, attention_reference.py, attention_triton.py, attention_backward_triton.py,
attention_mask_triton.py, attention_bits_triton.py."""

import math
from pathlib import Path

import pytest
import torch
from kernel_checks import run_as_script
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import megafx.kernels.attention.attention  # noqa: F401  registers the op
from megafx.kernels.attention.attention_reference import keep_mask, subkey
from megafx.kernels.common import philox
from megafx.ops import axes
from megafx.placements.types import Layout

attention = torch.ops.megafx.attention
SEED = torch.tensor(-987654321012345)
WHOLE = (-1, [], "tp")


def tensors(b=2, h=6, n=3, s=7, t=9, e=4, f=5, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = ((b, h, s, e), (b, n, t, e), (b, n, t, f))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def written_out(q, k, v, mask, scale, causal, window, softcap, keep=None, p=0.0):
    """The formula, as anybody would write it."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.ones(scores.shape, dtype=torch.bool)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & (mask[:, None, None] if mask.dim() == 2 else mask)
    elif mask is not None:
        scores = scores + (mask[:, None, None] if mask.dim() == 2 else mask)
    query, key = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    seen = seen & (key <= query) if causal else seen
    seen = seen & ((query - key).abs() < window) if window else seen
    weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
    weights = weights.masked_fill(~seen.any(-1, keepdim=True), 0)
    if keep is not None:
        weights = weights * keep * philox.scale(p)
    return weights @ v


MASKS = {
    "none": None,
    "padding": torch.tensor([[True] * 6 + [False] * 3, [True] * 9]),
    "bool": torch.rand(2, 1, 7, 9, generator=torch.Generator().manual_seed(1)) < 0.6,
    "nothing seen": torch.zeros(1, 1, 7, 9, dtype=torch.bool),
    "bias": torch.randn(1, 6, 7, 9, dtype=torch.float64),
    "bias of keys": torch.randn(2, 9, dtype=torch.float64),
}


@pytest.mark.parametrize(
    "options", [(False, 0, 0.0, 0), (True, 0, 0.0, 0), (True, 3, 1.5, 0), (False, 4, 0.0, 0)], ids=str
)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("name", MASKS)
def test_is_the_formula(name, p, options):
    """Output and every gradient, the mask's included."""
    (q, k, v), mask, inputs = tensors(), MASKS[name], ()
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.clone().requires_grad_()
        inputs = (mask,)
    where = tuple(torch.arange(n) for n in q.shape[:3])
    keep = keep_mask(where, 9, subkey(SEED, 4), p) if p else None
    found = attention(q, k, v, mask, None, None, None, SEED, 0.4, *options, p, 4, *WHOLE)
    wanted = written_out(q, k, v, mask, 0.4, *options[:3], keep, p)
    torch.testing.assert_close(found, wanted)
    grad = torch.randn(found.shape, dtype=found.dtype)
    for a, b in zip(*(torch.autograd.grad(y, (q, k, v, *inputs), grad) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b)


KEY_MASKS = {
    "bool": MASKS["padding"],
    "additive": torch.tensor([[0.0] * 6 + [-1e300] * 3, [0.0] * 9], dtype=torch.float64),
    "of one row": MASKS["padding"][:1],
}


@pytest.mark.parametrize("name", ["bool", "bias", "bias of keys"])
@pytest.mark.parametrize("kind", KEY_MASKS)
def test_two_masks_are_their_sum(kind, name):
    """A key_mask beside a mask: output, and every gradient."""
    (q, k, v), mask, keys, inputs = tensors(), MASKS[name], KEY_MASKS[kind], ()
    whole = keys[:, None, None].expand(2, 6, 7, 9)
    added = (
        torch.zeros_like(whole, dtype=q.dtype).masked_fill(~whole, -math.inf) if whole.dtype == torch.bool else whole
    )
    one = mask[:, None, None] if mask.dim() == 2 else mask
    if mask.dtype == torch.bool:
        both = added.masked_fill(~one, -math.inf)
    else:
        mask = mask.clone().requires_grad_()
        both, inputs = added + (mask[:, None, None] if mask.dim() == 2 else mask), (mask,)
    results = []
    for masks in ((mask, keys), (both, None)):
        out = attention(q, k, v, *masks, None, None, SEED, 0.4, True, 0, 0.0, 0, 0.3, 4, *WHOLE)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v, *inputs))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    alone = [
        attention(q, k, v, *masks, None, None, SEED, 0.4, True, 0, 0.0, 0, 0.3, 4, *WHOLE)
        for masks in ((None, keys), (keys, None))
    ]
    assert torch.equal(*alone)


@pytest.mark.parametrize("options", [(True, 0, 0.0, 0), (False, 3, 1.5, 0)], ids=str)
def test_segments_are_a_mask_of_equal_ids(options):
    """Output and every gradient, whole and of a rank that has some of the queries."""
    q, k, v = tensors(s=9)
    ids = torch.tensor([[5, 5, 5, 1, 1, 7, 7, 7, 7], [0, 1, 0, 1, 0, 1, 2, 0, 0]])
    for given in (ids, ids[:1], ids > 1):
        same = (given[:, :, None] == given[:, None, :])[:, None].expand(2, 1, 9, 9)
        for extra in (None, torch.randn(1, 6, 9, 9, dtype=torch.float64)):
            both = same if extra is None else extra.expand(2, 6, 9, 9).masked_fill(~same, -math.inf)
            found = attention(q, k, v, extra, None, given, None, SEED, 0.4, *options, 0.3, 4, *WHOLE)
            wanted = attention(q, k, v, both, None, None, None, SEED, 0.4, *options, 0.3, 4, *WHOLE)
            torch.testing.assert_close(found, wanted)
            for a, b in zip(*(torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (found, wanted)), strict=True):
                torch.testing.assert_close(a, b)
    layout, whole = (
        Layout.from_flat((1, 9, 1)),
        attention(q, k, v, None, None, ids, None, None, 0.4, *options, 0.0, 4, *WHOLE),
    )
    for rank in range(3):
        with axes.on_mesh({"tp": axes.AxisContext(rank, 3, "")}):
            part = _cut(q, 2, layout, rank, 3)
            local = attention(part, k, v, None, None, ids, None, None, 0.4, *options, 0.0, 4, 2, [1, 9, 1], "tp")
        torch.testing.assert_close(local, whole[:, :, 3 * rank : 3 * rank + 3])
    with pytest.raises(ValueError, match="are of 9 keys and as many queries, got 7"):
        attention(q[:, :, :7], k, v, None, None, ids, None, None, 0.4, *options, 0.0, 4, *WHOLE)
    with pytest.raises(ValueError, match="are not integers"):
        attention(q, k, v, None, None, ids.double(), None, None, 0.4, *options, 0.0, 4, *WHOLE)
    with pytest.raises(ValueError, match="hidden 1 is not 0"):
        attention(q, k, v, None, ids > 0, ids, None, None, 0.4, *options[:3], 1, 0.0, 4, *WHOLE)


@pytest.mark.parametrize("options", [(True, 0, 0.0, 0), (False, 3, 1.5, 0), (False, 0, 0.0, 1)], ids=str)
@pytest.mark.parametrize("name", ["none", "padding", "bool", "nothing seen", "bias"])
def test_a_sink_is_one_more_key_without_a_value(name, options):
    """Output and every gradient, with dropout, which is not drawn for the sink; a row that sees no key is zeros."""
    (q, k, v), mask = tensors(), MASKS[name]
    sink = torch.tensor([-2.0, 0.0, 1.0, 0.5, -0.5, 30.0], dtype=q.dtype, requires_grad=True)
    shown = torch.ones(2, 6, 7, 9, dtype=torch.bool)
    if mask is not None and mask.dtype == torch.bool:
        shown = shown & (mask[:, None, None] if mask.dim() == 2 else mask)
    causal, window, softcap, _ = options
    query, key = torch.arange(7)[:, None], torch.arange(9)
    shown = shown & (key <= query) if causal else shown
    shown = shown & ((query - key).abs() < window) if window else shown
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.4
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if mask is None or mask.dtype == torch.bool else scores + mask
    column = sink[:, None, None].expand(2, 6, 7, 1)
    weights = torch.cat((scores.masked_fill(~shown, -math.inf), column), -1).softmax(-1)[..., :-1]
    keep = keep_mask(tuple(torch.arange(n) for n in (2, 6, 7)), 9, subkey(SEED, 4), 0.3)
    wanted = (weights * keep * philox.scale(0.3)) @ v.repeat_interleave(2, 1)
    found = attention(q, k, v, mask, None, None, sink, SEED, 0.4, *options, 0.3, 4, *WHOLE)
    torch.testing.assert_close(found, wanted)
    assert name != "nothing seen" or not found.any()
    grad = torch.randn(found.shape, dtype=found.dtype)
    for a, b in zip(*(torch.autograd.grad(y, (q, k, v, sink), grad) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b)
    nothing = torch.full_like(sink, -math.inf)  # a sink that takes no weight
    with_none = attention(q, k, v, mask, None, None, nothing, SEED, 0.4, *options[:3], 0, 0.3, 4, *WHOLE)
    torch.testing.assert_close(
        with_none, attention(q, k, v, mask, None, None, None, SEED, 0.4, *options[:3], 0, 0.3, 4, *WHOLE)
    )
    if name == "none":
        with pytest.raises(ValueError, match="one number for each of 6 query heads"):
            attention(q, k, v, mask, None, None, sink[:3], SEED, 0.4, *options, 0.3, 4, *WHOLE)


def test_without_extras_it_is_the_librarys():
    q, k, v = tensors(s=9)
    gm = make_fx(lambda *a: attention(*a, None, None, None, None, None, 0.3, True, 0, 0.0, 0, 0.0, 0, *WHOLE))(q, k, v)
    names = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    assert not any("megafx" in n for n in names) and any("scaled_dot_product" in n or "softmax" in n for n in names)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(
        attention(q, k, v, None, None, None, None, None, 0.3, True, 0, 0.0, 0, 0.0, 0, *WHOLE), wanted
    )


def test_gradcheck():
    q, k, v = tensors(1, 2, 1, 4, 5, 3, 2)
    bias = torch.randn(1, 1, 4, 5, dtype=torch.float64, requires_grad=True)
    call = lambda q, k, v, bias: attention(q, k, v, bias, None, None, None, SEED, 0.4, True, 3, 2.0, 0, 0.3, 4, *WHOLE)
    assert torch.autograd.gradcheck(call, (q, k, v, bias))


@pytest.mark.parametrize("flat", [(1, 5, 1), (1, 3, 2), (2, 3, 1)], ids=lambda f: str(Layout.from_flat(f)))
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("t", [2, 3, 4])
def test_shards_draw_their_slice(dim, flat, t):
    """Batch, heads or queries cut by any layout: output and gradient of q are slices of the one-process ones."""
    layout, shape = Layout.from_flat(flat), [2, 3, 4, 6]
    shape[dim] = layout.size
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(n, dtype=torch.float64) for n in (shape, *[[*shape[:2], 9, 6]] * 2, shape))
    options = (SEED, 0.4, False, 0, 1.0, 0, 0.4, 3)

    def run(q, k, v, grad, where):
        q = q.requires_grad_()
        out = attention(q, k, v, None, None, None, None, *options, *where)
        return out, *torch.autograd.grad(out, q, grad)

    whole = run(q.clone(), k, v, grad, WHOLE)
    for rank in range(t):
        cut = lambda x: _cut(x, dim, layout, rank, t)  # noqa: B023
        with axes.on_mesh({"tp": axes.AxisContext(rank, t, "")}):
            given = (cut(q), k if dim == 2 else cut(k), v if dim == 2 else cut(v), cut(grad))
            local = run(*given, (dim, list(flat), "tp"))
        for a, b in zip(local, whole, strict=True):
            assert a.isfinite().all()
            for start, at, length in layout.pieces(rank, t):
                torch.testing.assert_close(a.narrow(dim, at, length), b.narrow(dim, start, length))


def _cut(x, dim, layout, rank, t):
    shape = [*x.shape]
    shape[dim] = layout.local_size(t)
    local = torch.full(shape, 0.5, dtype=x.dtype)
    for start, at, length in layout.pieces(rank, t):
        local.narrow(dim, at, length).copy_(x.narrow(dim, start, length))
    return local


def test_shared_kv_heads_under_cut_query_heads():
    """Two KV heads of four queries each on 4 ranks: every rank has one query head of each, and both KV heads."""
    q, k, v = tensors(1, 8, 2, 5, 6, 4, 4)
    options = (None, None, None, None, SEED, 0.4, True, 0, 0.0, 0, 0.4, 3)
    whole = attention(q, k, v, *options, *WHOLE)
    for rank in range(4):
        with axes.on_mesh({"tp": axes.AxisContext(rank, 4, "")}):
            local = attention(q[:, [rank, 4 + rank]], k, v, *options, 1, [2, 4, 1], "tp")
        torch.testing.assert_close(local, whole[:, [rank, 4 + rank]])


# -- the random bits


def drops(seed, op_id, p=0.1):
    """Standardised drops of [2, 4, 256, 1024] decisions: mean 0, variance 1 if the draws are fair."""
    where = torch.arange(2), torch.arange(4), torch.arange(256)
    keep = keep_mask(where, 1024, subkey(torch.tensor(seed), op_id), p)
    rate = philox.threshold(p) / 65536
    return ((~keep).double() - rate) / math.sqrt(rate * (1 - rate))


def correlation(a, b):
    return float((a * b).sum() / math.sqrt(a.numel()))


@pytest.mark.parametrize("seed, op_id", [(0, 0), (1234, 7), (-5, 40)])
def test_statistics(seed, op_id):
    """2**21 draws: rate; sums by query, key, head; neighbours in keys, queries, heads, batch; other seeds and ops."""
    m = drops(seed, op_id)
    squares = lambda z: float((z.square().sum() - z.numel()) / math.sqrt(2 * z.numel()))
    z = {"rate": float(m.sum() / math.sqrt(m.numel()))}
    z["queries"], z["keys"] = squares(m.sum(3) / 32), squares(m.sum(2) / 16)
    z["heads"] = squares(m.sum((2, 3)) / math.sqrt(256 * 1024))
    for lag in (1, 2, 7, 8, 9, 16, 63, 64, 65):
        z[f"key lag {lag}"] = correlation(m[..., lag:], m[..., :-lag])
        z[f"query lag {lag}"] = correlation(m[:, :, lag:], m[:, :, :-lag])
    z["head lag"], z["batch lag"] = correlation(m[:, 1:], m[:, :-1]), correlation(m[1:], m[:1])
    z["transposed"] = correlation(m[..., :256], m[..., :256].transpose(2, 3)) / math.sqrt(2)
    for other in (seed ^ 1, seed ^ 2**31, seed ^ 2**40):
        z[f"seed {other}"] = correlation(m, drops(other, op_id))
    z["op"] = correlation(m, drops(seed, op_id + 1))
    assert max(map(abs, z.values())) < 4.5, {k: v for k, v in z.items() if abs(v) >= 4.5}


# -- as an operator


def test_edges_and_errors():
    q, k, v = tensors()
    assert not attention(q, k, v, None, None, None, None, SEED, 0.4, False, 0, 0.0, 0, 1.0, 0, *WHOLE).any()
    call = lambda q, k, v, mask, *rest: attention(q, k, v, mask, None, None, None, *rest, *WHOLE)
    assert call(q[:0], k[:0], v[:0], None, SEED, 0.4, False, 0, 0.0, 0, 0.5, 0).shape == (0, 6, 7, 5)
    assert not call(q, k[:, :, :0], v[:, :, :0], None, SEED, 0.4, False, 0, 1.0, 0, 0.0, 0).any()
    torch.manual_seed(5)
    first = call(q, k, v, None, None, 0.4, False, 0, 0.0, 0, 0.5, 0)  # no seed: torch's generator gives one
    torch.manual_seed(5)
    assert torch.equal(call(q, k, v, None, None, 0.4, False, 0, 0.0, 0, 0.5, 0), first)
    with pytest.raises(ValueError, match="multiple of 4 KV heads"):
        call(q, k[:, [0, 0, 0, 0]], v[:, [0, 0, 0, 0]], None, SEED, 0.4, False, 0, 0.0, 0, 0.5, 0)
    with pytest.raises(ValueError, match="neither"):
        call(q, k, v, torch.ones(3, 9, dtype=torch.bool), SEED, 0.4, False, 0, 0.0, 0, 0.5, 0)
    bias, keys = MASKS["bias"], torch.ones(2, 9, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"not broadcastable to \[b, t\] \(2, 9\)"):
        attention(q, k, v, bias, keys[:, :5], None, None, SEED, 0.4, False, 0, 0.0, 0, 0.5, 0, *WHOLE)
    with pytest.raises(ValueError, match="gets no gradient"):
        attention(q, k, v, bias, keys.requires_grad_(), None, None, SEED, 0.4, False, 0, 0.0, 0, 0.5, 0, *WHOLE)
    with pytest.raises(ValueError, match="between 0 and 1"):
        call(q, k, v, None, SEED, 0.4, False, 0, 0.0, 0, 1.5, 0)


# -- Triton

SCRIPT = Path(__file__).with_name("triton_attention.py")


@pytest.mark.parametrize("part", ["0/6", *(pytest.param(f"{k}/6", marks=pytest.mark.slow) for k in range(1, 6))])
def test_triton_kernels_are_the_reference(part):
    run_as_script(SCRIPT, 600, True, part)
