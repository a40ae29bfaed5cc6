"""What each input of a graph reaches, that a gradient can come from: so that a call knows which gradients there are.

Autograd leaves `.grad` at None where a loss does not depend on a parameter, and optimizers skip those: AdamW does not decay
them. The backward graph makes all gradients in each call, zeros too. Two things decide in a call which there are: which
outputs the user differentiates, and which of their inputs modules that stay eager have used (ops/eager_call.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from megafx.ir.nodes import RESHAPES
from megafx.ir.program import (
    VAL,
    Input,
    Program,
    Reached,
    Source,
    differentiable_nodes,
    differentiable_outputs,
    is_floating,
)

aten = torch.ops.aten
# Whose backward needs no value: it may run twice. (A number that multiplies is saved.)
_SAVES_NOTHING = frozenset(
    ["add", "sub", "rsub", "neg", "sum", "mean", "cat", "stack", "clone", "alias", "_to_copy", "constant_pad_nd"]
)
_SAVES_NOTHING |= frozenset(
    ["slice", "select", "expand", "permute", "transpose", "t", "squeeze", "unsqueeze", "split", "split_with_sizes"]
)


def find_reached(program: Program, wants_grad: Callable[[Input], bool] | None = None) -> Reached | None:
    """None where all inputs reach the one output, and no module stays eager. program: CANONICAL. wants_grad: input -> whether
    its gradient is wanted.

    A gradient ends at detach, and at values that are no floating numbers.
    """
    outputs, results = differentiable_outputs(program, given_back=True), program.results()
    eager = program.graph.find_nodes(op="call_function", target=torch.ops.megafx.eager_call.default)
    bits: dict[Source, int] = {}
    found: dict[Any, int] = {}
    for i in outputs:
        found[results[i]] = found.get(results[i], 0) | bits.setdefault(program.outputs[i].name, 1 << len(bits))
    of_results: dict[str, list[int]] = {}
    trained, shared = differentiable_nodes(program, wants_grad), dict[str, int]()
    for node in reversed(list(program.graph.nodes)):
        if node.op == "output":
            continue
        if node in trained and _saves(node):
            mask = found.get(node, 0)
            for user in node.users if node.target is torch.ops.megafx.eager_call.default else ():
                mask |= found.get(user, 0)
            for name in (program.outputs[i].name for i in outputs):
                if mask & bits[name]:
                    shared[name] = shared.get(name, 0) | mask
        if node.target is torch.ops.megafx.eager_call.default:
            tensors = node.args[0]
            key = node.args[4]
            of_results[key] = [0] * (len(node.meta[VAL]) - 2)
            for user in node.users:
                place = user.args[1]
                if user.target is operator.getitem and place >= 2:
                    of_results[key][place - 2] |= found.get(user, 0)
            for i, x in enumerate(tensors):
                found[x] = found.get(x, 0) | bits.setdefault((key, i), 1 << len(bits))
        elif node.op == "call_function" and node.target is not aten.detach.default and is_floating(node):
            for operand in node.all_input_nodes:
                if operand.target is not torch.ops.megafx.eager_call.default:
                    found[operand] = found.get(operand, 0) | found.get(node, 0)
    givers = [(n, spec.name, found.get(n, 0)) for n, spec in program.input_nodes() if spec.kind in ("param", "user")]
    if len(outputs) < 2 and not eager and all(mask for n, _, mask in givers if is_floating(n)):
        return None
    sources = {bit: source for source, bit in bits.items()}

    def named(mask: int) -> tuple[Source, ...]:
        return tuple(source for bit, source in sources.items() if mask & bit)

    inputs = {name: named(mask) for _, name, mask in givers}
    others = {n: s for n, s in bits.items() if isinstance(n, str) or any(of_results[n[0]])}
    read: dict[str, tuple[Source, ...]] = {}
    for i in outputs:
        name, mask = program.outputs[i].name, found[results[i]]
        if users := tuple(s for s, bit in others.items() if s != name and mask & bit):
            read[name] = users
    sharing = {name: tuple(s for s in named(mask) if isinstance(s, str)) for name, mask in shared.items()}
    return Reached(inputs, {key: tuple(map(named, masks)) for key, masks in of_results.items()}, read, sharing)


def _saves(node: fx.Node) -> bool:
    """True if autograd keeps a value for the backward of what a node computes."""
    if node.op != "call_function" or node.target in (operator.getitem, aten.detach.default) or node.target in RESHAPES:
        return False
    return getattr(node.target, "_opname", "") not in _SAVES_NOTHING
