"""Exceptions that the model's own code raises arrive as in eager mode: type and message, also in a later call."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from loop import Loop, situation
from torch import Tensor, nn

from megafx.errors import CaptureError, MegafxError, UsageError

EITHER = "https://github.com/huggingface/transformers/issues/24310"
HANDLED = "https://pytorch.org/docs/stable/notes/faq.html"
LONG = "https://github.com/karpathy/nanoGPT/issues/320"


class TooLong(ValueError):
    """The model's own."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.limit = nn.Embedding(11, 6), nn.Linear(6, 11), 8
        self.scales = {"half": 0.5, "one": 1.0}

    def forward(
        self, ids: Tensor | None = None, embeds: Tensor | None = None, scale: str = "one", labels: Tensor | None = None
    ) -> Tensor:
        if (ids is None) == (embeds is None):
            raise ValueError("You must specify exactly one of ids or embeds")
        x = embeds if ids is None else self.embed(ids)
        assert x is not None and x.dim() == 3, f"three dims are needed, and there are {x.dim()}"
        if x.shape[1] > self.limit:
            raise TooLong(f"a sequence of {x.shape[1]} tokens, and the longest is {self.limit}")
        out = self.head(x * self.scales[scale]).flatten(0, 1)
        return F.cross_entropy(out, out.argmax(-1) if labels is None else labels)


def seen(loop: Loop, call: Callable[[], Any]) -> None:
    """The type and the message of what a call raises."""
    try:
        call()
    except Exception as error:
        loop.see(error=f"{type(error).__name__}: {error}")
    else:
        loop.see(error=None)


@situation(EITHER, like="a_later_call_is_wrong")
def the_first_call_is_wrong(loop: Loop) -> None:
    model = loop.model(Net())
    seen(loop, lambda: model())
    seen(loop, lambda: model(torch.randint(11, (2, 9))))
    loss = model(torch.randint(11, (2, 5)))
    loss.backward()
    loop.see(loss=loss)
    loop.see_gradients(model)


@situation(LONG)
def a_later_call_is_wrong(loop: Loop) -> None:
    model = loop.model(Net())
    for size in (5, 9, 10, 6):
        seen(loop, lambda size=size: model(torch.randint(11, (2, size))).backward())  # type: ignore[misc]  # a default for size
    seen(loop, lambda: model(torch.randint(11, (2, 5)), scale="two"))
    seen(loop, lambda: model(torch.randint(11, (2, 5)), scale="half"))
    seen(loop, lambda: model(torch.randint(11, (2, 5)), torch.randn(2, 5, 6)))
    seen(loop, lambda: model(embeds=torch.randn(2, 6)))
    seen(loop, lambda: model(torch.randint(11, (2, 5)), labels=torch.zeros(3, dtype=torch.long)))
    loop.see_gradients(model)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (self.down(self.up(x).relu()) * mask)[:, : mask.shape[1]].mean()


@situation(HANDLED)
def what_torch_raises_is_caught_by_its_class(loop: Loop) -> None:
    """`except RuntimeError` around a step, as for batches that do not fit."""
    model, one = loop.model(Joined()), torch.ones(4, 6)
    wrong: list[tuple[Any, ...]] = [(torch.randn(4, 5), one), (torch.randn(4, 6), torch.ones(3, 6)), (None, one)]
    wrong += [(torch.randn(4, 6).float(), one), (torch.randn(4, 6),), (one, one, one), (torch.randn(4, 6), "mask")]
    for turn in range(2):
        for given in wrong:
            try:
                model(*given).backward()
            except RuntimeError:
                loop.see(caught="RuntimeError")
            except (TypeError, AttributeError) as error:
                loop.see(caught=isinstance(error, TypeError))
            else:
                loop.see(caught=None)
        loss = model(torch.randn(4 + turn, 6), one[:1])
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


def _backward(model: Any, x: Tensor) -> None:
    model(x).square().mean().backward()


class Counts(nn.Module):
    """Counts, keeps a list and calls hooks before it raises in its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.calls, self.seen = 0, list[Tensor]()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x.detach().mean())
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0))
        h = self.up(x)
        if self.calls == 2:
            raise TooLong(f"call {self.calls}")
        return self.down(h.relu()).square().mean()


@situation("https://github.com/Lightning-AI/pytorch-lightning/issues/9580")
def a_loop_goes_on_after_an_error(loop: Loop) -> None:
    """What forward and hooks have done before the error counts, so that the next call does not raise again."""
    model, calls = Counts(), list[str]()
    model.up.register_forward_hook(lambda module, args, out: calls.append("up"))
    model = loop.model(model)
    for _ in range(4):
        x = torch.randn(5, 6)
        seen(loop, functools.partial(_backward, model, x))
        loop.see(calls=model.calls, kept=torch.stack(model.seen), hooks=list(calls), mean=model.mean)
    loop.see_gradients(model)


class Positive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.linear(x)
        raise TooLong("numbers above 0 are wanted")


@situation("https://github.com/Lightning-AI/pytorch-lightning/issues/9580")
def a_part_that_stays_eager_raises_for_some_data(loop: Loop) -> None:
    model = loop.model(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), Positive()))
    for sign in (1, -1, 1):
        with torch.no_grad():
            model[2].bias.fill_(9.0 * sign)
        x = torch.randn(5, 6)
        seen(loop, functools.partial(_backward, model, x))
    loop.see_gradients(model)


class Fails(Counts):
    """As `Counts`, with dropout that drops nothing; raises if `limit` is set."""

    limit = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x.detach().mean())
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0))
        h = F.dropout(self.up(x), 1e-300, self.training)
        if self.limit:
            raise TooLong(f"call {self.calls}")
        return self.down(h.relu()).square().mean()


def state_of(model: Any) -> list[Any]:
    return [model.calls, [float(x) for x in model.seen], model.mean.clone(), torch.get_rng_state()]


@situation("https://github.com/Lightning-AI/pytorch-lightning/issues/9580", ranks=(2,))
def one_rank_raises_alone(loop: Loop) -> None:
    """An error on every rank, of which nothing is left: the next call is as if it had not been."""
    model, batches = loop.model(Fails()), torch.randn(5, 6, 6)  # before dropout draws other numbers than eager mode's
    for step, x in enumerate(batches):
        if step in (0, 2, 3) and not loop.eager:
            before, model.limit = state_of(model), dist.get_rank() == 1
            with pytest.raises(
                (TooLong, MegafxError)
            ):  # an AgreementError where a graph is known: ranks hold other attributes
                model(x)
            model.limit = False
            assert str(state_of(model)) == str(before)
        loss = model(x)
        loss.backward()
        loop.see(loss=loss, calls=model.calls, mean=model.mean, kept=torch.stack(model.seen))
    loop.see_gradients(model)


@situation(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/9580", ranks=(), data=("ddp", "fsdp"), slow=("fsdp",)
)
def a_data_parallel_rank_raises_alone(loop: Loop) -> None:
    """Its batch does not fit the model; it leaves the batch out and makes the next call, in which it meets the other rank."""
    model, batches = loop.model(Fails()), torch.randn(5, 6, 6)  # before dropout draws other numbers than eager mode's
    for step, x in enumerate(batches):
        if not loop.eager and (step == 4 or (step in (0, 2) and dist.get_rank() == 1)):  # in the last step both do
            before, model.limit = state_of(model), True
            with pytest.raises(TooLong, match=f"call {model.calls + 1}"):
                model(loop.rows(x))
            model.limit = False
            assert str(state_of(model)) == str(before)
        loss = model(loop.rows(x))
        loss.backward()
        loop.see(loss=loss, calls=model.calls, mean=model.mean)
    loop.see_gradients(model)


class Scored(nn.Module):
    """x [rows, 8] -> what a function of the user's makes of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.score = nn.Linear(8, 6), torch.sum

    def forward(self, x: Tensor, score: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return (score or self.score)(self.linear(x))


@situation("https://discuss.pytorch.org/t/is-it-possible-to-calculate-the-loss-inside-the-forward-function/27297")
def a_loss_function_is_given_as_an_argument(loop: Loop) -> None:
    """Refused, on several ranks too; the advice is followed."""
    model, x = loop.model(Scored()), torch.randn(3, 8)
    if not loop.eager:
        with pytest.raises(CaptureError, match=r"(?s)builtins.function, which cannot enter.*an attribute of the model"):
            model(x, lambda y: y.square().mean())
    for scale in (1.0, 2.0):
        model.score = lambda y, by=scale: (by * y).square().mean()
        loss = model(x)
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


class Heads(nn.Module):
    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, x: Tensor, part: str) -> Tensor:
        return self.parts[part](x)


@situation("https://discuss.pytorch.org/t/how-to-share-weights-between-two-models/5004", ranks=(2,))
def two_models_share_a_part(loop: Loop) -> None:
    """Refused where parameters are cut; the advice is followed."""
    trunk = nn.Linear(8, 9)
    parts = {name: nn.Sequential(trunk, nn.Tanh(), nn.Linear(9, 4)) for name in ("actor", "critic")}
    if not loop.eager:
        copies = copy.deepcopy(parts)
        loop.model(copies["actor"])(torch.randn(3, 8))
        with pytest.raises(UsageError, match=r"(?s)is parallelized already.*put into one module"):
            loop.model(copies["critic"])
    torch.manual_seed(1)
    model, x = loop.model(Heads(parts)), torch.randn(3, 8)
    (model(x, "actor").square().mean() + model(x, "critic").sum()).backward()
    loop.see_gradients(model)


@situation(
    "https://github.com/facebookresearch/fairseq/blob/main/fairseq/trainer.py"
)  # it skips a batch on such an error
def a_loop_catches_runtime_errors_of_backward(loop: Loop) -> None:
    model = loop.model(nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(3, 8, requires_grad=True)
        loss, caught = model(x).square().mean(), False
        try:
            if step == 1:
                loss.backward()
            if step == 2:
                with torch.no_grad():
                    model[2].weight.mul_(0.5)
            if step == 3:
                with torch.no_grad():
                    model[2].weight.add_(0.5)
                torch.autograd.grad(loss, x, create_graph=True)
            loss.backward()
        except RuntimeError:
            caught = True
            optimizer.zero_grad()
        optimizer.step()
        loop.see(loss=loss, caught=caught)
        optimizer.zero_grad()
    loop.see_state(model)
