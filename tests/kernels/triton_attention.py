"""Attention's Triton kernels against the reference in fp64; run by kernels/test_attention.py in a process of its own.

python tests/kernels/triton_attention.py 0/8    # one in eight of the checks: on CUDA kernels take long to compile
"""

import functools
import itertools
import math
import sys
import warnings

import kernel_checks  # noqa: F401  makes Triton's interpreter quick
import torch

import megafx.kernels.attention.attention  # noqa: F401  registers the op
from megafx.kernels.attention import (
    attention_backward_triton,
    attention_mask_triton,
    attention_pieces,
    attention_reference,
    attention_sink_triton,
    attention_triton,
)
from megafx.kernels.attention.attention_reference import FILLED, FILLED_NAN, Inputs
from megafx.ops import axes

warnings.simplefilter("ignore")  # the interpreter's numpy: overflow in rows and columns that are out of bounds
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEED = torch.tensor(-(7 << 40) + 99, device=DEVICE)
PART, PARTS = (int(n) for n in (sys.argv[1] if len(sys.argv) > 1 else "0/1").split("/"))
COUNT = itertools.count()
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def check(
    b, h, n, s, t, e, f, *, dtype=torch.float32, mask=None, causal=False, window=0, softcap=0.0, hidden=0, p=0.0, cut=None,
    tma=True, turned=False, keys=None, segments=None, sink=None,
):  # fmt: skip
    """Results, row statistics and every gradient; the backward twice, bit for bit."""
    number, part = divmod(next(COUNT), PARTS)
    if part != PART:
        return
    shapes = (b, h, s, e), (b, n, t, e), (b, n, t, f), (b, h, s, f)
    q, k, v, grad = (torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes)
    if turned:  # heads inside, as projections make them
        q, k, v, grad = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, grad))
    dim, layout = cut or (-1, ())
    mask = None if mask is None else mask.to(DEVICE)
    keys = None if keys is None else keys.to(DEVICE)
    segments = None if segments is None else segments.to(DEVICE)
    sink = None if sink is None else sink.to(DEVICE)
    options = (e**-0.5, causal, window, softcap, hidden, p, 5, dim, layout, "tp")
    x = Inputs.of((q, k, v, mask, keys, segments, sink, SEED), options)
    wide = [y if y is None or y.dtype == torch.bool else y.double() for y in x[:5]]
    exact = Inputs.of((*wide, segments, None if sink is None else sink.double(), SEED), options)
    tuning = {"TMA": tma}
    out, lse = attention_triton.forward(x, **tuning)
    wanted, statistics = attention_reference.forward(exact)

    def backward(**given):
        return attention_backward_triton.backward(grad, x, out, lse, by_query=tuning, by_key=tuning, **given)

    grads = [backward() for _ in range(2 if DEVICE == "cuda" else 1)]  # the interpreter runs programs in one order
    in_other_ways = DEVICE == "cuda" or number % 3 == 0  # each takes as long as the first one
    if in_other_ways and s == t and e == f:  # side by side, as the gradient of a fused projection
        packed = torch.empty(b, s, h + 2 * n, e, dtype=dtype, device=DEVICE).transpose(1, 2)
        backward(into=packed.split([h, n, n], 1))
        assert torch.equal(packed.nan_to_num(), torch.cat(grads[0], 1).nan_to_num())
    found = [out, *grads[0]]
    expected = [wanted, *attention_reference.backward(grad.double(), exact)]
    if mask is not None and mask.dtype != torch.bool:
        found.append(attention_mask_triton.mask_backward(grad, x, out, lse))
        expected.append(attention_reference.mask_backward(grad.double(), exact))
    if sink is not None:
        found.append(attention_sink_triton.sink_backward(grad, out, lse, sink))
        expected.append(attention_reference.sink_backward(grad.double(), wanted, statistics, exact.sink))
    case = (b, h, n, s, t, e, f, dtype, causal, window, softcap, p, cut, tma)
    names = ["out", "dq", "dk", "dv"] + ["dmask"] * (mask is not None and mask.dtype != torch.bool) + ["dsink"]
    for name, a, w in zip(names, found, expected, strict=False):
        assert torch.equal(a.isnan(), w.isnan()), (case, name)
        error = float((a.double() - w).nan_to_num().norm() / w.nan_to_num().norm().clamp(min=1e-9))
        assert error < LIMITS[dtype] * (10 if name == "dsink" else 1), (case, name, error)  # a sum whose terms cancel
    seen = statistics.isfinite() & (statistics.abs() < 1e4)
    if hidden > 2:
        return  # NaN
    assert torch.equal(lse.isfinite(), statistics.isfinite()), case
    torch.testing.assert_close(lse[seen].double(), statistics[seen], rtol=1e-5, atol=1e-4)
    assert all(torch.equal(x, y) for x, y in zip(grads[0], grads[-1], strict=True)), case
    if not in_other_ways:
        return
    apart = backward(workspace=1)  # head by head
    assert all(torch.equal(a, w) for a, w in zip(apart, grads[0], strict=True)), case


def _on_cpu_backward(grad, q, k, v, out, lse, causal, scale):
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return call(grad, q, k, v, out, lse, 0.0, causal, scale=scale)


def _on_cpu_forward(q, k, v, causal, scale):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def check_pieces(b, h, n, t, d, ranks, sunk=False):
    """The library called for the parts of a rank's queries, against the reference; every rank of a sequence of t tokens."""
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    library = attention_pieces.CUDNN
    if DEVICE == "cpu":
        library = attention_pieces.Library(_on_cpu_forward, _on_cpu_backward)
    k, v = (torch.randn(b, t, n, d, device=DEVICE, dtype=dtype).transpose(1, 2) for _ in range(2))
    s = -(-t // ranks)
    sink = torch.randn(h, device=DEVICE, dtype=dtype) + 3 if sunk else None
    exact_sink = None if sink is None else sink.double()
    for rank in range(ranks):
        q, grad = (torch.randn(b, s, h, d, device=DEVICE, dtype=dtype).transpose(1, 2) for _ in range(2))
        options = (d**-0.5, True, 0, 0.0, 0, 0.0, 5, 2, (1, t, 1), "cp")
        with axes.on_mesh({"cp": axes.AxisContext(rank, ranks, "")}):
            x = Inputs.of((q, k, v, None, None, None, sink, None), options)
            exact = Inputs.of((q.double(), k.double(), v.double(), None, None, None, exact_sink, None), options)
            pieces = attention_pieces.pieces_of(x)
            held = sum(piece.length for piece in pieces)
            grad[:, :, held:] = 0  # of pads
            out, lse = attention_pieces.forward(x, pieces, library)
            found = [out, lse, *attention_pieces.backward(grad, x, out, lse, pieces, library)]
            wanted = [*attention_reference.forward(exact), *attention_reference.backward(grad.double(), exact)]
            norms = {}
            if sunk:  # of terms of both signs
                terms = (exact_sink[:, None] - wanted[1]).exp() * (grad.double() * wanted[0]).sum(-1)
                norms["dsink"] = terms.abs().sum((0, 2)).norm()
                found.append(attention_sink_triton.sink_backward(grad, out, lse, sink))
                wanted.append(attention_reference.sink_backward(grad.double(), *wanted[:2], exact_sink))
        for name, a, w in zip(("out", "lse", "dq", "dk", "dv", "dsink"), found, wanted, strict=False):
            a, w = (y[:, :, :held] if name in ("out", "lse", "dq") else y for y in (a, w))
            error = float((a.double() - w).norm() / norms.get(name, w.norm()))
            assert error < LIMITS[dtype], (rank, name, error)


def slices():
    """A rank's queries have the bits of one process; keys that none sees are not read, nor queries for keys.

    In the interpreter products are those of numpy's BLAS, which on some processors depend on where in a block a row is: there
    bits are compared where ranks begin with a block.
    """
    t = 4
    for window, rows in itertools.product((0, 70), (100, 128)):
        if next(COUNT) % PARTS != PART:
            continue
        n = t * rows
        q, k, v, grad = (torch.randn(1, 2, n, 16, device=DEVICE) for _ in range(4))
        options = (0.25, True, window, 0.0, 0, 0.0, 5)
        whole = Inputs.of((q, k, v, None, None, None, None, None), (*options, -1, (), "tp"))
        out, lse = attention_triton.forward(whole)
        dq, *_ = attention_backward_triton.backward(grad, whole, out, lse)
        for rank in range(t):
            here = slice(rank * rows, rank * rows + rows)
            dark, first = (here.stop + 63) // 64 * 64, max(0, here.start - window + 1) // 64 * 64 if window else 0
            parts = [x.clone() for x in (k, v)]
            for x in parts:
                x[:, :, dark:] = x[:, :, :first] = math.nan
            cut = [x[:, :, here].contiguous() for x in (q, grad, out, lse)]
            with axes.on_mesh({"tp": axes.AxisContext(rank, t, "")}):
                x = Inputs.of((cut[0], *parts, None, None, None, None, None), (*options, 2, (1, n, 1), "tp"))
                found = attention_triton.forward(x)
                made, dk, _ = attention_backward_triton.backward(cut[1], x, *cut[2:])
                early = [y.clone() for y in cut[:2]]
                for y in early:
                    y[:, :, :64] = math.nan
                late = slice((here.start + 64 + 63) // 64 * 64, min(dark, n))
                _, blind, _ = attention_backward_triton.backward(early[1], x._replace(q=early[0]), *cut[2:])
            bits = DEVICE == "cuda" or rows % 64 == 0
            same = torch.equal if bits else functools.partial(torch.allclose, rtol=1e-5, atol=1e-6)
            assert same(found[0], cut[2]) and same(found[1], cut[3]), (window, rows, rank)
            assert same(made, dq[:, :, here]), (window, rows, rank)
            assert not dk[:, :, dark:].any() and not dk[:, :, :first].any(), (window, rank)
            assert blind[:, :, late].isfinite().all(), (window, rank)


def main():
    torch.manual_seed(0)
    check(1, 2, 2, 70, 70, 16, 16)
    check(1, 2, 1, 70, 90, 16, 16, causal=True, p=0.3)
    check(1, 2, 1, 70, 90, 16, 16, causal=True, p=0.3, tma=False, turned=True)
    check(2, 1, 1, 70, 130, 16, 32, mask=torch.rand(2, 130) < 0.7, p=0.3, causal=True)
    hidden = torch.rand(1, 2, 70, 70) < 0.7
    hidden[:, :, 3] = False
    check(1, 2, 1, 70, 70, 16, 16, mask=hidden, softcap=3.0)
    check(1, 1, 1, 130, 130, 12, 16, window=20, causal=True, softcap=3.0)
    check(1, 1, 1, 70, 130, 16, 16, window=20, p=0.5)
    bias = torch.randn(1, 1, 70, 70)
    bias[0, 0, 4] = torch.finfo(torch.float32).min
    bias[0, 0, 5] = -math.inf
    check(2, 2, 1, 70, 70, 16, 16, mask=bias, dtype=torch.float16)
    check(1, 2, 2, 70, 70, 16, 16, mask=torch.randn(1, 2, 70, 70), causal=True, p=0.2)
    check(2, 1, 1, 65, 70, 16, 16, mask=torch.randn(2, 70))
    dark = torch.full((2, 70), 0.5)
    dark[0, 40:] = dark[1, 1:] = torch.finfo(torch.float32).min  # hides some keys
    seen = torch.rand(2, 130) < 0.7
    check(2, 4, 2, 70, 70, 16, 16, mask=torch.randn(1, 4, 70, 70), keys=dark, p=0.3)
    dark[1] = torch.finfo(torch.float32).min  # all of one element: uniform weights, whose statistic is good to 5e-4
    check(2, 4, 2, 70, 70, 16, 16, mask=torch.randn(1, 4, 70, 70), keys=dark, dtype=torch.float16)
    check(2, 2, 2, 65, 130, 16, 16, mask=torch.randn(1, 2, 1, 130), keys=seen, causal=True, tma=False, turned=True)
    check(2, 2, 1, 65, 130, 16, 16, mask=torch.rand(65, 130)[None, None] < 0.7, keys=dark[:, :1] * 0, softcap=3.0)
    for kind in (FILLED, FILLED_NAN):  # rows that see nothing, their scores without gradient
        check(1, 2, 1, 70, 70, 16, 16, mask=hidden, hidden=kind, dtype=torch.float16)
    check(
        2,
        2,
        1,
        65,
        130,
        16,
        16,
        mask=seen & torch.tensor([[True], [False]]),
        hidden=FILLED,
        softcap=3.0,
        dtype=torch.float16,
    )
    bias[0, 0, 5] = torch.finfo(torch.float32).min
    check(2, 2, 1, 70, 70, 16, 16, mask=bias, hidden=FILLED, dtype=torch.float16)
    check(2, 4, 2, 70, 70, 16, 16, mask=torch.randn(1, 4, 70, 70), keys=dark, hidden=FILLED, dtype=torch.float16)
    # several documents in a row: ids that rise (tiles are skipped), in any order, of one row, beside a mask and padding
    rising = torch.tensor([30, 60, 40, 1, 69]).repeat_interleave(torch.tensor([30, 60, 40, 1, 69]))
    check(2, 2, 1, 200, 200, 16, 16, segments=torch.stack([rising, rising.flip(0)]), causal=True, p=0.3)
    check(1, 2, 2, 200, 200, 16, 16, segments=rising[None], window=20, softcap=3.0, tma=False, turned=True)
    # tiles inside of one document are not compared; one whose id comes back after another is compared throughout
    long, twice = (torch.tensor(i).repeat_interleave(torch.tensor([40, 220, 40])) for i in ([1, 2, 3], [2, 1, 2]))
    check(2, 1, 1, 300, 300, 16, 16, segments=torch.stack([long, twice]), causal=True, p=0.3)
    check(2, 1, 1, 300, 300, 16, 16, segments=torch.stack([twice, long]))
    check(1, 1, 1, 300, 300, 16, 16, segments=(long != 2)[None], mask=torch.randn(300, 300)[None, None], causal=True)
    mixed = torch.randint(-2, 2, (2, 130))
    bias, padding = torch.randn(1, 2, 130, 130), torch.rand(2, 130) < 0.9
    check(2, 2, 1, 130, 130, 16, 16, segments=mixed.int(), mask=bias, keys=padding, causal=True, dtype=torch.float16)
    check(2, 2, 1, 130, 130, 16, 16, segments=mixed[:1] > 0, mask=padding, dtype=torch.float16)
    # sinks: of fp32 beside half precision; rows that see no key (a mask, a window beyond the keys) are zeros
    sink = torch.tensor([0.7, -1.5, 3.0, 0.0])
    check(2, 4, 2, 70, 90, 16, 16, sink=sink, causal=True)
    check(2, 4, 4, 130, 70, 12, 20, sink=sink.half(), window=20, dtype=torch.float16, p=0.3, tma=False, turned=True)
    check(1, 2, 1, 70, 70, 16, 16, sink=sink[:2], mask=hidden, softcap=3.0, p=0.3)
    check(1, 4, 2, 70, 70, 16, 16, sink=sink, mask=torch.randn(1, 4, 70, 70), keys=dark[:1], dtype=torch.float16)
    check(1, 2, 2, 200, 200, 16, 16, sink=sink[2:], segments=rising[None], causal=True)
    for rank in (0, 1):  # a rank's queries: their ids are those of their places in the whole sequence
        with axes.on_mesh({"tp": axes.AxisContext(rank, 2, "")}):
            check(1, 2, 1, 100, 200, 16, 16, segments=rising[None], causal=True, p=0.3, cut=(2, (1, 200, 1)))
    slices()
    for rank in (0, 1):  # windows, segments, no mask, two pieces (of which a tile may have parts)
        with axes.on_mesh({"tp": axes.AxisContext(rank, 2, "")}):
            check(1, 2, 1, 150, 300, 16, 16, window=40, causal=True, cut=(2, (1, 300, 1)))
            check(1, 1, 1, 150, 300, 16, 16, segments=long[None], window=90, cut=(2, (1, 300, 1)))
            check(1, 2, 2, 150, 300, 16, 16, causal=True, cut=(2, (2, 150, 1)), dtype=torch.float16)
            check(1, 1, 1, 150, 299, 16, 16, causal=True, p=0.3, cut=(2, (1, 299, 1)), tma=False)
    for dim, layout in ((1, (2, 2, 1)), (2, (1, 130, 1)), (0, (1, 3, 1))):  # a rank's part of a larger call
        with axes.on_mesh({"tp": axes.AxisContext(1, 2, "")}):
            b, h, s = (2, 2, 65)
            check(b, h, 2, s, 70, 16, 16, p=0.4, causal=True, cut=(dim, layout))
    check_pieces(1, 2, 2, 400, 16, 3)  # 134, 134 and 132 queries with two pads
    check_pieces(2, 2, 2, 256, 64, 2)
    check_pieces(1, 2, 2, 400, 16, 3, sunk=True)
    if DEVICE == "cuda":
        check_pieces(1, 8, 2, 4096, 128, 4)
    if DEVICE == "cuda":
        for width in (16, 32, 64, 80, 96, 128, 192, 256):
            check(2, 4, 2, 300, 200, width, width, dtype=torch.bfloat16, causal=True, p=0.1, turned=True)
        for width in (64, 80, 128):
            check(2, 4, 2, 300, 300, width, width, dtype=torch.bfloat16, causal=True, sink=sink.bfloat16(), turned=True)
            check(2, 4, 2, 300, 300, width, width, dtype=torch.bfloat16, causal=True, window=100, sink=sink)
        check(2, 2, 2, 200, 300, 256, 256, p=0.1, causal=True)
    print("all right")


if __name__ == "__main__":
    main()
