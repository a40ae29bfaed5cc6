"""Forward writes into the tensors that it was given, and the caller sees it: tokens, masks, caches, statistics, embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loop import Loop, situation
from torch import Tensor, nn

from megafx.errors import UsageError

IDS = "https://github.com/huggingface/transformers/issues/11056"
CACHE = "https://github.com/pytorch/pytorch/issues/121679"
LEAF = "https://discuss.pytorch.org/t/leaf-variable-was-used-in-an-inplace-operation/308"


class Net(nn.Module):
    """What `write` does to the arguments, and then a loss of them. writes: before the model computes with them."""

    def __init__(self, write: Callable[..., Any], late: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.write, self.late = write, late

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        h = self.up(x) if self.late else None
        self.write(x, other)
        h = self.up(x) if h is None else h
        out = self.down(F.gelu(h))
        return out.square().mean() + (0 if other is None else other.double().mean() * out.mean())


def train(loop: Loop, model: nn.Module, *arguments: Callable[[], Tensor], calls: int = 3) -> None:
    """Calls with and without gradients: the loss, and what each argument is after it."""
    model = loop.model(model)
    for number in range(calls):
        given = [make() for make in arguments]
        with torch.set_grad_enabled(number != 1):
            loss = model(*given)
        loop.see(loss=loss, after=given)
        if number != 1:
            loss.backward()
            loop.see_gradients(model)


def rows() -> Tensor:
    return torch.randn(4, 6)


@situation(LEAF, like="an_input_is_scaled_under_no_grad_and_by_detach")
def an_input_is_scaled(loop: Loop) -> None:
    train(loop, Net(lambda x, other: x.mul_(2)), rows)


@situation(LEAF)
def an_input_is_scaled_under_no_grad_and_by_detach(loop: Loop) -> None:
    def write(x: Tensor, other: Tensor) -> None:
        with torch.no_grad():
            x.add_(1)
        x.detach()[:, 1:3].zero_()

    train(loop, Net(write), rows)


@situation(CACHE, like="a_part_of_a_buffer_is_written_through_data")
def rows_and_columns_of_an_input_are_replaced(loop: Loop) -> None:
    def write(x: Tensor, other: Tensor) -> None:
        x[:, 0] = 1.0
        x[1:3].mul_(3)
        other[other > 0] = 0.5
        other.t()[2].copy_(x[0, :4])

    train(loop, Net(write), rows, rows)
    train(loop, Net(write), lambda: rows()[:, ::1], lambda: torch.randn(6, 4).t())


@situation(IDS, like="one_graph_serves_labels_that_are_the_input")
def tokens_and_a_mask_are_written(loop: Loop) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)

        def forward(self, ids: Tensor, mask: Tensor, labels: Tensor | None = None) -> Any:
            ids[:, 0] = 1
            mask.masked_fill_(ids == 3, 0)
            out = self.head(self.embed(ids) * mask[..., None])
            return out if labels is None else F.cross_entropy(out.flatten(0, 1), labels.flatten())

    model = loop.model(Model())
    for size in (5, 5, 7):
        ids, labels = torch.randint(11, (3, size)), torch.randint(11, (3, size))
        mask = torch.ones(3, size, dtype=torch.long)
        loss = model(ids, mask=mask, labels=labels)
        loss.backward()
        loop.see(loss=loss, ids=ids, mask=mask, labels=labels)
        with torch.no_grad():
            loop.see(out=model(ids[:, :4], mask[:, :4]), ids=ids)
    loop.see_gradients(model)


@situation(CACHE)
def keys_and_values_are_put_into_the_callers_cache(loop: Loop) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor, cache: dict[str, Tensor], position: Tensor) -> Tensor:
            b, s, _ = x.shape
            q, k, v = (f(x).view(b, s, 2, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
            cache["k"][:, :, position] = k
            cache["v"].index_copy_(2, position, v)
            seen = torch.arange(cache["k"].shape[2]) <= position[:, None]
            out = F.scaled_dot_product_attention(q, cache["k"], cache["v"], attn_mask=seen)
            return self.o(out.transpose(1, 2).reshape(b, s, 8))

    model, both = loop.model(Attention().eval()), torch.zeros(2, 2, 2, 7, 4)
    cache = {"k": both[0], "v": both[1]}  # parts of one tensor
    with torch.no_grad():
        for positions in ([0, 1, 2], [3], [4]):
            out = model(torch.randn(2, len(positions), 8), cache, torch.tensor(positions))
            loop.see(out=out, both=both)


@situation(LEAF)
def what_requires_a_gradient_is_written(loop: Loop) -> None:
    """By a layer before the model, whose gradient goes on through what the model wrote; a leaf is an error."""
    first, model = nn.Linear(6, 6), loop.model(Net(lambda x, other: x.mul_(2).add_(1)))
    for _ in range(2):
        x = first(torch.randn(4, 6))
        loss = model(x)
        (loss + x.square().sum()).backward()
        loop.see(loss=loss, x=x, first=first.weight.grad)
    loop.see_gradients(model)
    loop.see_error(lambda: model(torch.randn(4, 6, requires_grad=True)))
    loop.see_error(lambda: model(nn.Parameter(torch.randn(4, 6))))


@situation(LEAF)
def a_state_with_a_gradient_is_put_into_an_argument(loop: Loop) -> None:
    """A buffer of the caller's that gets a gradient by what is written into it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

        def forward(self, x: Tensor, out: Tensor) -> None:
            out.copy_(self.down(F.gelu(self.up(x))))

    model = loop.model(Model())
    for _ in range(2):
        out = torch.zeros(4, 6)
        loop.see(result=model(torch.randn(4, 6), out), out=out)
        out.square().mean().backward()
    loop.see_gradients(model)


@situation(LEAF)
def what_is_written_is_returned(loop: Loop) -> None:
    """As the caller's own tensor."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            same = x.clamp_(min=0)
            return self.up(x.clone()).relu_(), same

    model = loop.model(Model())
    for _ in range(2):
        x = torch.randn(4, 6)
        h, same = model(x)
        loop.see(h=h, same=same is x)
        same.add_(1)
        loop.see(x=x)
        h.sum().backward()
    loop.see_gradients(model)


@situation(LEAF)
def an_input_is_written_after_it_was_used(loop: Loop) -> None:
    """Without gradients. (Eager mode's backward is an error.)"""
    model = loop.model(Net(lambda x, other: x.zero_(), late=True))
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(4, 6)
            loop.see(loss=model(x), x=x)


@situation(LEAF, like="a_check_has_a_message_with_numbers")
def outputs_beside_the_loss_of_a_call_that_writes(loop: Loop) -> None:
    """The call is computed once more for their gradients: from what the argument was."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 5)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            x.mul_(0.5).add_(1)
            logits = self.down(F.gelu(self.up(x)))
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    model = loop.model(Model())
    for _ in range(2):
        x, labels = torch.randn(4, 6), torch.randint(5, (4,))
        out = model(x, labels)
        loop.see(x=x, loss=out["loss"])
        (out["loss"] + out["logits"].square().mean()).backward()
        loop.see_gradients(model)


class Statistics(nn.Module):
    """Writes into tensors that are no buffers: of an attribute, a dict and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.mean, self.seen, self.last = torch.zeros(9), {"calls": torch.zeros(())}, [torch.zeros(2, 9)]

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        self.seen["calls"] += 1
        self.last[0][0] = self.last[0][1]
        self.last[0][1] = self.mean
        return self.down(h / (1 + self.mean.abs())).square().mean()


@situation(CACHE, slow=("fsdp",), data=("ddp", "fsdp"))
def tensors_of_attributes_are_written(loop: Loop) -> None:
    model = loop.model(Statistics())
    before = model.mean, model.last[0]
    for _ in range(3):
        loss = model(loop.rows(torch.randn(6, 6)))
        loss.backward()
        loop.see(loss=loss, mean=model.mean, calls=model.seen["calls"], last=model.last[0])
    loop.see_gradients(model)
    loop.see(same=[before[0] is model.mean, before[1] is model.last[0]])


@situation(CACHE)
def arguments_that_share_memory(loop: Loop) -> None:
    """Refused; parts of one tensor that do not overlap are not. The advice is followed."""
    model, whole = loop.model(Net(lambda x, other: x.mul_(2))), torch.randn(8, 6)
    loop.see(loss=model(whole[:4], whole[4:]), whole=whole)
    other = whole[1:5]
    if not loop.eager:
        with pytest.raises(UsageError, match="writes into its argument 'x', which shares memory with 'other'"):
            model(whole[:4], other)
    x = whole[:4].clone()
    loop.see(loss=model(x, other.clone()), x=x)


@situation(CACHE, ranks=(), data=("ddp", "fsdp"))
def rows_of_each_rank_are_written(loop: Loop) -> None:
    """And what has no rows: statistics of the whole batch."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

        def forward(self, x: Tensor, total: Tensor) -> Tensor:
            x[:, 0] = 1.0
            h = F.gelu(self.up(x.clone()))
            x[:, 1:3] = h[:, :2].detach()
            total.add_(h.detach().sum(0))
            return self.down(h).square().mean()

    model, total = loop.model(Model()), torch.zeros(9)
    for _ in range(2):
        whole = torch.randn(6, 6)
        x = loop.rows(whole).clone()
        loss = model(x, total)
        loss.backward()
        loop.see(loss=loss, total=total, x=loop.mean(x.sum(0)) * loop.parts)
    loop.see_gradients(model)


@situation(LEAF)
def a_leaf_is_written_where_no_gradient_is_wanted(loop: Loop) -> None:
    """Under no_grad, from the first call on, whose training form decides how the model is cut."""
    model, x = loop.model(Net(lambda x, other: x.mul_(2))), torch.randn(4, 6, requires_grad=True)
    for _ in range(2):
        with torch.no_grad():
            loop.see(loss=model(x), x=x)
    model(torch.randn(4, 6)).backward()
    loop.see_gradients(model)
