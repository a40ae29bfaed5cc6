"""Covers: kernels/attention/rope.py, kernels/attention/rope_triton.py. The oracle is Hugging Face's formula, and complex
multiplication."""

import pytest
import torch
from kernel_checks import run_as_script

import megafx.kernels.attention.rope  # noqa: F401  registers the ops

ops = torch.ops.megafx
TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def tables(shape, dtype=torch.float64):
    """cos and sin of one angle a pair, [.., r/2]."""
    angle = torch.randn(shape, dtype=torch.float64) * 3
    return angle.cos().to(dtype), angle.sin().to(dtype)


def turned(x, cos, sin, interleaved):
    """(a + ib) e^(i angle) on the first 2 * cos columns of x."""
    half = cos.shape[-1]
    head, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = head.unflatten(-1, (half, 2)) if interleaved else head.unflatten(-1, (2, half)).transpose(-1, -2)
    z = torch.complex(pairs[..., 0], pairs[..., 1]) * torch.complex(cos, sin)
    pairs = torch.view_as_real(z)
    out = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat((out, rest), -1)


def spread(table, interleaved):
    """[.., r/2] -> [.., r]: one column for each element."""
    return table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)


@pytest.mark.parametrize("per_pair", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "shape, table",
    [((2, 3, 5, 8), (1, 1, 5, 4)), ((2, 3, 5, 10), (2, 1, 5, 3)), ((2, 5, 3, 8), (5, 1, 4)), ((5, 6), (5, 3)),
     ((2, 3, 1, 2, 4), (3, 1, 2, 2)), ((0, 3, 5, 8), (1, 1, 5, 4))],
    ids=str,
)  # fmt: skip
def test_values_and_gradients(shape, table, interleaved, per_pair):
    """Against complex numbers; the gradient is the rotation back. Partial rotary, heads before and after the sequence."""
    torch.manual_seed(0)
    x, (cos, sin) = torch.randn(shape, dtype=torch.float64, requires_grad=True), tables(table)
    given = (cos, sin) if per_pair else (spread(cos, interleaved), spread(sin, interleaved))
    y = ops.rope(x, *given, interleaved, per_pair)
    torch.testing.assert_close(y, turned(x.detach(), cos, sin, interleaved), **TIGHT)
    g = torch.randn_like(x)
    (dx,) = torch.autograd.grad(y, x, g)
    torch.testing.assert_close(dx, turned(g, cos, -sin, interleaved), **TIGHT)


def test_halves_of_the_tables_may_differ():
    """The Hugging Face formula as it stands, whatever is in the tables."""
    x, (cos, sin) = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True), tables((1, 1, 5, 8))
    rotated = torch.cat((-x[..., 4:], x[..., :4]), -1)
    expected, y = x * cos + rotated * sin, ops.rope(x, cos, sin, False, False)
    torch.testing.assert_close(y, expected, **TIGHT)
    g = torch.randn_like(y)
    torch.testing.assert_close(*(torch.autograd.grad(v, x, g)[0] for v in (y, expected)), **TIGHT)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("per_pair", [False, True])
def test_gradcheck_with_learned_tables(interleaved, per_pair):
    columns = 2 if per_pair else 4
    x = torch.randn(2, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = (torch.randn(2, columns, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda *a: ops.rope(*a, interleaved, per_pair), (x, cos, sin))
    k = torch.randn(2, 1, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: ops.rope_qk(*a, interleaved, per_pair), (x, k, cos, sin))


def test_rounds_once_and_saves_the_tables_alone():
    x = torch.randn(2, 4, 6, 16, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = (spread(t, False) for t in tables((1, 1, 6, 8), torch.bfloat16))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        y = ops.rope(x, cos, sin, False, False)
    assert y.dtype == torch.bfloat16 and len(saved) == 2 and all(s.shape == cos.shape for s in saved)
    wide = ops.rope(x.detach().double(), cos.double(), sin.double(), False, False)
    torch.testing.assert_close(y.double(), wide, rtol=2**-8, atol=1e-6)


def test_memory_layout_is_kept():
    x = torch.randn(2, 5, 3, 8).transpose(1, 2)
    cos, sin = (spread(t, False).float() for t in tables((1, 1, 5, 4)))
    assert ops.rope(x, cos, sin, False, False).stride() == x.stride()


def test_wrong_arguments():
    x, (cos, sin) = torch.randn(2, 5, 8), tables((5, 6))
    with pytest.raises(ValueError, match="do not fit the last dim"):
        ops.rope(x, cos, sin, False, True)
    with pytest.raises(ValueError, match="differ in shape"):
        ops.rope(x, cos, sin[:1], False, False)
    with pytest.raises(ValueError, match="more dims"):
        ops.rope(x[0, 0], cos, sin, False, False)


def triton_checks():
    from megafx.kernels.attention import rope as plain
    from megafx.kernels.attention import rope_triton as fast

    device = "cuda" if torch.cuda.is_available() else "cpu"
    CASES = [
        ((2, 3, 5, 8), (2, 1, 5, 8), (1, 1, 5, 4), (0, 2, 1, 3)),
        ((2, 3, 3, 80), (2, 3, 1, 80), (3, 1, 10), (0, 1, 2, 3)),
        ((1, 6, 4), (1, 6, 4), (6, 2), (0, 1, 2)),
        ((2, 3, 5, 24), (2, 3, 5, 24), (2, 1, 5, 12), (0, 1, 2, 3)),
        ((3, 2, 2, 3, 8), (3, 2, 2, 3, 8), (3, 4), (0, 1, 2, 3, 4)),
    ]
    for dtype, tolerance, cases in (
        (torch.float32, 1e-5, CASES),
        (torch.bfloat16, 2**-7, CASES[:1]),
        (torch.float16, 2**-9, CASES[3:4]),
    ):
        for q_shape, k_shape, table, order in cases:
            for interleaved in (False, True):
                for per_pair in (False, True):
                    q, k = (torch.randn(s).permute(order).contiguous().permute(order) for s in (q_shape, k_shape))
                    q, k = q.to(dtype), k.to(dtype)
                    cos, sin = (
                        torch.randn(*table[:-1], table[-1] * (1 if per_pair else 2)).to(dtype) for _ in range(2)
                    )
                    args = (cos.to(device), sin.to(device), interleaved, per_pair)
                    for one, two in (("rope", "rope_qk"), ("rope_backward", "rope_qk_backward")):
                        back = one == "rope_backward"
                        expected = [plain.rope_reference(x, cos, sin, interleaved, per_pair, back=back) for x in (q, k)]
                        found = getattr(fast, two)(q.to(device), k.to(device), *args)
                        found = [*found, getattr(fast, one)(q.to(device), *args)]
                        for a, b in zip(found, [*expected, expected[0]], strict=True):
                            assert a.stride() == b.stride(), (a.stride(), b.stride())
                            torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance)


def test_triton_kernel_is_the_reference():
    run_as_script(__file__, 120)


if __name__ == "__main__":
    triton_checks()
