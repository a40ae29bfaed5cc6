"""Hooks on what a call returns, and `retain_grad()` of it, where other outputs depend on that: a loss on its logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loop import Loop, situation
from loop_hooks import Net, ids
from torch import Tensor, nn
from torch.nn import functional as F

from megafx.errors import UsageError

RETAINED = "https://discuss.pytorch.org/t/why-cant-i-see-grad-of-an-intermediate-variable/94"
HOOKED = "https://github.com/pytorch/pytorch/issues/598"


class WithLoss(nn.Module):
    """Ids -> loss and logits; keeps features."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.features = Net(), torch.zeros(())

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        self.features = self.net.blocks[0](self.net.embed(tokens))
        logits = self.net.head(self.net.blocks[1](self.features))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), "logits": logits}


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(x))
        return h, self.second(h)


@situation(RETAINED)
def gradients_of_outputs_are_retained(loop: Loop) -> None:
    model = loop.model(WithLoss())
    for more in (0.0, 1.0):
        out = model(ids())
        out["logits"].retain_grad()
        model.features.retain_grad()
        (out["loss"] * 3 + more * out["logits"].square().mean()).backward(retain_graph=True)
        out["loss"].backward()
        loop.see(logits=out["logits"].grad, features=model.features.grad)
    loop.see_gradients(model)


@situation(HOOKED)
def hooks_on_outputs_change_and_record_gradients(loop: Loop) -> None:
    """A hook that is not linear, one that records, one that is taken away, one in a call whose input needs a gradient."""
    seen: list[Any] = []
    model = loop.model(Halves())
    for _ in range(2):
        x = torch.randn(3, 6, requires_grad=True)
        h, y = model(x)
        h.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        h.register_hook(lambda grad: seen.append(grad.clone()))
        h.register_hook(lambda grad: grad * 100).remove()
        y.register_hook(lambda grad: grad * 2)
        (y.square().sum() + h.sum()).backward()
        loop.see(x=x.grad)
    loop.see(seen=seen)
    loop.see_gradients(model)


@situation("https://discuss.pytorch.org/t/calculating-the-gradient-of-the-loss-with-respect-to-logits/100912")
def gradients_with_respect_to_an_output(loop: Loop) -> None:
    """Together with parameters: refused; the advice is followed."""
    model = loop.model(WithLoss())
    for again in (False, True):
        out = model(ids())
        logits, first = out["logits"], next(model.parameters())
        loop.see(alone=torch.autograd.grad(logits.square().sum(), logits, retain_graph=True)[0])
        both = out["loss"] + logits.square().mean()
        if loop.eager:
            wanted, _ = torch.autograd.grad(both, [logits, first], retain_graph=True, create_graph=again)
        else:
            with pytest.raises(
                UsageError, match=r"(?s)the output 'logits'.* by themselves first: torch.autograd.grad\(\.\.\."
            ):
                torch.autograd.grad(both, [logits, first], retain_graph=True, create_graph=again)
            (wanted,) = torch.autograd.grad(both, logits, retain_graph=True, create_graph=again)
        torch.autograd.grad(both, first, retain_graph=True)
        loop.see(wanted=wanted)
        (wanted.square().sum() if again else both).backward()
        loop.see_gradients(model)


@situation("https://github.com/pytorch/captum/issues/128")
def gradients_of_a_loss_with_respect_to_what_it_depends_on(loop: Loop) -> None:
    """By way of other outputs alone (None in autograd): refused, with `allow_unused` too; the advice is followed."""
    model, x = loop.model(Between()), torch.randn(3, 6)
    for of, wrt in (("loss", "y"), ("loss", "h"), ("y", "h")):
        out = model(x)
        if loop.eager:
            (wanted,) = torch.autograd.grad(out[of].sum(), out[wrt])
        else:
            with pytest.raises(
                UsageError, match=rf"the output '{wrt}'.*\n  fix: add it.* \+ 0 \* {wrt}.sum\(\), {wrt}\)"
            ):
                torch.autograd.grad(out[of].sum(), [out[wrt]], None, True, False, True)
            with pytest.raises(UsageError, match=rf"the output '{wrt}'.*\n  fix: call {wrt}.retain_grad\(\)"):
                out[of].sum().backward(inputs=[out[wrt]], retain_graph=True)
            assert out[wrt].grad is None
            (wanted,) = torch.autograd.grad(out[of].sum() + 0 * out[wrt].sum(), out[wrt], retain_graph=True)
            out[wrt].retain_grad()
            out[wrt].grad = None  # backward(inputs=...) has let autograd retain it
            out[of].sum().backward()
            assert torch.allclose(out[wrt].grad, wanted, rtol=1e-12)
        loop.see(wanted=wanted)
    model.zero_grad()
    out = model(x)
    out["h"].backward(torch.ones(3, 9), retain_graph=True)
    torch.autograd.backward(
        [out["h"], out["loss"]], [torch.ones(3, 9), None], retain_graph=True, inputs=[*model.parameters()]
    )
    loop.see_gradients(model)
    loop.see(none=torch.autograd.grad(out["loss"], out["apart"], allow_unused=True))
    model.zero_grad()
    (out["h"].sum() * 2).backward(inputs=[*model.first.parameters()])
    loop.see_gradients(model)


class Between(Halves):
    """Returns what the loss depends on, and what it does not."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]  # another form of output
        h, y = super().forward(x)
        return {"loss": y.square().mean(), "y": y, "h": h, "apart": self.first(x) * 2}
