"""What the gradient of an activation reads is kept in e4m3: a byte of each element, with one scale, of gate and up together.

Before:  %y = glu_packed(%x, None, 'silu'); ...; %d = glu_packed_backward(%dy, %x, None, 'silu', True)         # x is kept
After:   %a = transition(fp8_amax(%x), M -> R); %q, _, %s = fp8_quantize(%x, %a, -1, 'e4m3', ..)               # in forward
         %d = glu_packed_backward(%dy, fp8_restored(%q, %s), None, 'silu', True)
Legal because: the user asked for the rounding (`activation_func_fp8_input_store`, Megatron's name). The scale is of all ranks,
and the cast is elementwise, so that numbers are the same on any number of ranks.

The inputs of activations are the largest of what a layer keeps: gate and up are half of it in Llama. Left as they are: inputs
that something else reads in backward, and sums over ranks yet to be made. It has to run after `recompute_activations`, whose
gradient ops make the output again: of what is restored.
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import torch
from torch import fx

from megafx.errors import PlacementError
from megafx.ir.facts import facts_of
from megafx.ir.nodes import RESHAPES, in_backward, shows_operand, storage_of
from megafx.ir.program import VAL, Builder, Phase, Program
from megafx.kernels.fp8.quantize import quantize, restored
from megafx.passes.backward.maxima import Maxima
from megafx.placements.types import P
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.JOINT, Phase.JOINT
NAME = "store_activation_inputs"


def store_activation_inputs(program: Program, context: CompileContext) -> int:
    """Return the number of values that are kept in e4m3."""
    if not context.config.activation_func_fp8_input_store:
        return 0
    maxima, made, count = Maxima(program, context), dict[tuple[fx.Node, ...], list[tuple[fx.Node, fx.Node]]](), 0
    for gradient in list(program.graph.nodes):
        if not (in_backward(gradient) and facts_of(gradient.target).recompute):
            continue
        operands = _inputs(gradient)
        why = next(filter(None, (_refusal(operand, maxima) for operand in operands)), "")
        if why:
            program.note(NAME, f"an activation's input is kept as it is: {why}", gradient)
        elif operands:
            _restore(program, maxima, gradient, operands, made)
            count += len(operands)
    if count:
        program.erase_unused()
        program.graph.lint()
    return count


def _inputs(gradient: fx.Node) -> list[fx.Node]:
    """Forward values of the gradient's shape: its input, or gate and up; not a bias."""
    values: list[Any] = [a for a in gradient.args[1:] if isinstance(a, fx.Node)]
    return [a for a in dict.fromkeys(values) if not in_backward(a) and a.op != "placeholder" and a.meta[VAL].ndim > 1]


def _refusal(operand: fx.Node, maxima: Maxima) -> str:
    matrix = _matrix(operand)
    if matrix.meta[VAL].ndim != 2:
        return "it is no matrix"
    views, readers = [storage_of(operand)], set[fx.Node]()
    for view in views:
        later = {n for n in view.users if in_backward(n)}
        views += [n for n in view.users if n not in later and shows_operand(n)]
        readers |= later | {n for n in view.users if n.op == "output"}
    if not all(n.op != "output" and facts_of(n.target).recompute for n in readers):
        return "something else reads it too"
    try:
        held = maxima.placement(matrix)
    except PlacementError as error:
        return f"what ranks hold of it is not known: {error.found}"
    return "it is a sum over ranks yet to be made" if held == P else ""


def _matrix(operand: fx.Node) -> fx.Node:
    """The value, before it was seen as [batch, tokens, features]."""
    node: Any = operand
    while node.target in RESHAPES and node.meta[VAL].ndim != 2:
        node = node.args[0]
    return node


def _restore(
    program: Program, maxima: Maxima, gradient: fx.Node, operands: list[fx.Node],
    made: dict[tuple[fx.Node, ...], list[tuple[fx.Node, fx.Node]]],
) -> None:  # fmt: skip
    values = tuple(map(_matrix, operands))
    if values not in made:
        last = max(values)
        build = Builder(program, last.next, last, NAME)
        each = [maxima.largest(build, value, value, maxima.placement(value), -1, True) for value in values]
        # One scale of gate and up, whether their linears are merged or not.
        largest = reduce(lambda a, b: build(torch.ops.aten.maximum.default, a, b), each)
        casts = [build(quantize, value, largest, -1, "e4m3", False, True, False) for value in values]
        made[values] = [(build(operator.getitem, cast, 0), build(operator.getitem, cast, 2)) for cast in casts]
    build = Builder(program, gradient, gradient, NAME)
    for operand, value, cast in zip(operands, values, made[values], strict=True):
        back = build(restored, *cast, value.meta[VAL].dtype)
        for view in _views(operand, value):
            back = build(view.target, back, *view.args[1:])
        gradient.replace_input_with(operand, back)


def _views(operand: fx.Node, value: fx.Node) -> list[fx.Node]:
    """From the value to the operand."""
    found: list[fx.Node] = []
    node: Any = operand
    while node is not value:
        found.insert(0, node)
        node = node.args[0]
    return found
