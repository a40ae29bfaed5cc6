"""Covers: kernels/embedding_sum.py, kernels/embedding_sum_triton.py."""

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import run_as_script

import megafx.kernels.dropout.dropout
import megafx.kernels.dropout.embedding_sum  # noqa: F401  registers the ops
from megafx.ops import axes
from megafx.placements.types import Layout

ops = torch.ops.megafx
SEED = torch.tensor(-987654321012345)
WHOLE = (-1, [], "tp")
B, S, H, V = 3, 5, 12, 7


def randn(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def ids(*shape, rows=V):
    return torch.randint(rows, shape)


FORMS = {
    "words and positions": lambda: (randn(V, H), ids(B, S), randn(S + 2, H), torch.arange(2, S + 2)[None], None, None),
    "with types": lambda: (randn(V, H), ids(B, S), randn(2, H), ids(B, S, rows=2), randn(S, H), torch.arange(S)[None]),
    "a tensor and positions": lambda: (randn(B, S, H), None, randn(S, H), torch.arange(S)[None], None, None),
    "a tensor and a table as it is": lambda: (randn(B, S, H), None, randn(1, S, H), None, randn(V, H), ids(1, S)),
    "one row in the batch": lambda: (randn(V, H), ids(1, S), randn(S, H), torch.arange(S)[None], None, None),
    "no rows": lambda: (randn(V, H), ids(0, S), randn(S, H), torch.arange(S)[None], None, None),
    "not contiguous": lambda: (
        *(randn(H, V).t(), ids(S, B).t()),
        *(randn(S, 2 * H)[:, ::2], torch.arange(S)[None]),
        *(randn(S, B, H).transpose(0, 1), None),
    ),
}


def eager(operands, padding, p):
    total = sum(
        x if i is None else F.embedding(i, x, padding_idx=None if pad < 0 else pad)
        for x, i, pad in zip(operands[::2], operands[1::2], padding, strict=True)
        if x is not None
    )
    return ops.dropout(total, SEED, p, 5, *WHOLE) if p else total


def fused(operands, padding, p, where=WHOLE):
    return ops.embedding_sum(*operands, list(padding), SEED if p else None, p, 5, *where)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("form", FORMS)
def test_is_the_ops_that_it_replaces(form, p):
    """Bits, value and every gradient, exact in fp64; rows of padding_idx get none."""
    torch.manual_seed(0)
    operands = FORMS[form]()
    inputs = [x for x in operands[::2] if x is not None]
    padding = (1, -1, 2)
    wanted, y = eager(operands, padding, p), fused(operands, padding, p)
    torch.testing.assert_close(y, wanted, rtol=1e-13, atol=1e-13)
    grad = torch.randn_like(wanted)
    for ours, theirs in zip(
        torch.autograd.grad(y, inputs, grad), torch.autograd.grad(wanted, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_once(dtype):
    torch.manual_seed(0)
    operands = [x if x is None or not x.is_floating_point() else x.detach().to(dtype) for x in FORMS["with types"]()]
    y = fused(operands, (-1, -1, -1), 0.25)
    exact = fused([x.double() if x.is_floating_point() else x for x in operands], (-1, -1, -1), 0.25)
    assert y.dtype == dtype
    assert ((y.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("t", [2, 3, 4])
def test_shards_draw_slices_of_the_whole(dim, t):
    """Batch, sequence and width in uneven shards: results, and gradients whose sum is that of the whole."""
    torch.manual_seed(0)
    x, table = randn(B, S, H), randn(1, S, H)
    whole = fused((x, None, table, None, None, None), (-1, -1, -1), 0.3)
    grad = torch.randn_like(whole)
    wanted = torch.autograd.grad(whole, (x, table), grad)
    layout = Layout.contiguous(whole.shape[dim], t)
    size = layout.local_size(t)
    found = []
    for rank in range(t):
        start, end = rank * size, min((rank + 1) * size, whole.shape[dim])
        if start >= end:
            continue
        one = table if dim == 0 else cut(table, dim, start, size)
        with axes.on_mesh({"tp": axes.AxisContext(rank, t, "")}):
            part = (cut(x, dim, start, size), one)
            y = fused((part[0], None, part[1], None, None, None), (-1, -1, -1), 0.3, (dim, list(layout.flat()), "tp"))
            found.append((y, *torch.autograd.grad(y, (x, table), cut(grad, dim, start, size))))
    torch.testing.assert_close(torch.cat([y for y, *_ in found], dim).narrow(dim, 0, whole.shape[dim]), whole)
    for k in (0, 1):
        torch.testing.assert_close(sum(g[k + 1] for g in found), wanted[k], rtol=1e-12, atol=1e-12)


def cut(x, dim, start, size):
    """A shard, padded with zeros to its size."""
    part = x.narrow(dim, start, min(size, x.shape[dim] - start))
    padding = [0, 0] * (x.dim() - 1 - dim) + [0, size - part.shape[dim]]
    return F.pad(part, padding)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({0: torch.zeros(3, 4, 5, 6)}, "table"),
        ({1: torch.zeros(2, 3)}, "ids"),
        ({2: torch.zeros(4, 5)}, "last dim"),
    ],
)
def test_wrong_operands_are_told(change, says):
    operands = [torch.zeros(V, H), ids(B, S), torch.zeros(S, H), torch.arange(S)[None], None, None]
    for k, x in change.items():
        operands[k] = x
    with pytest.raises(ValueError, match=says):
        fused(operands, (-1, -1, -1), 0.0)


def triton_checks():
    from megafx.kernels.dropout import embedding_sum as reference
    from megafx.kernels.dropout import embedding_sum_triton as triton

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seed = torch.tensor(-987654321012345, device=device)

    def same(ours, theirs):
        for a, b in zip(ours, theirs, strict=True):
            bound = 1e-2 if a.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(a, b, rtol=bound, atol=bound)

    def place(x):
        return x.to(device) if isinstance(x, torch.Tensor) else x

    SHAPES = (
        (2, 3, 16, torch.float32),
        (3, 5, 37, torch.bfloat16),
        (1, 4, 130, torch.float32),
        (0, 4, 8, torch.float32),
    )
    for B, S, H, dtype in SHAPES:
        word, position, type_ = (torch.randn(n, H).to(dtype) for n in (7, S + 2, 2))
        x = torch.randn(B, S, 2 * H)[..., ::2].to(dtype)
        ids, types, where = torch.randint(7, (S, B)).t(), torch.randint(2, (B, S)), torch.arange(2, S + 2)[None]
        for operands in (
            (word, ids, position, where, None, None),
            (word, ids, type_, types, position, where.int()),
            (x, None, position, where, None, None),
            (x, None, torch.randn(1, S, H).to(dtype), None, type_, types),
        ):
            operands = [place(o) for o in operands]
            for drawing in ((None, 0.0, 0, -1, [], "tp"), (seed, 0.3, 5, -1, [], "tp")):
                args = (*operands, [-1, -1, -1], *drawing)
                same([triton.embedding_sum(*args)], [reference.embedding_sum_reference(*args)])
        for dim in (0, 1, 2):
            layout = Layout.contiguous(2 * (B, S, H)[dim] - 1, 2)
            with axes.on_mesh({"tp": axes.AxisContext(1, 2, "")}):
                drawing = (seed, 0.3, 5, dim, list(layout.flat()), "tp")
                args = (*map(place, (x, None, position, where, None, None)), [-1, -1, -1], *drawing)
                if B and layout.local_size(2) == (B, S, H)[dim]:
                    same([triton.embedding_sum(*args)], [reference.embedding_sum_reference(*args)])
        grad = torch.randn(B, S, H).to(dtype).to(device)
        args = (grad, dtype, seed, 0.3, 5, -1, [], "tp")
        same(triton.embedding_sum_backward(*args), reference.embedding_sum_backward_reference(*args))
    outside = (torch.ones(3, 8), torch.tensor([[0, 3], [-1, 2]]), torch.ones(1, 2, 8), None, None, None)
    bad = triton.embedding_sum(*map(place, outside), [-1, -1, -1], None, 0.0, 0, -1, [], "tp")
    assert bad.isnan().all(-1).tolist() == [[False, True], [True, False]]


def test_kernels_are_the_reference():
    """On the GPU where there is one, else in Triton's interpreter."""
    run_as_script(__file__, 120)


if __name__ == "__main__":
    triton_checks()
