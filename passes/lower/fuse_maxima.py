"""The kernel that writes a value leaves its largest magnitude too, for the scale of its cast to FP8.

Before:  %y = glu_packed(%x, None, 'silu'); %a = fp8_amax(%y, -1, cut, layout, axis)
After:   %r = glu_packed_largest(%x, None, 'silu', cut, layout, axis); %y = %r[0]; %a = %r[1]
Legal because: the call is one op after the other, to the bit (kernels/fp8/largest.py), and the largest is of all elements,
whatever view of the result was read.

It saves reading the value once more. Products, attention and copies leave no largest, and neither do ops whose result ranks
draw along another axis. It has to run before `call_directly`, and after `overlap_products`, which moves results into memory
that ranks share.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from megafx.ir.nodes import RESHAPES, behind, changed_copy
from megafx.ir.program import VAL, Phase, Program, inherit
from megafx.kernels.fp8.largest import giving_largest
from megafx.kernels.fp8.quantize import amax
from megafx.placements.moves import same_size
from megafx.planner.context import Planner

REQUIRES, ENSURES = Phase.PARTITIONED, Phase.PARTITIONED
NAME = "fuse_maxima"


def fuse_maxima(program: Program, planner: Planner) -> int:
    """Return the number of passes over memory saved."""
    parts = program.partition
    if parts is None or planner.config.fp8 is None:
        return 0
    program.partition, changes = parts.changed(lambda gm, direction: _fused(gm))
    return changes


def _fused(gm: fx.GraphModule) -> tuple[fx.GraphModule, int]:
    gm, changes = changed_copy(gm, _fuse)
    if changes:
        gm.graph.lint()
        gm.recompile()
    return gm, changes


def _fuse(found: fx.Node) -> bool:
    if found.target is not amax or found.args[1] != -1:
        return False
    x, _, cut, layout, axis = found.args
    value: Any = behind(x, RESHAPES)
    several = value.target is operator.getitem
    producer, result = value.args if several else (value, 0)
    call = giving_largest(producer.target, result) if producer.op == "call_function" else None
    if call is None or producer.kwargs or not _can(producer, value, found):
        return False
    made = producer.meta[VAL]
    count = len(made) if several else 1
    producer.target, producer.args = call, (*producer.args, cut, layout, axis)
    producer.meta[VAL] = (*(made if several else (made,)), found.meta[VAL])
    if not several:
        first = _item(producer, 0, made)
        producer.replace_all_uses_with(first, delete_user_cb=lambda user: user is not first)
    largest = _item(producer, count, found.meta[VAL])
    found.replace_all_uses_with(largest)
    found.graph.erase_node(found)
    return True


def _can(producer: fx.Node, value: fx.Node, found: fx.Node) -> bool:
    """True if the producer can take the arguments, and rows of what is read are rows of its result."""
    x: Any = found.args[0]
    before: Any = value.meta[VAL].shape
    places = [s for s in producer.target._schema.arguments if s.name == "axis"]  # type: ignore[union-attr]
    axes = [producer.args[-1]] if places else []
    return (
        all(axis in ("", found.args[4]) for axis in axes)
        and all(n < producer for n in found.all_input_nodes if n is not x)
        and same_size(before[-1], x.meta[VAL].shape[-1])
    )


def _item(producer: fx.Node, index: int, value: Any) -> fx.Node:
    with producer.graph.inserting_after(producer):
        node = producer.graph.call_function(operator.getitem, (producer, index))
    node.meta[VAL] = value
    return inherit(node, producer, NAME)
