"""What stands between the products of a mixture's experts, where it computes each row by itself.

    %h = grouped_mm(%x, %up, %ends)
    %b = index(%up_bias, [%ids]); %s = add(%h, %b); %a = relu(%s)      # ids: the expert of each row
    %y = grouped_mm(%a, %down, %ends)

gives the unit "v0 = add.Tensor(h0, e0); v1 = relu(v0); v1" of %h and the stack %up_bias. An op computes each row by itself if
its sharding rule says that the dim of the rows can be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from megafx.ir.nodes import RESHAPES, is_draw
from megafx.ir.program import VAL, Program, is_floating
from megafx.kernels.experts.row_units import write
from megafx.passes.experts.expert_rows import Product, why_not_expert_of_row
from megafx.rules.grammar import names
from megafx.rules.strategies import Operand, OpRule, rule_for

aten = torch.ops.aten
_SIZED = RESHAPES | {aten.expand.default}


class NotByRow(Exception):
    """Why a mixture cannot be joined: what was found, and at which node."""

    def __init__(self, found: str, node: fx.Node) -> None:
        self.found, self.node = found, node
        super().__init__(found)


class RowValue(NamedTuple):
    """A value of each row. dims: 0; or, of a value that all rows share, its dims once it is repeated for each row."""

    value: fx.Node
    dims: int = 0


@dataclass
class Found:
    """What grouped_mlp takes. firsts: the products before; nodes: what stands between, in order; unit: the same as text."""

    firsts: list[Product]
    nodes: list[fx.Node]
    unit: str
    stacks: list[fx.Node] = field(default_factory=list)
    rows: list[RowValue] = field(default_factory=list)
    cut: bool = True  # whether the result could be cut along the elements of a row (the experts' ffn)


def find_unit(program: Program, products: Sequence[Product], last: Product) -> Found | None:
    """What stands between earlier products and this one; None where there is no earlier product. Raises NotByRow."""
    firsts, nodes = _between(products, last)
    if not firsts:
        return None
    inside = {*nodes, *(n for p in (*firsts, last) for n in p.inner)}
    for node in (*(p.node for p in firsts), *nodes):
        other = next((u for u in node.users if u not in inside), None)
        if other is not None:
            raise NotByRow(f"{node.target}, whose result {other.target} reads too", node)
    if any(first.x is not firsts[0].x for first in firsts):
        raise NotByRow(f"{last.node.target} of products of different values", last.node)
    return _Reader(program, last, firsts, nodes).read()


def products_before(products: Sequence[Product], last: Product) -> list[Product]:
    """The products of the same rows that this one depends on."""
    return _between(products, last)[0]


def _between(products: Sequence[Product], last: Product) -> tuple[list[Product], list[fx.Node]]:
    """(products of the same rows that `last` depends on, nodes on the ways from them), in graph order."""
    others = {p.node: p for p in products if p.by is last.by and p is not last}
    before: dict[fx.Node, int] = {}
    for i, node in enumerate(last.node.graph.nodes if others else ()):
        if node is last.node:
            break
        before[node] = i
    starts = [node for node in others if node in before]
    reached, todo = {*starts}, [*starts]
    while todo:
        fresh = [u for u in todo.pop().users if u in before and u not in reached]
        reached.update(fresh)
        todo += fresh
    needed, todo = set(), [last.x]
    while todo:
        node = todo.pop()
        if node in reached and node not in needed:
            needed.add(node)
            todo += [] if node in others else node.all_input_nodes
    ordered = sorted(needed, key=lambda n: before[n])
    return [others[n] for n in ordered if n in others], [n for n in ordered if n not in others]


class _Reader:
    """Names what the unit takes from outside, and refuses what is not computed by row."""

    def __init__(self, program: Program, last: Product, firsts: list[Product], nodes: list[fx.Node]) -> None:
        self.program, self.last = program, last
        self.every = set(program.graph.nodes)
        self.found = Found(firsts, nodes, "")
        self.names = {first.node: f"h{i}" for i, first in enumerate(firsts)}
        self.inside = {*self.names, *nodes}
        self.count = self._rows(firsts[0].node)
        self.repeated: dict[tuple[fx.Node, int], str] = {}  # names of values that all rows share, by dims

    def read(self) -> Found:
        for node in self.found.nodes:
            self._check(node)
        self.found.unit = write(self.found.nodes, self._arguments, self._name_of) if self.found.nodes else "h0"
        return self.found

    def _rows(self, node: fx.Node) -> int:
        value = node.meta[VAL]
        return self.program.sizes.shape(value)[0] if isinstance(value, torch.Tensor) and value.dim() else -1

    def _check(self, node: fx.Node) -> None:
        if is_draw(node):
            raise NotByRow(f"{node.target}, which draws by the number of a row", node)
        if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(node.meta[VAL], torch.Tensor):
            raise NotByRow(f"{node.target}, which gives no single tensor", node)
        if self._rows(node) != self.count:
            raise NotByRow(f"{node.target}, which does not keep the rows", node)
        rule = rule_for(node, self.program, self.every)
        if rule.kind == "none":
            raise NotByRow(f"{node.target} ({rule.reason})", node)
        if rule.kind == "factors":
            row = rule.result[0]
            if not isinstance(row, str) or names(row) != (row,) or row in rule.forbidden:
                raise NotByRow(f"{node.target}, which mixes rows", node)
            last = rule.result[-1]
            self.found.cut &= last is not None and not any(f in rule.forbidden for f in names(last))
            for operand in rule.operands:
                self._operand(node, rule, row, operand)

    def _operand(self, node: fx.Node, rule: OpRule, row: str, operand: Operand) -> None:
        value, factors = operand.node, operand.factors
        by_row = bool(factors) and factors[0] == row and not any(row in names(f) for f in factors[1:])
        if by_row and (value in self.inside or value in self.names):
            return
        if value in self.inside:
            raise NotByRow(f"{node.target}, which mixes rows", node)
        if not is_floating(value):
            raise NotByRow(f"{node.target} with {self._said(value)}, which is not floating", node)
        if by_row:
            self._from_outside(value)
        elif all(f is None or f.startswith("_") for f in (*factors, *rule.result)):  # it is broadcast
            key = value, node.meta[VAL].dim()
            if key not in self.repeated:
                self.repeated[key] = f"r{len(self.found.rows)}"
                self.found.rows.append(RowValue(*key))
        else:
            raise NotByRow(f"{node.target} with {self._said(value)}, which has no row for each row", node)

    def _from_outside(self, value: fx.Node) -> None:
        """A lookup in a stack by the expert of each row, or a value that has its own rows."""
        stack, why = stack_of(value, self.last)
        if stack is None:
            self.names[value] = f"r{len(self.found.rows)}"
            self.found.rows.append(RowValue(value))
            return
        if why:
            raise NotByRow(f"a lookup in {self._said(stack)} by {why}", value)
        self.names[value] = f"e{len(self.found.stacks)}"
        self.found.stacks.append(stack)

    def _said(self, value: fx.Node) -> str:
        """A parameter or input by its name, a result by its op."""
        inputs = dict(self.program.input_nodes())
        return inputs[value].name if value in inputs else str(value.target)

    # -- as text

    def _arguments(self, node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
        """A node's arguments, where the number of rows is -1."""
        dims = node.meta[VAL].dim()
        if node.target in _SIZED:
            return [[-1, *a[1:]] if isinstance(a, (list, tuple)) and len(a) == dims else a for a in node.args], {}
        return list(node.args), dict(node.kwargs)

    def _name_of(self, node: fx.Node, value: Any) -> str:
        name = self.names.get(value) or self.repeated.get((value, node.meta[VAL].dim()))
        if name is None:
            raise NotByRow(f"{node.target}, which takes a size or setting that only the call knows", node)
        return name


def stack_of(value: Any, product: Product) -> tuple[fx.Node | None, str]:
    """(the stack [E, ..] of which a value takes something for each row, why it may not be by the row's expert or '')."""
    if value.target is not aten.index.Tensor or len(value.args[1]) != 1:
        return None, ""
    stack, (ids,) = value.args
    if ids.meta[VAL].dim() != 1 or stack.meta[VAL].shape[0] != product.experts:
        return None, ""
    if product.looked_up:
        return stack, "" if ids is product.by else "other ids than those of the weights"
    return stack, why_not_expert_of_row(ids, product.by, product.experts)
