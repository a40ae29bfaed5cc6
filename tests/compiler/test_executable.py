"""Covers: megafx/compiler/executable.py."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from local_programs import local_program
from lowered import executable_of
from torch import nn
from torch.nn import functional as F

import megafx.kernels.dropout.dropout  # noqa: F401  registers the op
from megafx.compiler.executable import Executable
from megafx.errors import UsageError
from megafx.passes.backward.build_joint_graph import differentiate


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=torch.float64))


def mlp(w: Any, v: Any, x: Any) -> tuple[Any, ...]:
    y = F.linear(F.gelu(F.linear(x, w)), v)
    return (y.square().mean(), y)


def inputs_of(batch: int = 2) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"w": parameter(6, 4), "v": parameter(4, 6), "x": torch.randn(batch, 3, 4).double()}


def made(function: Any, inputs: dict[str, Any], differentiated: tuple[int, ...] = (0,)) -> Executable:
    program = local_program(function, inputs, varying=("x",), loss=True)
    wrt = [i for i, spec in enumerate(program.inputs) if spec.kind == "param"]
    differentiate(program, wrt, list(differentiated))
    return executable_of(program)


ONE = torch.ones((), dtype=torch.float64)


def test_computes_what_autograd_computes_at_two_shapes() -> None:
    executable = made(mlp, inputs_of())
    for batch in (2, 5):
        inputs = inputs_of(batch)
        outputs, kept = executable.forward(list(inputs.values()))
        assert kept is not None
        got = executable.backward(kept, [ONE * 2])
        expected = mlp(*inputs.values())
        for a, b in zip(outputs, expected, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=0, atol=0)
        want = torch.autograd.grad(expected[0] * 2, [inputs["w"], inputs["v"]])
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_dropout_is_replayed_from_its_seed() -> None:
    def function(w: Any, seed: Any, x: Any) -> tuple[Any, ...]:
        return (torch.ops.megafx.dropout(x * w, seed, 0.5, 3, -1, [], "tp").sum(),)

    x = torch.ones(4, 64, dtype=torch.float64)
    executable = made(function, {"w": parameter(64), "seed": torch.tensor(7), "x": x})
    assert [s.kind for s in executable.parts.saved] == ["input", "input", "size"]  # x and the seed: no mask
    w = torch.ones(64, dtype=torch.float64)
    masks = []
    for seed in (7, 7, 8):
        (loss,), kept = executable.forward([w, torch.tensor(seed), x])
        assert kept is not None
        (dw,) = executable.backward(kept, [ONE])
        assert dw is not None and torch.equal(dw.sum(), loss)  # the same elements are dropped in both directions
        masks.append(dw)
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])


def test_inputs_and_tangents_of_any_strides() -> None:
    executable = made(mlp, inputs_of(), differentiated=(1,))
    w, v, x = inputs_of().values()
    x = x.transpose(0, 2).contiguous().transpose(0, 2)
    (_, y), kept = executable.forward([w, v, x])
    tangent = torch.ones((), dtype=torch.float64).expand(y.shape)
    assert kept is not None and not x.is_contiguous() and not tangent.is_contiguous()
    want = torch.autograd.grad(mlp(w, v, x)[1], [w, v], tangent)
    for a, b in zip(executable.backward(kept, [tangent]), want, strict=True):
        torch.testing.assert_close(a, b)


def test_missing_tangent_is_zero() -> None:
    executable = made(mlp, inputs_of(), differentiated=(0, 1))
    both, first = (executable.forward(list(inputs_of().values()))[1] for _ in range(2))
    assert both is not None and first is not None
    zero = torch.zeros(2, 3, 4, dtype=torch.float64)
    for a, b in zip(executable.backward(both, [ONE, zero]), executable.backward(first, [ONE, None]), strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


def test_backward_frees_what_forward_kept() -> None:
    executable = made(mlp, inputs_of())
    _, kept = executable.forward(list(inputs_of().values()))
    assert kept is not None
    alive = [weakref.ref(v) for v, s in zip(kept.values, executable.parts.saved, strict=True) if s.kind == "value"]
    executable.backward(kept, [ONE], retain=True)
    assert all(r() is not None for r in alive)
    executable.backward(kept, [ONE])
    assert alive and all(r() is None for r in alive)
    with pytest.raises(UsageError, match="backward ran through this call's graph before"):
        executable.backward(kept, [ONE])


def test_values_are_freed_while_backward_runs() -> None:
    """The first product of backward finds the loss's value gone, the last finds all gone."""
    executable = made(mlp, inputs_of())
    assert executable.parts.backward is not None
    _, kept = executable.forward(list(inputs_of().values()))
    assert kept is not None
    values = [weakref.ref(v) for v, s in zip(kept.values, executable.parts.saved, strict=True) if s.kind == "value"]
    alive: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default:
                alive.append(sum(r() is not None for r in values))
            return func(*args, **(kwargs or {}))

    with Watch():
        executable.backward(kept, [ONE])
    assert len(values) == 3 and alive[0] == 2 and alive[-1] == 0


def test_value_changed_in_place_is_noticed() -> None:
    executable = made(mlp, inputs_of())
    values = list(inputs_of().values())
    _, kept = executable.forward(values)
    with torch.no_grad():
        values[1].add_(1)
    assert kept is not None
    with pytest.raises(UsageError, match="was changed in place between forward and backward"):
        executable.backward(kept, [ONE])


def test_runs_under_the_context_and_without_autocast() -> None:
    program = local_program(
        lambda w, x: (F.linear(x, w),), {"w": nn.Parameter(torch.ones(4, 4)), "x": torch.ones(3, 4)}
    )
    entered: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    executable = executable_of(program, context)
    with torch.autocast("cpu", torch.bfloat16):
        (y,), kept = executable.forward([torch.ones(4, 4, requires_grad=True), torch.ones(3, 4)])
    assert y.dtype is torch.float32 and not y.requires_grad and kept is None
    assert entered == ["in", "out"]
