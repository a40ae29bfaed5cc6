"""Hooks on what a call returns, and `retain_grad()` of it, where other outputs depend on that: a loss on its logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from loop import Loop, situation
from loop_hooks import Net, ids
from torch import Tensor, nn
from torch.nn import functional as F

from megafx.errors import UsageError

LOGITS = "https://discuss.pytorch.org/t/calculating-the-gradient-of-the-loss-with-respect-to-logits/100912"
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


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(9, 5), nn.Linear(9, 5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.first(x)), torch.tanh(self.second(y))


@situation(RETAINED, like="gradients_with_respect_to_an_output")
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


@situation(HOOKED, like="gradients_of_a_loss_with_respect_to_what_it_depends_on")
def a_hook_on_an_output_that_another_call_takes(loop: Loop) -> None:
    """The second model has a part that a loss may leave out, and a gradient of its input only through the other one."""
    seen: list[Any] = []
    first, second = loop.model(Halves()), loop.model(Parts())
    for used in (0, 1):
        h, y = first(torch.randn(3, 6))
        h.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        h.register_hook(lambda grad: seen.append(grad.clone()))
        (second(h, torch.randn(3, 9))[used].square().sum() + y.square().sum()).backward()
        loop.see(seen=list(seen))
    for model in (first, second):
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


@situation(LOGITS)
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
    """By way of other outputs alone."""
    model, x = loop.model(Between()), torch.randn(3, 6)
    for wrt in ("y", "h"):
        out, first = model(x), model.first.weight
        (alone,) = torch.autograd.grad(out["loss"], out[wrt], retain_graph=True)
        both = torch.autograd.grad(out["loss"] + out["y"].square().sum(), [out["y"], out["h"]], retain_graph=True)
        out["loss"].backward(inputs=[out[wrt]], retain_graph=True)
        loop.see(alone=alone, both=both, kept=out[wrt].grad, none=first.grad)
        (again,) = torch.autograd.grad(out["loss"], out[wrt], retain_graph=True, create_graph=True)
        (again.square().sum() + out["loss"]).backward()
        loop.see_gradients(model)
        out = model(x)
        (out["loss"] + out[wrt].square().sum()).backward(inputs=[out[wrt], first])
        loop.see(kept=out[wrt].grad)
        loop.see_gradients(model)
        out = model(x)
        out["loss"].mul_(2).backward()
        loop.see_gradients(model)


@situation("https://github.com/pytorch/captum/issues/128")
def gradients_of_an_output_with_respect_to_one_between(loop: Loop) -> None:
    """Of an output on which a third one depends: refused, with `allow_unused` too; the advice is followed."""
    model, x = loop.model(Between()), torch.randn(3, 6)
    out = model(x)
    y, h = out["y"], out["h"]
    if loop.eager:
        (wanted,) = torch.autograd.grad(y.sum(), h, retain_graph=True)
    else:
        with pytest.raises(UsageError, match=r"the output 'h'.*\n  fix: add it.* \+ 0 \* h.sum\(\), h\)"):
            torch.autograd.grad(y.sum(), [h], None, True, False, True)
        with pytest.raises(UsageError, match=r"the output 'h'.*\n  fix: call h.retain_grad\(\)"):
            y.sum().backward(inputs=[h], retain_graph=True)
        assert h.grad is None
        (wanted,) = torch.autograd.grad(y.sum() + 0 * h.sum(), h, retain_graph=True)
        h.retain_grad()
        h.grad = None  # backward(inputs=...) has let autograd retain it
        y.sum().backward()
        assert torch.allclose(h.grad, wanted, rtol=1e-12)
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


@situation(LOGITS, rtol=1e-5, like="gradients_with_respect_to_an_output")  # transformers computes losses in fp32
def gradients_of_a_language_models_loss_with_respect_to_logits(loop: Loop) -> None:
    """With the defaults of transformers, which keeps a cache in eager mode; for a penalty too."""
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=1,
        attn_implementation="eager",
    )
    model, tokens = loop.model(transformers.LlamaForCausalLM(config).double()), torch.arange(10).view(2, 5)
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 0, 1]])
    out = model(tokens, labels=tokens, position_ids=positions)
    (found,) = torch.autograd.grad(out.loss, out.logits, retain_graph=True)
    out.loss.backward()
    loop.see(found=found, cleared=[p.grad is None for p in model.parameters()])
    model.zero_grad()
    embeds = torch.randn(2, 5, 8, requires_grad=True)
    out = model(inputs_embeds=embeds, labels=tokens, position_ids=positions)
    (found,) = torch.autograd.grad(out.loss, embeds, create_graph=True)
    (out.loss + found.square().sum()).backward()
    loop.see(embeds=embeds.grad)
    loop.see_gradients(model)


class Between(Halves):
    """Returns what the loss depends on, and what it does not."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]  # another form of output
        h, y = super().forward(x)
        return {"loss": y.square().mean(), "y": y, "h": h, "apart": self.first(x) * 2}
