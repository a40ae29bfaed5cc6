"""The products of a mixture with one weight for each row's expert, and whether ids say which expert a row belongs to.

Products of rows that are sorted by expert, or with weights that are looked up for each row:

    %y = grouped_mm(%x, %w, %ends)                                                 # sorted: `by` is %ends
    %g = index(%w, [%ids]); %b = bmm(unsqueeze(%x, 1), %g); %y = reshape(%b, ..)   # looked up: `by` is %ids
    %b = bmm(%g, unsqueeze(%x, -1)), with the weights [E, N, K], is the same: `turned`

Ids of sorted rows:

    %order = argsort(%chosen); %ids = index(%chosen, [%order])      # or the first result of sort(%chosen)
    %ends = cumsum(one_hot(%chosen, 5).sum(0), 0)                   # or histc(%ids, 5, 0, 4)

Then ids[s] = e for ends[e-1] <= s < ends[e]: `ids` is ascending, `ends` counts the same numbers, and none is negative (which
both would take for something else).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from megafx.ir.nodes import CASTS, COPIES, argument, aten_ops, behind
from megafx.ir.program import VAL, Program, fqn_of
from megafx.ir.sizes import Sizes
from megafx.rules.families import VIEWS

aten = torch.ops.aten
GROUPED = torch.ops.megafx.grouped_mm.default
_PRODUCTS = aten_ops("bmm matmul")
_DROPS = {*VIEWS, "aten.select.int"}  # of a dim of 1
_SORTS = aten_ops("sort sort.stable")
_ORDERS = aten_ops("argsort argsort.stable")
_INDICES = _SORTS | aten_ops("topk max.dim min.dim")  # their second result
_TAKES = aten_ops("index.Tensor index_select gather")
_MOVES = _TAKES | aten_ops("slice.Tensor select.int transpose.int permute")
_SAME = COPIES | {aten.detach.default}


def why_not_expert_of_row(ids: Any, ends: Any, experts: int) -> str:
    """Why `ids` [S] may not be the expert of each row that `ends` [E] says; '' if they are."""
    unsorted = _sorted_from(ids)
    if unsorted is None:
        return "ids that are not sorted as the rows are"
    if not any(_same(_counted(ends, experts), each) for each in (ids, unsorted)):
        return "ids that are not those whose counts end the groups"
    if not never_negative(unsorted):
        return "ids that are not indices of topk, sort or argmax, so that they may be negative"
    return ""


def _sorted_from(ids: Any) -> Any:
    """The ids that these are in ascending order, or None."""
    ids = _plain(ids)
    first, order = _operand(ids, 0), _operand(ids, 1)
    if ids.target is operator.getitem and order == 0 and _ascending(first, _SORTS):
        return first.args[0]
    if ids.target not in _TAKES:
        return None
    order = _plain(order[0] if ids.target is aten.index.Tensor and len(order) == 1 else _operand(ids, 2))
    if not isinstance(order, fx.Node) or first.meta[VAL].dim() != 1:
        return None
    source, which = _operand(order, 0), _operand(order, 1)
    if order.target is operator.getitem and which == 1 and _ascending(source, _SORTS):
        source = source.args[0]
    elif not _ascending(order, _ORDERS):
        return None
    return first if _same(source, first) else None


def _ascending(node: Any, sorts: frozenset[Any]) -> bool:
    """A sort of one dim, not descending."""
    one = isinstance(node, fx.Node) and node.target in sorts and _operand(node, 0).meta[VAL].dim() == 1
    return one and not argument(node, "descending", False)


def _counted(ends: Any, experts: int) -> Any:
    """The ids whose counts `ends` adds up, or None."""
    ends = _plain(ends, casts=True)
    counts = _plain(_operand(ends, 0), casts=True) if ends.target is aten.cumsum.default else None
    if counts is None:
        return None
    if counts.target is aten.histc.default and tuple(counts.args[1:]) == (experts, 0, experts - 1):
        return _plain(counts.args[0], casts=True)
    hot = _plain(counts.args[0], casts=True) if counts.target is aten.sum.dim_IntList else None
    if hot is not None and hot.target is aten.one_hot.default and hot.args[1] == experts:
        dims = {int(d) % hot.meta[VAL].dim() for d in counts.args[1]}
        return hot.args[0] if dims == set(range(hot.meta[VAL].dim() - 1)) else None
    return None


def never_negative(ids: Any) -> bool:
    """Whether ids are indices that topk, sort or argmax gave, in any order."""
    ids = _plain(ids, casts=True)
    if not isinstance(ids, fx.Node) or ids.op != "call_function":
        return False
    if ids.target is operator.getitem:
        source, which = _operand(ids, 0), _operand(ids, 1)
        if which == 0:
            return source.target in _SORTS and never_negative(source.args[0])
        return source.target in _INDICES
    if ids.target in (aten.argmax.default, aten.argmin.default, *_ORDERS):
        return True
    return (str(ids.target) in VIEWS or ids.target in _MOVES) and never_negative(ids.args[0])


def _plain(node: Any, casts: bool = False) -> Any:
    """What the value is a copy of; with casts, also a cast of."""
    return behind(node, _SAME | CASTS if casts else _SAME)


def _operand(node: Any, i: int) -> Any:
    return node.args[i] if isinstance(node, fx.Node) and len(node.args) > i else None


def _same(a: Any, b: Any) -> bool:
    """Whether two nodes hold the same elements in the same order, up to their shape."""

    def root(node: Any) -> Any:
        node = _plain(node, casts=True)
        while isinstance(node, fx.Node) and str(node.target) in VIEWS:
            node = _plain(node.args[0], casts=True)
        return node

    return a is not None and root(a) is root(b)


# -- products


@dataclass(frozen=True)
class Product:
    """node: the result [S, N] of x [S, K] and weight [E, K, N] (`turned`: [E, N, K]). inner: the nodes from x to the result."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    by: fx.Node
    inner: tuple[fx.Node, ...]
    looked_up: bool = False
    turned: bool = False

    @property
    def experts(self) -> int:
        return int(self.weight.meta[VAL].shape[0])

    @property
    def terms(self) -> int:
        """K: what each element of the result is a sum of."""
        return int(self.weight.meta[VAL].shape[2 if self.turned else 1])

    @property
    def width(self) -> int:
        """N."""
        return int(self.weight.meta[VAL].shape[1 if self.turned else 2])

    def __str__(self) -> str:
        return f"{self.node.target} of '{fqn_of(self.node)}'"


def find_products(program: Program) -> list[Product]:
    """In graph order."""
    found = []
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        args: Any = node.args
        if node.target is GROUPED:
            x, weight, ends = args
            found.append(Product(node, x, weight, ends, (node,)))
        elif node.target in _PRODUCTS and (product := _looked_up(node, args, program.sizes)):
            found.append(product)
    return found


def _looked_up(node: fx.Node, args: tuple[Any, ...], sizes: Sizes) -> Product | None:
    turned = _is_lookup(args[0])
    lookup, side = (args[0], args[1]) if turned else (args[1], args[0])
    if not _is_lookup(lookup) or str(side.target) not in VIEWS or len(node.users) != 1 or len(side.users) != 1:
        return None
    x, out = side.args[0], next(iter(node.users))
    rows = sizes.shape(lookup.meta[VAL])[0]
    column = sizes.shape(side.meta[VAL])[1:]
    one = column[1] if turned else column[0]
    if one != 1 or str(out.target) not in _DROPS or sizes.shape(x.meta[VAL]) != (rows, column[0] * column[1]):
        return None
    weight, (ids,) = lookup.args
    width = weight.meta[VAL].shape[1 if turned else 2]
    if sizes.shape(out.meta[VAL]) != (rows, width):
        return None
    return Product(out, x, weight, ids, (side, node, out), True, turned)


def _is_lookup(node: Any) -> bool:
    """weight[ids] of a stack [E, .., ..], a weight for each row."""
    if not isinstance(node, fx.Node) or node.target is not aten.index.Tensor:
        return False
    weight, indices = node.args
    value = weight.meta[VAL]  # type: ignore[union-attr]
    return value.dim() == 3 and len(indices) == 1 and indices[0].meta[VAL].dim() == 1  # type: ignore[arg-type,index,union-attr]
