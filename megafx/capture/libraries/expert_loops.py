"""Loops over the experts that some token chose, in one graph.

    hit = torch.greater(mask.sum((-1, -2)), 0).nonzero()     # what models write: mask [experts, choices, tokens]
    for e in hit:
        which, rows = torch.where(mask[e].squeeze(0))
        out.index_add_(0, rows, self.experts[e](x[rows]) * weights[rows, which, None])

How often the loop runs depends on data, which a graph cannot follow. Here it runs over all experts. What an iteration selects
by a mask is selected by `mask & hit[e]`: for an expert that no token chose, no rows, so that nothing is computed from them and
nothing added. Other results of an iteration would exist for such experts too: it is an error if the model uses them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from megafx.errors import CaptureError
from megafx.ir.source_lines import current_user_line

_FINDS = (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere)
_RESHAPES = (
    *(torch.squeeze, Tensor.squeeze, torch.flatten, Tensor.flatten, torch.ravel, Tensor.ravel),
    *(Tensor.view, Tensor.reshape, torch.reshape),
)
_UNBINDS = (torch.unbind, Tensor.unbind)  # what iterating asks for
_SELECTS = (*_FINDS, torch.where, Tensor.where, torch.masked_select, Tensor.masked_select)
_NUMBERS = (Tensor.item, Tensor.__int__, Tensor.__index__)
_INDEXES = (Tensor.__getitem__, Tensor.__setitem__)
_ADDS = (torch.index_add, Tensor.index_add, torch.index_put, Tensor.index_put)
_ADDS_IN_PLACE = (Tensor.index_add_, Tensor.index_put_, Tensor.__setitem__)
FIX = (
    "loop over all that there may be (`for e, expert in enumerate(self.experts)`): code on zero rows contributes nothing; "
    "or let each iteration add rows to one tensor and do nothing else (`out.index_add_(0, rows, ...)`)"
)


class _Iteration:
    """What one iteration makes. rows: the sizes of what it selects; made: id -> (tensor, whether only rows were added to it);
    names: the tensors that hold its index, by id."""

    def __init__(self, index: int, hit: Tensor) -> None:
        self.index, self.hit = index, hit
        self.names: dict[int, Tensor] = {}
        self.rows: set[Any] = set()
        self.made: dict[int, tuple[Tensor, bool]] = {}


class ExpertLoops(TorchFunctionMode):
    """found: id -> (indices that nonzero found, the mask that it was asked of); gone: what may not be used any more, by id."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self.note = note
        self.found: dict[int, tuple[Tensor, Tensor]] = {}
        self.gone: dict[int, Tensor] = {}
        self.current: _Iteration | None = None

    def index_of(self, x: Tensor) -> int | None:
        """The index of the expert whose iteration runs, where a tensor holds it as a number."""
        found = self.current is not None and id(x) in self.current.names and x.dim() == 0
        return self.current.index if self.current is not None and found else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        over_rows = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) == 0 if func in _UNBINDS else False
        if over_rows and id(args[0]) in self.found:
            return self._all_indices(*self.found[id(args[0])])
        self.check((args, kwargs))
        if self.current is not None:
            if func in _NUMBERS and id(args[0]) in self.current.names:
                return self.current.index
            _check_write(func, args, self.current)
            args = _with_number(func, _with_hit(func, args, self.current.hit), self.current)
        result = func(*args, **kwargs)
        if func in _FINDS and isinstance(result, Tensor) and args[0].dim() == 1:
            self.found[id(result)] = (result, args[0])
        elif func in _RESHAPES and id(args[0]) in self.found and result.dim() <= 2:
            self.found[id(result)] = (result, self.found[id(args[0])][1])
        if self.current is not None:
            _record(self.current, func, args, result)
        return result

    def check(self, values: Any) -> None:
        """Raise where something that an iteration made is used after it."""
        if self.gone and any(id(value) in self.gone for value in tree_leaves(values)):
            raise _refused("its results are used after an iteration")

    def _all_indices(self, found: Tensor, mask: Tensor) -> Iterator[Tensor]:
        """An index after the other, in the shape that an element of `found` has."""
        count: Any = mask.shape[0]
        if not isinstance(count, int):
            raise _refused("what it may select is not as many in all calls")
        if self.current is not None:
            raise _refused("it is within another such loop")
        self.note(
            f"a loop over what was hit runs over all {count} that there may be, over those that were not with no rows: "
            f"{current_user_line()}"
        )
        hit = mask if mask.dtype == torch.bool else mask != 0
        for index in range(count):
            self.current = iteration = _Iteration(index, hit[index])
            name = torch.tensor([index] if found.dim() == 2 else index)
            iteration.names[id(name)] = name
            try:
                yield name
            finally:
                self.current = None
                self.gone |= {key: value for key, (value, added) in iteration.made.items() if not added}


def _refused(why: str) -> CaptureError:
    found = f"a Python loop runs over what the data of a tensor selects, and {why}"
    return CaptureError(found, source=current_user_line(), fix=FIX)


def _check_write(func: Any, args: Any, iteration: _Iteration) -> None:
    """Raise where an iteration changes an older tensor otherwise than in selected rows."""
    name = getattr(func, "__name__", "")
    writes = func in _ADDS_IN_PLACE or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    if not writes or not args or not isinstance(args[0], Tensor) or id(args[0]) in iteration.made:
        return
    if func not in _ADDS_IN_PLACE or not _selected(args[1:], iteration):
        raise _refused("it changes a tensor of before it otherwise than by writing to selected rows")


def _with_hit(func: Any, args: Any, hit: Tensor) -> Any:
    """The arguments with masks that select nothing for an index that was not found."""
    if func in _SELECTS and len(args) == 1:
        mask = args[0]
        return ((mask if mask.dtype == torch.bool else mask != 0) & hit,)
    if func in (torch.masked_select, Tensor.masked_select):
        return (args[0], args[1] & hit, *args[2:])
    if func in _INDEXES:
        index = args[1]
        masked = tuple(_and(i, hit) for i in index) if isinstance(index, tuple) else _and(index, hit)
        return (args[0], masked, *args[2:])
    return args


def _with_number(func: Any, args: Any, iteration: _Iteration) -> Any:
    """Select by number what the iteration's index selects. Beyond the end nothing can have been found (or the model would
    fail): the last part is as good as any."""
    if func not in _INDEXES or id(args[1]) not in iteration.names or not isinstance(args[0].shape[0], int):
        return args
    number = min(iteration.index, args[0].shape[0] - 1)
    return (args[0], slice(number, number + 1) if args[1].dim() else number, *args[2:])


def _and(index: Any, hit: Tensor) -> Any:
    return index & hit if isinstance(index, Tensor) and index.dtype == torch.bool else index


def _symbols(value: Any) -> set[Any]:
    """The sizes of a tensor that data decides: they have no hint."""
    sizes: list[Any] = [n for n in value.shape if isinstance(n, torch.SymInt)] if isinstance(value, Tensor) else []
    return {s for n in sizes if not n.node.has_hint() for s in n.node.expr.free_symbols}


def _selected(args: Any, iteration: _Iteration) -> bool:
    """True if rows of this iteration are among the arguments."""
    return any(_symbols(a) & iteration.rows for a in tree_leaves(args))


def _record(iteration: _Iteration, func: Any, args: Any, result: Any) -> None:
    values = [r for r in tree_leaves(result) if isinstance(r, Tensor)]
    if (func in _RESHAPES or func is Tensor.__getitem__) and id(args[0]) in iteration.names:
        iteration.names |= {id(value): value for value in values}
    if func in _SELECTS or func in _INDEXES:
        for value in values:
            iteration.rows |= _symbols(value)
    for value in values:
        if id(value) in iteration.made or any(value is a for a in args[:1]):
            continue  # written in place
        into = args[0] if args and func in _ADDS else None
        _, before = iteration.made.get(id(into), (into, True))  # of before the iteration, or only rows were added to it
        iteration.made[id(value)] = (value, into is not None and before and _selected(args[1:], iteration))
