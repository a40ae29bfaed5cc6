"""A planned program with the time and bytes of each op: what the timeline runs and the report draws. Layers that are alike are
one region.

A region is a part of the model in its order: what comes before the layers, one kind of layer, or what comes after them. Its
nodes are ops, and between them the transitions that communicate, as in the PLACED graph. Edges join nodes of all regions.
Times are microseconds and sizes bytes, of one rank at the workload that the planner prices.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from megafx.analysis.communication import MOVES_TOKENS, exchanged_bytes
from megafx.analysis.layers import Layers
from megafx.analysis.prices import axes_of, exchange_seconds, products_in
from megafx.ir.contracts import TRANSITION, ends_of, is_transition
from megafx.ir.facts import ATTENTION, MATMUL, facts_of
from megafx.ir.nodes import argument, op_name
from megafx.ir.program import PLACEMENT, VAL, Input, Program, fqn_of, source_of
from megafx.ops.owners import OWNER_PARAMETER
from megafx.placements.data_axis import EXPERT_AXIS, inner_ranks
from megafx.placements.types import ALL_GATHER, ALL_TO_ALL, LOCAL, I, Owned, Placement, collectives, payload
from megafx.planner.context import CompileContext
from megafx.planner.cost import (
    TRAINING_PASSES,
    attention_seconds,
    collective_seconds,
    cost_kind,
    grouped_seconds,
    in_pieces,
    memory_seconds,
    op_bytes,
    op_flops,
    optimizer_seconds,
    product_seconds,
    share,
    transition_cost,
)
from megafx.planner.costed import CostedGraph, CostedOp, PricedTransition, Region
from megafx.planner.hardware import FLOAT8
from megafx.planner.plan import INDEX, OpChoice, folded_name
from megafx.planner.problem import contraction, share_of_op
from megafx.rules.strategies import OpRule


def costed_graph(program: Program, context: CompileContext) -> CostedGraph:
    """PLACED program -> its ops and collectives with their prices."""
    return _Builder(program, context).graph()


class _Builder:
    def __init__(self, program: Program, context: CompileContext) -> None:
        self.program, self.context, self.plan = program, context, context.solved
        self.params = {node: spec for node, spec in program.input_nodes() if spec.kind == "param"}
        self.layers = Layers.of({spec.name: node.meta[VAL].shape for node, spec in self.params.items()})
        self.moves: dict[fx.Node, PricedTransition] = {}
        self.cast: set[fx.Node] = set()  # whose cast to FP8 is priced
        self.removed: dict[str, list[str]] = defaultdict(list)
        for removal in self.plan.removals:
            many = "strategies" if removal.count > 1 else "strategy"
            self.removed[removal.node].append(f"{removal.count} {many} taken away: {removal.reason}")

    def graph(self) -> CostedGraph:
        nodes = [n for n in self.program.graph.nodes if self._communicates(n) or n in self.context.rules]
        names, where = self._regions(nodes)
        of_region: dict[str, list[fx.Node]] = defaultdict(list)
        for node in nodes:
            of_region[where[node]].append(node)
        alike: dict[Any, list[str]] = defaultdict(list)
        for name in names:
            alike[tuple(self._signature(n, name) for n in of_region[name])].append(name)
        regions: list[Region] = []
        ops: list[CostedOp] = []
        index: dict[fx.Node, int] = {}
        for number, same in enumerate(alike.values()):
            fqns = [name.removeprefix("after ") for name in same]
            shown = folded_name(INDEX.sub(".*", fqns[0]), fqns) if len(same) > 1 else same[0]
            regions.append(Region(shown, len(same), same[0] in self.layers.paths))
            for node in of_region[same[0]]:
                regions[-1].nodes.append(len(ops))
                ops.append(self._costed(node, number, same[0]))
            for name in same:
                index |= dict(zip(of_region[name], regions[-1].nodes, strict=True))
        edges: dict[tuple[int, int], None] = {}
        for node in nodes:
            for source in self._sources(node):
                if source in index and index[source] < index[node]:  # not from one layer to the next like it
                    edges[index[source], index[node]] = None
        self._keep(ops, index)
        self._hold(regions, ops, index)
        order = []
        for name in names:
            own = (name,) if name in self.layers.paths else tuple(dict.fromkeys(map(fqn_of, of_region[name])))
            order.append((own, ops[index[of_region[name][0]]].region))
        hardware, wanted = self.context.hardware, self.context.config.tp_comm_overlap
        overlap = wanted is not False and hardware.transfer_bytes_per_second is not None
        whole, named = self._whole(), {*self.plan.experts}
        experts = sum(self._bytes(n) * self._share(spec) for n, spec in self.params.items() if spec.name in named)
        return CostedGraph(
            regions, ops, [*edges], *whole, self.context.training, order, hardware, self.context.t, overlap, round(experts)
        )  # fmt: skip

    # -- which nodes, and where

    def _communicates(self, node: fx.Node) -> bool:
        """True if it is a transition with a collective, or an exchange of tokens; transitions of parameters' gradients come
        last, together."""
        if node.target in MOVES_TOKENS:
            self.moves[node] = self._exchange(node)
            return True
        if not is_move(node):
            return False
        source = argument(node, "x")
        if PLACEMENT not in source.meta or source in self.params:
            return False
        move = priced(self.program, self.context, source, node)
        if move.forward != LOCAL or move.backward != LOCAL:
            self.moves[node] = move
        return node in self.moves

    def _exchange(self, node: fx.Node) -> PricedTransition:
        """Tokens that travel to the ranks of their experts, or their sums; gradients travel back."""
        ranks, t = argument(node, "places").meta[VAL].shape[1], self.context.t
        part = share(self.plan.ops[node.name].out, t)
        sent = int(part * exchanged_bytes(self.program, node, ranks))
        us = round(1e6 * part * exchange_seconds(self.program, node, self.context.hardware, t), 3)
        back = ALL_TO_ALL if node in self.context.differentiable else LOCAL
        inner = inner_ranks(EXPERT_AXIS, axes_of(self.program, t))
        of_back = sent if back != LOCAL else 0
        return PricedTransition("S0", "S0", ALL_TO_ALL, back, sent, of_back, 2 * us, us, EXPERT_AXIS, ranks, inner)

    def _regions(self, nodes: list[fx.Node]) -> tuple[list[str], dict[fx.Node, str]]:
        """Names of the regions in order, and the region of each node."""
        where = dict(zip(nodes, self.layers.regions(fqn_of(n) or "<root>" for n in nodes), strict=True))
        return list(dict.fromkeys(where.values())), where

    def _signature(self, node: fx.Node, region: str) -> Any:
        shape = self._value(node)
        if node in self.moves:
            return str(self.moves[node]), shape  # with its axis
        choice = self.plan.ops[node.name]
        return (
            str(node.target),
            _inside(fqn_of(node), region),
            choice.ins,
            choice.out,
            shape,
            node in self.context.in_fp8,
        )

    def _sources(self, node: fx.Node) -> Iterable[fx.Node]:
        """The nodes of the result whose values it reads; transitions without communication are looked through."""
        for source in node.all_input_nodes:
            while is_transition(source) and source not in self.moves:  # one of an outer axis copies
                source = source.all_input_nodes[0]
            yield source

    # -- one node

    def _costed(self, node: fx.Node, region: int, name: str) -> CostedOp:
        module, source = _inside(fqn_of(node), name), str(source_of(node) or "")
        if node in self.moves:
            move = self.moves[node]
            label = move.forward if move.forward != LOCAL else f"backward {move.backward}"
            value = self._value(node)
            return CostedOp(node.name, region, module, move.dst[0], label, f"{move.src} -> {move.dst}", value=value, move=move,
                         source=source)  # fmt: skip
        rule, choice = self.context.rules[node], self.plan.ops[node.name]
        weights = [(rule.operands[i], choice.ins[i]) for i in rule.weights(self.context.weights)]
        has_weight = bool(weights) and node not in self.context.weights
        say = lambda p: text_of(p, self.program)
        flops, times = self._cost(node, rule, choice, has_weight)
        once, back, of_weight = (round(1e6 * seconds, 3) for seconds in times)
        texts = []
        for operand, placement in weights:
            spec = self.params.get(operand.node)
            shape = "x".join(map(str, operand.node.meta[VAL].shape))
            texts.append(f"{spec.name if spec else operand.node.name} {shape} as {say(placement)}")
        why = [choice.note] if choice.note else []
        if rule.kind == "none" and node not in self.context.owners:
            why.append(f"computed whole: {rule.reason}")
        return CostedOp(
            node.name, region, module, choice.out.kind, op_name(node),
            f"{', '.join(map(say, choice.ins))} -> {say(choice.out)}",
            style_of(node, choice.out, [p for _, p in weights]) if has_weight else "",
            "; ".join(texts), self._value(node), once, flops=flops, has_weight=has_weight, back_us=back, weight_us=of_weight,
            inner=statistics(self.program, self.context, node), source=source, why=why + self.removed[node.name],
            bytes=self._bytes(node) if isinstance(node.meta[VAL], torch.Tensor) else 0,
        )  # fmt: skip

    def _value(self, node: fx.Node) -> str:
        value = node.meta[VAL]
        if not isinstance(value, torch.Tensor):
            return ""
        shape = [self.program.sizes.workload(n) for n in self.program.sizes.shape(value)]
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"

    def _bytes(self, node: fx.Node) -> int:
        return self.program.sizes.bytes(node.meta[VAL])

    def _cost(
        self, node: fx.Node, rule: OpRule, choice: OpChoice, has_weight: bool
    ) -> tuple[float, tuple[float, float, float]]:
        """(FLOPs, seconds: forward, gradients of operands, gradient of the weight) of a rank."""
        value = node.meta[VAL]
        if not isinstance(value, torch.Tensor):
            return 0.0, (0.0, 0.0, 0.0)
        name, hardware, itemsize = op_name(node), self.context.hardware, value.dtype.itemsize
        terms, numel, dtype = (
            contraction(self.program, rule),
            self.program.sizes.numel(node.meta[VAL]),
            str(value.dtype).removeprefix("torch."),
        )
        part, kind = share_of_op(choice, name, self.context.t), cost_kind(name)
        flops = op_flops(name, numel, terms) * part
        if kind == MATMUL and value.ndim:
            held = share(choice.out, self.context.t)
            cut = held if choice.out.is_shard and choice.out.dim == value.ndim - 1 else 1.0
            n = self.program.sizes.workload(self.program.sizes.of(value.shape[-1])) * cut
            m, k = numel * held / max(n, 1), terms * part / held
            groups = products_in(self.program, node)
            if groups:
                # each rank has some of the experts, with their rows
                own = any(p.is_shard and p.dim == 0 for p in choice.ins)
                groups, m, k = (
                    (max(round(groups * part), 1), m * part / held, k * held / part) if own else (groups, m, k)
                )
                m /= groups
            shapes = ((m, n, k), (m, k, n), (k, n, m))
            fp8, wgrad = node in self.context.in_fp8, self.context.config.fp8_wgrad
            dtypes = [(FLOAT8, 1) if fp8 and each else (dtype, itemsize) for each in (True, True, wgrad)]
            price = functools.partial(grouped_seconds, groups) if groups else product_seconds
            once, back, weight = (price(*shape, *of, hardware) for shape, of in zip(shapes, dtypes, strict=True))
            if fp8:
                once, back, weight = (
                    product + memory_seconds(cast, hardware)
                    for product, cast in zip(
                        (once, back, weight), self._cast_bytes(rule.operands[0].node, m, n, k, itemsize), strict=True
                    )
                )
            return flops, (once, back, weight) if has_weight else (once, back + weight, 0.0)
        if kind == ATTENTION:
            causal = bool(argument(node, "is_causal", False) or argument(node, "causal", False))
            dropped = float(argument(node, "dropout_p", 0.0) or argument(node, "p", 0.0) or 0.0) > 0
            flops /= 1 + causal  # what the mask leaves
            return flops, (*attention_seconds(flops, dtype, hardware, dropout=dropped, keys=terms), 0.0)
        moved = op_bytes(name, numel * itemsize, [self._bytes(o.node) for o in rule.operands]) * part
        once = memory_seconds(moved, hardware) + (hardware.kernel_seconds if moved else 0.0)
        if name == "embedding":  # its gradient is zeros first
            held = share(choice.ins[0], self.context.t)
            return flops, (once, 0.0, 2 * once + memory_seconds(self._bytes(rule.operands[0].node) * held, hardware))
        return flops, (once, (1.0 if name == "add" else TRAINING_PASSES - 1.0) * once, 0.0)

    def _cast_bytes(self, x: fx.Node, m: float, n: float, k: float, itemsize: int) -> tuple[float, float, float]:
        """Bytes that casts to FP8 move for x [m, k] @ w [k, n]: in forward, and for the gradients of x and of w.

        An operand is read and written in FP8, in both orientations if both are due at once. Kernels that make x and the
        gradient leave their largest magnitude, for a scale of the whole; for weights, and for scales of rows, operands are read
        once more. What several linears read is cast at the first.
        """
        one = 0 if x in self.cast else m * k
        self.cast.add(x)
        rows = itemsize if self.context.config.fp8_recipe == "rowwise" else 0
        once, turned = itemsize + 1 + rows, itemsize + 1 + rows if rows else 2
        return (
            one * once + k * n * (2 * itemsize + 1),
            m * n * (once + 1) + k * n * once,
            one * turned if self.context.config.fp8_wgrad else 0.0,
        )

    # -- memory

    def _keep(self, ops: list[CostedOp], index: dict[fx.Node, int]) -> None:
        """Values that backward reads: operands of ops that are not linear in all of them at once. Each counts where it is first
        read. At most: fused ops may compute theirs again."""
        if not self.context.training:
            return
        seen: set[tuple[fx.Node, Placement]] = set()
        counted: set[int] = set()
        for node, rule in self.context.rules.items():
            choice = self.plan.ops[node.name]
            pairs = [(o.node, p) for o, p in zip(rule.operands, choice.ins, strict=True) if o.active]
            active = tuple(i for i, o in enumerate(rule.operands) if o.active)
            if rule.kind == "view" or any(set(active) <= set(group) for group in rule.linear):
                continue
            for value, placement in pairs:
                root = value
                while self.context.rules.get(root) is not None and self.context.rules[root].kind == "view":
                    root = root.all_input_nodes[0]
                if root in self.params or (root, placement) in seen:
                    continue
                seen.add((root, placement))
                if index[node] not in counted:
                    ops[index[node]].kept += int(self._bytes(value) * share(placement, self.context.t))
            counted.add(index[node])  # the first of like layers represents all

    def _hold(self, regions: list[Region], ops: list[CostedOp], index: dict[fx.Node, int]) -> None:
        """Parameters count where they are first read."""
        for node, spec in self.params.items():
            readers = [*node.users]
            while readers and readers[0] not in index:
                readers = [*readers[0].users, *readers[1:]]
            if readers:
                region = regions[ops[index[readers[0]]].region]
                region.held += self._bytes(node) * self._share(spec) / region.times

    def _share(self, spec: Input) -> float:
        """Of a parameter, what a rank holds of it before data-parallel ranks cut what is not of experts."""
        part = share(self.plan.params[spec.name], self.context.t)
        if spec.name in self.plan.experts:
            assert self.context.data is not None
            part /= self.context.data.experts
        return part

    def _whole(self) -> tuple[dict[str, int], PricedTransition | None, float]:
        """Bytes of parameters, gradients and AdamW's moments on a rank; the all-reduces of gradients; the optimizer's time."""
        t, held, optimizer = self.context.t, 0.0, 0.0
        sent, us = 0, 0.0
        for node, spec in self.params.items():
            part = self._share(spec)
            held += self._bytes(node) * part
            optimizer += 1e6 * optimizer_seconds(self.program.sizes.numel(node.meta[VAL]), self.context.hardware) * part
            for user in node.users:
                if is_transition(user):
                    move = priced(self.program, self.context, node, user)
                    if move.backward != LOCAL:
                        sent += move.backward_bytes
                        us += 1e6 * move.backward_bytes / self.context.hardware.link_bytes_per_second
        if not self.context.training:
            return {"parameters": int(held)}, None, 0.0
        memory = {"parameters": int(held), "gradients": int(held), "AdamW's moments": int(2 * held)}
        us = round(us + 1e6 * self.context.hardware.alpha_seconds, 3)
        summed = PricedTransition("P", "I", LOCAL, "all_reduce", 0, sent, us, ranks=t) if sent else None
        return memory, summed, round(optimizer, 3)


def _inside(fqn: str, region: str) -> str:
    """Path inside of a layer; elsewhere the whole path."""
    return fqn.removeprefix(region).removeprefix(".") if fqn == region or fqn.startswith(f"{region}.") else fqn


# -- transitions and texts


def is_move(node: fx.Node) -> bool:
    """True if the node is a transition, of the axis that is planned or of one outside of it."""
    return node.op == "call_function" and str(node.target) == TRANSITION


def priced(program: Program, context: CompileContext, value: fx.Node, made: fx.Node) -> PricedTransition:
    """The transition `made` of a value, on its own axis. One outside of the axis that is planned was made when shapes were
    local: what its ranks have together is what its whole end has. Planned ranks share that as they share the value."""
    axis, val, root = argument(made, "axis"), value.meta[VAL], value
    src, dst, ranks = value.meta[PLACEMENT], made.meta[PLACEMENT], context.t
    numel, shape, inner = program.sizes.numel(val), program.sizes.shape(val), 1
    if axis != context.axis:
        inner = inner_ranks(axis, axes_of(program, context.t))
        src, dst = ends_of(program, made)
        ranks = argument(made, "size")
        if src.is_shard:
            numel = ranks * numel if dst.is_shard else program.sizes.numel(made.meta[VAL])
        numel = round(numel * share(made.meta[PLACEMENT], context.t))
    while is_transition(root):  # one of several in a row: what they move decides
        root = root.all_input_nodes[0]
    row, needs_grad = collectives(src, dst), root in context.differentiable
    sizes = (numel, val.dtype.itemsize, context.hardware, ranks)
    pieces = in_pieces(src, shape) or in_pieces(dst, shape)
    cost = transition_cost(src, dst, *sizes, needs_grad=needs_grad, in_pieces=pieces, inner=inner)
    ends, backward = (text_of(src, program), text_of(dst, program)), row.backward if needs_grad else LOCAL
    sent = (cost.forward_bytes, cost.backward_bytes)
    us, forward_us = (round(1e6 * s, 3) for s in (cost.seconds, cost.forward_seconds))
    return PricedTransition(*ends, row.forward, backward, *sent, us, forward_us, axis, ranks, inner)


def statistics(program: Program, context: CompileContext, node: fx.Node) -> PricedTransition | None:
    """The gather of a vocabulary-parallel loss: four statistics a token from each rank, nothing backward. None: of others."""
    choice = context.solved.ops.get(node.name)
    localized = facts_of(node.target).localize
    if choice is None or choice.out != I or localized is None or choice.factor != localized.factor:
        return None
    value, t = node.meta[VAL], context.t
    itemsize = max(value.dtype.itemsize, 4)
    numel = 4 * t * program.sizes.numel(value)
    cost_us = round(1e6 * collective_seconds(ALL_GATHER, numel, itemsize, context.hardware, t), 3)
    sent = payload(ALL_GATHER, numel, t) * itemsize
    return PricedTransition("S0", "I", ALL_GATHER, LOCAL, sent, 0, cost_us, cost_us, ranks=t)


def text_of(placement: Placement, program: Program) -> str:
    """'S2', or with the layout where it is not one contiguous range: 'S2/8x64', 'S0/batch*(seq)'."""
    if not placement.is_shard or placement.cut.simple() or isinstance(placement, Owned):
        return str(placement)
    return f"S{placement.dim}/{placement.cut.text(program.sizes.text)}"


def style_of(node: fx.Node, out: Placement, weights: list[Placement]) -> str:
    lookup = "embedding" in str(node.target)
    if not any(p.is_shard for p in weights):
        return "on a shard of the sequence" if out.is_shard else "replicated"
    of_experts = any(p.is_shard and p.dim == 0 for p in weights) and facts_of(node.target).experts
    if of_experts or node.target is OWNER_PARAMETER:
        return "expert-parallel"
    if out.kind == "P":
        return "vocab-parallel" if lookup else "row-parallel"
    return "hidden-parallel" if lookup or cost_kind(op_name(node)) != MATMUL else "column-parallel"
