"""Outputs beside a loss: terms of the user's own loss that are computed from them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from loop import Loop, situation
from torch import Tensor, nn
from torch.nn import functional as F

KL = "https://github.com/huggingface/transformers/issues/25182"
WEIGHTED = "https://github.com/huggingface/transformers/issues/7024"


class LM(nn.Module):
    """A language model of one block, which returns what those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(29, 12), nn.LayerNorm(12), nn.Linear(12, 29, bias=False)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        states = [self.embed(ids)]
        states.append(states[-1] + self.down(F.gelu(self.up(states[-1]))))
        states.append(self.norm(states[-1]))
        logits = self.head(states[-1])
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits, tuple(states))


class Output(NamedTuple):
    """loss: 0-d, or None. logits: [B, S, V]. hidden_states: [B, S, H] each."""

    loss: Any
    logits: Tensor
    hidden_states: tuple[Tensor, ...]


def batch(rows: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(0, 29, (rows, 7))
    return {"ids": ids, "labels": ids}


def kl(logits: Tensor) -> Tensor:
    teacher = torch.linspace(-1, 1, logits.shape[-1]).softmax(-1).expand(logits.shape)
    return F.kl_div(logits.log_softmax(-1), teacher, reduction="batchmean")


@situation(KL, like="hidden_states_are_used_beside_the_loss")
def a_term_of_the_logits_is_added_to_the_loss(loop: Loop) -> None:
    model = loop.model(LM())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        out = model(**batch())
        loss = out.loss + 0.5 * kl(out.logits)
        loop.see(loss=loss, needs=(out.loss.requires_grad, out.logits.requires_grad, out.logits.is_leaf))
        optimizer.zero_grad()
        loss.backward()
        loop.see_gradients(model)
        optimizer.step()


@situation(WEIGHTED, like="hidden_states_are_used_beside_the_loss")
def the_users_loss_of_logits_alone_with_labels_given(loop: Loop) -> None:
    model = loop.model(LM())
    for _ in range(2):
        given = batch(3)
        logits = model(**given).logits.float().double()
        F.cross_entropy(logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten(), label_smoothing=0.1).backward()
        loop.see_gradients(model)


@situation("https://github.com/huggingface/transformers/issues/24001")
def hidden_states_are_used_beside_the_loss(loop: Loop) -> None:
    model = loop.model(LM())
    for step in range(3):  # not in the first step, which trains by the loss alone
        out = model(**batch())
        loss = out.loss
        if step:
            loss = loss + out.hidden_states[-1].square().mean() + out.hidden_states[0].sin().mean()
        (loss / 3).backward()
        loop.see(loss=loss)
        loop.see_gradients(model)


@situation(KL)
def terms_are_accumulated_over_micro_batches(loop: Loop) -> None:
    model = loop.model(LM())
    outputs = [model(**batch(rows)) for rows in (2, 3, 2)]
    for out in outputs[:2]:
        (out.loss + kl(out.logits)).backward()
    outputs[2].loss.backward(retain_graph=True)
    loop.see_gradients(model)
    outputs[2].logits.square().mean().backward()
    loop.see_gradients(model)
    try:
        outputs[0].logits.sum().backward()
    except Exception:
        loop.see(second_backward="refused")


class Noisy(nn.Module):
    """Dropout, batch norm, and three values: a loss, a prediction, a value without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.drop, self.down = (
            nn.Linear(6, 15, bias=False),
            nn.BatchNorm1d(15),
            nn.Dropout(0.0),
            nn.Linear(15, 7),
        )
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        h = self.drop(self.norm(self.up(x)).relu())
        out = self.down(h)
        with torch.no_grad():
            target = out.softmax(-1)
        return {"loss": F.cross_entropy(out, y), "out": out * self.temperature, "h": h, "target": target}


@situation(
    "https://github.com/pytorch/pytorch/issues/67043",
    like="weights_that_are_not_finite_are_mended_before_they_are_used",
)
def buffers_are_written_once_where_a_call_is_computed_again(loop: Loop) -> None:
    model = loop.model(Noisy())
    for _ in range(3):
        x = torch.randn(5, 6, requires_grad=True)
        out = model(x, torch.arange(5))
        loop.see(needs={name: value.requires_grad for name, value in out.items()})
        (out["loss"] + out["h"].mean() + (out["out"] - out["target"]).square().mean()).backward()
        loop.see(gradient_of_x=x.grad)
        loop.see_gradients(model)
        loop.see_state(model)


@situation(KL)
def outputs_beside_a_loss_are_read_without_gradients(loop: Loop) -> None:
    model = loop.model(LM())
    out = model(**batch())
    with torch.no_grad():
        loop.see(probabilities=out.logits.softmax(-1))
    loop.see(best=out.logits.argmax(-1), value=out.logits.detach() + 0, data=out.logits.data * 1)
    leaf = out.logits.detach().requires_grad_()
    kl(leaf).backward()
    loop.see(gradient_of_logits=leaf.grad)
    out.logits.retain_grad()
    (out.loss + kl(out.logits)).backward()
    loop.see_gradients(model)
    model.eval()
    with torch.no_grad():
        out = model(**batch())
    loop.see(loss=out.loss, logits=out.logits)


@situation(KL, like="terms_are_accumulated_over_micro_batches")
def a_gradient_with_respect_to_parameters_is_asked_for(loop: Loop) -> None:
    model = loop.model(LM())
    out = model(**batch())
    weight = model.norm.weight
    (found,) = torch.autograd.grad(out.loss + out.logits.square().mean(), [weight])
    loop.see(gradient=found)
