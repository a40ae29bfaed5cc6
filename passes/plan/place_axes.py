"""Type every value on each axis outside of the tensor-parallel one, and make the program that of one of its ranks.

Before:  %c = cross_entropy(%logits, %labels, -100, 0.0, False); %n = sum(ne(%labels, -100)); %l = div(sum(%c), %n)
         %y = dropout(%x, %seed, 0.1, 3, -1, [], 'tp');   %a = mean(%y)
After:   %c = cross_entropy(%logits, %labels, -100, 0.0, False); %n = sum(ne(%labels, -100))
         %t = transition(%n, P -> R, 'dp', 2); %l = div(sum(%c), %t); %w = transition(%l, P -> R, 'dp', 2)
         %y = dropout(%x, %seed, 0.1, 3, -1, [], 'dp+tp'); %m = mean(%y); %a = div(%m, 2)
Legal because: what the ranks compute together is what one process computes. A `Policy` says what of the inputs they share out;
parameters are whole. The sharding rules that serve the tensor-parallel axis say what follows for each value, and what serves
localize_shapes writes an op for its part. The result is canonical again: to the next axis, transitions are ops with a rule.

The types are R, S(d) and P as in placements/types.py, on the sizes of the whole. They are derived, not searched: of the rows of
an op's rule, the one that its operands fit with the fewest sums. A sum that an op needs whole (a count of labels), or that
leaves the graph, gets a transition P -> R, whose backward sums the gradients that the ranks have for it. So
outputs are R or S, and what users compute of them may differ from rank to rank. A value that depends on no input and has the
dim that is cut (an expanded position table) is the same all along it: a shard too. Rows that a mask selects are each rank's own
(rules/selected_rows.py): their number is that of all ranks where it divides a sum. A draw says that its rows are one rank's of
many. An op that needs parts of other ranks is an error that names it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from megafx.errors import PlanError
from megafx.ir.nodes import argument, draw_of, is_draw, op_name, set_arguments
from megafx.ir.program import HELD, PLACEMENT, VAL, Batch, Builder, Phase, Program, ancestors, located, tensors_of
from megafx.ir.sizes import SizeEmitter, Sizes
from megafx.ops.axes import DrawAxis
from megafx.ops.eager_call import cut_rows, find_call
from megafx.passes.localize.editor import Localizer
from megafx.passes.localize.rewrites import localize_mean
from megafx.passes.plan.statistics import NAME, spell_out_statistics
from megafx.placements.data_axis import BATCH_AXIS
from megafx.placements.types import I, Layout, P, Placement, R, S
from megafx.planner.context import CompileContext
from megafx.planner.plan import OpChoice
from megafx.rules.inference import is_uniform
from megafx.rules.selected_rows import NotOwnRows, SelectedRows
from megafx.rules.strategies import OpRule, factor_layouts, place, row, rule_for

REQUIRES, ENSURES = Phase.CANONICAL, Phase.CANONICAL
eager_call = torch.ops.megafx.eager_call.default
aten, ops = torch.ops.aten, torch.ops.megafx
MEANS = (aten.mean.default, aten.mean.dim)
# A value made of no tensor is the same along the dim that is cut where all its elements are alike.
FILLS = frozenset(("full", "zeros", "ones", "empty", "scalar_tensor"))
LIKE = frozenset(name for what in ("zeros", "ones", "full", "empty") for name in (f"{what}_like", f"new_{what}"))
# Ops that repeat what they are given.
REPEATS = ("aten.expand", "aten.repeat", "aten.broadcast_to")


@dataclass(frozen=True)
class Policy:
    """What the ranks of an axis share out of a call: the dim of the inputs that has the size called `symbol`.

    Each rank is given its part, all of them equally long.
    """

    axis: str
    ranks: int
    symbol: str
    what: str  # what, of: the kind of parallelism, and what it cuts, in words
    of: str
    other: str  # what to do where it cannot be


def policies(context: CompileContext) -> list[Policy]:
    """Of the axes outside of the tensor-parallel one, outermost first."""
    if context.data is None or context.data.ranks == 1:
        return []
    average = "which takes each rank's batch for itself as DistributedDataParallel does"
    other = f"Config(data_parallel_loss='average'), {average}"
    return [Policy(BATCH_AXIS, context.data.ranks, "batch", "data parallelism", "batch", other)]


def place_axes(program: Program, context: CompileContext) -> int:
    """Fill `program.batch`; returns the number of draws and means changed and of transitions made.

    With data_parallel_loss="average" each rank's loss is of its own rows: nothing is typed, and draws are as the rank's
    generator has it. Raises PlanError where an op mixes rows.
    """
    changes = 0
    for policy in policies(context) if program.batch is None else ():  # a stage of a pipeline was typed with the whole
        if context.config.data_parallel_loss == "average":
            program.batch = Batch(policy.ranks, {}, (R,) * len(program.outputs), False, False, False)
            changes += _share_buffers(program, policy)
            continue
        given = [node for node, spec in program.input_nodes() if spec.kind == "user"]
        if not any(isinstance(node.meta[VAL], torch.Tensor) for node in given):  # no rows: the same on every rank
            losses = any(spec.loss for spec in program.outputs)
            program.batch = Batch(policy.ranks, {}, (R,) * len(program.outputs), losses, False)
            continue
        symbol = program.sizes.symbols.get(policy.symbol)
        if symbol is None:
            raise PlanError(
                f"the {policy.of} of this call is no size that may vary, so it cannot be cut over data-parallel ranks",
                fix=f"give example inputs of at least two rows, all with the {policy.of} as their first dim; where the model's "
                "own code makes a number of it (len(x), a loop over rows), write x.shape[0], for all rows at once, or use "
                f"{policy.other}",
            )
        typer = Typer(program, policy, symbol)
        changes += spell_out_statistics(program, typer.over_rows) + typer.run()
    if program.batch is not None and context.data is not None:
        program.batch = replace(program.batch, axes=context.data.mesh)
    return changes


def _share_buffers(program: Program, policy: Policy) -> int:
    """A buffer that each rank computes of its own rows becomes rank 0's, which DistributedDataParallel sends too: ranks keep
    equal buffers. Returns their number."""
    output, results, count = program.output_node(), list(program.results()), 0
    for i, (node, spec) in enumerate(zip(results, program.outputs, strict=True)):
        if spec.kind == "mutation" and isinstance(node, fx.Node):
            build = Builder(program, output, node, NAME)
            part = build(ops.transition.default, node, "R", "P", [], [], policy.axis, policy.ranks)
            results[i] = build(ops.transition.default, part, "P", "R", [], [], policy.axis, policy.ranks)
            count += 1
    output.args = (tuple(results),)
    return count


class WholeSizes(Sizes):
    """Structural sizes of what all ranks hold together: where one rank has `symbol`, they have `ranks * symbol`."""

    def __init__(self, sizes: Sizes, symbol: sympy.Symbol, ranks: int) -> None:
        own = {"_prime_of": dict(sizes._prime_of), "_atom_of": dict(sizes._atom_of), "_memo": {}}
        self.__dict__.update(sizes.__dict__, **own)
        self.symbol, self.ranks = symbol, ranks

    def _prime(self, atom: sympy.Expr) -> int:
        return super()._prime(atom) * (self.ranks if atom == self.symbol else 1)


@dataclass(frozen=True)
class Row:
    """A way to run an op: what its operands have to be, what its results are, and the factor that is cut, if one is."""

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]
    factor: str = ""


def rows(rule: OpRule, held: list[Placement], ranks: int) -> Iterator[Row]:
    """The ways to run an op that operands which are held like this may fit."""
    template = rule.template
    count = len(template.results)
    yield Row((R,) * len(held), (R,) * count)
    for group, outs in template.groups:
        if group:
            ins = tuple(P if i in group else R for i in range(len(held)))
            yield Row(ins, tuple(P if kind == "P" else R for kind in outs) if template.kind != "view" else (P,))
    for i, have in enumerate(held):
        if not have.is_shard:
            continue
        if template.kind == "view":
            made = row(template, f"dim{have.dim}", have.cut, ranks)
            if made is not None:
                yield Row(made.ins, (made.out,), made.factor)
            continue
        for factor, layout in factor_layouts(template, i, have.dim, have.cut, ranks):
            if template.written_out(factor):
                continue
            operands = [place(template, k, factor, layout, ranks) for k in range(len(held))]
            results = [place(template, -1 - k, factor, layout, ranks) for k in range(count)]
            if None not in operands and None not in results:
                yield Row(tuple(p for p in operands if p), tuple(p for p in results if p), factor)


class Typer:
    def __init__(self, program: Program, policy: Policy, symbol: sympy.Symbol) -> None:
        self.program, self.policy, self.ranks, self.symbol = program, policy, policy.ranks, symbol
        self.sizes = WholeSizes(program.sizes, symbol, self.ranks)
        self.cut_size = self.sizes.of_expr(symbol)
        self.view = replace(program, sizes=self.sizes)
        self.facts: dict[fx.Node, Any] = {}
        self.counted: dict[int, fx.Node] = {}  # number of rows that a mask selects -> that of all ranks
        self.moved: dict[tuple[fx.Node, Placement], fx.Node] = {}
        pairs = zip(program.results(), program.outputs, strict=True)
        whole = lambda node: self.sizes.shape(node.meta[VAL])
        same = lambda node, dim: is_uniform(node, dim, self.sizes)
        self.selected = SelectedRows(
            self.ranks, lambda node: (self.facts[node],), whole, lambda node: whole(node)[0], same
        )
        self.for_buffers = ancestors([n for n, o in pairs if o.kind == "mutation" and isinstance(n, fx.Node)])
        self.changes = 0
        self.equal_batches = False

    def run(self) -> int:
        self.local = Localizer(self.program, self.policy.axis, self.ranks, {}, whole=self.sizes)
        inputs = dict(self.program.input_nodes())
        for node in list(self.program.graph.nodes):
            if node.op == "placeholder":
                cut = inputs[node].kind == "user" and isinstance(node.meta[VAL], torch.Tensor)
                self.facts[node] = self._cut(node) if cut else R
            elif node.op == "call_function" and tensors_of(node):
                self.facts[node] = self._typed(node)
        losses = [spec.loss for spec in self.program.outputs]
        kinds = []
        results = list(self.program.results())
        for i, (node, spec) in enumerate(zip(results, self.program.outputs, strict=True)):
            fact = self.facts.get(node) if isinstance(node, fx.Node) else None
            if fact == P:
                results[i], fact = self._move(node, P, R), R
            elif isinstance(node, fx.Node) and isinstance(node.meta.get(VAL), (torch.SymInt, torch.SymFloat)):
                results[i] = self._of_all_ranks(node, self.program.output_node())
            if isinstance(fact, Placement) and fact.is_shard and fact.cut.size in self.selected.masks:
                raise self._error(
                    node, "is an output of rows that a mask selects, of which each rank has its own number"
                )
            if spec.kind == "mutation" and fact is not None and fact != R:
                raise self._error(node, f"what becomes of buffer '{spec.name}' is {_say(fact)}")
            kinds.append(fact if isinstance(fact, Placement) else R)
        self.program.output_node().args = (tuple(results),)
        for node in self.program.graph.nodes:  # the next axis has placements of its own
            node.meta.pop(PLACEMENT, None)
            if isinstance(fact := self.facts.get(node), Placement):
                node.meta[HELD] = {**node.meta.get(HELD, {}), self.policy.axis: fact}
        self.program.erase_unused()
        parts = {inputs[n].name: fact for n, fact in self.facts.items() if n in inputs and fact != R}
        self.program.batch = Batch(self.ranks, parts, tuple(kinds), any(losses), self.equal_batches)
        return self.changes

    def _found(self, value: torch.Tensor) -> Placement | None:
        """S on the one dim that has the size that is cut; R where none has; None where it is in the shape in another way.
        What the first rank has comes first in a dim of several."""
        shape, size = self.sizes.shape(value), self.cut_size
        dims = [d for d, n in enumerate(shape) if n % size == 0 and n]
        strange = [n for n in shape if n % size and self.sizes.mentions(n, self.policy.symbol)]
        if strange or len(dims) > 1:
            return None
        return S(dims[0], Layout.contiguous(shape[dims[0]], self.ranks)) if dims else R

    def _cut(self, node: fx.Node) -> Placement:
        found = self._found(node.meta[VAL])
        if found is None:
            shape = tuple(node.meta[VAL].shape)
            raise self._error(node, f"has the {self.policy.of} in its shape {shape} in a way that cannot be cut")
        return found

    def over_rows(self, node: fx.Node, dims: Any) -> bool:
        """True if the dim that is cut is among these dims of a value; None and [] are all."""
        found = self._found(node.meta[VAL])
        count = max(node.meta[VAL].dim(), 1)
        return found is not None and found.is_shard and (not dims or found.dim in [d % count for d in dims])

    # -- ops

    def _typed(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            arguments = node.args
            return self.facts[arguments[0]][arguments[1]]
        name = str(node.target).split(".")[1]
        self._count_all(node)
        try:
            selected = self.selected.typed(node)
        except NotOwnRows as reason:
            raise self._error(
                node, f"takes numbers of rows that a mask selects, of which each rank has its own: {reason}"
            ) from None
        if selected is not None:
            return selected
        operands = [a for a in node.all_input_nodes if a in self.facts]
        if not operands or name in LIKE:
            fact = self._cut(node) if isinstance(node.meta[VAL], torch.Tensor) else R
            if fact.is_shard and name not in FILLS | LIKE:
                raise self._error(
                    node, f"numbers the rows of the {self.policy.of}, which each rank would number from 0"
                )
            return fact
        rule = rule_for(node, self.view, self.facts, self.policy.axis)
        held = [self.facts[o.node] for o in rule.operands]
        if all(h == R for h in held):
            return self._same_everywhere(node, rule)
        chosen = self._choose(node, rule, held)
        for operand, have, want in zip(rule.operands, held, chosen.ins, strict=True):
            if (have == P) != (want == P):
                node.replace_input_with(operand.node, self._move(operand.node, have, want))
        self._localize(node, rule, chosen)
        return chosen.outs if isinstance(node.meta[VAL], (tuple, list)) else chosen.outs[0]

    def _same_everywhere(self, node: fx.Node, rule: OpRule) -> Any:
        """Placement of a result whose operands are all R: R, or S if the op repeats them along the dim that is cut."""
        value = node.meta[VAL]
        if isinstance(value, (tuple, list)):
            return tuple(R for _ in value)
        fact = self._cut(node)
        if fact.is_shard and not str(node.target).startswith(REPEATS):
            raise self._error(
                node, f"gives values that need not be alike for all rows of the {self.policy.of} such a dim"
            )
        return fact

    def _choose(self, node: fx.Node, rule: OpRule, held: list[Placement]) -> Row:
        """The row of the op's rule that its operands fit, with the fewest sums over ranks."""
        best: tuple[int, Row] | None = None
        for made in rows(rule, held, self.ranks):
            price = 0
            for operand, have, want in zip(rule.operands, held, made.ins, strict=True):
                if have == want or (have == R and want == I):
                    continue
                value = operand.node.meta[VAL]
                if have == P and want in (R, I):  # moves next to nothing where there is no dim of the data
                    static = all(isinstance(n, int) for n in value.shape)
                    price += 0 if (operand.node, R) in self.moved else 10 if static else 100
                elif have == R and want == P and value.dtype.is_floating_point:
                    price += 1000 if node in self.for_buffers else 1
                else:
                    break
            else:
                if best is None or price < best[0]:
                    best = price, made
        by_rows = find_call(str(node.args[4])).by_rows if node.target is eager_call else None
        if best is not None and by_rows is not None:
            if not by_rows.linear and not any(spec.loss for spec in self.program.outputs):
                raise PlanError(
                    f"{self.policy.what} cannot cut the {self.policy.of}: '{find_call(str(node.args[4])).fqn}' computes with "
                    "gradients what is not linear in them, and those of a loss that is computed outside of the model, from a "
                    "rank's rows, are greater than in one process",
                    fix="compute the loss in the model's forward and return it, or use "
                    "Config(data_parallel_loss='average'), with which it sees the gradients that DistributedDataParallel gives",
                    **located(node),
                )
            cut_rows(str(node.args[4]))
        if best is None and node.target is eager_call:
            what = find_call(str(node.args[4])).what
            raise PlanError(
                f"{self.policy.what} cannot cut the {self.policy.of}: {what}, which would see a rank's rows where it sees the "
                f"whole {self.policy.of} in one process",
                fix="Config(data_parallel_loss='average'), with which it sees each rank's own batch, as with "
                "DistributedDataParallel",
                **located(node),
            )
        if best is None:
            where = ", ".join(_say(h) for h in held)
            what = f"has operands that are {where} on the axis '{self.policy.axis}', which no row of its rule takes"
            raise self._error(node, what, _OF_ROWS if op_name(node) in _EXTREMES else "")
        return best[1]

    # -- what depends on the other ranks

    def _count_all(self, node: fx.Node) -> None:
        """A number made of the size that is cut (a loss divided by it) is that of all ranks; as a size it is this rank's."""
        for spec in node.target._schema.arguments if hasattr(node.target, "_schema") else ():
            given = argument(node, spec.name)
            kind = str(spec.real_type)
            if not isinstance(given, fx.Node) or given in self.facts or kind.startswith("List"):
                continue
            expr = getattr(getattr(given.meta.get(VAL), "node", None), "expr", None)
            if expr is None or self.symbol not in expr.free_symbols:
                if expr is not None:
                    self._count_selected(node, given, expr, kind)
                continue
            if kind not in ("Tensor", "number", "Optional[number]"):
                raise self._error(
                    node, f"takes '{spec.name}' from the size of the {self.policy.of}, which is one rank's"
                )
            node.replace_input_with(given, self._of_all_ranks(given, node))
            self.changes += 1

    def _of_all_ranks(self, number: fx.Node, node: fx.Node) -> Any:
        """The number that the size of all ranks gives where one rank's gives this."""
        value = number.meta[VAL]
        if self.symbol not in value.node.expr.free_symbols:
            return number
        if isinstance(value, torch.SymInt):
            whole = self.program.sizes.of_expr(value.node.expr.xreplace({self.symbol: self.ranks * self.symbol}))
            return SizeEmitter(self.program.graph, self.program.sizes)(whole)
        args = [self._of_all_ranks(a, node) if isinstance(a, fx.Node) else a for a in number.args]
        return Builder(self.program, node, number, NAME)(number.target, *args)

    def _count_selected(self, node: fx.Node, given: fx.Node, expr: sympy.Expr, kind: str) -> None:
        """The same of the number of rows that a mask selects."""
        found = [s for s in expr.free_symbols if self.program.sizes.of_expr(s) in self.selected.masks]
        if not found:
            return
        if kind != "Tensor" or expr not in found:
            raise self._error(node, "takes a number from that of the rows that a mask selects on one rank")
        rows = self.program.sizes.of_expr(expr)
        node.replace_input_with(given, self._number_of_selected(rows, node))

    def _move(self, node: fx.Node, src: Placement, dst: Placement) -> fx.Node:
        """The value at another placement."""
        if (node, dst) not in self.moved:
            where = node.next
            # an op among the inputs would come before those that it may take a size of
            while where.op == "placeholder":
                where = where.next
            build = Builder(self.program, where, node, NAME)
            ends: Any = (src.tag, dst.tag, [], [], self.policy.axis, self.ranks)
            made = build(ops.transition.default, node, *ends)
            self.moved[node, dst], self.facts[made] = made, dst
            self.changes += 1
        return self.moved[node, dst]

    def _localize(self, node: fx.Node, rule: OpRule, chosen: Row) -> None:
        """What the op is on a rank's part of its operands, where it is more than the op itself."""
        out = chosen.outs[0]
        of_rows = any(p.is_shard for p in chosen.ins)  # of partial sums a mean is linear
        if out == P and node.target in MEANS and of_rows:
            if any(p.is_shard and p.cut.size in self.selected.masks for p in chosen.ins):
                self._mean_of_selected(node)
                return
            self.local.rules[node], node.meta[PLACEMENT] = rule, P
            localize_mean(self.local, node, OpChoice(chosen.ins, P, chosen.factor))
            self.facts[self.local.instead[node]] = P
        elif out.is_shard and is_draw(node) and draw_of(node).p and draw_of(node).seed is not None:
            shape = self.sizes.shape(node.meta[VAL])
            if not out.cut.contiguous_shards(self.ranks) or any(n != 1 for n in shape[: out.dim]):
                shape = tuple(node.meta[VAL].shape)
                what = f"draws random numbers for a value of shape {shape} whose rows are not the {self.policy.of}'s"
                first = out.cut.size not in self.selected.masks
                fix = f"put the {self.policy.of} first in what is dropped out"
                raise self._error(node, what, fix if first else f"use {self.policy.other}")
            set_arguments(node, axis=str(DrawAxis.parse(draw_of(node).axis)._replace(of_batch=True)))
        else:
            return
        self.equal_batches = True
        self.changes += 1

    def _mean_of_selected(self, node: fx.Node) -> None:
        """Of rows that a mask selects, ranks have unequal numbers: the sum, by the number of all ranks."""
        source = node.args[0]
        shape, given = self.sizes.shape(source.meta[VAL]), argument(node, "dim")
        dims = [int(d) % len(shape) for d in given] if given else list(range(len(shape)))
        build = Builder(self.program, node, node, NAME)
        options = {"dtype": argument(node, "dtype")}
        made = build(aten.sum.dim_IntList, source, dims, bool(argument(node, "keepdim")), **options)
        emit, others = SizeEmitter(self.program.graph, self.program.sizes), 1
        for n in (shape[d] for d in dims):
            if n in self.selected.masks:
                made = build(aten.div.Tensor, made, self._number_of_selected(n, node))
            else:
                others *= n
        made = build(aten.div.Scalar, made, emit(others)) if others != 1 else made
        node.replace_all_uses_with(made)
        self.facts[made] = P
        self.changes += 1

    def _number_of_selected(self, rows: int, node: fx.Node) -> fx.Node:
        """How many rows a mask selects on all ranks, as a tensor."""
        if rows not in self.counted:
            count = Builder(self.program, node, node, NAME)(aten.sum.default, self.selected.masks[rows])
            self.facts[count] = P
            self.counted[rows] = self._move(count, P, R)
        return self.counted[rows]

    def _error(self, node: fx.Node, found: str, fix: str = "") -> PlanError:
        return PlanError(
            f"{self.policy.what} cannot cut the {self.policy.of}: %{node.name} ({node.target}) {found}",
            fix=fix or f"compute it from one row at a time, or use {self.policy.other}",
            **located(node),
        )


_EXTREMES = ("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "median", "prod", "logsumexp")
_OF_ROWS = (
    "return its rows, and take it in your own loop over those of all ranks (torch.distributed.all_reduce, all_gather), or use "
    "Config(data_parallel_loss='average'), with which it is of each rank's own rows"
)


def _say(fact: Any) -> str:
    return {"R": "whole", "P": "sums over a rank's rows"}.get(getattr(fact, "kind", ""), f"cut as {fact}")
