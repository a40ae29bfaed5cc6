"""Covers: passes/canonicalize/random.py where models draw random numbers, and what stays as captured or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functions import Function, ids_of, x_of
from interpret import run_program

from megafx.capture.export import capture_call
from megafx.errors import CaptureError
from megafx.ir.nodes import set_arguments
from megafx.passes.canonicalize.canonicalize import canonicalize_program

aten = torch.ops.aten

DRAWS: dict[str, tuple[Callable[..., Any], float, float]] = {  # result, mean, standard deviation
    "rand": (lambda m, x: torch.rand((x.shape[0], x.shape[1], 8)), 0.5, 12**-0.5),
    "rand_like_bf16": (lambda m, x: torch.rand_like(x.bfloat16()).float(), 0.5, 12**-0.5),
    "uniform_": (lambda m, x: torch.empty_like(x).uniform_(2, 4), 3.0, 2 * 12**-0.5),
    "randn_like": (lambda m, x: torch.randn_like(x), 0.0, 1.0),
    "normal_": (lambda m, x: torch.empty_like(x).normal_(3, 0.5), 3.0, 0.5),
    "bernoulli_": (lambda m, x: x.new_empty(x.shape).bernoulli_(0.3), 0.3, 0.21**0.5),
    "bernoulli": (lambda m, x: torch.bernoulli(x * 0 + 0.25), 0.25, 0.1875**0.5),
    "randint": (lambda m, x: torch.randint(0, 10, (x.shape[0], x.shape[1], 8)).double(), 4.5, 8.25**0.5),
    "randint_low": (lambda m, x: torch.randint(3, 7, (x.shape[0], x.shape[1], 8)).double(), 4.5, 1.25**0.5),
    "randint_of_a_size": (lambda m, x: torch.randint(x.shape[1], x.shape).double(), 49.5, 833.25**0.5),
    "randint_like": (lambda m, x: torch.randint_like(x, 2), 0.5, 0.5),
    "randint_like_low": (lambda m, x: torch.randint_like(x.long(), low=-2, high=1).double(), -1.0, (2 / 3) ** 0.5),
    "randperm": (lambda m, x: torch.randperm(x.numel()).view(x.shape) / x.numel(), 0.5, 12**-0.5),
    "dropout1d": (lambda m, x: F.dropout1d(x * 0 + 1, 0.5, m.training), 1.0, 1.0),
    "alpha_dropout": (lambda m, x: F.alpha_dropout(x * 0, 0.5, m.training), 0.0, 0.7792),
    "dropout": (lambda m, x: F.dropout(x * 0 + 1, 0.5, m.training), 1.0, 1.0),
    "native_dropout": (lambda m, x: torch.native_dropout(x * 0 + 1, 0.5, m.training)[0], 1.0, 1.0),
    "native_dropout_in_training_by_default": (lambda m, x: torch.native_dropout(x * 0 + 1, 0.5, None)[0], 1.0, 1.0),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_functions_of_the_seed(name: str) -> None:
    fn, mean, deviation = DRAWS[name]
    model = Function(fn, {})
    program = capture_call(model, (x_of(),))
    canonicalize_program(program)
    x = x_of(40, 100)
    first, again, other = (run_program(program, model, (x,), seed=seed).detach() for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    count = 40 if name == "dropout1d" else 40 * 100 * 8
    assert abs(float(first.mean()) - mean) < 5 * deviation / count**0.5
    assert abs(float(first.std()) - deviation) < 0.2 * deviation
    if name == "dropout1d":  # a channel is dropped as a whole
        assert torch.equal(first, first[:, :, :1].expand_as(first))


@pytest.mark.parametrize("high", [2, 3, 1000, 2**20])
def test_integers_stay_in_their_range(high: int) -> None:
    model = Function(lambda m, x: torch.randint(1, high + 1, (x.shape[0], x.shape[1], 8)), {})
    program = capture_call(model, (x_of(),))
    canonicalize_program(program)
    drawn = run_program(program, model, (x_of(40, 100),), seed=3)
    assert drawn.dtype == torch.int64 and int(drawn.min()) >= 1 and int(drawn.max()) <= high
    if high < 5:
        assert {*drawn.flatten().tolist()} == {*range(1, high + 1)}


def test_a_permutation_has_every_number_once() -> None:
    model = Function(lambda m, x: torch.randperm(x.numel()), {})
    program = capture_call(model, (x_of(),))
    canonicalize_program(program)
    drawn = run_program(program, model, (x_of(7, 9),), seed=3)
    assert drawn.dtype == torch.int64 and torch.equal(drawn.sort().values, torch.arange(7 * 9 * 8))


@pytest.mark.parametrize("causal", [True, False])
def test_attention_with_dropout_is_our_op(causal: bool) -> None:
    """With the dropout taken out again it is torch's op: grouped heads, masks, and rows that see nothing."""

    def fn(m: Any, x: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (4, 2)).transpose(1, 2)
        k = q[:, :2] * 2
        return F.scaled_dot_product_attention(
            q, k, k, *mask, dropout_p=m.p, is_causal=causal, enable_gqa=True, scale=0.3
        )

    model = Function(fn, {})
    model.p = 0.1
    mask = [] if causal else [torch.rand(2, 1, 5, 5) > 0.5]
    if mask:
        mask[0][0, 0, 3] = False
    x = x_of()
    program = capture_call(model, (x, *mask))
    canonicalize_program(program)
    (attention,) = program.graph.find_nodes(op="call_function", target=torch.ops.megafx.attention.default)
    assert not program.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    first, again, other = (run_program(program, model, (x, *mask), seed=s) for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    set_arguments(attention, p=0.0)
    program.gm.recompile()
    model.p = 0.0
    wanted, found = model(x, *mask), run_program(program, model, (x, *mask))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(found.sum(), x), torch.autograd.grad(wanted.sum(), x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_loss_that_stays_as_captured() -> None:
    model = Function(lambda m, x, ids: F.cross_entropy((x * m.w)[0, 0], ids[0, 0]), {"w": (8,)})
    program = capture_call(model, (x_of(), ids_of()))
    canonicalize_program(program)
    assert str(program.notes[0]).startswith(
        "canonicalize: cross entropy with logits of 1 dims is left as captured (no vocab sharding)"
    )
    assert program.graph.find_nodes(op="call_function", target=aten.cross_entropy_loss.default)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_of_classes_in_the_middle(reduction: str) -> None:
    """[n, classes, d, ...], also with weights, smoothing, ignored targets and probabilities."""

    def fn(m: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y, w = x * m.w, m.w.detach().abs()
        losses = [
            F.cross_entropy(y.transpose(1, 2), ids, ignore_index=2, reduction=reduction),
            F.cross_entropy(y.transpose(1, 2), ids, weight=w, label_smoothing=0.1, reduction=reduction),
            F.cross_entropy(y.transpose(1, 2), y.transpose(1, 2).detach().softmax(1), weight=w, reduction=reduction),
            F.nll_loss(y.transpose(1, 2).log_softmax(1), ids, reduction=reduction),
            F.cross_entropy(
                y.movedim(2, 1).unsqueeze(-1).expand(-1, -1, -1, 2), ids.unsqueeze(-1).expand(-1, -1, 2), w
            ),
        ]
        return sum((k + 1) * loss.square().mean() for k, loss in enumerate(losses))

    model, x, ids = Function(fn, {"w": (8,)}), x_of(), ids_of()
    program = capture_call(model, (x, ids))
    canonicalize_program(program)
    assert len(program.graph.find_nodes(op="call_function", target=torch.ops.megafx.cross_entropy.default)) == 4
    assert not program.graph.find_nodes(op="call_function", target=aten.cross_entropy_loss.default)
    wanted, found = model(x, ids), run_program(program, model, (x, ids))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(found, x), torch.autograd.grad(wanted, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def _refused(fn: Callable[..., Any]) -> str:
    program = capture_call(Function(fn, {"w": (8,)}), (x_of(),))
    with pytest.raises(CaptureError) as caught:
        canonicalize_program(program)
    return caught.value.found


def test_write_without_gradient_is_refused() -> None:
    """Eager lets the gradient pass by such a write: no functional op does."""

    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * m.w
        with torch.no_grad():
            y.clamp_(0)
        return y

    assert _refused(fn) == (
        "the model writes under no_grad into a tensor that has a gradient, which cannot be made functional"
    )


def test_number_from_data_is_refused() -> None:
    assert _refused(lambda m, x: x * x.detach().max().item()).startswith("a tensor's data becomes a Python number")


@pytest.mark.parametrize("train", [True, None])
def test_native_dropout_whose_mask_is_read_is_refused(train: bool | None) -> None:
    found = _refused(lambda m, x: torch.mul(*torch.native_dropout(x, 0.5, train)))
    assert found == "aten.native_dropout.default draws random numbers that depend on the process"
