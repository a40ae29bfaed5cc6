"""Put the tokens of the residual stream in one dim, which ranks can cut into ranges of memory.

Before:  %e = embedding(%w, %ids)            # [b s h]
         %x = add(%e, embedding(%p, %pos))   # + [s h]
         %y = layer_norm(%x, [h], ...)
         %z = linear(%y, ...)
         %q = reshape(%z, [b, s, n, d])
After:   %e = embedding(%w, reshape(%ids, [b*s]))                                # [b*s h]
         %x = add(%e, embedding(%p, reshape(expand(%pos, [b, s]), [b*s])))
         %y = layer_norm(%x, [h], ...)
         %z = linear(%y, ...)                                                    # [b*s n*d]
         %q = reshape(%z, [b, s, n, d])
Legal because: these ops compute each token by itself, and a reshape keeps the order of the tokens. A draw has the bits that it
had, since elements keep their places in memory.

With b > 1 a shard of s is b pieces of memory, so that each gather and reduce-scatter of it copies; a shard of b*s is one.
Nothing else needs to know which dims the tokens come from: fixed sizes, a sequence that comes first and images go the same
way. An op that mixes tokens stays as it is, and what it reads is reshaped back.

Rewritten are norms over the last dim of values with two or more dims before it, and the ops connected to them that work
token by token. A norm next to neither a product with a weight nor an embedding (of queries, head by head) is left alone.
A table that has only some of the dims (positions) is looked up for each token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from megafx.ir.facts import ATTENTION, MATMUL
from megafx.ir.nodes import RESHAPES, draw_of, is_draw, op_name
from megafx.ir.program import TOKENS, VAL, Builder, Phase, Program, active_nodes, inherit, recompute_val, set_at
from megafx.ir.sizes import SizeEmitter
from megafx.ops.owners import owners_of
from megafx.planner.context import CompileContext
from megafx.planner.cost import cost_kind
from megafx.planner.policy import normalised_places, weight_values
from megafx.rules.grammar import names
from megafx.rules.strategies import Operand, OpRule, rule_for

REQUIRES, ENSURES = Phase.CANONICAL, Phase.CANONICAL
NAME = "flatten_tokens"
aten = torch.ops.aten
# Arguments that number dims or list sizes; `dim` alone can be renumbered.
DIMS = frozenset(("dims", "size", "sizes", "shape", "start_dim", "end_dim", "dim0", "dim1", "repeats", "shifts"))

FULL, FIRST, LAST, ROW, NONE = "full", "first", "last", "row", "none"  # what an operand has of the tokens' dims


def flatten_tokens(program: Program, context: CompileContext) -> int:
    """Return the number of values that have their tokens in one dim now."""
    given = context.given
    wanted = context.config.sequence_parallel is not False if given is None else given.flat_tokens
    if context.t == 1 or not wanted:
        return 0
    return _Flattener(program).run()


class _Flattener:
    """flat: value with tokens in several dims -> the same with one."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.active = active_nodes(program)
        self.weights = weight_values(program, self.active)
        self.owned = owners_of(program)
        self.sizes = SizeEmitter(program.graph, program.sizes)
        self.rules: dict[fx.Node, OpRule] = {}
        self.flat: dict[fx.Node, fx.Node] = {}

    def run(self) -> int:
        graph, regions = self.program.graph, self._regions()
        if not regions:
            return 0
        for lead in dict.fromkeys(regions.values()):  # sizes are before everything that is made
            for at in range(len(lead)):
                _ = self.sizes(lead[at]), self.sizes(math.prod(lead[at:])), self.sizes(math.prod(lead[:at]))
        for node in [n for n in graph.nodes if n in regions]:
            self._rewrite(node, regions[node])
        for node in reversed(graph.nodes):
            if node in regions:
                self._read_elsewhere(node, regions)
                graph.erase_node(node)
        self.program.erase_unused()
        return len(regions)

    # -- which values

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        value = node.meta.get(VAL)
        return self.program.sizes.shape(value) if isinstance(value, torch.Tensor) else ()

    def _rule(self, node: fx.Node) -> OpRule:
        if node not in self.rules:
            self.rules[node] = rule_for(node, self.program, self.active)
        return self.rules[node]

    def _regions(self) -> dict[fx.Node, tuple[int, ...]]:
        """Each node to rewrite -> the dims of its tokens."""
        found: dict[fx.Node, tuple[int, ...]] = {}
        seen: set[fx.Node] = set()
        for node in self.program.graph.nodes:
            if node.op != "call_function" or node not in self.active or node in seen:
                continue
            places = normalised_places(node, self._rule(node))
            if len(places) != 1:
                continue
            source, dim = places[0]
            shape = self._shape(source)
            lead = shape[:-1]
            if dim == len(shape) - 1 >= 2 and any(n != 1 for n in lead[1:]) and self._by_token(node, lead):
                region = self._flood(node, lead)
                seen |= region
                if any(self._beside_weights(n) for n in region):
                    found |= dict.fromkeys(region, lead)
        return found

    def _flood(self, start: fx.Node, lead: tuple[int, ...]) -> set[fx.Node]:
        """The ops round `start` that compute the same tokens one by one."""
        region, todo = {start}, [start]
        while todo:
            node = todo.pop()
            for other in (*node.all_input_nodes, *node.users):
                if other not in region and self._by_token(other, lead):
                    region.add(other)
                    todo.append(other)
        return region

    def _beside_weights(self, node: fx.Node) -> bool:
        """True if an embedding makes the value, or a product with a weight makes or reads it."""
        products = [n for n in (*node.all_input_nodes, *node.users) if cost_kind(op_name(n)) == MATMUL]
        return op_name(node) == "embedding" or any(a in self.weights for n in products for a in n.all_input_nodes)

    def _by_token(self, node: fx.Node, lead: tuple[int, ...]) -> bool:
        """True if the op computes each token of [*lead, n] from that of its operands."""
        if node.op != "call_function" or node not in self.active or node in self.owned:
            return False
        if is_draw(node) and draw_of(node).shard_dim >= 0:  # cut by an outer axis, along one of these dims
            return False
        product = cost_kind(op_name(node)) in (MATMUL, ATTENTION) and node.target is not aten.linear.default
        if self._shape(node)[:-1] != lead or product:
            return False
        rule = self._rule(node)
        if rule.kind != "factors" or rule.template.several or _changes(node, len(lead)) is None:
            return False
        factors = rule.result[: len(lead)]
        alone = all(isinstance(f, str) and names(f) == (f,) and f not in rule.forbidden for f in _long(factors, lead))
        if not alone or rule.result[-1] in factors:
            return False
        held = [self._held(node, operand, factors, lead) for operand in rule.operands]
        return FULL in held and None not in held

    def _held(self, node: fx.Node, operand: Operand, factors: tuple[Any, ...], lead: tuple[int, ...]) -> str | None:
        """FULL: all of the tokens' dims; FIRST, LAST: a table that has the first or last of them; ROW, NONE: none, with or
        without dims of one element in their places; None: others, or what is no table."""
        shape, wanted, dims = self._shape(operand.node), _long(factors, lead), _dims(node, operand)
        held = [f for f in operand.factors[:dims] if f in wanted]
        if any(set(names(f)) & set(wanted) for f in operand.factors if f not in held):
            return None
        if not held:
            return ROW if dims == len(lead) and all(n == 1 for n in shape[:dims]) else NONE
        if any(n != 1 for n, f in zip(shape[:dims], operand.factors[:dims], strict=True) if f not in wanted):
            return None
        if held == wanted:
            return FULL
        if dims == len(shape) or shape[-1] == 1:
            return None
        if held == wanted[len(wanted) - len(held) :]:
            return LAST
        # other values with a row for each sequence are better added to its tokens than looked up, as gradients are sums then
        source = _source(operand.node)
        table = source in self.weights or source not in self.active or source.target is aten.embedding.default
        return FIRST if held == wanted[: len(held)] and table else None

    # -- rewriting

    def _rewrite(self, node: fx.Node, lead: tuple[int, ...]) -> None:
        rule, factors = self._rule(node), self._rule(node).result[: len(lead)]
        with self.program.graph.inserting_before(node):
            new = self.program.graph.node_copy(node)
        for name, value in (_changes(node, len(lead)) or {}).items():
            new.update_kwarg(name, value) if name in new.kwargs else new.update_arg(_place(node, name), value)
        for operand in rule.operands:
            held = self._held(node, operand, factors, lead)
            if held != NONE:
                width = self._shape(operand.node)[_dims(node, operand) :]
                set_at(new, operand.path, self._operand(operand.node, held, width, lead, new))
        recompute_val(self.program, new)
        inherit(new, node, NAME)
        new.meta[TOKENS] = lead
        self.flat[node] = new

    def _operand(
        self, value: fx.Node, held: str | None, width: tuple[int, ...], lead: tuple[int, ...], where: fx.Node
    ) -> fx.Node:
        """The value as an op on [tokens, n] reads it. width: its dims behind those of the tokens, one or none."""
        build = Builder(self.program, where, value, NAME)
        if held == ROW:
            return build(aten.reshape.default, value, [self.sizes(n) for n in width])
        if held in (FIRST, LAST):
            return self._looked_up(build, value, lead, held == FIRST)
        if value not in self.flat:
            wanted = (math.prod(lead), *width)
            self.flat[value] = next((v for v in _reshaped(value) if self._shape(v) == wanted), value)
            if self._shape(self.flat[value]) != wanted:
                made = build(aten.reshape.default, value, [self.sizes(n) for n in wanted])
                made.meta[TOKENS] = lead
                self.flat[value] = made
        return self.flat[value]

    def _looked_up(self, build: Callable[..., fx.Node], table: fx.Node, lead: tuple[int, ...], first: bool) -> fx.Node:
        """table: [.., n] with the first or the last dims of the tokens -> its row for each token."""
        *dims, width = self._shape(table)
        rows, tokens = math.prod(dims), math.prod(lead)
        again = [self.sizes(tokens // rows), self.sizes(rows)]

        def for_each_token(index: fx.Node) -> fx.Node:
            if index.meta[VAL].dim() > 1 or first:
                index = build(aten.reshape.default, index, [self.sizes(rows), *[1] * first])
            index = build(aten.expand.default, index, again[::-1] if first else again)
            return build(aten.reshape.default, index, [self.sizes(tokens)])

        source = _source(table)
        if source.target is aten.embedding.default and not source.kwargs:
            weight, index, *rest = source.args
            made = build(aten.embedding.default, weight, for_each_token(index), *rest)
        else:
            device = table.meta[VAL].device
            index = build(aten.arange.default, self.sizes(rows), dtype=torch.int64, device=device)
            if len(dims) > 1:
                table = build(aten.reshape.default, table, [self.sizes(rows), self.sizes(width)])
            made = build(aten.embedding.default, table, for_each_token(index))
        made.meta[TOKENS] = lead
        return made

    def _read_elsewhere(self, node: fx.Node, regions: dict[fx.Node, tuple[int, ...]]) -> None:
        """Give users outside of the region the value with its dims."""
        flat, back = self.flat[node], None
        for user in [u for u in node.users if u not in regions]:
            if user.target in RESHAPES:
                user.replace_input_with(node, flat)
                if self._shape(user) == self._shape(flat):
                    user.replace_all_uses_with(flat)
                continue
            if back is None:
                build = Builder(self.program, node, node, NAME)
                back = build(aten.reshape.default, flat, [self.sizes(n) for n in self._shape(node)])
            user.replace_input_with(node, back)


def _long(factors: tuple[Any, ...], lead: tuple[int, ...]) -> list[Any]:
    """Factors of the dims that have more than one element."""
    return [f for f, n in zip(factors, lead, strict=True) if n != 1]


def _dims(node: fx.Node, operand: Operand) -> int:
    """How many dims of the operand may be those of tokens: all of an embedding's ids, else all but the last."""
    ids = op_name(node) == "embedding" and operand.path == (1,)
    return len(operand.factors) if ids else max(len(operand.factors) - 1, 0)


def _reshaped(value: fx.Node) -> Iterator[fx.Node]:
    """The value, and what it is a reshape of."""
    yield value
    while value.target in RESHAPES:
        value = value.args[0]
        yield value


def _source(value: fx.Node) -> fx.Node:
    """What the value is with dims of one element here and there."""
    while value.target in (*RESHAPES, aten.unsqueeze.default):
        before = value.args[0]
        if before.meta[VAL].shape[-1] != value.meta[VAL].shape[-1]:
            break
        value = before
    return value


def _place(node: fx.Node, name: str) -> int:
    return [a.name for a in node.target._schema.arguments].index(name)


def _changes(node: fx.Node, last: int) -> dict[str, Any] | None:
    """New arguments once dims [0, last) are merged into one; None where the op names other dims than the last."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    found: dict[str, Any] = {}
    for place, spec in enumerate(node.target._schema.arguments):
        given = node.kwargs.get(spec.name, node.args[place] if place < len(node.args) else None)
        if spec.name in DIMS:
            return None
        if spec.name == "pad" and isinstance(given, (list, tuple)) and len(given) > 2:
            if any(given[2:]):  # pairs, that of the last dim first; (1, -1) would shift tokens
                return None
            found["pad"] = given[:2]
        if spec.name == "indices" and isinstance(given, (list, tuple)):  # a place in the list is a dim
            before, rest = given[:last], given[last:]
            if any(i is not None for i in before) or any(i is None or i.meta[VAL].dim() != 1 for i in rest):
                return None
            found["indices"] = [None, *rest]
        if spec.name == "dim" and given is None and spec.has_default_value() and spec.default_value is not None:
            if isinstance(spec.default_value, list) or spec.default_value % (last + 1) != last:
                return None
        elif spec.name == "dim" and given is not None:
            dims = given if isinstance(given, (list, tuple)) else [given]
            if any(not isinstance(d, int) or d % (last + 1) != last for d in dims):
                return None
            found["dim"] = [1] if isinstance(given, (list, tuple)) else 1
    return found
