"""Covers: kernels/loss/cross_entropy.py, kernels/loss/cross_entropy_triton.py. The oracle is F.cross_entropy on the whole
logits."""

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import run_as_script
from torch.fx.experimental.proxy_tensor import make_fx

import megafx.kernels.loss.cross_entropy  # noqa: F401  registers the ops
import megafx.kernels.loss.cross_entropy_reference as module
from megafx.ops import axes
from megafx.placements.types import Layout, Piece

ops = torch.ops.megafx
TIGHT = {"rtol": 1e-12, "atol": 1e-13}


def on_rank(rank, t):
    return axes.on_mesh({"tp": axes.AxisContext(rank, t, "")})


def case(tokens, classes, dtype=torch.float64, spread=3.0, ignore_index=-100, ignored=2):
    torch.manual_seed(tokens * 1000 + classes)
    x = (torch.randn(tokens, classes, dtype=torch.float64) * spread).to(dtype)
    y = torch.randint(0, classes, (tokens,))
    y[:ignored] = ignore_index
    return x, y, torch.randn(tokens, dtype=torch.float64)


def oracle(x, y, g, ignore_index, smoothing):
    """Loss and gradient by torch, in fp64 from the same logits."""
    x = x.double().requires_grad_()
    loss = F.cross_entropy(x, y, reduction="none", ignore_index=ignore_index, label_smoothing=smoothing)
    (grad,) = torch.autograd.grad(loss, x, g)
    return loss.detach(), grad


def whole(x, y, g, ignore_index, smoothing):
    x = x.clone().requires_grad_()
    loss = ops.cross_entropy(x, y, ignore_index, smoothing, False)
    (grad,) = torch.autograd.grad(loss, x, g.to(loss.dtype))
    return loss.detach(), grad


def sharded(x, y, g, ignore_index, smoothing, layout, t, pad=float("nan")):
    """Every rank in turn; pads hold `pad`. Returns rank 0's loss and the whole gradient; checks that ranks agree."""
    tokens, local = len(x), []
    for rank in range(t):
        part = torch.full((tokens, layout.local_size(t)), pad, dtype=x.dtype)
        for start, at, length in layout.pieces(rank, t):
            part[:, at : at + length] = x[:, start : start + length]
        local.append(part.requires_grad_())
    flat = layout.flat()
    stats = []
    for rank in range(t):
        with on_rank(rank, t):
            stats.append(ops.ce_stats(local[rank].detach(), y, flat, t, "tp"))
    gathered = torch.stack(stats)  # what the all-gather in the graph gives every rank
    losses, whole_grad = [], torch.empty_like(x)
    for rank in range(t):
        with on_rank(rank, t):
            loss = ops.ce_loss(local[rank], y, gathered, ignore_index, smoothing, False, flat, t, "tp")
            (grad,) = torch.autograd.grad(loss, local[rank], g.to(loss.dtype))
        losses.append(loss.detach())
        in_pads = torch.ones(layout.local_size(t), dtype=torch.bool)
        for start, at, length in layout.pieces(rank, t):
            whole_grad[:, start : start + length] = grad[:, at : at + length]
            in_pads[at : at + length] = False
        assert torch.equal(grad[:, in_pads], torch.zeros(tokens, int(in_pads.sum()), dtype=grad.dtype))
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    return losses[0], whole_grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignore_index", [-100, -1, 3])
@pytest.mark.parametrize("t", [0, 1, 2, 3, 4])
def test_loss_and_gradient(t, ignore_index, smoothing):
    """t = 0: the op on the whole vocabulary. 17 classes divide on no t > 1. ignore_index may be a class that exists."""
    x, y, g = case(9, 17, ignore_index=ignore_index)
    if t == 0:
        loss, grad = whole(x, y, g, ignore_index, smoothing)
    else:
        loss, grad = sharded(x, y, g, ignore_index, smoothing, Layout.contiguous(17, t), t)
    expected_loss, expected_grad = oracle(x, y, g, ignore_index, smoothing)
    torch.testing.assert_close(loss, expected_loss, **TIGHT)
    torch.testing.assert_close(grad, expected_grad, **TIGHT)
    assert (loss[:2] == 0).all() and (grad[:2] == 0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    "flat, t",
    [((1, 50257, 1), 4), ((1, 50257, 1), 3), ((1, 5, 1), 4), ((1, 3, 4), 2), ((1, 3, 4), 4), ((2, 5, 1, 3, 2), 3)],
    ids=str,
)
def test_layouts(flat, t, smoothing):
    """GPT-2's vocabulary; ranks without any class; units; blocks and repeats."""
    layout = Layout.from_flat(flat)
    x, y, g = case(6, layout.size)
    loss, grad = sharded(x, y, g, -100, smoothing, layout, t)
    expected_loss, expected_grad = oracle(x, y, g, -100, smoothing)
    torch.testing.assert_close(loss, expected_loss, **TIGHT)
    torch.testing.assert_close(grad, expected_grad, **TIGHT)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
@pytest.mark.parametrize("t", [0, 3])
def test_low_precision(dtype, tolerance, t):
    """fp32 statistics whatever the logits; the gradient within one rounding to the dtype of the logits."""
    x, y, g = case(33, 513, dtype)
    loss, grad = whole(x, y, g, -100, 0.1) if t == 0 else sharded(x, y, g, -100, 0.1, Layout.contiguous(513, t), t)
    expected_loss, expected_grad = oracle(x, y, g, -100, 0.1)
    assert loss.dtype == torch.float32 and grad.dtype == dtype
    torch.testing.assert_close(loss.double(), expected_loss, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1.01 * tolerance, atol=2e-7)


@pytest.mark.parametrize("t", [0, 2])
def test_fp16_under_loss_scaling(t):
    """2**16 / T as GradScaler gives it: gradients that fp16 can hold come out right, small ones do not vanish."""
    x, y, _ = case(64, 300, torch.float16)
    g = torch.full((64,), 2.0**16 / 64, dtype=torch.float64)
    _, grad = whole(x, y, g, -100, 0.0) if t == 0 else sharded(x, y, g, -100, 0.0, Layout.contiguous(300, t), t)
    _, expected = oracle(x, y, g, -100, 0.0)
    assert grad.isfinite().all()
    torch.testing.assert_close(grad.double(), expected, rtol=2**-10, atol=2e-7)


@pytest.mark.parametrize("t", [0, 2])
def test_large_offsets(t):
    """A common offset of 30000 changes nothing in fp32: log-sum-exp kept as one fp32 number would be off by 1e-3."""
    x, y, g = case(20, 64, torch.float32)
    x = (x * 8).round() / 8 + 30000  # exact in fp32
    loss, grad = whole(x, y, g, -100, 0.0) if t == 0 else sharded(x, y, g, -100, 0.0, Layout.contiguous(64, t), t)
    expected_loss, expected_grad = oracle(x, y, g, -100, 0.0)
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("t", [0, 2, 4])
def test_masked_classes(t, smoothing):
    """Classes at -inf, a whole shard of them too, as torch has it (infinite loss with smoothing or at the target)."""
    x, y, g = case(8, 12)
    x[:, 6:] = -torch.inf
    x[3, 1] = -torch.inf
    y = y % 6
    y[3] = 1
    args = (x, y, g, -100, smoothing)
    loss, grad = whole(*args) if t == 0 else sharded(*args, Layout.contiguous(12, t), t)
    expected_loss, expected_grad = oracle(*args)
    torch.testing.assert_close(loss, expected_loss, **TIGHT)
    torch.testing.assert_close(grad, expected_grad, **TIGHT)


@pytest.mark.parametrize("t", [0, 2, 3])
def test_shards_of_very_different_size(t):
    """One shard's logits are 2000 above another's, whichever comes first: exp of the difference would overflow."""
    x, y, g = case(8, 12)
    x[:4, :4] += 2000
    x[4:, 8:] += 2000
    args = (x, y, g, -100, 0.1)
    loss, grad = whole(*args) if t == 0 else sharded(*args, Layout.contiguous(12, t), t)
    expected_loss, expected_grad = oracle(*args)
    torch.testing.assert_close(loss, expected_loss, **TIGHT)
    torch.testing.assert_close(grad, expected_grad, **TIGHT)


def test_rows_come_in_chunks(monkeypatch):
    """A chunk smaller than a row, and one that does not divide the rows."""
    x, y, g = case(10, 17)
    expected = whole(x, y, g, -100, 0.1)
    for chunk in (5, 17 * 3):
        monkeypatch.setattr(module, "CPU_CHUNK", chunk)
        for a, b in zip(whole(x, y, g, -100, 0.1), expected, strict=True):
            assert torch.equal(a, b)


def test_strided_logits_and_small_targets():
    """Views with gaps (shifted logits), transposed logits, int32 and uint8 targets, an expanded gradient."""
    x, y, _ = case(8, 16, ignored=0)
    expected_loss, expected_grad = oracle(x, y, torch.ones(8, dtype=torch.float64), -100, 0.0)
    for view in (torch.cat([x, x], 1)[:, :16], x.t().contiguous().t()):
        for target in (y, y.int(), y.to(torch.uint8)):
            leaf = view.detach().requires_grad_()
            loss = ops.cross_entropy(leaf, target, -100, 0.0, False)
            (grad,) = torch.autograd.grad(loss.sum(), leaf)
            torch.testing.assert_close(loss, expected_loss, **TIGHT)
            torch.testing.assert_close(grad, expected_grad, **TIGHT)


def test_no_tokens():
    x = torch.empty(0, 5, requires_grad=True)
    y = torch.empty(0, dtype=torch.long)
    loss = ops.cross_entropy(x, y, -100, 0.1, False)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert loss.shape == (0,) and grad.shape == (0, 5)
    loss, grad = sharded(x.detach(), y, torch.empty(0), -100, 0.1, Layout.contiguous(5, 2), 2)
    assert loss.shape == (0,) and grad.shape == (0, 5)


def test_all_tokens_ignored():
    """Loss and gradient are 0; the mean, which the graph divides, is then 0/0 = nan as in torch."""
    x, y, g = case(4, 6, ignored=4)
    loss, grad = whole(x, y, g, -100, 0.1)
    assert not loss.any() and not grad.any()
    assert (loss.sum() / (y != -100).sum()).isnan() and F.cross_entropy(x, y).isnan()


@pytest.mark.parametrize("target", [-1, 6, 1000, -100])
@pytest.mark.parametrize("t", [0, 2])
def test_target_out_of_bounds(target, t):
    """torch's own error, whatever shard the class would be on."""
    x, y, g = case(4, 6, ignored=0)
    y[2] = target
    with pytest.raises(IndexError) as torchs:
        F.cross_entropy(x, y, ignore_index=-7)
    args = (x, y, g, -7, 0.0)
    with pytest.raises(IndexError) as ours:
        whole(*args) if t == 0 else sharded(*args, Layout.contiguous(6, t), t)
    assert str(ours.value) == str(torchs.value) == f"Target {target} is out of bounds."


def test_wrong_arguments():
    x, y, _ = case(4, 6)
    with pytest.raises(ValueError, match="label_smoothing must be between"):
        ops.cross_entropy(x, y, -100, 1.5, False)
    with pytest.raises(ValueError, match=r"logits \[T, V\] and target \[T\]"):
        ops.cross_entropy(x, y[:3], -100, 0.0, False)
    with pytest.raises(TypeError, match="class indices"):
        ops.cross_entropy(x, torch.randn(4), -100, 0.0, False)


def test_saves_no_softmax():
    """Kept for backward: the logits, the targets and two numbers a token."""
    x, y, _ = case(8, 100, torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        ops.cross_entropy(x.requires_grad_(), y, -100, 0.1, False)
    assert sorted((tuple(s.shape), s.dtype) for s in saved if s is not x and s is not y) == [((8, 2), torch.float32)]


def targets_of(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function" and "megafx" in str(n.target)]


def test_joint_graph_of_a_sharded_vocabulary():
    """Traced without a rank: the rank is asked for when the graph runs."""

    def step(x, y, gathered, g):
        stats = ops.ce_stats(x.detach(), y, [1, 7, 1], 2, "tp")
        loss = ops.ce_loss(x, y, gathered, -100, 0.1, False, [1, 7, 1], 2, "tp")
        return stats, loss, torch.autograd.grad(loss, x, g)[0]

    x, y, g = case(5, 7)
    example = (torch.randn(3, 4, dtype=torch.float64).requires_grad_(), y[:3], torch.randn(2, 3, 4).double(), g[:3])
    gm = make_fx(step, tracing_mode="symbolic")(*example)
    names = ["ce_stats", "ce_loss", "ce_loss_backward"]
    assert targets_of(gm) == [f"megafx.{n}.default" for n in names]
    parts = [x[:, :4].contiguous(), torch.cat([x[:, 4:], torch.full((5, 1), 9.0, dtype=x.dtype)], 1)]
    gathered = torch.zeros(2, 5, 4, dtype=x.dtype)
    for _ in range(2):  # first the statistics, then what they give
        outs = []
        for rank in range(2):
            with on_rank(rank, 2):
                outs.append(gm(parts[rank], y, gathered, g))
        gathered = torch.stack([o[0] for o in outs])
    loss, grad = oracle(x, y, g, -100, 0.1)
    torch.testing.assert_close(outs[1][1], loss, **TIGHT)
    torch.testing.assert_close(torch.cat([o[2] for o in outs], 1)[:, :7], grad, **TIGHT)


@pytest.mark.parametrize("t", [1, 2, 3])
def test_log_sum_exp_beside_the_loss(t):
    """[loss, lse], and the gradient of both: ignored tokens have a log-sum-exp too."""
    x, y, g = case(9, 11)
    h = torch.randn(9, dtype=x.dtype)
    leaf = x.clone().requires_grad_()
    wanted = torch.stack([F.cross_entropy(leaf, y, reduction="none", label_smoothing=0.1), leaf.logsumexp(1)])
    (right,) = torch.autograd.grad(wanted, leaf, torch.stack([g, h]))
    if t == 1:
        leaf = x.clone().requires_grad_()
        found = ops.cross_entropy(leaf, y, -100, 0.1, True)
        (grad,) = torch.autograd.grad(found, leaf, torch.stack([g, h]))
        leaf = x.clone().requires_grad_()
        (alone,) = torch.autograd.grad(ops.cross_entropy(leaf, y, -100, 0.1, True)[1] @ h, leaf)
        torch.testing.assert_close(alone, x.softmax(1) * h[:, None], **TIGHT)
    else:
        layout, grads = Layout.contiguous(11, t), []
        flat, n = list(layout.flat()), -(-11 // t)
        parts = torch.cat([x, x.new_full((9, n * t - 11), 7.0)], 1).split(n, 1)
        stats = []
        for rank, part in enumerate(parts):
            with on_rank(rank, t):
                stats.append(ops.ce_stats(part, y, flat, t, "tp"))
        for rank, part in enumerate(parts):
            leaf = part.clone().requires_grad_()
            with on_rank(rank, t):
                found = ops.ce_loss(leaf, y, torch.stack(stats), -100, 0.1, True, flat, t, "tp")
                grads += torch.autograd.grad(found, leaf, torch.stack([g, h]))
        grad = torch.cat(grads, 1)[:, :11]
    torch.testing.assert_close(found, wanted, **TIGHT)
    torch.testing.assert_close(grad, right, **TIGHT)


def test_gradients_over_the_logits():
    """The ops that write in place give what the others give, in the logits' memory."""
    x, y, g = case(9, 8)
    _, norm = ops.cross_entropy_forward(x, y, -100, 0.1)
    args = (y, norm, None, -100, 0.1)
    wanted, logits = ops.cross_entropy_backward(g, x, *args), x.clone()
    assert ops.cross_entropy_backward_(g, logits, *args) is logits and torch.equal(logits, wanted)
    with on_rank(1, 2):
        shard = x[:, 4:].contiguous()
        gathered = torch.stack([ops.ce_stats(shard, y, [1, 8, 1], 2, "tp")] * 2)
        args = (y, gathered, None, -100, 0.1, [1, 8, 1], 2, "tp")
        wanted = ops.ce_loss_backward(g, shard, *args)
        assert ops.ce_loss_backward_(g, shard, *args) is shard and torch.equal(shard, wanted)


def test_under_compile():
    x, y, g = case(5, 7)

    def step(x):
        return ops.cross_entropy(x * 2, y, -100, 0.1, False)

    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(a)
    compiled.backward(g)
    step(b).backward(g)
    assert torch.equal(compiled, step(b)) and torch.equal(a.grad, b.grad)


def test_inductor_knows_what_is_written(monkeypatch):
    """An input that it takes for written is copied, and copied back, at every call."""
    pytest.importorskip("triton")
    from fake_triton import Driver
    from torch._higher_order_ops import triton_kernel_wrap as wrap
    from triton.runtime import driver

    from megafx.kernels.loss import cross_entropy_triton

    monkeypatch.setattr(driver, "_active", Driver())
    written = {}

    def launched(kernel, grid, like, *args, num_warps, **constants):
        tensors = dict(zip(kernel.arg_names, args, strict=False))
        which = wrap.kernel_side_table.add_kernel(kernel), wrap.kernel_side_table.add_constant_args(constants)
        written[kernel.fn.__name__] = set(wrap.get_mutated_tensors(*which, tensors, {}))

    monkeypatch.setattr(cross_entropy_triton, "launch", launched)
    x, y, norm = torch.randn(5, 1001).bfloat16(), torch.zeros(5, dtype=torch.long), torch.randn(5, 2)
    monkeypatch.setattr(cross_entropy_triton, "check_async", lambda ok, classes: None)
    cross_entropy_triton.forward(x, y, -100, 0.1)
    cross_entropy_triton.stats(x, y, Piece(0, 0, 1001))
    cross_entropy_triton.combine(torch.randn(2, 5, 4), y, module.Loss.whole(-100, 0.1, x), True)
    cross_entropy_triton.backward(torch.ones(5), x, y, norm, torch.ones(5), -100, 0.1)
    expected = {"_forward": {"loss", "norm", "ok"}, "_stats": {"out"}, "_combine": {"loss", "norm", "ok"}}
    assert written == expected | {"_gradient": {"out"}}


def test_opcheck():
    x, y, g = case(5, 8)
    leaf = x.clone().requires_grad_()
    torch.library.opcheck(ops.cross_entropy_forward.default, (leaf, y, -100, 0.1))
    _, norm = ops.cross_entropy_forward(x, y, -100, 0.1)
    torch.library.opcheck(ops.cross_entropy_backward.default, (g, x, y, norm, g, -100, 0.1))
    with on_rank(1, 2):
        shard = x[:, 4:].contiguous()
        torch.library.opcheck(ops.ce_stats.default, (shard, y, [1, 8, 1], 2, "tp"))
        gathered = torch.stack([ops.ce_stats(shard, y, [1, 8, 1], 2, "tp")] * 2)
        how, place = (-100, 0.1), ([1, 8, 1], 2, "tp")
        for lse in (False, True):
            given = (shard.clone().requires_grad_(), y, gathered, *how, lse, *place)
            torch.library.opcheck(ops.ce_loss.default, given)
        torch.library.opcheck(ops.ce_loss_backward.default, (g, shard, y, gathered, None, *how, *place))


def triton_checks():
    from megafx.kernels.loss import cross_entropy_reference as plain
    from megafx.kernels.loss import cross_entropy_triton as fast

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    LAYOUTS = (
        lambda T, V: torch.randn(T, V) * 3,
        lambda T, V: (torch.randn(T, V + 3) * 3)[:, 1 : V + 1],
        lambda T, V: (torch.randn(V, T) * 3).t(),
    )
    # Rows shorter than a group of 8, ends of any alignment, several tiles; views with gaps, transposed logits.
    SHAPES = [
        (3, 5, 0),
        (4, 17, 0),
        (4, 17, 1),
        (2, 64, 2),
        (5, 1000, 0),
        (3, 9001, 0),
        (2, 8192, 0),
        (1, 1, 0),
        (0, 7, 0),
    ]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        close = dict(rtol=1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps, atol=1e-6)
        for T, V, layout in SHAPES if dtype == torch.float32 else SHAPES[1:5]:
            x, y, g = LAYOUTS[layout](T, V).to(dtype), torch.randint(0, V, (T,)), torch.randn(T)
            stored = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
            there = stored.to(device).as_strided(x.shape, x.stride(), x.storage_offset())
            y[1:2] = -100
            # the whole vocabulary, and a shard: columns [0, V - 1) are classes [10, ..)
            pieces = Piece(0, 0, V), Piece(10, 0, max(V - 1, 1))
            for smoothing, some in (
                ((0.0, pieces[:1]), (0.1, pieces[1:])) if device == "cpu" else ((0.0, pieces), (0.1, pieces))
            ):
                for piece in some:
                    target = torch.where(y == -100, y, y + piece.global_start)
                    stats = plain.local_stats(x, target, [piece])
                    found = fast.stats(there, target.to(device), piece).cpu()
                    torch.testing.assert_close(found, stats, rtol=1e-5, atol=1e-5 * max(V, 1))
                    everyone, classes = torch.stack([stats, stats]), V + piece.global_start
                    total = plain.combine(everyone)
                    how = plain.Loss(-100, smoothing, [piece], classes)
                    expected = plain.loss_of(total, target, how), plain.norm_of(total)
                    found = fast.combine(everyone.to(device), target.to(device), how, True)
                    for a, b in zip(found, expected, strict=True):
                        torch.testing.assert_close(a.cpu(), b, rtol=2e-6, atol=2e-6)
                    norm = plain.norm_of(stats)
                    for h in (None, torch.randn(T)):
                        expected = plain.plain_gradient(g, x, target, norm, how, None, h)
                        args = (g.to(device), there, target.to(device), norm.to(device), how)
                        found = fast.gradient(*args, None, None if h is None else h.to(device))
                        torch.testing.assert_close(found.cpu(), expected, **close)
                loss, norm = fast.forward(there, y.to(device), -100, smoothing)
                stats = plain.local_stats(x, y, [Piece(0, 0, V)])
                expected = plain.loss_of(stats, y, plain.Loss(-100, smoothing, [], V))
                torch.testing.assert_close(loss.cpu(), expected, rtol=2e-6, atol=2e-6)
                torch.testing.assert_close(norm.cpu(), plain.norm_of(stats), rtol=2e-6, atol=2e-6)
    x = torch.randn(3, 50, device=device)
    y = torch.tensor([1, 2, -100], device=device)
    loss, norm = fast.forward(x, y, -100, 0.0)
    args = (torch.ones(1, device=device).expand(3), x, y, norm, plain.Loss.whole(-100, 0.0, x))
    apart = fast.gradient(*args)
    assert torch.equal(fast.gradient(*args, x), apart) and torch.equal(x, apart)  # in place of the logits
    masked = torch.full((2, 20), -torch.inf, device=device)
    masked[0, 3] = 1.0
    stats = fast.stats(masked, torch.tensor([3, 3], device=device), Piece(0, 0, 20)).cpu()
    assert stats[0, :3].tolist() == [1.0, 1.0, 1.0] and stats[1, :2].tolist() == [-torch.inf, 0.0]
    scaled = fast.linear_cross_entropy_backward(apart, torch.tensor(0.3, device=device))
    torch.testing.assert_close(scaled, apart * 0.3)


def test_triton_kernels_are_the_reference():
    run_as_script(__file__, 240)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_cuda_is_the_cpu(dtype):
    x, y, g = case(64, 1000, dtype)
    loss, grad = whole(x.cuda(), y.cuda(), g.cuda(), -100, 0.1)
    expected_loss, expected_grad = whole(x, y, g, -100, 0.1)
    torch.testing.assert_close(loss.cpu(), expected_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.cpu(), expected_grad)


if __name__ == "__main__":
    triton_checks()
