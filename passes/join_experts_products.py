"""The products of a mixture with one weight for each row's expert: on rows sorted by expert, or with weights looked up.

%y = grouped_mm(%x, %w, %ends)                                                 # sorted: `by` is %ends
%g = index(%w, [%ids]); %b = bmm(unsqueeze(%x, 1), %g); %y = reshape(%b, ..)   # looked up: `by` is %ids
%b = bmm(%g, unsqueeze(%x, -1)), with the weights [E, N, K], is the same: `turned`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from megafx.ir import VAL, Program, fqn_of
from megafx.op_families import VIEWS
from megafx.sizes import Sizes

aten = torch.ops.aten
GROUPED = torch.ops.megafx.grouped_mm.default
_PRODUCTS = (aten.bmm.default, aten.matmul.default)
_DROPS = {*VIEWS, "aten.select.int"}  # of a dim of 1


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
