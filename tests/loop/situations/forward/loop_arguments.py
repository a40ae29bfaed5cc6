"""Kinds of containers that a call is given."""

from __future__ import annotations

import enum
import functools
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from loop import Loop, situation
from torch import Tensor, nn
from transformers import BatchEncoding

from megafx.errors import CaptureError

CONTAINERS = "https://github.com/pytorch/pytorch/issues/142161"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, batch: Mapping[str, Tensor], views: Sequence[Tensor] = ()) -> Tensor:
        loss = (self.linear(batch["x"]) * batch["weight"]).square().mean()
        return loss + sum(self.linear(view).tanh().mean() for view in views)


@situation(CONTAINERS)
def batches_are_dicts_with_defaults_and_deques(loop: Loop) -> None:
    model = loop.model(Net())
    for rows in (3, 5):
        batch = defaultdict(list, x=torch.randn(rows, 6), weight=torch.randn(4))
        loss = model(batch, deque([torch.randn(2, 6), torch.randn(rows, 6)]))
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


class Task(enum.IntEnum):
    CLASSES = 0
    RANKS = 1


class Pool(str, enum.Enum):  # noqa: UP042  # as users write it
    MEAN = "mean"
    LAST = "last"


class Parts(enum.Flag):
    LINEAR = enum.auto()
    SQUARE = enum.auto()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.heads = nn.ModuleDict({"CLASSES": nn.Linear(8, 3), "RANKS": nn.Linear(8, 5)})

    def forward(
        self, x: Tensor, task: Task, pool: Any = Pool.MEAN, parts: Any = Parts.LINEAR, **options: Any
    ) -> Tensor:
        h = torch.tanh(self.trunk(x)).to(options.get("dtype", x.dtype))
        h = h[options.get("rows", slice(None))].to(options.get("device", "cpu"), memory_format=torch.contiguous_format)
        h = h.mean(1) if pool is Pool.MEAN else h[:, -1]
        y = self.heads[task.name](h.to(x.dtype)) * (task + 1)
        y = y * y if Parts.SQUARE in parts else y
        return (y * options.get("turn", 1j)).imag.square().sum() + sum(y[0, i] for i in options.get("places", range(2)))


@situation("https://github.com/pytorch/pytorch/issues/135859", like="covariances_and_correlations")
def arguments_are_enums_dtypes_slices_and_complex_numbers(loop: Loop) -> None:
    """Each value has a graph of its own."""
    model = loop.model(Heads())
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((Task.CLASSES,), {}),
        ((Task.RANKS, Pool.LAST), {"dtype": torch.float32, "device": torch.device("cpu")}),
        ((Task.RANKS, "last", Parts.LINEAR | Parts.SQUARE), {"rows": slice(1, None), "turn": 2 + 0.5j}),
        ((Task.CLASSES, Pool.LAST, Parts.SQUARE), {"rows": slice(0, 3), "places": range(0, 3, 2)}),
        ((Task.CLASSES,), {}),
    ]
    for arguments, options in calls:
        loss = model(torch.randn(4, 5, 6), *arguments, **options)
        model.zero_grad()
        loss.backward()
        loop.see(loss=loss)
        loop.see_gradients(model)


class Batch:
    """As libraries of graphs and of detection make them."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


class Slots:
    """One part in a slot of a base class."""

    __slots__ = ("weight",)


class OfSlots(Slots):
    __slots__ = ("x",)

    def __init__(self, x: Tensor, weight: Tensor) -> None:
        self.x, self.weight = x, weight


class Fields(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class Pair(list[Any]):
    x = property(lambda self: self[0])
    weight = property(lambda self: self[1])


class OfAnyBatch(Net):
    """forward takes the batch apart by attributes or by items; marks: a set of strings."""

    def forward(self, batch: Any, marks: Any = ()) -> Any:
        if isinstance(batch, BatchEncoding):
            batch = batch.to("cpu")
        by_key = isinstance(batch, Mapping) and not isinstance(batch, Fields)
        get = batch.__getitem__ if by_key else functools.partial(getattr, batch)
        h = self.linear(get("x")) * get("weight")
        loss = h.square().mean() / (2 if "half" in marks else 1)
        return Fields(loss=loss, pair=Pair([h, 3]), held=UserDict(batch=batch), counts=Counter("aab"))


@situation("https://github.com/huggingface/transformers/issues/23474", like="arguments_are_sets")
def batches_are_of_classes_of_their_own(loop: Loop) -> None:
    """Dicts, lists and objects of other classes than Python's, and a tokenizer's; forward returns such ones, too. One graph."""
    for kind in (Fields, OrderedDict, UserDict, ChainMap, SimpleNamespace, Batch, BatchEncoding, Pair, OfSlots):
        model = loop.model(OfAnyBatch())
        for rows in (3, 5):
            parts = {"x": torch.randn(rows, 6), "weight": torch.randn(4)}
            by_name = kind in (SimpleNamespace, Batch, Fields, OfSlots)
            batch: Any = kind([*parts.values()]) if kind is Pair else kind(**parts) if by_name else kind(parts)
            if kind is BatchEncoding:
                batch._encodings = [object()]  # of a fast tokenizer
            out = model(batch)
            out.loss.backward()
            loop.see(loss=out["loss"], h=out.pair.x, held=type(out.held["batch"]).__name__, counts=dict(out.counts))
            assert type(out) is Fields and type(out.pair) is Pair and type(out.counts) is Counter
        loop.see_gradients(model)
        assert loop.eager or model.megafx.captures == 1


@situation(CONTAINERS)
def arguments_are_sets(loop: Loop) -> None:
    """Each set has a graph of its own, whatever set object it is."""
    model, marks = loop.model(OfAnyBatch()), {"half"}
    for held in (marks, {"none", "half"}, frozenset(["half"]), marks, {"none"}):
        batch = {"x": torch.randn(3, 6), "weight": torch.randn(4)}
        loop.see(loss=model(batch, held).loss)
        marks.symmetric_difference_update({"more", "half"} if held is marks else ())
    assert loop.eager or model.megafx.captures == 5


@situation(CONTAINERS)
def what_changes_in_arguments_is_refused(loop: Loop) -> None:
    """A set, the dict in a tokenizer's batch, an object that counts; iterators; what a tokenizer knows beside the tensors; an
    object that is part of itself."""

    def counts(batch: Any) -> Any:
        batch.n += 1

    circle = Batch(x=torch.ones(2))
    circle.graph = [circle]  # type: ignore[attr-defined]  # it takes any
    tokenized: Any = BatchEncoding({"x": torch.ones(2)}, n_sequences=1)
    tokenized._encodings = [object()]
    calls: list[tuple[Callable[[Any], Any], Any, str]] = [
        (lambda batch: batch["marks"].add("more"), {"marks": {"a"}}, r"changes its argument 'batch'\['marks'\], a set"),
        (lambda batch: batch.update(y=batch["x"]), BatchEncoding({"x": torch.ones(2)}), "changes its argument 'batch'"),
        (counts, Batch(n=1), "changes its argument 'batch', a Batch"),
        (next, iter([torch.ones(2)]), r"pass a list: list\(batch\)"),
        (lambda batch: batch["x"], MappingProxyType({"x": torch.ones(2)}), r"pass a dict: dict\(batch\)"),
        (lambda batch: len(batch), {torch.ones(2)}, "pass a list of its members"),
        (lambda batch: batch.word_ids(0), tokenized, "reads '_encodings'"),
        (
            lambda batch: batch.x,
            circle,
            r"batch\[graph\]\[0\] is the Batch that it is part of: a graph takes no circles",
        ),
    ]
    for use, batch, found in calls:
        loop.see(found=found)
        if not loop.eager:
            with pytest.raises(CaptureError, match=found):
                loop.model(Uses(use))(batch)


class Uses(nn.Module):
    def __init__(self, use: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(2, 2), use

    def forward(self, batch: Any) -> Tensor:
        self.use(batch)
        return self.linear.weight.sum()
