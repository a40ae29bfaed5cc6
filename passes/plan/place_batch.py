"""Type every value on the data-parallel axis, on which ranks hold slices of the batch.

Before:  %c = cross_entropy(%logits, %labels, -100, 0.0, False); %n = sum(ne(%labels, -100)); %l = div(sum(%c), %n)
         %y = dropout(%x, %seed, 0.1, 3, -1, [], 'tp');   %a = mean(%y)
After:   %c = cross_entropy(%logits, %labels, -100, 0.0, False); %n = sum(ne(%labels, -100)); %t = batch_sum(%n, 'dp', 2)
         %l = div(sum(%c), %t); %w = batch_sum(%l, 'dp', 2)      # R on dp, as `Program.batch` says
         %y = dropout(%x, %seed, 0.1, 3, -1, [], 'dp+tp'); %m = mean(%y); %a = div(%m, 2)
Legal because: a rank's graph computes its slice of what one process computes on the batch of all ranks. Inputs are cut on
their batch dim, parameters whole; the sharding rules that serve the tensor-parallel axis say what follows for each value.
A value that depends on no input and has a batch dim (an expanded position table) is the same for every row: a slice too.

The types are R, S(d) and P as in placements/types.py, on the sizes of the whole batch: one rank's batch times the ranks. A mean
over the batch becomes a summand by dividing by their number, and so does a whole value that is added to summands (a penalty on
parameters beside a loss of rows). A sum that an op needs whole (a count of labels), or that leaves the graph with a gradient,
gets its `batch_sum`, whose backward sums the gradients that the ranks have for it: outputs are R or S, so that what users
compute of them may differ from rank to rank. A draw says that its rows are one rank's of many. An op that needs rows of other
ranks is an error that names it. Batch norms, and variances, deviations and norms over the batch, are spelled out as means and
sums first, which then are those of all rows; any, all and counts of what is not zero as sums.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from megafx.analysis.batch_rows import FILLS, LIKE, REPEATS, Row, WholeSizes, cut, rows
from megafx.errors import PlanError
from megafx.ir.nodes import argument, aten_ops, draw_of, is_draw, op_name, set_arguments
from megafx.ir.program import (
    VAL,
    Batch,
    Builder,
    Phase,
    Program,
    ancestors,
    differentiable_outputs,
    located,
    tensors_of,
)
from megafx.ir.sizes import SizeEmitter
from megafx.ops.axes import with_batch
from megafx.ops.eager_call import find_call
from megafx.placements.data_axis import BATCH_AXIS
from megafx.placements.types import I, P, Placement, R
from megafx.planner.context import Planner
from megafx.rules.strategies import OpRule, rule_for

REQUIRES, ENSURES = Phase.CANONICAL, Phase.CANONICAL
eager_call = torch.ops.megafx.eager_call.default
NAME = "place_batch"
aten, ops = torch.ops.aten, torch.ops.megafx
MEANS = (aten.mean.default, aten.mean.dim)


def place_batch(program: Program, planner: Planner) -> int:
    """Fill `program.batch`; returns the number of draws and means changed and of sums made whole.

    With data_parallel_loss="average" each rank's loss is of its own rows: nothing is typed, and draws are as the rank's
    generator has it. Raises PlanError where an op mixes rows.
    """
    if planner.data is None:
        return 0
    ranks = planner.data.ranks
    if planner.config.data_parallel_loss == "average":
        program.batch = Batch(ranks, (R,) * len(program.outputs), False, False, False)
        return 0
    symbol = program.sizes.symbols.get("batch")
    if symbol is None:
        raise PlanError(
            "the batch of this call is no size that may vary, so it cannot be cut over data-parallel ranks",
            fix="give example inputs of at least two rows, all with the batch as their first dim",
        )
    typer = _Typer(program, ranks, symbol)
    return _spell_out_batch_statistics(program, typer.over_rows) + typer.run()


class _Typer:
    def __init__(self, program: Program, ranks: int, symbol: sympy.Symbol) -> None:
        self.program, self.ranks, self.symbol = program, ranks, symbol
        self.sizes = WholeSizes(program.sizes, symbol, ranks)
        self.batch = self.sizes.of_expr(symbol)
        self.view = replace(program, sizes=self.sizes)
        self.facts: dict[fx.Node, Any] = {}
        self.wholes: dict[fx.Node, fx.Node] = {}
        self.parts: dict[fx.Node, fx.Node] = {}
        pairs = zip(program.results(), program.outputs, strict=True)
        self.for_buffers = ancestors([n for n, o in pairs if o.kind == "mutation" and isinstance(n, fx.Node)])
        self.changes = 0
        self.equal_batches = False

    def run(self) -> int:
        inputs = dict(self.program.input_nodes())
        for node in list(self.program.graph.nodes):
            if node.op == "placeholder":
                cut = inputs[node].kind == "user" and isinstance(node.meta[VAL], torch.Tensor)
                self.facts[node] = self._cut(node) if cut else R
            elif node.op == "call_function" and tensors_of(node):
                self.facts[node] = self._typed(node)
        losses = [spec.loss for spec in self.program.outputs]
        kinds = []
        results, differentiable = list(self.program.results()), {*differentiable_outputs(self.program)}
        for i, (node, spec) in enumerate(zip(results, self.program.outputs, strict=True)):
            fact = self.facts.get(node) if isinstance(node, fx.Node) else None
            if fact == P and (i in differentiable or spec.kind == "mutation"):
                results[i], fact = self._whole(node), R
            if spec.kind == "mutation" and fact is not None and fact != R:
                raise self._error(node, f"what becomes of buffer '{spec.name}' is {_say(fact)}")
            kinds.append(fact if isinstance(fact, Placement) else R)
        self.program.output_node().args = (tuple(results),)
        self.program.batch = Batch(self.ranks, tuple(kinds), any(losses), self.equal_batches)
        return self.changes

    def _cut(self, node: fx.Node) -> Placement:
        """S on the one dim that has the batch; R where none has. Leading rows are the batch's in a dim of several."""
        found = cut(self.sizes, node.meta[VAL], self.batch, self.ranks)
        if found is None:
            what = f"has the batch in its shape {tuple(node.meta[VAL].shape)} in a way that cannot be cut"
            raise self._error(node, what)
        return found

    def over_rows(self, node: fx.Node, dims: Any) -> bool:
        """Whether the dim of the batch is among these dims of a value; None and [] are all."""
        found = cut(self.sizes, node.meta[VAL], self.batch, self.ranks)
        count = max(node.meta[VAL].dim(), 1)
        return found is not None and found.is_shard and (not dims or found.dim in [d % count for d in dims])

    # -- ops

    def _typed(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            arguments: Any = node.args
            return self.facts[arguments[0]][arguments[1]]
        name = str(node.target).split(".")[1]
        self._count_all_rows(node)
        operands = [a for a in node.all_input_nodes if a in self.facts]
        if not operands or name in LIKE:
            fact = self._cut(node) if isinstance(node.meta[VAL], torch.Tensor) else R
            if fact.is_shard and name not in FILLS | LIKE:
                raise self._error(node, "numbers the rows of the batch, which each rank would number from 0")
            return fact
        rule = rule_for(node, self.view, self.facts)
        held = [self.facts[o.node] for o in rule.operands]
        if all(h == R for h in held):
            return self._same_everywhere(node, rule)
        chosen = self._choose(node, rule, held)
        for operand, have, want in zip(rule.operands, held, chosen.ins, strict=True):
            if have == P and want != P:
                node.replace_input_with(operand.node, self._whole(operand.node))
            elif have == R and want == P:
                node.replace_input_with(operand.node, self._part(operand.node))
        if chosen.outs[0] == P and node.target in MEANS:
            self._divide(node)
        if chosen.outs[0].is_shard and is_draw(node) and draw_of(node).p and draw_of(node).seed is not None:
            self._draw_rows(node, chosen.outs[0])
        return chosen.outs if isinstance(node.meta[VAL], (tuple, list)) else chosen.outs[0]

    def _same_everywhere(self, node: fx.Node, rule: OpRule) -> Any:
        """Placement of a result whose operands are all R: R, or S if the op repeats them along a batch dim."""
        value = node.meta[VAL]
        if isinstance(value, (tuple, list)):
            return tuple(R for _ in value)
        fact = self._cut(node)
        if fact.is_shard and not str(node.target).startswith(REPEATS):
            raise self._error(node, "gives values that need not be alike for all rows of the batch a batch dim")
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
                    price += 0 if operand.node in self.wholes else 10 if static else 100
                elif have == R and want == P and value.dtype.is_floating_point:
                    price += 1000 if node in self.for_buffers else 1
                else:
                    break
            else:
                if best is None or price < best[0]:
                    best = price, made
        if best is None and node.target is eager_call:
            what = find_call(str(node.args[4])).what
            raise PlanError(
                f"data parallelism cannot cut the batch: {what}, which would see a rank's rows where it sees the whole batch "
                "in one process",
                fix="Config(data_parallel_loss='average'), with which it sees each rank's own batch, as with "
                "DistributedDataParallel",
                **located(node),
            )
        if best is None:
            where = ", ".join(_say(h) for h in held)
            what = f"has operands that are {where} on the data-parallel axis, which no row of its rule takes"
            raise self._error(node, what, _OF_ROWS if op_name(node) in _EXTREMES else "")
        return best[1]

    # -- what depends on the other ranks

    def _count_all_rows(self, node: fx.Node) -> None:
        """A number made of the batch size (a loss divided by it) is that of all ranks; as a size it is this rank's."""
        for spec in node.target._schema.arguments if hasattr(node.target, "_schema") else ():
            given = argument(node, spec.name)
            kind = str(spec.real_type)
            if not isinstance(given, fx.Node) or given in self.facts or kind.startswith("List"):
                continue
            expr = getattr(getattr(given.meta.get(VAL), "node", None), "expr", None)
            if expr is None or self.symbol not in expr.free_symbols:
                continue
            if kind not in ("Tensor", "number", "Optional[number]") or not isinstance(given.meta[VAL], torch.SymInt):
                raise self._error(node, f"takes '{spec.name}' from the size of the batch, which is one rank's")
            whole = self.program.sizes.of_expr(expr.xreplace({self.symbol: self.ranks * self.symbol}))
            made: Any = SizeEmitter(self.program.graph, self.program.sizes)(whole)
            node.replace_input_with(given, made)
            self.changes += 1

    def _whole(self, node: fx.Node) -> fx.Node:
        """The sum over ranks of a summand."""
        if node not in self.wholes:
            made = Builder(self.program, node.next, node, NAME)(ops.batch_sum.default, node, BATCH_AXIS, self.ranks)
            self.wholes[node], self.facts[made] = made, R
            self.changes += 1
        return self.wholes[node]

    def _part(self, node: fx.Node) -> fx.Node:
        """A summand of a value that every rank has."""
        if node not in self.parts:
            where = node.next
            while (
                where.op == "placeholder"
            ):  # an op among the inputs would come before those that it may take a size of
                where = where.next
            made = Builder(self.program, where, node, NAME)(aten.div.Scalar, node, self.ranks)
            self.parts[node], self.facts[made] = made, P
            self.changes += 1
        return self.parts[node]

    def _divide(self, node: fx.Node) -> None:
        """A mean over this rank's rows -> its part of the mean over all."""
        build = Builder(self.program, node.next, node, NAME)
        users = list(node.users)
        made = build(aten.div.Scalar, node, self.ranks)
        for user in users:
            user.replace_input_with(node, made)
        self.facts[made] = P
        self.equal_batches = True
        self.changes += 1

    def _draw_rows(self, node: fx.Node, fact: Placement) -> None:
        shape = self.sizes.shape(node.meta[VAL])
        if not fact.cut.contiguous_shards(self.ranks) or any(n != 1 for n in shape[: fact.dim]):
            shape = tuple(node.meta[VAL].shape)
            what = f"draws random numbers for a value of shape {shape} whose rows are not the batch's"
            raise self._error(node, what, "put the batch first in what is dropped out")
        set_arguments(node, axis=with_batch(draw_of(node).axis))
        self.equal_batches = True
        self.changes += 1

    def _error(self, node: fx.Node, found: str, fix: str = "") -> PlanError:
        return PlanError(
            f"data parallelism cannot cut the batch: %{node.name} ({node.target}) {found}",
            fix=fix
            or "compute it from one row at a time, or use Config(data_parallel_loss='average'), which takes each "
            "rank's batch for itself as DistributedDataParallel does",
            **located(node),
        )


_EXTREMES = ("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "median", "prod", "logsumexp")
_OF_ROWS = (
    "return its rows, and take it in your own loop over those of all ranks (torch.distributed.all_reduce, all_gather), or use "
    "Config(data_parallel_loss='average'), with which it is of each rank's own rows"
)


def _spell_out_batch_statistics(program: Program, over_rows: Callable[[fx.Node, Any], bool]) -> int:
    """Write batch norms, and variances, deviations, norms and counts over the batch, as means, sums and elementwise ops;
    returns their number. over_rows(value, dims): whether the batch's dim is among these."""
    sizes = SizeEmitter(program.graph, program.sizes)
    changes = 0
    for node in [n for n in program.graph.nodes if n.op == "call_function"]:
        build = Builder(program, node, node, NAME)
        if node.target is aten.batch_norm.default:
            made = _batch_norm(build, node)
        elif node.target not in _SPELLED_OUT or not over_rows(node.args[0], _dims(node)):
            continue
        elif node.target in _COUNTS:
            made = _count(build, node)
        elif node.target is aten.linalg_vector_norm.default:
            if argument(node, "ord") != 2:
                continue
            made = _norm(build, node)
        else:
            made = _variance(build, node, sizes)
            if node.target in _DEVIATIONS:
                made = _root(build, made)
        node.replace_all_uses_with(made)
        program.graph.erase_node(node)
        changes += 1
    return changes


_DEVIATIONS = (aten.std.correction, aten.std.dim, aten.std.default)
_COUNTS = aten_ops(
    "any.default any.dim any.dims all.default all.dim all.dims count_nonzero.default count_nonzero.dim_IntList"
)
_SPELLED_OUT = (
    *_COUNTS,
    *(aten.var.correction, aten.var.dim, aten.var.default, aten.linalg_vector_norm.default),
    *_DEVIATIONS,
)


def _dims(node: fx.Node) -> Any:
    """The dims that it reduces; None and [] are all."""
    dims = argument(node, "dim")
    return [dims] if isinstance(dims, int) else dims


def _count(build: Builder, node: fx.Node) -> fx.Node:
    """any, all and count_nonzero by how many elements are zero, or are not."""
    x, name = argument(node, "self"), op_name(node)
    counted = build(aten.eq.Scalar if name == "all" else aten.ne.Scalar, x, 0)
    dims = _dims(node) or [*range(x.meta[VAL].dim())]
    total = build(aten.sum.dim_IntList, counted, dims, bool(argument(node, "keepdim")))
    if name == "count_nonzero":
        return total
    made = build(aten.eq.Scalar if name == "all" else aten.ne.Scalar, total, 0)
    dtype = node.meta[VAL].dtype
    return made if made.meta[VAL].dtype == dtype else build(aten.to.dtype, made, dtype)


def _root(build: Builder, square: fx.Node) -> fx.Node:
    """sqrt, whose gradient is 0 at 0, as that of a norm or a deviation is. (NaN stays NaN.)"""
    nonzero = build(aten.ne.Scalar, square, 0)
    root = build(aten.sqrt.default, build(aten.where.ScalarOther, nonzero, square, 1))
    return build(aten.where.ScalarOther, nonzero, root, 0)


def _norm(build: Builder, node: fx.Node) -> fx.Node:
    x, dims, keep, dtype = (argument(node, name) for name in ("self", "dim", "keepdim", "dtype"))
    x = x if dtype is None else build(aten.to.dtype, x, dtype)
    value = x.meta[VAL]
    short = value.dtype in (torch.bfloat16, torch.float16)
    y = build(aten.to.dtype, x, torch.float32) if short else x
    every = [*range(value.dim())]
    total = build(aten.sum.dim_IntList, build(aten.mul.Tensor, y, y), dims or every, keep)
    root = _root(build, total)
    return build(aten.to.dtype, root, value.dtype) if short else root


def _batch_norm(build: Builder, node: fx.Node) -> fx.Node:
    x, weight, bias, eps = (argument(node, name) for name in ("input", "weight", "bias", "eps"))
    value, per_channel = x.meta[VAL], [1, x.meta[VAL].shape[1], *([1] * (x.meta[VAL].dim() - 2))]
    dims = [d for d in range(value.dim()) if d != 1]
    short = value.dtype in (torch.bfloat16, torch.float16)
    y = build(aten.to.dtype, x, torch.float32) if short else x
    if argument(node, "training"):
        y = build(aten.sub.Tensor, y, build(aten.mean.dim, y, dims, True))
        variance = build(aten.mean.dim, build(aten.mul.Tensor, y, y), dims, True)
    else:
        mean, variance = (
            build(aten.reshape.default, argument(node, f"running_{name}"), per_channel) for name in ("mean", "var")
        )
        y = build(aten.sub.Tensor, y, mean)
    y = build(aten.mul.Tensor, y, build(aten.rsqrt.default, build(aten.add.Tensor, variance, eps)))
    for op, operand in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
        y = y if operand is None else build(op, y, build(aten.reshape.default, operand, per_channel))
    return build(aten.to.dtype, y, value.dtype) if short else y


def _variance(build: Builder, node: fx.Node, sizes: SizeEmitter) -> fx.Node:
    x, dims, keep = (argument(node, name) for name in ("self", "dim", "keepdim"))
    shape, correction, unbiased = x.meta[VAL].shape, argument(node, "correction"), argument(node, "unbiased")
    correction = correction if unbiased is None else int(unbiased)
    dims = [d % len(shape) for d in dims] if dims else [*range(len(shape))]
    off = build(aten.sub.Tensor, x, build(aten.mean.dim, x, dims, True))
    biased = build(aten.mean.dim, build(aten.mul.Tensor, off, off), dims, keep)
    count = sizes(
        build.program.sizes.of(math.prod(shape[d] for d in dims))
    )  # `_count_all_rows` counts those of all ranks
    left = sizes(build.program.sizes.of(math.prod(shape[d] for d in dims) - (1 if correction is None else correction)))
    return build(aten.div.Tensor, build(aten.mul.Tensor, biased, count), left)


def _say(fact: Any) -> str:
    return {"R": "whole", "P": "sums over a rank's rows"}.get(getattr(fact, "kind", ""), f"cut as {fact}")
