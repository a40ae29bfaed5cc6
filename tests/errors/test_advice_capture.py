"""Covers: the advice of errors of capture: each is raised by a model, and by the model that follows the advice it is not:
output and gradients are then those of eager mode, on one rank."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import os
import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from advice import refused
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import checkpoint

import megafx
from megafx.capture.export import capture_call
from megafx.config import Config

ONE = Config(tensor_model_parallel_size=1, cache=False, uncaptured="error")
X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(2, 3, 4)
DRAWN = torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


class Block(nn.Module):
    """forward is fn(self, x); layers, a table and a list to play with."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn, self.seen, self.memo, self.limit, self.odd = fn, [], {}, 0, Odd(2.0)
        self.lin, self.more, self.table = nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(4, 4)
        self.register_buffer("buffer", torch.zeros(4))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(self, *args, **kwargs)

    def keep(self, grad: Tensor) -> None:
        self.kept = grad


class Net(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(4, 4), Block(fn)

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.block(self.first(x), **kwargs)


def made(fn: Callable[..., Any]) -> nn.Module:
    torch.manual_seed(0)
    return Net(fn).double()


def call(fn: Callable[..., Any], config: Config = ONE, **kwargs: Any) -> None:
    megafx.parallelize(made(fn), config)(X, **kwargs)


def works(fn: Callable[..., Any], config: Config = ONE, model: nn.Module | None = None, **kwargs: Any) -> None:
    """Two calls of it are those of eager mode: outputs and gradients."""
    eager = made(fn) if model is None else model
    ours = megafx.parallelize(copy.deepcopy(eager), config)
    for scale in (1.0, -0.5):
        found = []
        for net in (eager, ours):
            net.zero_grad()
            x = (X * scale).requires_grad_()
            out = net(x, **kwargs)
            out.square().sum().backward()
            grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in net.named_parameters()}
            found.append({"output": out.detach(), "x": x.grad} | grads)
        torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


def eager(fn: Callable[..., Any]) -> None:
    """The other way that the advice names: the module is left out of the graph."""
    works(fn, Config(tensor_model_parallel_size=1, cache=False, eager_modules=["block"]))


def _with_chosen(y: Tensor, of_rows: Callable[[Tensor], Tensor]) -> Tensor:
    rows, total = y[y.sum(-1) > 0], y.sum()
    if rows.shape[0] > 0:
        total = total + of_rows(rows)
    return total


DECISIONS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "a branch": (
        "a Python decision (`if`, `while`, `assert`, `bool()`, `int()`) depends on the data of a tensor",
        lambda m, x: m.lin(x) if x.sum() > 0 else x,
        lambda m, x: torch.where(x.sum() > 0, m.lin(x), x),
    ),
    "a draw": (
        "a Python decision (`if`, `while`) depends on a number that forward draws: a graph would keep the answer",
        lambda m, x: x if torch.rand(()) < -1.0 else m.lin(x),
        lambda m, x: torch.where(torch.rand(()) < -1.0, x, m.lin(x)),
    ),
    "a number of a draw": (
        "a Python decision (`if`, `while`) depends on a number that forward draws: a graph would keep the answer",
        lambda m, x: x if m.training and torch.rand(1).item() > 2.0 else m.lin(x),
        lambda m, x: torch.where(torch.rand(()) > 2.0, x, m.lin(x)),
    ),
    "a number": (
        "a tensor's data becomes a Python number (`.item()`, `.tolist()`, `.numpy()`, `int(tensor)`)",
        lambda m, x: m.lin(x) * x.max().item(),
        lambda m, x: m.lin(x) * x.max(),
    ),
    "a text": (
        "<what> becomes a text while the model is captured, when it has no value",
        lambda m, x: m.lin(x) if f"{x.sum().item():.3f}" else x,
        lambda m, x: m.lin(x),
    ),
    "a mean of none": (
        "code asks whether there are any rows, and <target> of none is no number: the graph would compute it",
        lambda m, x: _with_chosen(m.lin(x), lambda rows: rows.mean()),
        lambda m, x: _with_chosen(m.lin(x), lambda rows: rows.sum() / max(rows.shape[0], 1)),
    ),
    "vmap": (
        "a transform of torch.func (vmap, grad, vjp, jvp) inside of the model",
        lambda m, x: torch.vmap(lambda row: m.lin(row) * row.sum())(x),
        lambda m, x: m.lin(x) * x.sum((1, 2), keepdim=True),
    ),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_what_depends_on_data(name: str) -> None:
    row, wrong, right = DECISIONS[name]
    with refused(row) as error:
        call(wrong)
    works(right)
    if "eager_modules" in error[0].fix:
        eager(wrong)


def test_rows_that_data_select() -> None:
    def wrong(m: Any, x: Tensor) -> Tensor:
        rows = (x.sum(-1) > 0).nonzero()
        return m.lin(x) if len(rows) > 1 else x

    with refused("a Python decision (`if`, `while`, `assert`, `len()`) depends on how many rows"):
        call(wrong)
    eager(wrong)

    def asks_nothing(m: Any, x: Tensor) -> Tensor:
        out, rows = torch.zeros_like(x).flatten(0, 1), (x.sum(-1) > 0).flatten().nonzero().squeeze(-1)
        return out.index_add(0, rows, m.lin(x.flatten(0, 1)[rows]))

    works(asks_nothing)

    def unique(m: Any, x: Tensor) -> Tensor:
        return m.lin(x)[torch._unique2((x > 0).long())[0]].sum()

    with refused("<what> depends on the data of a tensor"):
        call(unique)
    works(lambda m, x: torch.where(x > 0, m.lin(x), 0.0))


def test_whether_anything_is_padding() -> None:
    """As ESM-2 and fairseq ask before they use a mask."""

    def wrong(m: Any, x: Tensor) -> Tensor:
        padding = x.sum(-1) > 10
        if not padding.any():
            padding = None
        return m.lin(x) if padding is None else m.lin(x.masked_fill(padding[..., None], 0.0))

    with refused("a Python decision (`if`, `while`, `assert`) depends on whether an element of a tensor is true"):
        call(wrong)
    eager(wrong)
    works(lambda m, x: m.lin(x.masked_fill((x.sum(-1) > 10)[..., None], 0.0)))


LINES = io.StringIO()
CHANGES: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "a value with a gradient is written": (
        "<found>, which cannot be made functional",
        lambda m, x: _doubled(m.lin(x)),
        lambda m, x: m.lin(x) * 2,
    ),
    "sparse gradients": (
        "an embedding with sparse=True has a sparse gradient",
        lambda m, x: F.embedding((x > 0).long(), m.table.weight, sparse=True),
        lambda m, x: F.embedding((x > 0).long(), m.table.weight),
    ),
    "least squares": (
        "torch.linalg.lstsq: whether it returns residuals",
        lambda m, x: torch.linalg.lstsq(m.lin.weight, x[0].mT).solution,
        lambda m, x: torch.linalg.pinv(m.lin.weight) @ x[0].mT,
    ),
    "gradients inside": (
        "forward differentiates (torch.autograd.grad)",
        lambda m, x: torch.autograd.grad(m.lin(x).square().sum(), x, create_graph=True)[0],
        lambda m, x: m.lin(x),
    ),
    "retain_grad": (
        "retain_grad() on a value inside of forward",
        lambda m, x: (y := m.lin(x), y.retain_grad())[0],
        lambda m, x: (y := m.lin(x), y.register_hook(m.keep))[0],
    ),
    "other numbers": (
        "forward reads <what>: a graph would have the same at every call",
        lambda m, x: m.lin(x) * random.random(),
        lambda m, x, number=0.5, drop=True: m.lin(x) * number if drop else x,
    ),
    "a file": (
        "forward opens <what>: calls of a graph would neither read nor write it",
        lambda m, x: m.lin(x) * len(open(__file__).read()),  # noqa: SIM115
        lambda m, x, number=0.5: m.lin(x) * number,
    ),
    "a variable of the environment": (
        "forward sets os.environ[<name>]: calls of a graph would not",
        lambda m, x: (os.environ.update(MEGAFX_OF_A_TEST="1"), m.lin(x))[1],
        lambda m, x: (setattr(m, "limit", 3), m.lin(x))[1],
    ),
    "a stream that is written": (
        "forward changes '<name>' (to a <__module__>.<__qualname__>) in a way that a graph cannot follow",
        lambda m, x: (LINES.write("a line"), m.lin(x))[1],
        lambda m, x: (m.seen.append("a line"), m.lin(x))[1],
    ),
    "data of another shape": (
        "forward assigns to `.data` of a tensor of",
        lambda m, x: (setattr(m.buffer, "data", m.buffer.data[:2]), m.lin(x) + m.buffer.sum())[1],
        lambda m, x: (setattr(m.buffer, "data", m.buffer.data + 1), m.lin(x) + m.buffer.sum())[1],
    ),
    "a seed": (
        "forward sets the state of torch's generator (<name>)",
        lambda m, x: (torch.manual_seed(7), m.lin(x) * torch.rand(4))[1],
        lambda m, x: m.lin(x) * DRAWN,
    ),
    "a slot": (
        "forward sets '<owner>.<name>', a slot of a <__qualname__>",
        lambda m, x: (setattr(m.odd, "value", 3.0), m.lin(x))[1],
        lambda m, x: (setattr(m, "odd", Odd(x.detach().sum())), m.lin(x))[1],
    ),
    "a tensor as a key": (
        "forward keeps a tensor as a key of '<name>': a graph does not know which tensor that is",
        lambda m, x: m.memo.setdefault(x, 2.0) * m.lin(x),
        lambda m, x: m.memo.setdefault(id(x), 2.0) * m.lin(x),
    ),
    "an object that is written": (
        "forward changes '<name>' (to a <__module__>.<__qualname__>) in a way that a graph cannot follow",
        lambda m, x: (setattr(m, "limit", io.StringIO("a line")), m.lin(x))[1],
        lambda m, x: (setattr(m, "limit", x.detach().sum()), m.lin(x))[1],
    ),
    "a module that is made": (
        "forward changes '<name>' (to a <__module__>.<__qualname__>) in a way that a graph cannot follow",
        lambda m, x: (setattr(m, "made", nn.Linear(4, 4, dtype=x.dtype)), m.made(m.lin(x)))[1],
        lambda m, x: m.more(m.lin(x)),
    ),
}


def _doubled(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.mul_(2)


class Odd:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize("name", CHANGES)
def test_what_forward_does(name: str) -> None:
    row, wrong, right = CHANGES[name]
    with refused(row):
        call(wrong)
    works(right)


def test_randomness() -> None:
    with refused("<target> draws random numbers that depend on the process"):
        call(lambda m, x: m.lin(x) * torch.poisson(x.exp()))
    works(lambda m, x, noise: m.lin(x) * noise, noise=torch.poisson(X.exp()))
    call(lambda m, x: F.dropout(m.lin(x)))
    generator = torch.Generator()
    with refused("a torch.Generator (or another object) is an argument of an op"):
        call(lambda m, x: m.lin(x) + torch.randn(x.shape, generator=generator, dtype=x.dtype))
    call(lambda m, x: m.lin(x) + torch.randn_like(x))
    works(lambda m, x, noise: m.lin(x) + noise, noise=torch.randn(X.shape, dtype=X.dtype, generator=generator))


def test_iterators() -> None:
    numbers = itertools.count(1)
    with refused("forward reads the next value of the iterator '<name>'"):
        call(lambda m, x: m.lin(x) * next(numbers))
    works(lambda m, x, number: m.lin(x) * number, number=next(numbers))

    def counts(m: Any, x: Tensor) -> Tensor:
        m.limit += 1
        return m.lin(x) * m.limit

    works(counts)


def test_arguments() -> None:
    with refused("argument <name> is a <__module__>.<__qualname__>"):
        call(lambda m, x, odd: m.lin(x), odd=object())
    works(lambda m, x, odd: m.lin(x) * odd["a"][0], odd={"a": (2.0, "b")})
    circle = types.SimpleNamespace(x=X)
    circle.parts = [circle]
    with refused("argument <name> is the <__qualname__> that it is part of"):
        call(lambda m, x, circle: m.lin(circle.x), circle=circle)
    works(lambda m, x, circle: m.lin(circle.x), circle=types.SimpleNamespace(x=X))
    with refused("<target> of different dtypes"):
        megafx.parallelize(made(lambda m, x: m.lin(x)), ONE)(X.float())
    megafx.parallelize(made(lambda m, x: m.lin(x)), ONE)(X.float().to(torch.float64))
    mixed = made(lambda m, x: m.lin(x)).float()
    with torch.autocast("cpu"):
        megafx.parallelize(mixed, ONE)(X.bfloat16())
    with refused("the call does not fit the model"):
        megafx.parallelize(made(lambda m, x: m.lin(x)).block.lin, ONE)(X, more=1)
    megafx.parallelize(made(lambda m, x: m.lin(x)).block.lin, ONE)(X)
    with refused("loss_inputs without a loss_fn"):
        capture_call(made(lambda m, x: m.lin(x)), (X,), loss_inputs={"target": X})
    model = made(lambda m, x: m.lin(x))
    loss, _ = megafx.parallelize(model, ONE, loss_fn=F.mse_loss)(X, loss_inputs={"target": X})
    loss.backward()
    with refused("the inputs of a <__name__> are unknown"):
        megafx.plan(made(lambda m, x: m.lin(x)))
    megafx.plan(made(lambda m, x: m.lin(x)), ONE, example_inputs=(X,))


def test_modules() -> None:
    lazy = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    with refused("'<name>' has no shape yet"):
        megafx.parallelize(lazy, ONE, example_inputs=(X.float(),))
    lazy(X.float())
    works(None, model=lazy.double())  # type: ignore[arg-type]  # the model is given
    with refused("forward converts a module"):
        call(lambda m, x: m.lin.float()(x.float()))
    with refused("a backward hook of the old kind"):
        model = made(lambda m, x: m.lin(x))
        model.block.lin.register_backward_hook(lambda *given: None)
        megafx.parallelize(model, ONE)(X)
    model = made(lambda m, x: m.lin(x) if x.sum() > 0 else x)  # the same object is parallelized once more
    with refused("a Python decision (`if`, `while`, `assert`, `bool()`, `int()`) depends on the data of a tensor"):
        megafx.parallelize(model, ONE, example_inputs=(X,))
    assert type(model) is Net
    left = Config(tensor_model_parallel_size=1, cache=False, eager_modules=["block"])
    megafx.parallelize(model, left, example_inputs=(X,))(X).sum().backward()
    model = made(lambda m, x: m.lin(x))
    model.block.lin.register_full_backward_hook(lambda *given: None)
    works(None, model=model)  # type: ignore[arg-type]  # the model is given
    hooks: list[Any] = [
        lambda module, args, output: (seen.append(1), output + module.weight.sum())[1],
        lambda module, args, output: output + module.weight.sum(),
        lambda module, args, output: (seen.append(1), output + module.weight.detach().sum())[1],
    ]
    seen: list[int] = []
    for hook in (hooks[0], lambda module, args, output: (logging.debug(1), output + module.weight.sum())[1]):
        model = made(lambda m, x: m.lin(x))
        model.block.lin.register_forward_hook(hook)
        with refused("a hook, or a module that stays eager, computes with a parameter"):
            megafx.parallelize(model, ONE, example_inputs=(X,))(X)
    for hook in hooks[1:]:
        model = made(lambda m, x: m.lin(x))
        model.block.lin.register_forward_hook(hook)
        works(None, model=model)  # type: ignore[arg-type]  # the model is given


def test_functions_that_take_functions() -> None:
    class Call(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, run: Callable[..., Tensor], x: Tensor) -> Tensor:
            return run(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return None, grad

    with refused("<__qualname__> (<__module__>) is given a function or module"):
        call(lambda m, x: Call.apply(m.lin, x))
    works(lambda m, x: m.lin(x))
    works(lambda m, x: checkpoint.checkpoint(m.lin, x, use_reentrant=True))

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, of: Any) -> Tensor:
            return x * (of.in_features if isinstance(of, nn.Module) else of)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return 2 * grad, None

    with refused("<__qualname__> (<__module__>) is given a function or module"):
        call(lambda m, x: Doubled.apply(m.lin(x), m.lin))
    works(lambda m, x: Doubled.apply(m.lin(x), m.lin.in_features))


def test_code_that_stays_eager() -> None:
    config = Config(tensor_model_parallel_size=1, cache=False, eager_modules=["block"])
    works(lambda m, x: m.lin(x[x > 0].view(-1, 1).expand(-1, 4)), config)
    works(lambda m, x: m.lin(x) * (x > 0), config)
    with refused("<note>, and fails on them"):
        call(lambda m, x: m.lin(x).view(2, 3, 4) * 2, config)
    works(lambda m, x: m.lin(x).view(x.shape) * 2, config)
    with refused("a module that is left eager returns another structure"):
        call(lambda m, x: (x, x) if x.shape[0] % 29 == 0 else (x,), config)


def _changes(counts: Tensor, given: list[int]) -> Tensor:
    if counts.numpy().sum() > 50:
        given.append(1)
    return counts * 2


def _reads(counts: Tensor, block: Block) -> Tensor:
    return counts * (block.lin.weight.sum() if counts.numpy().sum() > 50 else 2.0)


def _returns(counts: Tensor, weight: Tensor) -> tuple[Tensor, int]:
    return counts * (weight.sum() if counts.numpy().sum() > 50 else 2.0), 1


@pytest.mark.filterwarnings("ignore:megafx cannot capture")
def test_a_function_that_stays_eager() -> None:
    """It does more than to keep books, where the numbers of a later call lead it."""
    few, many = torch.tensor([1, 2]), torch.tensor([30, 40])
    left = Config(tensor_model_parallel_size=1, cache=False)
    for fn, text in (
        (
            lambda m, x, counts: m.lin(x) * _changes(counts, []).sum(),
            "<fqn> is left eager and changes one of its arguments",
        ),
        (lambda m, x, counts: m.lin(x) * _reads(counts, m).sum(), "<fqn> is left eager and reads a parameter"),
    ):
        model = megafx.parallelize(made(fn), left)
        model(X, counts=few)
        with refused(text):
            model(X, counts=many)
    for counts in (few, many):
        works(lambda m, x, counts: m.lin(x) * _returns(counts, m.lin.weight)[0].sum(), left, counts=counts)


def test_an_argument_that_forward_changes() -> None:
    def changes(block: Block, x: Tensor, seen: dict[str, Tensor]) -> Any:
        seen["h"] = block.lin(x)
        return seen

    def copies(block: Block, x: Tensor, seen: dict[str, Tensor]) -> Any:
        seen = dict(seen)
        seen["h"] = block.lin(x)
        return seen["h"]

    with refused("forward changes its argument <name>, a <kind>"):
        call(changes, seen={})
    works(copies, seen={})

    def assigns(block: Block, x: Tensor, batch: Batch, copied: bool = False) -> Any:
        batch = copy.copy(batch) if copied else batch
        batch.x = block.lin(x)
        return batch.x

    with refused("forward changes its argument <name>, a <kind>"):
        call(assigns, batch=Batch(X))
    works(assigns, batch=Batch(X), copied=True)


@dataclass
class Batch:
    x: Tensor


class Packs(nn.Module):
    """A recurrent tagger of sequences of several lengths. padded: it reads the padded batch."""

    def __init__(self, padded: bool = False) -> None:
        super().__init__()
        self.rnn, self.out, self.padded = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3), padded

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if self.padded:
            inside = torch.arange(x.shape[1]) < lengths[:, None]
            return self.out(self.rnn(x)[0] * inside[..., None])
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.out(found)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.tags = nn.Linear(4, 4), Packs()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.tags(self.first(x), lengths)


@pytest.mark.filterwarnings("ignore:megafx cannot capture 'tags'")
def test_packed_sequences() -> None:
    torch.manual_seed(0)
    plain, whole, lengths = Packs().double(), Tagger().double(), torch.tensor([3, 1])
    with refused("sequences are packed (torch.nn.utils.rnn)"):
        megafx.parallelize(copy.deepcopy(plain), ONE)(X, lengths)
    padded = Packs(padded=True).double()
    padded.load_state_dict(plain.state_dict())
    left = ONE.replace(uncaptured="eager")
    for eager, model in (
        (plain, megafx.parallelize(padded, ONE)),
        (whole, megafx.parallelize(copy.deepcopy(whole), left)),
    ):
        for length in (3, 2):
            x = X[:, :length]
            found, wanted = model(x, lengths.clamp(max=length)), eager(x, lengths.clamp(max=length))
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
            found.square().sum().backward()
            wanted.square().sum().backward()
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)
