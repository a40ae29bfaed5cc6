"""The kernel that writes a value leaves its largest magnitude too, for the scale of its cast to FP8.

Before:  %y = glu_packed(%x, None, 'silu'); %a = fp8_amax(%y, -1, cut, layout, axis)
         %b = glu_packed_backward(%dy, %x, None, 'silu', True); _, %qt, %s = fp8_quantize(%b[2], %a, -1, 'e4m3', ..)
After:   %r = glu_packed_largest(%x, None, 'silu', cut, layout, axis); %y = %r[0]; %a = %r[1]
         %b = glu_packed_backward_cast(%dy, %x, None, 'silu', %a); %qt = fp8_transposed(%b[2]); %s = %b[3]
Legal because: the call is one op after the other, to the bit (kernels/fp8/largest.py), and the largest is of all elements,
whatever view of the result was read.

It saves reading the value once more. Products, attention and copies leave no largest, and neither do ops whose result ranks
draw along another axis. An output that backward recomputes has the largest magnitude that it had in forward: it is cast where
it is made, if nothing else reads it and no bias is summed.

It has to run before `call_directly`, and after `overlap_products`, which moves results into memory that ranks share.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

import megafx.kernels.activation.activation  # noqa: F401  registers the ops
from megafx.ir.nodes import RESHAPES, behind, change_parts, replace
from megafx.ir.program import VAL, Phase, Program, new_call
from megafx.kernels.fp8.largest import giving_largest
from megafx.kernels.fp8.quantize import amax, quantize, transposed
from megafx.placements.moves import same_size
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.PARTITIONED, Phase.PARTITIONED
NAME = "fuse_maxima"
ops = torch.ops.megafx
_CASTING = {
    ops.bias_act_backward.default: ops.bias_act_backward_cast.default,
    ops.glu_packed_backward.default: ops.glu_packed_backward_cast.default,
}


def fuse_maxima(program: Program, context: CompileContext) -> int:
    """Return the number of passes over memory saved."""
    return 0 if context.config.fp8 is None else change_parts(program, _cast_again, _fuse)


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
    replace(found, largest)
    return True


def _cast_again(cast: fx.Node) -> bool:
    """The cast of what a gradient op recomputes."""
    if cast.target is not quantize or cast.args[2:5] != (-1, "e4m3", False):
        return False
    x = cast.args[0]
    value: Any = behind(x, RESHAPES)
    producer = value.args[0] if value.target is operator.getitem and value.args[1] == 2 else value
    largest = cast.args[1]
    target = _CASTING.get(producer.target)
    if target is None or producer.kwargs or not producer.args[4] or not largest < producer:
        return False
    if producer.args[2] is not None:  # with sums for a bias the kernel has no registers left (156 on sm_90, for 124)
        return False
    chain = [x]
    while chain[-1] is not value:
        chain.append(chain[-1].args[0])
    if any(len(n.users) > 1 for n in chain):
        return False
    (dx, dbias, _), scale = producer.meta[VAL], cast.meta[VAL][2]
    for node in chain:
        node.meta[VAL] = node.meta[VAL].to(torch.uint8)
    producer.target, producer.args = target, (*producer.args[:4], largest)
    producer.meta[VAL] = (dx, dbias, value.meta[VAL], scale)
    turned = new_call(cast, transposed, (x,), cast.meta[VAL][1], cast, NAME)
    made = (x, turned, _item(producer, 3, scale))
    items: list[Any] = list(cast.users)
    for item in items:
        replace(item, made[item.args[1]])
    cast.graph.erase_node(cast)
    if not turned.users:
        cast.graph.erase_node(turned)
    return True


def _can(producer: fx.Node, value: fx.Node, found: fx.Node) -> bool:
    """True if the producer can take the arguments, and rows of what is read are rows of its result."""
    x = found.args[0]
    before: Any = value.meta[VAL].shape
    target = producer.target
    places = [s for s in target._schema.arguments if s.name == "axis"]
    axes = [producer.args[-1]] if places else []
    return (
        all(axis in ("", found.args[4]) for axis in axes)
        and all(n < producer for n in found.all_input_nodes if n is not x)
        and same_size(before[-1], x.meta[VAL].shape[-1])
    )


def _item(producer: fx.Node, index: int, value: Any) -> fx.Node:
    return new_call(producer.next, operator.getitem, (producer, index), value, producer, NAME)
