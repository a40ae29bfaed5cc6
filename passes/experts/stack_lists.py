"""Experts of a list become products of stacked weights on rows sorted by expert, where ranks share out experts or tokens.

Before:  %at0 = rows(eq(%ids, 0), 'u0'); %t0 = select(%at0, 1, 0); %k0 = select(%at0, 1, 1)         # ids: [T, 2]
         %y0 = mul(linear(index(%x, [%t0]), %w0), index(%p, [%t0, %k0])); %o0 = index_add(%out, 0, %t0, %y0)
         %at1 = rows(eq(%ids, 1), 'u1'); ..                             ; %o1 = index_add(%o0, 0, %t1, %y1)
After:   %flat = view(%ids, [S]); %order = group_order(%flat, 2); %ends = group_ends(%flat, 2)
         %w = transpose(stack([%w0, %w1]), 1, 2); %h = grouped_mm(group_rows(%x, %order, 2), %w, %ends)
         %y = mul(%h, group_rows(view(%p, [S]), %order, 1))
         %o = add(%out, sum(view(ungroup_rows(%y, %order), [T, 2, n]), [1]))
Legal because: all ops between compute each row by itself, so that rows of all experts may stand one below the other; a token
gets the sum of what its experts give.

A row is a place of the masks, which have a dim of tokens and others of fixed sizes. Where no two experts have the same place,
and each place has one (masks compare indices of topk or argmax, or are a one-hot code), a row is a place. Else each place is
a row for each expert; those that an expert does not get have a number beyond the last expert: they are computed nowhere once
tokens travel (`dispatch_experts`), and add zeros. Ranks that share out tokens alone (cp) stack the first kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from megafx.ir.nodes import CASTS, PASS_ON, behind, op_name
from megafx.ir.program import VAL, Phase, Program, fqn_of
from megafx.ir.sizes import SizeEmitter
from megafx.kernels.experts import group_rows, grouped_mm  # noqa: F401  registers the ops
from megafx.passes.experts.expert_chains import Added, InStep, Refused, chains, is_one, numbers, one_op, tail
from megafx.passes.experts.expert_units import chosen_among
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.CANONICAL, Phase.CANONICAL
NAME = "stack_lists"
ops, aten = torch.ops.megafx, torch.ops.aten
_EACH = -1  # a dim of rows that has one for each expert, beside the dims of the masks


def stack_lists(program: Program, context: CompileContext) -> int:
    """Return the number of mixtures whose experts are stacked."""
    data = context.data
    if data is None or (data.experts == 1 and (data.cp == 1 or context.config.moe_grouped_gemm is False)):
        return 0
    count = 0
    for chain in chains(program.graph):
        stacking = _Stacking(program, chain, data.experts > 1)
        try:
            stacking.run()
        except Refused as reason:
            y = chain[0].y
            what = (
                f"{len(chain)} experts of a list, of which '{fqn_of(y)}' computes the first, are not stacked: {reason}"
            )
            program.note("experts", what, y)
            continue
        count += 1
    program.erase_unused()
    return count


class _Stacking(InStep):
    """Of one mixture of E experts. travels: tokens go to the ranks of their experts. dims: what the rows are: dims of the
    masks, that of tokens first. exact: each row has an expert. rows, tokens: how many, structural. ids, order: of the rows."""

    name = NAME

    def __init__(self, program: Program, chain: list[Added], travels: bool) -> None:
        super().__init__(program, chain)
        self.travels = travels

    def run(self) -> None:
        """Raises Refused."""
        self.experts = len(self.chain)
        added = tuple(each.y for each in self.chain)
        linears = self.linears(added)
        self.find_places(added)
        if not linears:
            raise Refused(
                f"they do not do the same, or {op_name(added[0])} has no form that does the rows of all experts"
            )
        for products in linears:
            self._check(products)
        self._name_rows()
        y = self.batch(added)
        if not self.exact:
            given = self.build(aten.lt.Scalar, self.ids, self.experts)
            given = self.build(aten.unsqueeze.default, self.build(aten.to.dtype, given, y.meta[VAL].dtype), 1)
            y = self.build(aten.mul.Tensor, y, self.build(ops.group_rows.default, given, self.order, 1))
        back = self.build(ops.ungroup_rows.default, y, self.order)
        if self.choices > 1:
            back = self.build(aten.reshape.default, back, [self._emit(self.tokens), self.choices, *tail(added[0])])
            back = self.build(aten.sum.dim_IntList, back, [1])
        self.last.replace_all_uses_with(self.build(aten.add.Tensor, self.chain[0].out, back))

    def _check(self, products: tuple[fx.Node, ...]) -> None:
        for place in range(1, len(products[0].args)):
            values = [p.args[place].meta[VAL] if p.args[place] is not None else None for p in products]
            if len({None if v is None else (tuple(v.shape), v.dtype, v.device) for v in values}) > 1:
                raise Refused("shapes or dtypes of their weights differ")

    def _emit(self, size: int) -> Any:
        return SizeEmitter(self.program.graph, self.program.sizes)(size)

    # -- rows

    def _name_rows(self) -> None:
        token = self.column(tuple(each.rows for each in self.chain))
        if token is None:
            raise Refused("their results are not put back where the masks have them")
        masks: Any = tuple(p.args[0] for p in self.places)
        self.shape = self.program.sizes.shape(masks[0].meta[VAL])
        self.dims = [token, *(d for d in range(len(self.shape)) if d != token)]
        if any(not isinstance(masks[0].meta[VAL].shape[d], int) for d in self.dims[1:]):
            raise Refused("their masks have several dims whose sizes vary")
        ids = self._chosen(masks)
        self.exact = ids is not None
        if not self.exact and not self.travels:
            raise Refused("a token may have any of them, which would be a row for each where no token travels")
        if ids is None:
            device = masks[0].meta[VAL].device
            numbers = self.build(aten.arange.default, self.experts, dtype=torch.int64, device=device, pin_memory=False)
            every = self._arranged(self.of_all(masks), [_EACH, *range(len(self.shape))], [*self.dims, _EACH])
            self.dims.append(_EACH)
            ids = self.build(aten.where.ScalarOther, every, numbers, 2**30)
        else:
            ids = self._arranged(ids, [*range(len(self.shape))], self.dims)
        self.tokens = self.shape[token]
        self.choices = math.prod(self._length(d) for d in self.dims[1:])
        self.rows = self.tokens * self.choices
        self.ids = self.build(aten.reshape.default, ids, [self._emit(self.rows)])
        self.by_token = ids
        self.order = self.build(ops.group_order.default, self.ids, self.experts)

    def _length(self, dim: int) -> int:
        return self.experts if dim == _EACH else self.shape[dim]

    def _arranged(self, value: fx.Node, dims: Sequence[int], wanted: Sequence[int]) -> fx.Node:
        """The dims of a value in another order; what follows stays."""
        at = [dims.index(d) for d in wanted]
        if at == [*range(len(at))]:
            return value
        return self.build(aten.permute.default, value, [*at, *range(len(at), value.meta[VAL].dim())])

    def _chosen(self, masks: tuple[fx.Node, ...]) -> fx.Node | None:
        """The number of the expert of each place, where it has one."""
        first: Any = masks[0]
        if one_op(masks) and first.target is aten.eq.Scalar and is_one(ids := [m.args[0] for m in masks]):
            numbered = [m.args[1] for m in masks] == [*range(self.experts)]
            return ids[0] if numbered and chosen_among(ids[0]) == self.experts else None
        parts: Any = masks
        while one_op(parts) and (parts[0].target in PASS_ON or _not_zero(parts[0])):
            parts = tuple(p.args[0] for p in parts)
        if not one_op(parts) or parts[0].target is not aten.select.int or not is_one([p.args[0] for p in parts]):
            return None
        source, dim = parts[0].args[0], parts[0].args[1]
        if [p.args[2] for p in parts] != [*range(self.experts)] or any(p.args[1] != dim for p in parts):
            return None
        dims = [*range(source.meta[VAL].dim())]
        of_experts = dims[dim]
        source = behind(source, PASS_ON)
        while source.target in (aten.transpose.int, aten.permute.default) or _not_zero(source):
            if not _not_zero(source):
                dims = _before(dims, source)
            source = behind(source.args[0], PASS_ON)
        if source.target is not aten.one_hot.default or source.args[1] != self.experts or dims[-1] != of_experts:
            return None
        left = [d - (d > of_experts) for d in dims[:-1]]
        return self._arranged(source.args[0], left, [*range(len(left))])

    # -- doing it once

    def stacked(self, values: tuple[Any, ...]) -> fx.Node:
        key = ("stacked", *values)
        if key not in self.known:
            first: Any = values[0]
            if one_op(values) and first.target in CASTS and all(numbers(v) == numbers(first) for v in values):
                inner = self.stacked(tuple(v.args[0] for v in values))  # parameters, which ranks hold
                self.known[key] = self.build(first.target, inner, *first.args[1:], **first.kwargs)
            else:
                self.known[key] = self.build(aten.stack.default, [*values], 0)
        return self.known[key]

    def expert(self) -> fx.Node:
        by = self.build(ops.group_rows.default, self.ids, self.order, 1)
        return by if self.exact else self.build(aten.clamp.default, by, None, self.experts - 1)

    def _dims(self, columns: list[tuple[Any, ...]]) -> list[int]:
        dims = [self.column(each) for each in columns]
        if None in dims or len({*dims}) < len(dims):
            raise Refused("a value is not read where the masks have rows")
        return dims

    def of_rows(self, value: fx.Node, columns: list[tuple[Any, ...]]) -> fx.Node:
        return self._of_rows(value, self._dims(columns))

    def of_each(self, values: tuple[fx.Node, ...], columns: list[tuple[Any, ...]]) -> fx.Node:
        dims, every = self._dims(columns), self.of_all(values)
        if not self.exact:
            return self._of_rows(every, [_EACH, *dims])
        rest = every.meta[VAL].shape[1 + len(dims) :]
        if dims != self.dims[:1] or math.prod(rest) != 1:
            raise Refused("each reads a value of its own by more than the number of the token")
        flat = self.build(aten.reshape.default, every, [self.experts, self._emit(self.tokens)])
        by = self.build(aten.reshape.default, self.by_token, [self._emit(self.tokens), self.choices])
        own = self.build(aten.gather.default, self.build(aten.transpose.int, flat, 0, 1), 1, by)
        own = self.build(aten.reshape.default, own, [self._emit(self.rows), *rest])
        return self.build(ops.group_rows.default, own, self.order, 1)

    def _of_rows(self, value: fx.Node, dims: list[int]) -> fx.Node:
        """Of a value whose first dims are these, what each row has."""
        if dims == self.dims[:1]:
            return self.build(ops.group_rows.default, value, self.order, self.choices)
        present = [d for d in self.dims if d in dims]
        tail = [*value.meta[VAL].shape[len(dims) :]]
        value = self._arranged(value, dims, present)
        for at, dim in enumerate(self.dims):
            if dim not in dims:
                value = self.build(aten.unsqueeze.default, value, at)
        if len(present) < len(self.dims):
            sizes = [-1 if d in dims else self._emit(self._length(d)) for d in self.dims]
            value = self.build(aten.expand.default, value, [*sizes, *tail])
        flat = self.build(aten.reshape.default, value, [self._emit(self.rows), *tail])
        return self.build(ops.group_rows.default, flat, self.order, 1)


def _not_zero(node: Any) -> bool:
    """True if the node says where its operand is not 0."""
    return node.target in (aten.ne.Scalar, aten.gt.Scalar) and node.args[1] == 0


def _before(dims: list[int], node: fx.Node) -> list[int]:
    """dims: names of a permuted value's dims. Those of its operand."""
    args = node.args
    if node.target is aten.transpose.int:
        moved = [*range(len(dims))]
        a, b = (x % len(dims) for x in args[1:3])
        moved[a], moved[b] = moved[b], moved[a]
    else:
        moved = [x % len(dims) for x in args[1]]
    return [dims[moved.index(d)] for d in range(len(dims))]
