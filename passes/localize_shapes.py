"""Turn the placed graph into one rank's: local shapes, real axis size.

Before:  %1 = transition(%0, I, S1, ..., size=1)   # [b s 768] S1@tp, a graph on global shapes
         %2 = reshape(%1, [b, s, 12, 64])
After:   %1 = transition(%0, I, S1, ..., size=2)   # [b ceil(s/2) 768]
         %2 = reshape(%1, [b, (s+1)//2, 12, 64])
Legal because: every op's strategy is a row of its sharding rule, so applying the op to the shards gives the shard of the
result; ops for which that needs more than the op itself (a mean, a masked lookup, a vocabulary-parallel loss, a dropout that
must draw its slice of one mask) are rewritten here, one family a file. Every value's shape is checked against its placement.

Padding: where t does not divide a dim, shards carry pads (placements.py). Forward pads hold anything finite; a reduction over
a padded dim masks them first, which also keeps their gradients zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megafx.passes.insert_collectives import get_at, set_at
from torch import fx

from megafx.errors import PlacementError
from megafx.ir import MADE_BY, PLACEMENT, VAL, Phase, Program, fqn_of, inherit, recompute_val, source_of
from megafx.placements import P, Placement
from megafx.plan import OpChoice
from megafx.planning import Planning
from megafx.sizes import SizeEmitter

REQUIRES, ENSURES = Phase.PLACED, Phase.LOCAL
NAME = "localize_shapes"
aten = torch.ops.aten


class Localizer:
    """What the op families need: the program, sizes of any value before localizing, and an emitter of local sizes."""

    def __init__(self, program: Program, planning: Planning) -> None:
        self.program, self.rules, self.weights = program, planning.rules, planning.weights
        self.t, self.axis = planning.solved.t, planning.solved.axis
        self.sizes = SizeEmitter(program.graph, program.sizes)
        self.global_shape = {
            n: program.sizes.shape(n.meta[VAL])
            for n in program.graph.nodes
            if isinstance(n.meta.get(VAL), torch.Tensor)
        }

    def local_dims(self, shape: tuple[int, ...], placement: Placement) -> list[int | fx.Node]:
        """Emitted local sizes of a value of this global shape."""
        return [
            self.sizes.local_size(placement.cut, self.t) if placement.is_shard and d == placement.dim else self.sizes(n)
            for d, n in enumerate(shape)
        ]

    def layout(self, placement: Placement) -> list[int | fx.Node]:
        return [self.sizes(n) for n in placement.flat_layout]

    def before(self, node: fx.Node) -> Callable[..., fx.Node]:
        """emit(target, *args): a new node in front of `node` that stems from it."""
        return self._emitter(node, node)

    def _emitter(self, node: fx.Node, where: fx.Node) -> Callable[..., fx.Node]:
        def emit(target: Any, *args: Any, placement: Placement | None = None, **kwargs: Any) -> fx.Node:
            with self.program.graph.inserting_before(where):
                new = self.program.graph.call_function(target, args, kwargs)
            recompute_val(self.program, new)
            inherit(new, node, NAME)
            if placement is not None:
                new.meta[PLACEMENT] = placement
            return new

        return emit

    def mask_pads(self, node: fx.Node, value: fx.Node, placement: Placement) -> fx.Node:
        """`value` (a shard) with zeros in its pads, in front of `node`."""
        emit = self.before(node)
        n = placement.cut.size
        device = value.meta[VAL].device
        ones = emit(aten.ones.default, [self.sizes(n)], dtype=torch.bool, device=device)
        flat = self.layout(placement)
        here = emit(torch.ops.megafx.transition.default, ones, "I", "S0", [], flat, self.axis, self.t)
        here.meta[PLACEMENT] = Placement("S", 0, placement.layout)
        shape = [1] * value.meta[VAL].ndim
        mask = here
        if len(shape) > 1:
            sizes: list[Any] = list(shape)
            sizes[placement.dim] = self.sizes.local_size(placement.cut, self.t)
            mask = emit(aten.reshape.default, here, sizes, placement=placement)
        zero = emit(aten.scalar_tensor.default, 0, dtype=value.meta[VAL].dtype, device=device)
        return emit(aten.where.self, mask, value, zero, placement=placement)


Family = Callable[[Localizer, fx.Node, OpChoice], None]
FAMILIES: dict[str, Family] = {}  # op -> what to do besides running it on local operands


def localizes(*ops: str) -> Callable[[Family], Family]:
    def register(family: Family) -> Family:
        FAMILIES.update(dict.fromkeys(ops, family))
        return family

    return register


def localize_shapes(program: Program, planning: Planning) -> int:
    """Rewrite the graph to one rank's; returns the number of values whose shape changed."""
    _load_families()
    plan = planning.solved
    local = Localizer(program, planning)
    changed = 0
    _localize_inputs(local)
    for node in list(program.graph.nodes):
        if node.op != "call_function" or PLACEMENT not in node.meta:
            continue
        before = local.global_shape.get(node)
        if node.target is torch.ops.megafx.transition.default:
            node.args = (*node.args[:6], plan.t)
            recompute_val(program, node)
        else:
            _localize(local, node, plan.ops[node.name])
        value = node.meta[VAL]
        changed += isinstance(value, torch.Tensor) and program.sizes.shape(value) != before
    program.graph.eliminate_dead_code()
    program.phase = Phase.LOCAL
    return changed


def _load_families() -> None:
    from megafx.passes import localize_lookups, localize_random, localize_reductions, localize_views  # noqa: F401


def _localize_inputs(local: Localizer) -> None:
    for node in local.program.placeholders():
        placement = node.meta.get(PLACEMENT)
        if placement is not None and placement.is_shard:
            value = node.meta[VAL]
            shape = list(value.shape)
            shape[placement.dim] = placement.cut.local_size(local.t)
            with local.program.fake_mode:
                node.meta[VAL] = value.new_empty(shape)


def _localize(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    if choice.out == P:
        _mask_reduced_pads(local, node, choice)
    family = FAMILIES.get(str(node.target))
    if family is not None and (choice.out.is_shard or any(p.is_shard for p in choice.ins)):
        family(local, node, choice)
    if node.users:  # else the family put another node in its place
        recompute_val(local.program, node)
        _check(local, node, choice.out)


def _mask_reduced_pads(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """Zero the pads of activations along a sharded dim that the op sums over. Weights' pads are zero already."""
    rule = local.rules[node]
    for operand, placement in zip(rule.operands, choice.ins, strict=True):
        if (
            placement.is_shard
            and placement.cut.padded(local.t)
            and operand.active
            and operand.node not in local.weights
        ):
            value = get_at(node, operand.path)
            set_at(node, operand.path, local.mask_pads(node, value, placement))


def _check(local: Localizer, node: fx.Node, placement: Placement) -> None:
    """The op must have produced the shard that the plan says."""
    value = node.meta[VAL]
    if not isinstance(value, torch.Tensor):
        return
    wanted = local.local_dims(local.global_shape[node], placement)
    sizes = local.program.sizes
    expected = tuple(sizes.of(n.meta[VAL]) if isinstance(n, fx.Node) else n for n in wanted)
    if expected != sizes.shape(value):
        raise PlacementError(
            f"{node.target} gives a local shape {tuple(value.shape)} where its placement {placement} on {local.t} ranks "
            f"means {tuple(n.meta[VAL] if isinstance(n, fx.Node) else n for n in wanted)}",
            fix="a size in the op's arguments is not localized, or its sharding rule is wrong; run `megafx check-rules`",
            module=fqn_of(node),
            source=source_of(node),
        )


def replace(local: Localizer, node: fx.Node, new: fx.Node) -> None:
    """`new` takes the place of `node`, with its placement."""
    new.meta[PLACEMENT] = node.meta[PLACEMENT]
    new.meta[MADE_BY] = (*node.meta.get(MADE_BY, ()), NAME)
    node.replace_all_uses_with(new)
    local.global_shape[new] = local.global_shape[node]
    _check(local, new, new.meta[PLACEMENT])
