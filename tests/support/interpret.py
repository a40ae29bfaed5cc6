"""Run a program on one process with real tensors: the reference that each pass is tested against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from megafx.equivalence import input_values
from megafx.errors import UsageError
from megafx.ir.program import Program


def bind_inputs(program: Program, *call: Any, **options: Any) -> list[Any]:
    """`input_values` in the order of the placeholders."""
    values = input_values(program, *call, **options)
    unbound = next((spec for spec in program.inputs if spec.name not in values), None)
    if unbound is not None:
        raise UsageError(f"input {unbound.name} of kind {unbound.kind} has no value in a forward call")
    return [values[spec.name] for spec in program.inputs]


def run_program(
    program: Program,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_inputs: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Any:
    """What model(*args, **kwargs) returns, computed by the program's graph; buffers are updated as the model would."""
    values = bind_inputs(program, model, args, kwargs, loss_inputs=loss_inputs, seed=seed)
    outputs = fx.Interpreter(program.gm).run(*values)
    state = dict(model.named_buffers(remove_duplicate=False))
    for spec, value in zip(program.outputs, outputs, strict=True):
        if spec.kind == "mutation":
            with torch.no_grad():
                state[spec.name].copy_(value)
    assert program.call is not None
    return program.call.unflatten([v for s, v in zip(program.outputs, outputs, strict=True) if s.kind == "user"])
