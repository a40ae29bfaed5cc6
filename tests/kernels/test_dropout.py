"""Covers: kernels/dropout/dropout.py, kernels/dropout/dropout_triton.py."""

import math

import pytest
import torch
from kernel_checks import element_draws, run_as_script
from torch.fx.experimental.proxy_tensor import make_fx

import megafx.kernels.dropout.dropout as module
from megafx.kernels.common import philox
from megafx.kernels.common.draw import Run
from megafx.ops import axes
from megafx.placements.types import Layout

dropout = torch.ops.megafx.dropout
SEED = torch.tensor(-987654321012345)
WHOLE = (-1, [], "tp")


def kept(shape, p, seed=SEED, op_id=0):
    """The mask by definition, one Philox call an element."""
    index = torch.arange(math.prod(shape)).view(shape)
    return element_draws(index, philox.key_of(seed), op_id) >= philox.threshold(p)


def on_rank(rank, t):
    return axes.on_mesh({"tp": axes.AxisContext(rank, t, "")})


def cut(x, dim, layout, rank, t, pad=7.0):
    """The local tensor of a rank, pads filled."""
    shape = [*x.shape]
    shape[dim] = layout.local_size(t)
    local = torch.full(shape, pad, dtype=x.dtype)
    for start, at, length in layout.pieces(rank, t):
        local.narrow(dim, at, length).copy_(x.narrow(dim, start, length))
    return local


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 37), (16,), (), (2, 3, 8), (5, 1)])
def test_whole_tensor(dtype, shape):
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    y = dropout(x, SEED, 0.3, 5, *WHOLE)
    wide = torch.promote_types(dtype, torch.float32)
    expected = torch.where(kept(shape, 0.3, op_id=5), x.to(wide) * philox.scale(0.3), 0).to(dtype)
    assert y.dtype == dtype and torch.equal(y, expected)


@pytest.mark.parametrize("t", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(
    "flat",
    [(1, 16, 1), (1, 7, 1), (1, 5, 8), (3, 8, 1), (4, 3, 1), (2, 3, 4, 5, 2), (1, 4, 16, 2, 16, 2, 16)],
    ids=lambda f: str(Layout.from_flat(f)),
)
def test_shards_are_slices_of_the_whole(t, dim, flat):
    """Output and gradient of every rank are bit-equal slices of the one-process ones: any dim, uneven, blocks, repeats."""
    layout, shape = Layout.from_flat(flat), [3, 5, 8]
    shape[dim] = layout.size
    x, g = torch.randn(shape), torch.randn(shape)
    y, dx = dropout(x, SEED, 0.4, 2, *WHOLE), dropout(g, SEED, 0.4, 2, *WHOLE)
    assert torch.equal(y != 0, kept(shape, 0.4, op_id=2))
    for rank in range(t):
        local = cut(x, dim, layout, rank, t).requires_grad_()
        with on_rank(rank, t):
            out = dropout(local, SEED, 0.4, 2, dim, flat, "tp")
            (grad,) = torch.autograd.grad(out, local, cut(g, dim, layout, rank, t))
        assert out.isfinite().all()
        for start, at, length in layout.pieces(rank, t):
            assert torch.equal(out.narrow(dim, at, length), y.narrow(dim, start, length))
            assert torch.equal(grad.narrow(dim, at, length), dx.narrow(dim, start, length))


@pytest.mark.parametrize("dim", [-1, 0, 1, 2])
@pytest.mark.parametrize("flat", [(1, 6, 1), (2, 3, 1), (1, 2, 2, 3, 1)], ids=lambda f: str(Layout.from_flat(f)))
def test_rows_of_a_data_parallel_rank(dim, flat):
    """They draw what they draw in the batch of all ranks, sharded or not."""
    shape = [4, 5, 8]
    layout = Layout.from_flat(flat) if dim >= 0 else None
    if layout is not None:
        shape[dim] = layout.size
    for ranks, t in ((2, 2), (3, 3)):
        mask = kept([ranks * shape[0], *shape[1:]], 0.4, op_id=2)
        for place in range(ranks * t):
            at = {"tp": axes.AxisContext(place % t, t), "dp": axes.AxisContext(place // t, ranks)}
            mine = mask[place // t * shape[0] :][: shape[0]].double()
            local = cut(mine, dim, layout, place % t, t, 1.0) if layout is not None else mine
            with axes.on_mesh(at):
                here = flat if dim >= 0 else ()
                out = dropout(torch.ones_like(local), SEED, 0.4, 2, dim, here, "dp+tp")
            for start, here, length in layout.pieces(place % t, t) if layout is not None else ((0, 0, shape[0]),):
                along = max(dim, 0)
                assert torch.equal(out.narrow(along, here, length) != 0, mine.narrow(along, start, length) != 0)


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunks_join_up(monkeypatch, chunk):
    """Chunks smaller than a row, and of several rows; rows of any alignment."""
    x = torch.randn(6, 30)
    expected = dropout(x, SEED, 0.5, 0, *WHOLE)
    monkeypatch.setattr(module, "CPU_CHUNK", chunk)
    assert torch.equal(dropout(x, SEED, 0.5, 0, *WHOLE), expected)
    for rank in range(2):
        with on_rank(rank, 2):
            half = dropout(x[:, 15 * rank : 15 * rank + 15], SEED, 0.5, 0, 1, [1, 2, 15], "tp")
        assert torch.equal(half, expected[:, 15 * rank : 15 * rank + 15])


@pytest.mark.parametrize("start", [2**35 - 40, 2**35 + 3, 2**36 - 4])
def test_huge_tensors(start):
    """Elements whose group index crosses 2**32, in one row and in rows that lie on both sides."""
    x, key = torch.ones(96), philox.key_of(SEED)
    for run in (
        Run(1, 96, 0, 96, start, 0),
        Run(4, 24, 0, 24, start - 2**20, 2**19),
        Run(2, 48, 0, 48, start, 2**35 + 5),
    ):
        rows = run.global_start + torch.arange(run.rows)[:, None] * run.global_stride + torch.arange(run.length)
        expected = element_draws(rows.view(-1), key, 4) >= philox.threshold(0.5)
        assert torch.equal(module.reference(x, SEED, 0.5, 4, [run]) != 0, expected)


def test_gradient_is_the_mask_and_only_the_seed_is_saved():
    x = torch.randn(4, 40, dtype=torch.float64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        y = dropout(x, SEED, 0.25, 1, *WHOLE)
    y.sum().backward()  # an expanded gradient
    assert [s.shape for s in saved] == [()]
    assert torch.equal(x.grad, kept(x.shape, 0.25, op_id=1).double() * philox.scale(0.25))
    assert torch.autograd.gradcheck(lambda a: dropout(a, SEED, 0.25, 1, *WHOLE), x)


def test_deterministic_in_seed_and_op_alone():
    x = torch.ones(1000)
    y = dropout(x, SEED, 0.5, 0, *WHOLE)
    torch.manual_seed(3)
    assert torch.equal(dropout(x, SEED.clone(), 0.5, 0, *WHOLE), y)
    assert not torch.equal(dropout(x, SEED + 1, 0.5, 0, *WHOLE), y)
    assert not torch.equal(dropout(x, SEED + 2**32, 0.5, 0, *WHOLE), y)
    assert not torch.equal(dropout(x, SEED, 0.5, 1, *WHOLE), y)


@pytest.mark.parametrize("shape", [(2, 5, 8), (2, 1, 1, 40)])
def test_a_part_of_a_tensor_is_dropped_as_its_copy(shape):
    """Rows of another tensor are contiguous, and start where they lie in its memory."""
    part = torch.randn(shape)[1]
    assert part.is_contiguous() and part.storage_offset() == 40
    assert torch.equal(dropout(part, SEED, 0.5, 0, *WHOLE), dropout(part.clone(), SEED, 0.5, 0, *WHOLE))
    with on_rank(0, 2):
        one = dropout(part, SEED, 0.5, 0, part.dim() - 1, Layout.contiguous(2 * part.shape[-1], 2).flat(), "tp")
        other = dropout(
            part.clone(), SEED, 0.5, 0, part.dim() - 1, Layout.contiguous(2 * part.shape[-1], 2).flat(), "tp"
        )
    assert torch.equal(one, other)


def test_edges():
    x = torch.randn(4, 6).t()
    assert torch.equal(dropout(x, SEED, 0.0, 0, *WHOLE), x)
    assert torch.equal(dropout(x, SEED, 1.0, 0, *WHOLE), torch.zeros(6, 4))
    assert torch.equal(dropout(x, SEED, 0.5, 0, *WHOLE), dropout(x.contiguous(), SEED, 0.5, 0, *WHOLE))
    assert dropout(torch.empty(0, 3), SEED, 0.5, 0, *WHOLE).shape == (0, 3)
    with on_rank(1, 2):
        assert dropout(torch.empty(0, 3), SEED, 0.5, 0, 1, [1, 6, 1], "tp").shape == (0, 3)
    y = dropout(torch.full((100,), torch.inf), SEED, 0.5, 0, *WHOLE)
    assert torch.equal(y == 0, ~kept((100,), 0.5)) and not y.isnan().any()  # dropped infinities are 0, as written
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="probability must be between 0 and 1"):
            dropout(x, SEED, p, 0, *WHOLE)
    with pytest.raises(TypeError, match="floating-point"):
        dropout(torch.arange(4), SEED, 0.5, 0, *WHOLE)
    with pytest.raises(ValueError, match="32-bit"):
        dropout(x, SEED, 0.5, -1, *WHOLE)


def test_traces_with_symbolic_shapes():
    """One graph serves all sizes; the backward op is a node of its own."""

    def step(x, g, seed):
        y = dropout(x, seed, 0.3, 6, 1, [1, x.shape[1], 2], "tp")
        return y, torch.autograd.grad(y, x, g)[0]

    x = torch.randn(4, 6, requires_grad=True)
    gm = make_fx(step, tracing_mode="symbolic")(x, torch.randn(4, 6), SEED)
    assert [n.target for n in gm.graph.nodes].count(dropout.default) == 2
    x, g = torch.randn(5, 10), torch.randn(5, 10)
    with on_rank(1, 2):
        y, dx = gm(x, g, SEED)
    mask = kept((5, 20), 0.3, op_id=6)[:, 10:]
    assert torch.equal(y != 0, mask) and torch.equal(dx, torch.where(mask, g * philox.scale(0.3), 0))


def test_under_compile():
    def step(x, seed):
        return dropout(x * 2, seed, 0.3, 6, *WHOLE) + 1

    x = torch.randn(4, 33)
    torch.testing.assert_close(torch.compile(step, backend="aot_eager", fullgraph=True)(x, SEED), step(x, SEED))


ROWS, COLUMNS, BOUND = 1024, 2048, 4.5


def drops(seed, op_id, p=0.1):
    """Standardised drops of a [ROWS, COLUMNS] tensor: mean 0 and variance 1 if the draws are fair."""
    y = dropout(torch.ones(ROWS, COLUMNS), torch.tensor(seed), p, op_id, *WHOLE)
    rate = philox.threshold(p) / 65536
    return ((y == 0).double() - rate) / math.sqrt(rate * (1 - rate))


def z_of_squares(z):
    """Sum of squares of independent standard normals, standardised."""
    return float((z.square().sum() - z.numel()) / math.sqrt(2 * z.numel()))


def correlation(a, b):
    return float((a * b).sum() / math.sqrt(a.numel()))


@pytest.mark.parametrize("seed, op_id", [(0, 0), (1234, 7), (-5, 40)])
def test_statistics(seed, op_id):
    """Statistical tests at 2**21 draws a key: every z value (seeds are fixed) is below 4.5.

    Keep rate; sums of rows, columns and 32 x 32 tiles; correlation at lags within and across groups of 8, rows included; drops
    of each of the 8 elements of a group; against keys that differ in one bit and other op ids.
    """
    m = drops(seed, op_id)
    flat = m.view(-1)
    z = {"rate": float(flat.sum() / math.sqrt(flat.numel()))}
    z["rows"] = z_of_squares(m.sum(1) / math.sqrt(COLUMNS))
    z["columns"] = z_of_squares(m.sum(0) / math.sqrt(ROWS))
    z["tiles"] = z_of_squares(m.view(ROWS // 32, 32, COLUMNS // 32, 32).sum((1, 3)) / 32)
    z["groups"] = z_of_squares(m.view(-1, 8).sum(0) / math.sqrt(flat.numel() / 8))
    z["pairs"] = z_of_squares((m.view(-1, 8).T @ m.view(-1, 8) / math.sqrt(flat.numel() / 8)).triu(1)[0, 1:])
    for lag in (1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 64, 1024, COLUMNS - 1, COLUMNS, COLUMNS + 1, 8 * COLUMNS):
        z[f"lag {lag}"] = correlation(flat[lag:], flat[:-lag])
    for bit in (0, 1, 15, 16, 31, 32, 40, 62):
        z[f"seed bit {bit}"] = correlation(flat, drops(seed ^ (1 << bit), op_id).view(-1))
    for other in (op_id + 1, op_id ^ 2**31, op_id + 8):
        z[f"op {other}"] = correlation(flat, drops(seed, other).view(-1))
    z |= {f"op {op_id + 1} lag {k}": correlation(flat[k:], drops(seed, op_id + 1).view(-1)[:-k]) for k in (1, 8)}
    assert max(map(abs, z.values())) < BOUND, {k: v for k, v in z.items() if abs(v) >= BOUND}
    assert correlation(flat, drops(seed, op_id).view(-1)) > 1000  # what the bound would find


def triton_checks():
    from megafx.kernels.common.draw import runs_of
    from megafx.kernels.dropout import dropout_triton
    from megafx.kernels.dropout.dropout import reference

    device = "cuda" if torch.cuda.is_available() else "cpu"
    seed = torch.tensor(-(7 << 40) + 99, device=device)
    CASES = [
        ((5, 37), -1, []),
        ((4, 40), 1, [1, 120, 1]),
        ((3, 14), 1, [1, 40, 1]),
        ((2, 6, 8), 1, [2, 9, 1]),
        ((3, 24), 1, [1, 3, 16, 1, 8]),
        ((4, 8), 0, [1, 11, 1]),
    ]

    def same(x, runs):
        expected, out = (
            reference(x.cpu(), seed.cpu(), 0.3, 7, runs),
            dropout_triton.dropout(x, seed, 0.3, 7, runs).cpu(),
        )
        assert torch.equal(out != 0, expected != 0), (x.dtype, x.shape, runs)
        if device == "cpu" and x.dtype == torch.bfloat16:  # the interpreter truncates to bf16 where hardware rounds
            torch.testing.assert_close(out, expected, rtol=2**-7, atol=0)
        else:
            assert torch.equal(out, expected), (x.dtype, x.shape, runs)

    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for shape, dim, layout in CASES:
            for rank in range(3):
                x = torch.randn(shape, dtype=torch.float64).to(device, dtype)
                same(x, runs_of(shape, dim, layout, rank, 3))
    same(torch.ones(10000, device=device), [Run(1, 10000, 0, 10000, 2**36 + 8, 0)])
    same(torch.ones(96, device=device), [Run(4, 24, 0, 24, 2**35 - 3, 2**33)])


def test_triton_kernel_is_the_reference():
    run_as_script(__file__, 120)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("op_id", [0, 1, 2**31 + 5])
def test_cuda_is_the_cpu(dtype, op_id):
    """Whole and as shards, forward and backward, seed on either device."""
    for shape, dim, flat in [((64, 1000), -1, []), ((3, 39, 16), 1, [1, 77, 1]), ((5, 7, 8), 2, [2, 3, 1, 1, 2])]:
        x = torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
        y = x.detach().cuda().requires_grad_()
        with on_rank(1, 2):
            a, b = dropout(x, SEED, 0.3, op_id, dim, flat, "tp"), dropout(y, SEED.cuda(), 0.3, op_id, dim, flat, "tp")
            assert torch.equal(a, b.cpu()) and torch.equal(dropout(y, SEED, 0.3, op_id, dim, flat, "tp"), b)
            (da,), (db,) = torch.autograd.grad(a.sum(), x), torch.autograd.grad(b.sum(), y)
        assert torch.equal(da, db.cpu())


if __name__ == "__main__":
    triton_checks()
