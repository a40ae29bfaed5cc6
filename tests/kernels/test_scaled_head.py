"""Covers: kernels/loss/scaled_head.py. The oracle is F.cross_entropy of F.linear, of what FP8 made of the operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_checks import DEVICE, run_as_script
from torch import Tensor
from torch.nn import functional as F

import megafx.kernels.loss.logits_chunks as chunks
from megafx.kernels.fp8.quantize import FORMATS, TOP
from megafx.kernels.loss import scaled_head
from megafx.ops.axes import AxisContext, on_mesh
from megafx.placements.types import Layout

ops = torch.ops.megafx
TIGHT = {"rtol": 1e-10, "atol": 1e-12}
FORMAT = "e5m2"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(scaled_head, "CLASSES", 20)


def case(tokens: int, classes: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """x [T, 16], weight [V, 16], bias [V], target [T], upstream gradients [T]."""
    generator = torch.Generator().manual_seed(tokens + classes)
    x, w, b = (
        torch.randn(*n, generator=generator).to(DEVICE, dtype) for n in ((tokens, 16), (classes, 16), (classes,))
    )
    y = torch.randint(0, classes, (tokens,), generator=generator)
    y[1:3] = -100
    g = torch.rand(tokens, generator=generator).to(DEVICE, torch.float64 if dtype == torch.float64 else torch.float32)
    return x, w, b, y.to(DEVICE), g


def cast(x: Tensor, kept: int, transposed: bool) -> tuple[Tensor, Tensor]:
    largest = ops.fp8_amax(x, kept, -1, [], "tp")
    q, qt, scale = ops.fp8_quantize(x, largest, kept, "e4m3", False, not transposed, transposed)
    return (qt if transposed else q), scale


def casts(x: Tensor, w: Tensor, rowwise: bool) -> tuple[Any, ...]:
    """x, weight, their scales; both transposed, and their scales; the format of gradients."""
    over_rows, over_columns = (0, 1) if rowwise else (-1, -1)
    (xq, sx), (wq, sw) = (cast(v, over_rows, False) for v in (x, w))
    (xt, sxt), (wt, swt) = (cast(v, over_columns, True) for v in (x, w))
    return xq, wq, sx, sw, xt, wt, sxt, swt, FORMAT


def numbers(q: Tensor, scale: Tensor) -> Tensor:
    return q.view(FORMATS["e4m3"]).double() * (scale.double()[:, None] if scale.dim() else scale.double())


def eager(
    operands: tuple[Any, ...], b: Tensor | None, y: Tensor, g: Tensor, smoothing: float, bound: Tensor
) -> tuple[Tensor, ...]:
    """Losses [T] and the gradients for g, in fp64. bound: of the magnitude of the logits' gradients."""
    xq, wq, sx, sw, xt, wt, sxt, swt, format = operands
    logits = numbers(xq, sx) @ numbers(wq, sw).t()
    logits = (logits if b is None else logits + b.double()).requires_grad_()
    loss = F.cross_entropy(logits, y, reduction="none", label_smoothing=smoothing)
    (exact,) = torch.autograd.grad(loss, logits, g.double())
    scale = bound.double() / TOP[format]
    dlogits = (exact * (1 / scale)).to(FORMATS[format]).double() * scale
    return loss.detach(), dlogits @ numbers(wt, swt).t(), dlogits.t() @ numbers(xt, sxt).t(), exact.sum(0)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize(
    ("tokens", "classes", "pads", "bias"), [(300, 67, 64, True), (130, 50, 1, False), (7, 9, 1, True)]
)
def test_a_sum_of_losses_is_its_emulation(
    tokens: int, classes: int, pads: int, bias: bool, rowwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "class_padding", lambda n, device: -n % pads)
    x, w, b, y, g = case(tokens, classes)
    b = b if bias else None
    operands, one = casts(x, w, rowwise), torch.ones_like(g)
    found = ops.scaled_linear_cross_entropy(*operands, b, y, -100, 0.1, torch.float64)
    losses, *wanted = eager(operands, b, y, one, 0.1, one[0])
    for a, e in zip(found, (losses.sum(), *wanted), strict=True):
        torch.testing.assert_close(a, e if a.numel() else a, **TIGHT)
    assert found[3].numel() == (classes if bias else 0)
    plain = ops.linear_cross_entropy_forward(x, w, b, y, -100, 0.1, True)
    for a, e in zip(found[1:3], plain[1:3], strict=True):  # FP8 is another number, of about the same size
        assert 1e-3 < float((a - e).norm() / e.norm()) < 0.2


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize(("t", "lse"), [(1, False), (2, False), (3, True), (4, False)])
def test_ranks_with_some_classes_each_are_the_emulation(t: int, lse: bool, rowwise: bool) -> None:
    """Uneven: 67 classes, of which ranks have padding; with a gradient of the log-sum-exp the bound is of both."""
    classes = 67
    x, w, b, y, g = case(300, classes)
    operands = casts(x, w, rowwise)
    xq, wq, sx, sw, xt, wt, sxt, swt, format = operands
    layout, rows = list(Layout.contiguous(classes, t).flat()), -(-classes // t)
    lse_grad = g.flip(0) if lse else None

    def part(v: Tensor, rank: int, dim: int = 0) -> Tensor:
        wide = torch.cat([v, v.new_zeros([rows * t - classes if d == dim else n for d, n in enumerate(v.shape)])], dim)
        return wide.narrow(dim, rank * rows, rows).contiguous()

    stats, dx, dws, dbs = [], torch.zeros(()), [], []
    place = (layout, t, "tp")
    for rank in range(t):
        with on_mesh({"tp": AxisContext(rank, t)}):
            scale = part(sw, rank) if rowwise else sw
            given = (xq, part(wq, rank), sx, scale, part(b, rank), y)
            stats.append(ops.scaled_linear_ce_stats(*given, *place, torch.float64))
    for rank in range(t):
        with on_mesh({"tp": AxisContext(rank, t)}):
            scale = part(sw, rank) if rowwise else sw
            turned = (xt, part(wt, rank, 1), sxt, swt, format)
            given = (xq, part(wq, rank), sx, scale, *turned, part(b, rank), y, torch.stack(stats), lse_grad, -100, 0.0)
            mine = ops.scaled_linear_ce_loss_backward(g, *given, *place, torch.float64)
            dx = dx + mine[0]
            dws.append(mine[1])
            dbs.append(mine[2])
    bound = (g.masked_fill(y == -100, 0.0) + (0.0 if lse_grad is None else lse_grad)).amax()
    if lse:
        logits = (numbers(xq, sx) @ numbers(wq, sw).t() + b).requires_grad_()
        loss = F.cross_entropy(logits, y, reduction="none")
        total = (loss * g).sum() + (logits.logsumexp(1) * lse_grad).sum()
        (exact,) = torch.autograd.grad(total, logits)
        unit = bound / TOP[format]
        dlogits = (exact * (1 / unit)).to(FORMATS[format]).double() * unit
        wanted = dlogits @ numbers(wt, swt).t(), dlogits.t() @ numbers(xt, sxt).t(), exact.sum(0)
    else:
        wanted = eager(operands, b, y, g, 0.0, bound)[1:]
    for a, e in zip((dx, torch.cat(dws)[:classes], torch.cat(dbs)[:classes]), wanted, strict=True):
        torch.testing.assert_close(a, e, **TIGHT)


def test_infinite_gradients_are_not_lost_and_ignored_tokens_make_none() -> None:
    x, w, b, y, g = case(7, 9)
    operands = casts(x, w, False)
    stats = ops.scaled_linear_ce_stats(*operands[:4], b, y, [1, 9, 1], 1, "", torch.float64)[None]
    how = (None, -100, 0.0, [1, 9, 1], 1, "", torch.float64)
    g[0] = float("inf")
    dx = ops.scaled_linear_ce_loss_backward(g, *operands, b, y, stats, *how)[0]
    assert dx.isnan().all()  # as of a matrix that has one: nothing of it counts
    g[:] = float("inf")  # a mean over no label at all
    none = torch.full_like(y, -100)
    found = ops.scaled_linear_ce_loss_backward(g, *operands, b, none, stats, *how)
    assert not any(v.any() for v in found)


def test_the_gradient_of_the_weight_may_be_fp32() -> None:
    x, w, b, y, _ = case(300, 67, torch.bfloat16)
    operands = casts(x, w, False)
    low = ops.scaled_linear_cross_entropy(*operands, b, y, -100, 0.0, torch.bfloat16)
    full = ops.scaled_linear_cross_entropy_fp32(*operands, b, y, -100, 0.0, torch.bfloat16)
    assert full[2].dtype == torch.float32 and low[2].dtype == torch.bfloat16
    torch.testing.assert_close(low[2].float(), full[2], rtol=3e-2, atol=1e-2)


def library_checks() -> None:
    """CUDA's products against the emulation: sizes that 16 does not divide, several chunks, each dtype."""
    chunks.CHUNK_BYTES, scaled_head.CLASSES = 1 << 20, 1 << 10
    for tokens, classes in ((1000, 3001), (512, 4096)):
        for dtype in (torch.bfloat16, torch.float16):
            for rowwise in (False, True):
                x, w, b, y, g = case(tokens, classes, dtype)
                w = w * 0.1
                operands, one = casts(x, w, rowwise), torch.ones(tokens, device=DEVICE)
                found = ops.scaled_linear_cross_entropy(*operands, b, y, -100, 0.1, dtype)
                losses, *wanted = eager(operands, b, y, one, 0.1, one[0])
                for a, e in zip(found, (losses.sum(), *wanted), strict=True):
                    off = float((a.double() - e).norm() / e.norm())
                    assert off < 2e-2, (tokens, classes, dtype, rowwise, off)
                place = ([1, classes, 1], 1, "")
                stats = ops.scaled_linear_ce_stats(*operands[:4], b, y, *place, dtype)[None]
                found = ops.scaled_linear_ce_loss_backward(g, *operands, b, y, stats, None, -100, 0.0, *place, dtype)
                wanted = eager(operands, b, y, g, 0.0, g.masked_fill(y == -100, 0.0).amax())[1:]
                for a, e in zip(found, wanted, strict=True):
                    off = float((a.double() - e).norm() / e.norm())
                    assert off < 2e-2, (tokens, classes, dtype, rowwise, off)


def test_it_runs_on_a_gpu() -> None:
    run_as_script(__file__, 600)


if __name__ == "__main__":
    torch.manual_seed(0)
    library_checks()
