"""Parameters one below the other, as one: weights [n0, k], [n1, k], ... -> [n0 + n1 + .., k]; biases likewise.

The op is a concatenation, which never runs: passes/lower/partition.py makes its result an input of the graphs, and
distributed/parameters.py gives that: a view where the parameters lie side by side in one memory (`place_joined` puts them
there), else a copy. The gradient is one tensor too, and each parameter's is a slice of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megafx.ir.facts import FREE, real
from megafx.kernels.common.op import define_op
from megafx.rules.families import OpCall, Part, RuleText, dims


def check(parameters: Sequence[Tensor]) -> None:
    first = parameters[0]
    for p in parameters:
        if p.dtype != first.dtype or p.shape[1:] != first.shape[1:] or p.dim() == 0:
            raise ValueError(
                f"join_parameters needs parameters of one dtype that are alike but for dim 0, got {first.dtype} "
                f"{tuple(first.shape)} and {p.dtype} {tuple(p.shape)}"
            )


def reference(parameters: list[Tensor]) -> Tensor:
    check(parameters)
    return torch.cat(parameters)


def _fake(parameters: list[Tensor]) -> Tensor:
    check(parameters)
    first = parameters[0]
    return first.new_empty((sum(p.shape[0] for p in parameters), *first.shape[1:]))


def _rule(call: OpCall) -> RuleText:
    parts, at = {}, 0
    given = call.get("parameters")
    for i, a in enumerate(given):
        parts[i] = Part("f0", at, at + a.shape[0])
        at += a.shape[0]
    return RuleText(f"lin: {', '.join('+' + dims(a.shape) for a in given)} -> {dims(call.results[0])}", parts=parts)


join_parameters = define_op(
    "join_parameters(Tensor[] parameters) -> Tensor",
    rule=_rule,
    samples=[([real(4, 6), real(2, 6)],)],
    cost=FREE,  # the parameters lie in one memory
    reference=reference,
    fake=_fake,
)


def _saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rows = [p.shape[0] for p in inputs[0]]


def _backward(ctx: Any, grad: Tensor) -> list[Tensor]:
    found, at = [], 0
    for rows in ctx.rows:
        found.append(torch.ops.aten.slice.Tensor(grad, 0, at, at + rows))
        at += rows
    return found


# define_gradient is for operands that are no lists
torch.library.register_autograd("megafx::join_parameters", _backward, setup_context=_saves)
