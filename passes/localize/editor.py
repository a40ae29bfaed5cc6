"""What the op families of `localize_shapes` share: emitted local sizes, masks of pads, the registry, the shape check."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import fx

from megafx.errors import PlacementError
from megafx.ir.nodes import mark
from megafx.ir.program import MADE_BY, PLACEMENT, VAL, Program, inherit, located, recompute_val
from megafx.ir.sizes import SizeEmitter, Sizes
from megafx.placements.types import Placement
from megafx.planner.plan import OpChoice
from megafx.rules.strategies import OpRule

NAME = "localize_shapes"
aten = torch.ops.aten


class Localizer:
    """What the op families need: the program, sizes of any value before localizing, and an emitter of local sizes."""

    def __init__(
        self, program: Program, axis: str, t: int, rules: dict[fx.Node, OpRule], weights: Container[fx.Node] = (),
        whole: Sizes | None = None,
    ) -> None:  # fmt: skip
        """whole: the sizes of what the ranks hold together, where the program's are one rank's already."""
        self.program, self.axis, self.t, self.rules, self.weights = program, axis, t, rules, weights
        self.sizes = SizeEmitter(program.graph, whole or program.sizes)
        self.instead: dict[fx.Node, fx.Node] = {}  # what was put in the place of a node
        self.changed: set[fx.Node] = set()  # whose values are others than before
        self.global_shape = {
            n: (whole or program.sizes).shape(n.meta[VAL])
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

        def emit(target: Any, *args: Any, placement: Placement | None = None, **kwargs: Any) -> fx.Node:
            with self.program.graph.inserting_before(node):
                new = self.program.graph.call_function(target, args, kwargs)
            recompute_val(self.program, new)
            self.changed.add(new)
            inherit(new, node, NAME)
            mark(new, placement)
            return new

        return emit

    def mask_pads(self, node: fx.Node, value: fx.Node, placement: Placement, fill: float | str = 0) -> fx.Node:
        """`value` (a shard) with `fill` in its pads, in front of `node`; 'row': 1, 2, 3, ... along its last whole dim."""
        emit = self.before(node)
        device = value.meta[VAL].device
        ones = emit(aten.ones.default, [self.sizes(placement.cut.size)], dtype=torch.bool, device=device)
        move: Any = (ones, "I", "S0", [], self.layout(placement), self.axis, self.t)
        mask = emit(torch.ops.megafx.transition.default, *move, placement=Placement("S", 0, placement.layout))
        if value.meta[VAL].ndim > 1:
            sizes: list[Any] = [1] * value.meta[VAL].ndim
            sizes[placement.dim] = self.sizes.local_size(placement.cut, self.t)
            mask = emit(aten.reshape.default, mask, sizes, placement=placement)
        if fill == "row":
            last = max(d for d in range(value.meta[VAL].ndim) if d != placement.dim)
            length: Any = self.sizes(self.program.sizes.shape(value.meta[VAL])[last])
            pad = emit(aten.arange.default, length, dtype=value.meta[VAL].dtype, device=device)
            pad = emit(aten.add.Tensor, pad, 1)
            trailing = value.meta[VAL].ndim - 1 - last
            pad = emit(aten.reshape.default, pad, [length, *[1] * trailing]) if trailing else pad
        else:
            pad = emit(aten.scalar_tensor.default, fill, dtype=value.meta[VAL].dtype, device=device)
        return emit(aten.where.self, mask, value, pad, placement=placement)


Family = Callable[[Localizer, fx.Node, OpChoice], None]


def check_shape(local: Localizer, node: fx.Node, placement: Placement) -> None:
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
            **located(node),
        )


def replace(local: Localizer, node: fx.Node, new: fx.Node) -> None:
    """`new` takes the place of `node`, with its placement."""
    new.meta[PLACEMENT] = node.meta[PLACEMENT]
    new.meta[MADE_BY] = (*node.meta.get(MADE_BY, ()), NAME)
    node.replace_all_uses_with(new)
    local.global_shape[new], local.instead[node] = local.global_shape[node], new
    local.changed.add(new)
    check_shape(local, new, new.meta[PLACEMENT])
