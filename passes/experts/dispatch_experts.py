"""Let data-parallel ranks share out the experts of mixtures: tokens travel to the ranks of their experts, results back.

Before:  %order = group_order(%ids, 8); %ends = group_ends(%ids, 8); %x = group_rows(%tokens, %order, 2)      # S rows
         %h = grouped_mm(%x, %up, %ends); %y = grouped_mm(relu(%h), %down, %ends)
         %z = mul(%y, group_rows(%weights, %order, 1)); %out = sum(view(ungroup_rows(%z, %order), [T, 2, n]), [1])
After:   %n = tokens_to_ranks(%ids, 2, 4, 2)
         %m = room(room_needed(counts_sent(%ends, %n, 4), 'ep'), 0)                      # of tokens and rows
         %p = places_of(%n, %m); %t = tokens_sent(%p, 'arrived0', %m)
         %a = experts_received(%ids, %p, %t, 2, 4, 'ep')
         %r = received_rows(%a, 'received0', %m, 4); %e = ends_received(%a, %r, 4); %k = rows_of_tokens(%r, %a)
         %u = transition(%up, R -> S0, 'ep', 2); %d = transition(%down, R -> S0, 'ep', 2)
         %x = dispatch_rows(%tokens, %p, %t, %r, %k, 2, False, 'ep')
         %h = grouped_mm(%x, %u, %e); %y = grouped_mm(relu(%h), %d, %e)
         %z = mul(%y, dispatch_rows(%weights, %p, %t, %r, %k, 2, True, 'ep'))
         %out = combine_rows(%z, %p, %t, %r, %k, 2, False, 'ep')                         # each token's sum
Legal because: what lies between the products computes each row by itself (`group_by_expert` has checked it), so that a row is
the same wherever it is computed. A rank takes its experts of the weights; the others' gradients are theirs.

Experts of a capacity have as many rows each: these travel by ordinary transitions (passes/experts/capacity_experts.py).

What travels is as little as can be: the tokens that the first products take, once to each rank that has an expert of theirs,
and the sums of what the last ones give, weighted. A parameter that nothing else reads is then stored so (`hold_experts`): each
rank has its experts alone.

Source: Lepikhin et al. 2020 (GShard, 2006.16668); Megatron's `expert_model_parallel_size`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from megafx.analysis.communication import exchanged_bytes
from megafx.errors import PlanError
from megafx.ir.contracts import is_transition
from megafx.ir.nodes import PASS_ON, argument, behind, op_name, replace
from megafx.ir.program import VAL, Builder, Phase, Program, fqn_of, located, tensors_of
from megafx.ir.sizes import RowCount, SizeEmitter
from megafx.kernels.experts import dispatch_rows as _defines_the_ops  # noqa: F401
from megafx.passes.experts.capacity_experts import share_out_batches
from megafx.passes.experts.expert_parts import NAME, OwnExperts
from megafx.passes.experts.expert_units import GROUPED
from megafx.placements.data_axis import EXPERT_AXIS
from megafx.planner.context import CompileContext
from megafx.rules.families import VIEWS
from megafx.units import bytes_text

REQUIRES, ENSURES = Phase.CANONICAL, Phase.CANONICAL
aten, ops = torch.ops.aten, torch.ops.megafx
_VIEWED = PASS_ON | {aten.transpose.int, aten.permute.default}
_SMALL = 4  # elements of a row that may travel so that its sum can be made where it is computed


def dispatch_experts(program: Program, context: CompileContext) -> int:
    """Return the number of mixtures whose experts are shared out. Raises PlanError where there is none."""
    if context.data is None or context.data.experts == 1:
        return 0
    ranks = context.data.experts
    if "expert" in context.config.overrides.values():
        raise PlanError(
            f"override 'expert' gives experts to tensor-parallel ranks, and expert_model_parallel_size={ranks} to "
            "data-parallel ones",
            fix="drop the override: tensor-parallel ranks then cut each expert's ffn",
        )
    own = OwnExperts(program, ranks, context.data.same_experts)
    count = 0
    for order in program.graph.find_nodes(op="call_function", target=ops.group_order.default):
        mixture = _Mixture(program, order, own)
        if mixture.products:
            mixture.write(count)
            count += 1
    count += share_out_batches(program, own)
    if not count:
        why = next((f": {note.message}" for note in program.notes if note.topic == "experts"), "")
        raise PlanError(
            f"expert_model_parallel_size={ranks}, but this model has no mixture of experts whose rows are sorted by expert and "
            f"computed by grouped products, whose experts are a list, or have a capacity{why}",
            fix="set expert_model_parallel_size to 1; transformers' mixtures are computed so with "
            "`experts_implementation='grouped_mm'` in their config",
        )
    program.erase_unused()
    for node in program.graph.find_nodes(op="call_function", target=GROUPED):
        if not is_transition(behind(node.args[1], _VIEWED), EXPERT_AXIS):
            what = "a grouped product is not shared out, so each rank holds and computes all of its experts"
            program.note("experts", f"{what}: its rows are not sorted by the ids that count its groups", node)
    context.experts = own.held_alone()
    return count


class _Mixture:
    """Of one order of rows by expert. rows: how many, structural. choices: how many rows a token has. sorted: values that have
    these rows. products, lookups: nodes that read what is an expert's: weights, and entries by the expert of each row. moved:
    nodes that the ranks of the experts compute."""

    def __init__(self, program: Program, order: fx.Node, own: OwnExperts) -> None:
        self.program, self.order, self.own = program, order, own
        self.ids, self.experts = order.args
        self.rows = program.sizes.shape(order.meta[VAL])[0]
        self.sorted: dict[fx.Node, None] = {}
        self.products: list[fx.Node] = []
        self.lookups: list[fx.Node] = []
        for node in program.graph.nodes:
            if node.op == "call_function" and self._is_sorted(node):
                self.sorted[node] = None
                if node.target is GROUPED and self._is_end(node.args[2]):
                    self.products.append(node)
                elif self._looks_up(node):
                    self.lookups.append(node)
        taken = [self._taken(node)[1] for node in self.sorted if self._is_taken(node)]
        self.choices = max(taken, default=1)
        self.moved = self._moved() if self.products else {}
        self.made: dict[fx.Node, fx.Node] = {}
        self.arrived: dict[fx.Node, fx.Node] = {}

    # -- what is computed where

    def _is_taken(self, node: fx.Node) -> bool:
        return node.target is ops.group_rows.default and node.args[1] is self.order

    def _taken(self, node: fx.Node) -> tuple[fx.Node, int]:
        """(the value whose rows a node takes in the order of experts, how many rows in turn are of the same row of it)."""
        source, _, times = node.args
        before = source.args[0] if source.target is aten.repeat_interleave.self_int and times == 1 else None
        if before is not None and argument(source, "dim") == 0:
            return before, self.rows // self.program.sizes.shape(before.meta[VAL])[0]
        return source, times

    def _is_sorted(self, node: fx.Node) -> bool:
        if self._is_taken(node):
            return True
        values = tensors_of(node)
        reads = node.target is not ops.ungroup_rows.default and any(a in self.sorted for a in node.all_input_nodes)
        return reads and all(self.program.sizes.shape(v)[:1] == (self.rows,) for v in values)

    def _is_end(self, node: Any) -> bool:
        return bool(node.target is ops.group_ends.default and node.args[0] is self.ids)

    def _looks_up(self, node: fx.Node) -> bool:
        """True if a node takes the entry of each row's expert from a value that has one for each."""
        args = node.args
        if node.target is aten.index.Tensor and len(args[1]) == 1:
            source, by = args[0], args[1][0]
        elif node.target is aten.index_select.default and args[1] == 0:
            source, by = args[0], args[2]
        else:
            return False
        by = behind(by, PASS_ON | {aten.clamp.default})
        of_rows = by.target is ops.group_rows.default and by.args[:2] == (self.ids, self.order)
        return bool(of_rows and source not in self.sorted and source.meta[VAL].shape[0] == self.experts)

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        """Operands that have the sorted rows."""
        return [] if node in self.lookups else [a for a in node.all_input_nodes if a in self.sorted]

    def _moved(self) -> dict[fx.Node, None]:
        """What lies between products, and what follows the last ones as long as little else comes in: weights of rows."""
        after: set[fx.Node] = {*self.products}
        for node in self.sorted:
            if any(a in after for a in self._operands(node)):
                after.add(node)
        before: set[fx.Node] = {*self.products}
        for node in reversed(self.sorted):
            if any(user in before for user in node.users if user in self.sorted):
                before.add(node)
        moved = (after & before) | {*self.lookups}
        for node in self.sorted:
            operands = self._operands(node)
            if any(a in moved for a in operands) and all(a in moved or self._is_small(a) for a in operands):
                moved.add(node)
        return {node: None for node in self.sorted if node in moved}

    def _is_small(self, node: fx.Node) -> bool:
        """True if a row of a value is a number or two, which may travel."""
        return all(math.prod(v.shape[1:]) <= _SMALL for v in tensors_of(node))

    # -- the ops in their place

    def write(self, number: int) -> None:
        first, experts = next(iter(self.moved)), self.experts
        here, ranks, choices = self.own.here(experts), self.own.ranks, self.choices
        build = Builder(self.program, first, self.products[0], NAME)
        ends = self.products[0].args[2]
        numbers = build(ops.tokens_to_ranks.default, self.ids, choices, here, ranks)
        counts = build(ops.counts_sent.default, ends, numbers, here)
        room = build(ops.room.default, build(ops.room_needed.default, counts, EXPERT_AXIS), number)
        self.places = build(ops.places_of.default, numbers, room)
        there = build(ops.tokens_sent.default, self.places, f"arrived{number}", room)
        arrived = build(ops.experts_received.default, self.ids, self.places, there, choices, here, EXPERT_AXIS)
        self.received = build(ops.received_rows.default, arrived, f"received{number}", room, here)
        self.ends = build(ops.ends_received.default, arrived, self.received, here)
        self.tables = self.places, there, self.received, build(ops.rows_of_tokens.default, self.received, arrived)
        tokens = self.rows // choices * min(choices, ranks)
        for made, name, among in ((self.received, f"received{number}", self.rows), (there, f"arrived{number}", tokens)):
            symbol = made.meta[VAL].shape[0].node.expr
            self.program.sizes.row_counts[symbol] = RowCount(name, among, 1)
        self.numbers: fx.Node | None = None
        for node in self.moved:
            self.made[node] = self._again(node)
        for node in self.moved:
            self._leave(node)
        self.program.erase_unused()
        size, sent = self.program.sizes, sum(exchanged_bytes(self.program, n, ranks) for n in self.arrived.values())
        of = size.workload(size.of(self.places.meta[VAL].shape[0]))
        leave = round(of * (1 - (1 - 1 / ranks) ** choices) * (ranks - 1))
        what = (
            f"{experts} experts of '{fqn_of(self.products[0])}' are shared out over {ranks} ranks: {here} a rank. Where "
            f"choices fall anywhere, a rank sends {leave} rows for its {of} tokens ({bytes_text(sent)}) each way"
        )
        self.program.note("experts", what, self.made[self.products[0]])

    def _ways(self, entries: bool) -> tuple[Any, ...]:
        return *self.tables, self.choices, entries, EXPERT_AXIS

    def _again(self, node: fx.Node) -> fx.Node:
        """The op on the rows that arrive here."""
        build = Builder(self.program, node, node, NAME)
        args = node.args
        if node in self.products:
            return build(GROUPED, self._here(args[0], build), self.own.part(args[1], node), self.ends)
        if node in self.lookups:
            entries = self.own.part(args[0], node)  # and zeros, for rows after the last end
            below = [0, 0] * (entries.meta[VAL].dim() - 1) + [0, 1]
            padded = build(aten.constant_pad_nd.default, entries, below)
            return build(aten.index_select.default, padded, 0, self._numbers(build))
        target = node.target
        given = fx.map_arg((node.args, node.kwargs), lambda a: self._argument(a, node, build))
        return build(target, *given[0], **given[1])

    def _argument(self, given: fx.Node, node: fx.Node, build: Builder) -> Any:
        value = given.meta[VAL]
        if given in self.sorted:
            return self._here(given, build)
        if isinstance(value, torch.SymInt) and self.program.sizes.of(value) == self.rows:
            count = self.program.sizes.of(self.received.meta[VAL].shape[0])
            return SizeEmitter(self.program.graph, self.program.sizes)(count)
        for tensor in tensors_of(given):
            if self.program.sizes.shape(tensor)[:1] == (self.rows,):
                raise PlanError(
                    "experts cannot be shared out over ranks: between their products, "
                    f"{op_name(node)} reads %{given.name}, which has a row for each of this rank's rows and does not come from "
                    "them",
                    fix="compute it of the rows that are sorted by expert, or give it no dim of the rows: it is then broadcast",
                    **located(node),
                )
        return given

    def _here(self, value: fx.Node, build: Builder) -> fx.Node:
        """The rows of a value that this rank's experts get."""
        if value in self.made:
            return self.made[value]
        if value not in self.arrived:
            source, times = self._taken(value) if self._is_taken(value) else (value, 0)
            # computed of sorted rows, or rows of which each is another number of choices
            if times not in (1, self.choices):
                source, times = build(ops.ungroup_rows.default, value, self.order), 1
            self.arrived[value] = build(ops.dispatch_rows.default, source, *self._ways(times != self.choices))
        return self.arrived[value]

    def _numbers(self, build: Builder) -> fx.Node:
        """Of each row that arrives, the number of its expert among this rank's."""
        if self.numbers is None:
            self.numbers = build(ops.group_of_rows.default, self.received, self.ends)
        return self.numbers

    def _leave(self, node: fx.Node) -> None:
        """Bring home what others read of a value: each token's sum where that is all they read, else each row."""
        rows: fx.Node | None = None
        for user in [user for user in node.users if user not in self.moved]:
            for total in self._sums(user):
                build = Builder(self.program, total, total, NAME)
                replace(total, build(ops.combine_rows.default, self.made[node], *self._ways(False)))
            if user.target is ops.ungroup_rows.default and not user.users:
                continue
            if rows is None:
                build = Builder(self.program, node.next, node, NAME)
                rows = build(ops.combine_rows.default, self.made[node], *self._ways(self.choices > 1))
            if user.target is ops.ungroup_rows.default:
                user.replace_all_uses_with(rows)
            else:
                ordered = Builder(self.program, user, node, NAME)(ops.group_rows.default, rows, self.order, 1)
                user.replace_input_with(node, ordered)

    def _sums(self, user: fx.Node) -> list[fx.Node]:
        """Sums of each token's rows, of rows that were put back."""
        found: list[fx.Node] = []
        if user.target is not ops.ungroup_rows.default or self.choices == 1:
            return found
        for view in [u for u in user.users if str(u.target) in VIEWS]:
            shape, tail = self.program.sizes.shape(view.meta[VAL]), self.program.sizes.shape(user.meta[VAL])[1:]
            if shape == (self.rows // self.choices, self.choices, *tail):
                found += [u for u in view.users if u.target is aten.sum.dim_IntList and self._sums_choices(u)]
        return found

    def _sums_choices(self, node: fx.Node) -> bool:
        dims: Any = argument(node, "dim")
        value = node.args[0]
        same = node.meta[VAL].dtype == value.meta[VAL].dtype
        return same and [d % value.meta[VAL].dim() for d in dims] == [1] and not argument(node, "keepdim")
