"""Functions of the user whose gradients are their own, and hooks on values, on data-parallel ranks: where each row is computed
by itself, a rank runs them on its own rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loop import Loop, situation
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from megafx.errors import PlanError, UsageError

FORMS = ("ddp", "zero1", "fsdp")
DANN = "https://github.com/fungtion/DANN/blob/master/models/functions.py"
LSQ = "https://github.com/zhutmost/lsq-net/blob/master/quan/quantizer/lsq.py"
WHOLE = False


class Reverse(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.neg() * ctx.alpha, None


class Sign(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign() * alpha

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * (ctx.saved_tensors[0].abs() <= 1), None


class OfClass(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(labels)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * (ctx.saved_tensors[0] > 1)[:, None], None


class Bounded(Reverse):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.clamp(-ctx.alpha, ctx.alpha), None


class Normed(Reverse):
    """Divided by the norm of the whole gradient, where a global says so."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (grad / grad.norm() if WHOLE else grad) * ctx.alpha, None


class LearnedStep(Function):
    """Rounded to steps of a learned size, whose gradient is a sum over all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(x, step)
        return (x / step).round().clamp(-4, 3) * step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, step = ctx.saved_tensors
        q = x / step
        inside = ((q >= -4) & (q <= 3)).to(grad)
        of_step = inside * (q.round() - q) + (1 - inside) * q.clamp(-4, 3)
        return grad * inside, (grad * of_step).sum().reshape(step.shape)


class Outliers(LearnedStep):
    """Gradients far beyond the mean of all are left out, of which few numbers have none."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.where(grad.abs() > 1e3 * grad.abs().mean(), 0.0, grad), None


class SignedWeight(Function):
    """A product whose gradient has the signs of the weight; what it gives are the logits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.sign(), grad.T @ x * 0.5


class ByNumber(LearnedStep):
    """Its gradient is divided by a number of all values."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, step = ctx.saved_tensors
        return grad, (grad * x / step).sum().reshape(step.shape) / math.sqrt(x.numel())


class Adversary(nn.Module):
    """Classes and domains of rows; the loss, or what it is of."""

    def __init__(self, of: Callable[..., Tensor]) -> None:
        super().__init__()
        self.trunk, self.label, self.domain, self.of = nn.Linear(7, 12), nn.Linear(12, 5), nn.Linear(12, 2), of
        self.step = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, y: Tensor, inside: bool) -> Any:
        h = F.relu(self.trunk(x))
        found = self.label(h), self.domain(self.of(self, h, y))
        return losses(*found, y) if inside else found


class Head(nn.Linear):
    def __init__(self) -> None:
        super().__init__(7, 5, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]  # its base takes no labels
        return F.cross_entropy(SignedWeight.apply(x, self.weight), y)


def losses(classes: Tensor, domains: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(classes, y) + F.cross_entropy(domains, y % 2)


def train(loop: Loop, of: Callable[..., Tensor], *, inside: bool = True, rows: int = 6, **options: Any) -> None:
    model = loop.model(Adversary(of), **options)
    for _ in range(2):
        x, y = loop.rows(torch.randn(rows, 7)), loop.rows(torch.randint(0, 5, (rows,)))
        model.zero_grad()
        loss = model(x, y, True) if inside else losses(*model(x, y, False), y)
        loss.backward()
        loop.see(loss=loop.mean(loss))
        loop.see_gradients(model)


def hooked(h: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    h = h * 1.0
    h.register_hook(hook)
    return h


@situation(DANN, data=FORMS, slow=(2, "zero1", "fsdp"))
def gradients_are_reversed_for_a_classifier_of_domains(loop: Loop) -> None:
    train(loop, lambda m, h, y: Reverse.apply(h, 0.3))
    train(loop, lambda m, h, y: hooked(h, lambda g: -0.3 * g))


@situation(DANN, data=FORMS, slow=(1, 2, "zero1", "fsdp"))
def a_reversal_whose_losses_are_outside_of_the_model(loop: Loop) -> None:
    train(loop, lambda m, h, y: Reverse.apply(h, 0.3), inside=False)
    train(loop, lambda m, h, y: OfClass.apply(h, y), inside=False)


@situation(LSQ, data=FORMS, slow=(1, 2, "zero1", "fsdp"))
def estimators_and_learned_steps_of_rows(loop: Loop) -> None:
    train(loop, lambda m, h, y: Sign.apply(h - 0.5, 0.7))
    train(loop, lambda m, h, y: LearnedStep.apply(h, m.step))
    train(loop, lambda m, h, y: LearnedStep.apply(h, m.step), inside=False)
    model = loop.model(Head())
    loss = model(loop.rows(torch.randn(6, 7)), loop.rows(torch.randint(0, 5, (6,))))
    loss.backward()
    loop.see(loss=loop.mean(loss))
    loop.see_gradients(model)


@situation("https://discuss.pytorch.org/t/gradient-clipping/2836", data=FORMS, slow=(1, 2, "zero1", "fsdp"))
def bounded_gradients_of_rows(loop: Loop) -> None:
    """Losses of a rank's rows have greater gradients, which a bound would change: refused where they are outside."""
    train(loop, lambda m, h, y: Bounded.apply(h, 1e-3))
    train(loop, lambda m, h, y: hooked(h, lambda g: g.clamp(-1e-3, 1e-3)))
    if loop.parts > 1:
        with pytest.raises(PlanError, match="is not linear in them"):
            train(loop, lambda m, h, y: Bounded.apply(h, 1e-3), inside=False)
        model = loop.model(Adversary(lambda m, h, y: Bounded.apply(h, 1e-3)), data_parallel_loss="average")
        y = torch.arange(3)
        losses(*model(torch.randn(3, 7), y, False), y).backward()


@situation(LSQ, ranks=(1,), data=("ddp",))
def gradients_of_the_whole_batch(loop: Loop) -> None:
    """Refused on data-parallel ranks, at the first call or by the first backward that computes so."""
    global WHOLE
    for of in (
        lambda m, h, y: ByNumber.apply(h, m.step),
        lambda m, h, y: Outliers.apply(h, m.step),
        lambda m, h, y: hooked(h, lambda g: g / g.norm()),
    ):
        if loop.parts > 1:
            with pytest.raises(PlanError, match="stays eager, which would see a rank's rows"):
                train(loop, of)
    torch.manual_seed(0)
    x, y = loop.rows(torch.randn(6, 7)), loop.rows(torch.randint(0, 5, (6,)))
    model = loop.model(Adversary(lambda m, h, y: Normed.apply(h, 0.5)))
    loss = model(x, y, True)
    loss.backward()
    loop.see(loss=loss)
    loop.see_gradients(model)
    if loop.parts > 1:
        loss = model(x, y, True)
        WHOLE = True
        try:
            with pytest.raises(UsageError, match="computes otherwise than when the graph was made"):
                loss.backward()
            model = loop.model(Adversary(lambda m, h, y: Normed.apply(h, 0.5)), data_parallel_loss="average")
            model(x, y, True).backward()
        finally:
            WHOLE = False
