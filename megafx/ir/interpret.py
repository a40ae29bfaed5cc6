"""Run a program on one process with real tensors: the reference that each pass is tested against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from megafx.errors import UsageError
from megafx.ir.program import Program


def bind_inputs(
    program: Program,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_inputs: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> list[torch.Tensor]:
    """The placeholders' values for a call of `model` (any model with the same FQNs, e.g. an fp64 copy)."""
    if program.call is None:
        raise UsageError("this program was not made by capture, so its inputs have no names in a call")
    state: dict[str, torch.Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    user = iter(program.call.flatten(args, kwargs, loss_inputs))
    values: list[torch.Tensor] = []
    for spec in program.inputs:
        if spec.kind in ("param", "buffer"):
            values.append(state[spec.name])
        elif spec.kind == "constant":
            values.append(program.constants[spec.name])
        elif spec.kind == "user":
            values.append(next(user))
        elif spec.kind == "seed":
            values.append(torch.tensor(seed, dtype=torch.int64))
        else:
            raise UsageError(f"input {spec.name} of kind {spec.kind} has no value in a forward call")
    return values


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
