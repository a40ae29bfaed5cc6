"""Covers: kernels/fp8/quantize.py, kernels/fp8/quantize_triton.py, kernels/fp8/scaled_mm.py."""

import functools
import math

import pytest
import torch
from kernel_checks import DEVICE, run_as_script

import megafx.kernels.fp8.scaled_mm  # noqa: F401  registers the ops
from megafx.kernels.fp8.quantize import FORMATS, TOP
from megafx.ops.axes import AxisContext, on_mesh

ops = torch.ops.megafx
WHOLE = (-1, [], "tp")
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def cast(x, kept=-1, format="e4m3", power=False, plain=True, transposed=True):
    return ops.fp8_quantize(x, ops.fp8_amax(x, kept, *WHOLE), kept, format, power, plain, transposed)


def numbers(q, format):
    return q.view(FORMATS[format]).double()


def across(scale, kept):
    return scale[:, None] if kept == 0 else scale


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("kept", [-1, 0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cast_is_within_half_a_step_and_uses_the_whole_range(dtype, kept, format):
    x = (torch.randn(13, 22) * torch.logspace(-3, 2, 13)[:, None]).to(dtype)
    q, qt, scale = cast(x, kept, format)
    assert q.dtype == torch.uint8 and torch.equal(qt, q.t()) and qt.is_contiguous()
    assert scale.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    wanted = x.double().abs().amax() if kept < 0 else x.double().abs().amax(1 - kept)
    torch.testing.assert_close(scale.double(), wanted / TOP[format], rtol=1e-6, atol=0)
    back, s = numbers(q, format) * across(scale, kept), across(scale, kept)
    step = 2.0**-4 if format == "e4m3" else 2.0**-3  # half a unit in the last place, of a normal number
    least = 2.0**-10 if format == "e4m3" else 2.0**-17  # half of the smallest
    assert ((back - x.double()).abs() <= torch.maximum(x.double().abs() * step, least * s) * (1 + 1e-6)).all()
    assert float(numbers(q, format).abs().max()) == TOP[format]


def test_what_is_restored_is_the_numbers_times_their_scale():
    x = torch.randn(13, 22).double()
    q, _, scale = cast(x)
    assert torch.equal(ops.fp8_restored(q, scale, torch.float64), numbers(q, "e4m3") * scale)


def test_powers_of_two_scale_without_rounding():
    x = torch.randn(6, 8)
    scale = cast(x, 0, power=True)[2]
    exact = cast(x, 0)[2]
    assert (torch.frexp(scale)[0] == 0.5).all() and (scale >= exact).all() and (scale < 2 * exact).all()
    assert float(cast(torch.full((2, 2), 448.0), power=True)[2]) == 1.0


def test_zeros_and_numbers_that_are_not_finite():
    q, _, scale = cast(torch.zeros(3, 4))
    assert float(scale) == 1.0 and not q.any()
    assert cast(torch.zeros(3, 4), 0)[2].tolist() == [1.0, 1.0, 1.0]
    tiny = cast(torch.full((2, 2), 1e-42))
    assert math.isfinite(float(tiny[2])) and not numbers(tiny[0], "e4m3").isnan().any()
    right, _, s = cast(torch.randn(5, 4), 0)
    for bad in (float("nan"), float("inf")):
        x = torch.randn(3, 4)
        x[1, 2] = bad
        for kept in (-1, 0):
            q, _, scale = cast(x, kept)
            y = ops.scaled_mm(q, right, scale, s, "e4m3", "e4m3", torch.float32)
            assert y[1].isnan().all(), (bad, kept)
            assert bool(y[0].isfinite().all()) == (kept == 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("each", [False, True])
def test_a_product_is_that_of_the_numbers(dtype, each):
    a, b = torch.randn(7, 20), torch.randn(9, 20)
    kept = 0 if each else -1
    qa, _, sa = cast(a, kept, "e5m2")
    qb, _, sb = cast(b, kept)
    y = ops.scaled_mm(qa, qb, sa, sb, "e5m2", "e4m3", dtype)
    wanted = (numbers(qa, "e5m2") * across(sa.double(), kept)) @ (numbers(qb, "e4m3") * across(sb.double(), kept)).t()
    limit = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5, torch.float64: 1e-6}[dtype]
    torch.testing.assert_close(y.double(), wanted, rtol=limit, atol=limit)
    assert y.dtype == dtype and float((y.double() - a.double() @ b.double().t()).norm() / wanted.norm()) < 0.1


def test_pads_take_no_part_in_the_largest():
    """5 rows on 2 ranks: the second rank holds two and a pad."""
    x = torch.tensor([[1.0, -2.0], [3.0, 1.0], [1e9, -1e9]])
    layout = [1, 5, 1]
    found = []
    for rank in range(2):
        with on_mesh({"tp": AxisContext(rank, 2)}):
            found.append(ops.fp8_amax(x, -1, 0, layout, "tp").item())
            assert ops.fp8_amax(x, 1, 0, layout, "tp").tolist() == ([1e9, 1e9] if rank == 0 else [3.0, 2.0])
    assert found == [1e9, 3.0]
    with on_mesh({"tp": AxisContext(2, 3)}):  # 2 rows on 3 ranks: nothing but pads
        assert ops.fp8_amax(x[:1], -1, 0, [1, 2, 1], "tp").item() == 0.0


def test_both_orientations_are_two_casts():
    """With pads: of the rows that a rank has, the last is one, and takes no part in what columns have."""
    x = torch.randn(3, 6)
    with on_mesh({"tp": AxisContext(1, 2)}):
        rows, columns = ops.fp8_amax_both(x, 0, [1, 5, 1], "tp")
        assert torch.equal(rows, ops.fp8_amax(x, 0, *WHOLE)) and torch.equal(columns, x[:2].abs().amax(0))
    q, qt, scale, column_scale = ops.fp8_quantize_both(x, rows, columns, "e4m3", False)
    assert torch.equal(q, ops.fp8_quantize(x, rows, 0, "e4m3", False, True, False)[0])
    assert torch.equal(qt, ops.fp8_quantize(x, columns, 1, "e4m3", False, False, True)[1])
    assert scale.shape == (3,) and column_scale.shape == (6,)


def test_refusals():
    x = torch.randn(3, 4)
    q, _, s = cast(x)
    with pytest.raises(TypeError, match="floating-point matrix"):
        ops.fp8_amax(x[0], -1, *WHOLE)
    with pytest.raises(ValueError, match=r"\[m, k\] and \[n, k\]"):
        ops.scaled_mm(q, q.t(), s, s, "e4m3", "e4m3", torch.float32)
    with pytest.raises(NotImplementedError, match="no autograd formula"):
        torch.autograd.grad(ops.fp8_amax(x.requires_grad_(), -1, *WHOLE), x)


def triton_checks():
    """Casts to the bit of the CPU's; in the interpreter to a step, or half of it: its casts to FP8 lose the carry of a
    mantissa that rounds up to the next power of two."""
    from megafx.kernels.fp8 import quantize as plain
    from megafx.kernels.fp8 import quantize_triton as kernels

    def close(found, wanted, format):
        if DEVICE == "cuda":
            assert torch.equal(found, wanted)
        else:
            a, b = numbers(found, format), numbers(wanted, format)
            step = b.abs() * (0.126 if format == "e4m3" else 0.251) + 2.0**-8
            assert (((a - b).abs() <= step) | (2 * a == b)).all()

    shapes = [(5, 37), (70, 130), (1, 16), (132, 65)] + ([(512, 1024)] if DEVICE == "cuda" else [])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in shapes:
            x = (torch.randn(shape) * 3).to(DEVICE, dtype)
            x = x[:, :-3] if shape == (70, 130) else x  # rows that do not lie side by side
            for kept in (-1, 0, 1):
                largest = plain.amax_reference(x, kept, *WHOLE)
                assert torch.equal(kernels.amax(x, kept, *WHOLE), largest), (dtype, shape, kept)
                for format, power in (("e4m3", False), ("e4m3", True), ("e5m2", False)):
                    given = (x, largest, kept, format, power, True, True)
                    on_cpu = plain.quantize_reference(x.cpu(), largest.cpu(), *given[2:])
                    for found, wanted in zip(kernels.quantize(*given), on_cpu, strict=True):
                        found = found.cpu()
                        if wanted.dtype == torch.uint8:
                            close(found, wanted, format)
                        else:
                            assert torch.equal(found, wanted), (dtype, shape, kept, format, power)
            both = kernels.amax_both(x, *WHOLE)
            for found, wanted in zip(both, plain.amax_both_reference(x, *WHOLE), strict=True):
                assert torch.equal(found, wanted), (dtype, shape)
            on_cpu = plain.quantize_both_reference(x.cpu(), *(v.cpu() for v in both), "e5m2", False)
            for found, wanted in zip(kernels.quantize_both(x, *both, "e5m2", False), on_cpu, strict=True):
                if wanted.dtype == torch.uint8:
                    close(found.cpu(), wanted, "e5m2")
                else:
                    assert torch.equal(found.cpu(), wanted), (dtype, shape)
        q = plain.quantize_reference(x, plain.amax_reference(x, -1, *WHOLE), -1, "e4m3", False, True, False)[0]
        assert torch.equal(kernels.transposed(q), q.t())
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(40).reshape(80, 128)
    scale = torch.tensor(0.37, device=DEVICE)
    for dtype, beside in ((torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10), (torch.float32, 0.0)):
        found, wanted = kernels.restored(every, scale, dtype), plain.restored_reference(every, scale, dtype)
        beside = 0.0 if DEVICE == "cuda" else beside  # the interpreter cuts bits off
        torch.testing.assert_close(found, wanted, rtol=beside, atol=0.0, equal_nan=True)
        assert int(found.isnan().sum()) == 80
    x = torch.randn(70, 130).to(DEVICE)
    x[3, 5] = float("nan")
    assert kernels.amax(x, -1, *WHOLE).isnan() and kernels.amax(x, 0, *WHOLE).isnan().sum() == 1
    assert kernels.amax(x, 1, *WHOLE).isnan().nonzero().tolist() == [[5]]
    one = kernels.quantize(x, kernels.amax(x, -1, *WHOLE), -1, "e4m3", False, True, False)
    assert one[2].isnan() and (
        DEVICE != "cuda" or numbers(one[0], "e4m3").isnan().all()
    )  # the interpreter has no such NaN
    zero = torch.zeros(4, 4, device=DEVICE)
    assert kernels.quantize(zero, kernels.amax(zero, 0, *WHOLE), 0, "e4m3", True, True, False)[2].tolist() == [1.0] * 4
    assert kernels.amax(zero[:0], 1, *WHOLE).tolist() == [0.0] * 4
    largest_checks()
    if DEVICE == "cuda":
        library_checks()


def largest_checks():
    """What kernels leave of their results is the largest of the results, to the bit; results are as without."""
    import megafx.kernels.activation.activation
    import megafx.kernels.norm.add_norm  # noqa: F401  registers the ops
    from megafx.kernels.common import maxima_triton
    from megafx.kernels.fp8 import largest as largest_of
    from megafx.kernels.fp8 import quantize_triton as kernels

    seed, draw = torch.tensor(3, device=DEVICE), (0.3, 1, -1, [], "")
    for dtype in (torch.bfloat16, torch.float32):
        new = functools.partial(torch.randn, device=DEVICE, dtype=dtype)
        shapes = [(2, 3, 130)] if dtype == torch.bfloat16 else [(3, 600)]
        shapes += [(6, 40), (700, 4096), (64, 14336), (8, 12288)] if DEVICE == "cuda" else []
        for shape in shapes:
            h = shape[-1]
            x, y, wide, w, bias = new(*shape), new(*shape) * 3, new(*shape[:-1], 2 * h), new(h), new(2 * h)
            rows = [torch.rand(shape[:-1], device=DEVICE) for _ in range(2)]
            add = (x, None, y, w, None, 1e-5, None, 0.0, 0, -1, [], "")
            back = (dtype, None)
            calls = [
                ("bias_act", 0, (x, bias[:h], "gelu")), ("bias_act_backward", 0, (y, x, bias[:h], "gelu_tanh", True)),
                ("bias_act_backward", 0, (y, x, None, "relu2", False)), ("glu", 0, (x, y, "silu")),
                ("glu_packed", 0, (wide, None, "silu")), ("glu_packed", 0, (wide, bias, "gelu")),
                ("glu_packed_backward", 0, (x, wide, None, "silu", True)),
                ("glu_packed_backward", 0, (x, wide, bias, "silu", False)),
                ("rms_norm_forward", 0, (x, w, 1e-5, 1.0)), ("layer_norm_forward", 0, (x, w, bias[:h], 1e-5)),
                ("rms_norm_backward", 0, (y, x, w, rows[0], 0.0, True)),
                ("layer_norm_backward", 0, (y, x, w, *rows, True, True)),
                ("bias_dropout_add_layer_norm", 1, add),
                ("bias_dropout_add_rms_norm", 1, (x, None, y, w, 1e-5, 0.0, seed, *draw)),
                *[
                    ("bias_dropout_add_rms_norm_backward", i, (x, y, y, w, rows[0], 0.0, True, *back, seed, *draw))
                    for i in (0, 1)
                ],
            ]  # fmt: skip
            for name, result, args in calls:
                op = getattr(ops, name).default
                call, launcher = largest_of.giving_largest(op, result), largest_of.launcher_of(op)
                plain = launcher(*args)
                plain = (plain,) if isinstance(plain, torch.Tensor) else plain
                with maxima_triton.asking(result) as wanted:
                    again = launcher(*args)
                assert wanted.partial is not None, name
                found = wanted.joined(plain[result])
                again = (again,) if isinstance(again, torch.Tensor) else again
                for a, b in zip(plain, again, strict=True):
                    assert torch.equal(a, b), name
                wanted = kernels.amax(plain[result].reshape(-1, plain[result].shape[-1]), -1, *WHOLE)
                assert torch.equal(found, wanted) and float(found) > 0, (name, dtype, shape, found, wanted)
                if DEVICE == "cuda":
                    for _ in range(3):  # run, recorded, repeated
                        assert torch.equal(call(*args, *WHOLE)[-1], wanted), name
        for h, name, biased in ((40, "bias_act", True), (600, "bias_act", False), (40, "glu_packed", True)):
            packed = 2 * h if "glu" in name else h
            y, x, bias = new(3, h), new(3, packed), new(packed) if biased else None
            plain = getattr(ops, f"{name}_backward").default
            dx, dbias, again = largest_of.launcher_of(plain)(y, x, bias, "silu", True)
            amax = kernels.amax(again, -1, *WHOLE) * 1.5
            q, _, scale = kernels.quantize(again, amax, -1, "e4m3", False, True, False)
            cast_op = getattr(ops, f"{name}_backward_cast").default
            found = largest_of.launcher_of(cast_op)(y, x, bias, "silu", amax)
            for a, b in zip(found, (dx, dbias, q, scale), strict=True):
                assert torch.equal(a, b), (name, dtype, h)
        x, y = new(2, 8), new(2, 8)
        x[0, 0] = float("nan")
        with maxima_triton.asking(0) as wanted:
            plain = largest_of.launcher_of(ops.glu.default)(x, y, "silu")
        assert wanted.joined(plain).isnan()


def library_checks():
    """torch._scaled_mm against the emulation, sizes that 16 does not divide included."""
    from megafx.kernels.fp8.scaled_mm import reference, scaled_mm

    for m, n, k in ((64, 48, 32), (17, 33, 50), (128, 256, 512)):
        for kept in (-1, 0):
            # Hopper's tensor cores keep fewer bits of a sum than fp32 has.
            for dtype, limit in ((torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 5e-4)):
                for format in ("e4m3", "e5m2"):
                    a, _, sa = cast(torch.randn(m, k, device=DEVICE), kept, format)
                    b, _, sb = cast(torch.randn(n, k, device=DEVICE), kept)
                    given = (a, b, sa, sb, format, "e4m3", dtype)
                    found, wanted = scaled_mm(*given), reference(*given)
                    assert found.shape == wanted.shape and found.dtype == dtype and found.is_contiguous()
                    off = float((found.double() - wanted.double()).norm() / wanted.double().norm())
                    assert off < limit, (m, n, k, kept, dtype, format, off)


def test_triton_kernels_agree():
    run_as_script(__file__, 1200)


if __name__ == "__main__":
    torch.manual_seed(0)
    triton_checks()
