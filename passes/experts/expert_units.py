"""The MLPs of a mixture's experts in a graph: products with one weight for each row's expert, and the ops between them.

PRODUCTS of rows that are sorted by expert, or with weights that are looked up for each row:

    %y = grouped_mm(%x, %w, %ends)                                                 # sorted: `by` is %ends
    %g = index(%w, [%ids]); %b = bmm(unsqueeze(%x, 1), %g); %y = reshape(%b, ..)   # looked up: `by` is %ids
    %b = bmm(%g, unsqueeze(%x, -1)), with the weights [E, N, K], is the same: `turned`

UNITS. The ops between products become the text of a row-wise unit (kernels/experts/row_units.py):

    %h = grouped_mm(%x, %up, %ends)
    %b = index(%up_bias, [%ids]); %s = add(%h, %b); %a = relu(%s)      # ids: the expert of each row
    %y = grouped_mm(%a, %down, %ends)

gives the unit "v0 = add.Tensor(h0, e0); v1 = relu(v0); v1" of %h and the stack %up_bias. An op computes each row by itself if
its sharding rule says that the dim of the rows can be cut.

IDS say which expert a row belongs to:

    %order = argsort(%chosen); %ids = index(%chosen, [%order])      # or the first result of sort(%chosen)
    %ends = cumsum(one_hot(%chosen, 5).sum(0), 0)                   # or histc(%ids, 5, 0, 4)

Then ids[s] = e for ends[e-1] <= s < ends[e]: `ids` is ascending, `ends` counts the same numbers, and none is negative.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from megafx.ir.nodes import CASTS, COPIES, RESHAPES, argument, aten_ops, behind, is_draw, op_name
from megafx.ir.program import VAL, Program, fqn_of, is_floating
from megafx.ir.sizes import Sizes
from megafx.kernels.experts import group_rows as _defines_the_ops  # noqa: F401
from megafx.kernels.experts.row_units import write
from megafx.rules.families import VIEWS
from megafx.rules.grammar import names
from megafx.rules.strategies import Operand, OpRule, rule_for

aten, ops = torch.ops.aten, torch.ops.megafx
GROUPED = torch.ops.megafx.grouped_mm.default
_PRODUCTS = aten_ops("bmm matmul")
_DROPS = {*VIEWS, "aten.select.int"}  # of a dim of 1
_SORTS = aten_ops("sort sort.stable")
_ORDERS = aten_ops("argsort argsort.stable")
_INDICES = _SORTS | aten_ops("topk max.dim min.dim")  # their second result
_TAKES = aten_ops("index.Tensor index_select gather")
_MOVES = _TAKES | aten_ops("slice.Tensor select.int transpose.int permute")
_SAME = COPIES | {aten.detach.default}
_SIZED = RESHAPES | {aten.expand.default}

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
        args = node.args
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
    value = weight.meta[VAL]
    return value.dim() == 3 and len(indices) == 1 and indices[0].meta[VAL].dim() == 1


# -- units


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
class ExpertMlp:
    """What grouped_mlp takes. firsts: the products before; nodes: the ops between, in order; unit: the same as text."""

    firsts: list[Product]
    nodes: list[fx.Node]
    unit: str
    stacks: list[fx.Node] = field(default_factory=list)
    rows: list[RowValue] = field(default_factory=list)
    cut: bool = True  # whether the result could be cut along the elements of a row (the experts' ffn)


def find_unit(program: Program, products: Sequence[Product], last: Product) -> ExpertMlp | None:
    """The ops between earlier products and this one; None where there is no earlier product. Raises NotByRow."""
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
    starts = [node for node in others if node < last.node]
    reached, todo = {*starts}, [*starts]
    while todo:
        fresh = [u for u in todo.pop().users if u < last.node and u not in reached]
        reached.update(fresh)
        todo += fresh
    needed, todo = set(), [last.x]
    while todo:
        node = todo.pop()
        if node in reached and node not in needed:
            needed.add(node)
            todo += [] if node in others else node.all_input_nodes
    ordered = sorted(needed)
    return [others[n] for n in ordered if n in others], [n for n in ordered if n not in others]


class _Reader:
    """Names what the unit takes from outside, and refuses what is not computed by row."""

    def __init__(self, program: Program, last: Product, firsts: list[Product], nodes: list[fx.Node]) -> None:
        self.program, self.last = program, last
        self.every = set(program.graph.nodes)
        self.found = ExpertMlp(firsts, nodes, "")
        self.names = {first.node: f"h{i}" for i, first in enumerate(firsts)}
        self.inside = {*self.names, *nodes}
        self.count = self._rows(firsts[0].node)
        self.repeated: dict[tuple[fx.Node, int], str] = {}  # names of values that all rows share, by dims

    def read(self) -> ExpertMlp:
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


# -- ids


def why_not_expert_of_row(ids: Any, ends: Any, experts: int) -> str:
    """Why `ids` [S] may not be the expert of each row that `ends` [E] says; '' if they are."""
    unsorted = _sorted_from(ids)
    if unsorted is None:
        return "ids that are not sorted as the rows are"
    if not any(same_elements(counted_ids(ends, experts), each) for each in (ids, unsorted)):
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
    if ids.target is ops.group_rows.default:
        return first if order.target is ops.group_order.default and same_elements(order.args[0], first) else None
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
    return first if same_elements(source, first) else None


def sorts_ascending(node: fx.Node) -> bool:
    """True for a sort, or an argsort, of ids [S], smallest first."""
    return _ascending(node, _SORTS | _ORDERS) and not is_floating(_operand(node, 0))


def _ascending(node: Any, sorts: frozenset[Any]) -> bool:
    """A sort of one dim, not descending."""
    one = isinstance(node, fx.Node) and node.target in sorts and _operand(node, 0).meta[VAL].dim() == 1
    return one and not argument(node, "descending", False)


def counted_ids(ends: Any, experts: int) -> Any:
    """The ids whose counts `ends` adds up, or None."""
    ends = _plain(ends, casts=True)
    if ends.target is ops.group_ends.default:
        return ends.args[0] if ends.args[1] == experts else None
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
    """True if ids are indices that topk, sort or argmax gave, in any order."""
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
    if op_name(ids) == "transition" and "P" not in ids.args[1:3]:  # of an outer axis
        return never_negative(ids.args[0])
    return (str(ids.target) in VIEWS or ids.target in _MOVES) and never_negative(ids.args[0])


def chosen_among(ids: Any) -> int:
    """Of how many the ids are indices that topk, sort or argmax gave; 0 where they are not."""
    ids = _plain(ids, casts=True)
    if not isinstance(ids, fx.Node) or not never_negative(ids):
        return 0
    if ids.target is operator.getitem:
        source, which = _operand(ids, 0), _operand(ids, 1)
        if which == 0:
            return chosen_among(source.args[0])
        ids = source
    elif str(ids.target) in VIEWS or ids.target in _MOVES:
        return chosen_among(ids.args[0])
    dim = argument(ids, "dim")
    among = ids.args[0].meta[VAL].shape[-1 if dim is None and "argm" not in op_name(ids) else dim]
    return among if isinstance(among, int) else 0


def _plain(node: Any, casts: bool = False) -> Any:
    """What the value is a copy of; with casts, also a cast of."""
    return behind(node, _SAME | CASTS if casts else _SAME)


def _operand(node: Any, i: int) -> Any:
    return node.args[i] if isinstance(node, fx.Node) and len(node.args) > i else None


def same_elements(a: Any, b: Any) -> bool:
    """True if two nodes hold the same elements in the same order, up to their shape."""

    def root(node: Any) -> Any:
        node = _plain(node, casts=True)
        while isinstance(node, fx.Node) and str(node.target) in VIEWS:
            node = _plain(node.args[0], casts=True)
        return node

    return a is not None and root(a) is root(b)
