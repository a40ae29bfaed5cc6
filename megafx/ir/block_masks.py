"""A BlockMask among the arguments of a call: what its mask_mod reads are inputs of the graph.

FlexAttention's BlockMask is a table of blocks, and a function of single pairs: the mask_mod. A graph reads the function
(capture/libraries/flex.py). So a `MaskArgument` replaces the argument, and pytree takes it apart: its leaves are the tensors
that mask_mod reads from around it (ids of documents, lengths), and one for each of the lengths and the number of rows; its form
is the code, with the numbers that it reads. Calls with other tensors have one graph; other code or numbers have another.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from megafx.errors import CaptureError

MODULE = "torch.nn.attention.flex_attention"
_VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device)
_FIX = (
    "let mask_mod be a function that reads numbers, tensors and other such functions, each by a name of its own (window = "
    "self.window before it), or make the BlockMask in forward"
)


def with_mask_arguments(value: Any) -> Any:
    """An argument of a call, with a `MaskArgument` in the place of each BlockMask in it."""
    if MODULE not in sys.modules:
        return value
    if type(value) in (list, tuple):
        return type(value)(map(with_mask_arguments, value))
    if type(value) is dict:
        return {name: with_mask_arguments(each) for name, each in value.items()}
    flex: Any = sys.modules[MODULE]
    if type(value) is not flex.BlockMask or value.mask_mod in (flex.noop_mask, flex._sliced_mask_mod_error):
        return value
    rows, heads, queries, keys = value.shape
    shapes = ((0, queries), (0, keys), (rows, 0))
    leaves = [torch.empty(shape, dtype=torch.uint8, device=value.kv_num_blocks.device) for shape in shapes]
    form = _take_apart(value.mask_mod, leaves, "mask_mod", 0)
    return mask_argument()(leaves, _Form(form, heads, tuple(value.BLOCK_SIZE)), value)


@dataclass(frozen=True)
class _Function:
    """What is the same of a function in all calls."""

    code: CodeType
    cells: int  # how many `variables` are of an outer function; the others are of its module, whose names are `around`
    defaults: Any
    variables: tuple[tuple[str, Any], ...]  # what it reads from around it, by name
    around: dict[str, Any] = field(compare=False)

    def __repr__(self) -> str:
        texts = [*_texts(self.code)]
        return f"{self.code.co_qualname}{texts}({self.variables}, {self.defaults})"


def _texts(code: CodeType) -> Iterator[str]:
    """What code does, as text that is the same in each process."""
    yield f"{code.co_filename}:{code.co_firstlineno} {code.co_code.hex()} {code.co_names}"
    for value in code.co_consts:
        yield from _texts(value) if isinstance(value, CodeType) else [repr(value)]


@dataclass(frozen=True)
class _Leaf:
    index: int


@dataclass(frozen=True)
class _Value:
    """kind: True, 1 and 1.0 are equal."""

    kind: str
    value: Any


@dataclass(frozen=True)
class _Form:
    of: Any
    heads: int
    block: tuple[int, ...]


def _take_apart(value: Any, leaves: list[Any], name: str, depth: int) -> Any:
    """A value that mask_mod reads -> its form; tensors go to `leaves`. depth: of functions that read one another."""
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return _Leaf(len(leaves) - 1)
    if type(value) in _VALUES:
        return _Value(type(value).__name__, value)
    if type(value) in (list, tuple):
        return (type(value).__name__, *(_take_apart(x, leaves, name, depth) for x in value))
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, tuple(value.keywords), tuple(value.keywords.values()))
        return ("partial", *(_take_apart(x, leaves, name, depth) for x in parts))
    if isinstance(value, FunctionType) and depth < 8 and value.__kwdefaults__ is None:
        return _function(value, leaves, depth)
    kind = type(value)
    raise CaptureError(
        f"the BlockMask that forward is given has a mask_mod with '{name}', a {kind.__module__}.{kind.__qualname__}",
        fix=_FIX,
    )


def _function(value: FunctionType, leaves: list[Any], depth: int) -> _Function:
    code, around = value.__code__, value.__globals__
    inside = [(n, c.cell_contents) for n, c in zip(code.co_freevars, value.__closure__ or (), strict=True)]
    outside = [(n, around[n]) for n in dict.fromkeys(_names(code)) if n in around and not _is_fixed(around[n])]
    variables = tuple((n, _take_apart(x, leaves, n, depth + 1)) for n, x in (*inside, *outside))
    defaults = _take_apart(value.__defaults__, leaves, "a default", depth + 1)
    return _Function(code, len(inside), defaults, variables, around)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _names(value)


def _is_fixed(value: Any) -> bool:
    """True if a name of a module is taken to mean the same in all calls: a module, a class, a function of a library."""
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return False
    of_torch = str(getattr(value, "__module__", "")).split(".")[0] == "torch"
    return of_torch or isinstance(value, (ModuleType, type, BuiltinFunctionType))


def _put_together(form: Any, leaves: list[Any]) -> Any:
    if isinstance(form, _Leaf):
        return leaves[form.index]
    if isinstance(form, _Value):
        return form.value
    if isinstance(form, _Function):
        values = [(n, _put_together(x, leaves)) for n, x in form.variables]
        around = form.around | dict(values[form.cells :])
        cells = tuple(CellType(x) for _, x in values[: form.cells])
        return FunctionType(form.code, around, form.code.co_name, _put_together(form.defaults, leaves), cells or None)
    kind, *parts = form
    made = [_put_together(x, leaves) for x in parts]
    if kind == "partial":
        function, args, names, values = made
        return functools.partial(function, *args, **dict(zip(names, values, strict=True)))
    return made if kind == "list" else tuple(made)


@functools.cache
def mask_argument() -> type:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    base: Any = BlockMask  # whose attributes are computed here

    class MaskArgument(base):
        """leaves: [0, queries], [0, keys], [rows, 0], and tensors. given: the BlockMask that they are of, once it is known."""

        def __init__(self, leaves: list[Any], form: _Form, given: Any = None) -> None:
            self.leaves, self.form, self.given = leaves, form, given

        @property
        def mask_mod(self) -> Any:
            return _put_together(self.form.of, self.leaves)

        @property
        def seq_lengths(self) -> tuple[Any, Any]:
            queries, keys = self.leaves[:2]
            return queries.shape[1], keys.shape[1]

        @property
        def shape(self) -> tuple[Any, ...]:
            return self.leaves[2].shape[0], self.form.heads, *self.seq_lengths

        @property
        def BLOCK_SIZE(self) -> Any:
            return self.form.block

        def to(self, device: Any) -> Any:
            return self

        def __repr__(self) -> str:
            return f"MaskArgument({self.form})"

        __str__ = __repr__

        def __getattr__(self, name: str) -> Any:
            if type(self.leaves[0]) is not torch.Tensor:  # in a trace
                raise CaptureError(
                    f"forward reads '{name}' of a BlockMask, whose table of blocks a graph does not have",
                    fix="give the BlockMask to flex_attention as it is",
                )
            if self.given is None:  # of other tensors than the user's: copies, or without gradients
                rows, heads, queries, keys = self.shape
                where, block = str(self.leaves[0].device), self.BLOCK_SIZE
                self.given = create_block_mask(self.mask_mod, rows, heads, queries, keys, where, block)
            return getattr(self.given, name)

    def keyed(mask: Any) -> Any:
        names = ["queries", "keys", "rows", *(f"tensor{i}" for i in range(len(mask.leaves) - 3))]
        return [(pytree.GetAttrKey(n), x) for n, x in zip(names, mask.leaves, strict=True)], mask.form

    pytree.register_pytree_node(
        MaskArgument,
        lambda mask: (mask.leaves, mask.form),
        lambda leaves, form: MaskArgument([*leaves], form),
        serialized_type_name="megafx.MaskArgument",
        flatten_with_keys_fn=keyed,
    )
    return MaskArgument
