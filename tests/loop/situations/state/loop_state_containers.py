"""Sets, dicts with defaults, lists and deques that forward changes and reads."""

from __future__ import annotations

import array
import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loop import Loop, situation
from torch import Tensor, nn

from megafx.errors import CaptureError

SEEN = "https://github.com/pytorch/pytorch/issues/112090"
HISTORY = "https://github.com/NVIDIA/Megatron-LM/issues/1652"
Use = Callable[[Any, Any, Tensor], None]


class Keeps(nn.Module):
    """use(model, container, output) runs in forward."""

    def __init__(self, container: Any, use: Use) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 12), nn.Linear(12, 6)
        self.container, self.use, self.number = container, use, 1.0
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        self.use(self, self.container, y)
        return y * self.number


def _train(loop: Loop, model: nn.Module, rows: tuple[int, ...] = (4, 4, 4)) -> None:
    for step, count in enumerate(rows):
        torch.manual_seed(step)
        loss = model(torch.randn(count, 7)).square().mean()
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


def _first_of_its_shape(model: Any, seen: set[Any], y: Tensor) -> None:
    model.number = 1.0 if tuple(y.shape) in seen else 2.0
    seen.add(tuple(y.shape))


def _taken(model: Any, left: set[Any], y: Tensor) -> None:
    model.number = float(left.pop() if left else 0)


def _updated(model: Any, seen: set[Any], y: Tensor) -> None:
    seen.update(range(y.shape[0]))
    seen.discard(2)
    model.number = len(seen) / 4
    model.last = {y.shape[0]} | getattr(model, "last", set())


@situation(SEEN)
def sets_that_forward_changes(loop: Loop) -> None:
    uses: list[tuple[Use, set[Any]]] = [(_first_of_its_shape, set()), (_taken, {1, 2, 3}), (_updated, {100})]
    for use, start in uses:
        torch.manual_seed(0)
        model = loop.model(Keeps(start, use))
        _train(loop, model, (4, 4, 5, 4, 5))
        loop.see(left=sorted(model.container), same=model.container is start, last=sorted(getattr(model, "last", ())))


@situation(SEEN, like="sets_that_forward_changes")
def sets_that_forward_reads(loop: Loop) -> None:
    def use(model: Any, on: Any, y: Tensor) -> None:
        model.number = len(on) + sum(1 for name in model.container if name > "a")

    model = loop.model(Keeps({"a"}, use))
    _train(loop, model, (4,))
    model.container.add("b")
    _train(loop, model, (4,))
    model.container = frozenset("xyz")
    _train(loop, model, (4,))


@situation(SEEN, slow=(2,))
def dicts_with_defaults_get_no_keys_from_a_capture(loop: Loop) -> None:
    def listed(model: Any, held: Any, y: Tensor) -> None:
        model.number = len({**held}) + len(held | {"q": 1}) + ("step 1" in held)
        held[f"step {model.step}"] = 1
        model.step += 1

    def counted(model: Any, held: Any, y: Tensor) -> None:
        model.number = 1.0 + held.get("calls", 7)
        held["calls"] += 1

    def popped(model: Any, held: Any, y: Tensor) -> None:
        model.number = float(held.pop("step", None) or 5)
        held["step"] = model.step
        model.step += 1

    uses: list[tuple[Use, Any]] = [(listed, collections.defaultdict(int)), (counted, collections.Counter[str]())]
    uses += [(counted, collections.defaultdict(int)), (popped, collections.Counter[str]())]
    for use, container in uses:
        torch.manual_seed(0)
        model = loop.model(Keeps(container, use))
        _train(loop, model)
        loop.see(held=[*model.container.items()])


class Key(NamedTuple):
    length: int
    dtype: torch.dtype


class Tables(nn.Module):
    """Masks and counts by sizes within tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.masks, self.calls = nn.Linear(8, 8), dict[Any, Tensor](), dict[Any, int]()

    def forward(self, x: Tensor) -> Tensor:
        shape, key, nested = x.shape[:2], Key(x.shape[1], x.dtype), (x.shape[0], (x.shape[1], "first"))
        if key not in self.masks:
            self.masks[key] = torch.full((x.shape[1], x.shape[1]), -1.0, dtype=x.dtype).triu(1)
        if nested not in self.masks:
            self.masks[nested] = x.detach().sum()
        self.calls[shape] = self.calls.get(shape, 0) + 1
        scores = x @ x.transpose(1, 2) + self.masks[key]
        return self.up(scores.softmax(-1) @ x) * self.masks[nested] * self.calls[shape]


@situation("https://github.com/pytorch/pytorch/issues/112090")
def tables_are_kept_by_sizes_in_tuples(loop: Loop) -> None:
    model = loop.model(Tables())
    for length in (4, 5, 4, 1, 5):
        loss = model(torch.randn(2, length, 8)).square().mean()
        loss.backward()
        loop.see(loss=loss, calls={str(tuple(k)): n for k, n in model.calls.items()}, masks=[*model.masks.values()])
    loop.see_gradients(model)


@situation(HISTORY, slow=(2,))
def lists_and_deques_are_extended_or_filled_anew(loop: Loop) -> None:
    def filled(model: Any, held: Any, y: Tensor) -> None:
        held[:] = [y.mean().detach(), y.sum().detach()]
        model.number = len(held)

    def emptied(model: Any, held: Any, y: Tensor) -> None:
        del held[:]
        held.append(y.mean().detach())

    def replaced(model: Any, held: Any, y: Tensor) -> None:
        model.container = [y.mean().detach(), *model.container[:2]]
        model.total = torch.stack(model.container).sum()

    def extended(model: Any, held: Any, y: Tensor) -> None:
        held += [y.mean().detach(), y.shape[0]]

    uses: list[tuple[Use, Any]] = [(filled, list), (emptied, list), (replaced, list)]
    uses += [(extended, list), (extended, lambda: collections.deque(maxlen=3))]
    for use, kind in uses:
        torch.manual_seed(0)
        model = loop.model(Keeps(kind(), use))
        _train(loop, model)
        loop.see(held=[*model.container], total=getattr(model, "total", None))


@situation(HISTORY, slow=(2,))
def lists_and_deques_are_changed_at_other_places_than_their_end(loop: Loop) -> None:
    mean = lambda y: y.mean().detach()
    uses: list[Use] = [
        lambda model, held, y: held.insert(0, mean(y)),
        lambda model, held, y: (held.append(mean(y)), held.reverse()),
        lambda model, held, y: (held.append(mean(y)), held.sort(key=lambda x: x.dim(), reverse=True)),
        lambda model, held, y: held.__setitem__(slice(0, 0), [mean(y)]),
        lambda model, held, y: (held.append(mean(y)), held.__delitem__(slice(None, -2))),
        lambda model, held, y: (held.append(mean(y)), held.__imul__(2)),
        lambda model, held, y: (held.append(mean(y)), setattr(model, "total", torch.stack(held).sum())),
        lambda model, held, y: (held.append(mean(y)), setattr(model, "total", sum([mean(y)] + held))),  # noqa: RUF005
        lambda model, held, y: held.appendleft(mean(y)),
        lambda model, held, y: (held.append(mean(y)), held.rotate()),
    ]
    for i, use in enumerate(uses):
        torch.manual_seed(0)
        container: Any = collections.deque(maxlen=3) if i > 7 else []
        model = loop.model(Keeps(container, use))
        _train(loop, model)
        loop.see(held=[*model.container], total=getattr(model, "total", None))
    torch.manual_seed(0)
    model = loop.model(Keeps([], lambda model, held, y: held.append(mean(y))))
    _train(loop, model)
    model.container.reverse()
    loop.see(total=torch.stack(model.container).sum(), first=model.container.pop(0))
    _train(loop, model)
    loop.see(held=model.container)


@situation(HISTORY, ranks=(1,))
def arrays_that_forward_changes_are_named(loop: Loop) -> None:
    """The advice: numbers in a list."""

    def counts(model: Any, held: Any, y: Tensor) -> None:
        held[0] += 1
        model.number = float(held[0])

    def grows(model: Any, held: Any, y: Tensor) -> None:
        held.append(3)

    kinds: list[tuple[Any, Use]] = [(np.zeros(3), counts), (array.array("i", [1]), grows), (bytearray(b"a"), grows)]
    for held, use in kinds:
        if not loop.eager:
            before = held.tolist() if hasattr(held, "tolist") else bytes(held)
            with pytest.raises(CaptureError, match=r"(?s)'container' \(to a .*loop_state_containers"):
                loop.model(Keeps(held, use))(torch.randn(4, 7))
            assert before == (held.tolist() if hasattr(held, "tolist") else bytes(held))
    torch.manual_seed(0)
    fixed = np.ones(3)
    fixed.flags.writeable = False
    model = loop.model(Keeps([0.0, 0.0], counts))
    model.fixed = fixed
    _train(loop, model)
    loop.see(held=model.container)


class Rotated(nn.Module):
    """A table that is no part of a checkpoint is made for the longest sequence so far; another one becomes a part."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.longest = nn.Linear(4, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            self.register_buffer("table", torch.arange(float(self.longest)).cos(), persistent=False)
            self.register_buffer("seen", torch.tensor(self.longest), persistent=self.longest > 3)
        return self.proj(x) * self.table[: x.shape[1], None]


@situation("https://github.com/huggingface/transformers/issues/27049", slow=(2,))
def tables_that_are_not_saved_grow_in_forward(loop: Loop) -> None:
    model = loop.model(Rotated())
    for count in (2, 5, 3):
        out = model(torch.randn(3, count, 4))
        out.square().mean().backward()
        loop.see(out=out, saved=[*model.state_dict()], longest=model.longest)
    loop.see_gradients(model)
