"""Covers: megafx/capture/errors.py. What cannot be captured: module, line, what was found, what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functions import D, Lambda, _x
from torch import nn

from megafx.capture.export import capture_call
from megafx.errors import CaptureError
from megafx.passes.canonicalize.canonicalize import canonicalize_program


class Sub(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.block = Lambda(fn)

    def forward(self, x: torch.Tensor) -> Any:
        return self.block(x)


def _error(fn: Callable[..., Any], capfd: Any, canonical: bool = False) -> str:
    with pytest.raises(CaptureError) as caught:
        program = capture_call(Sub(fn), *_x(2, 6))
        canonicalize_program(program)
    assert canonical or caught.value.source is not None
    out = capfd.readouterr()
    assert out.out + out.err == "", "export's own output must not reach the terminal"
    return str(caught.value).replace(__file__, "FILE")


def _line(fn: Callable[..., Any], offset: int = 1) -> int:
    return fn.__code__.co_firstlineno + offset


WAY_OUT = '; or leave the module out of the graph, if it holds few parameters: Config(eager_modules=["block"])'


def test_error_branch_on_data(capfd: Any) -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        if m.lin(x).sum() > 0:
            return x
        return m.lin(x)

    assert _error(fn, capfd) == (
        "a Python decision (`if`, `while`, `assert`, `bool()`, `int()`) depends on the data of a tensor\n"
        f"  in module 'block' at FILE:{_line(fn)} `if m.lin(x).sum() > 0:`\n"
        f"  fix: use torch.where or a mask, or decide by a Python value that is known before the call{WAY_OUT}"
    )


def test_error_item(capfd: Any) -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x[: int(x.max().item())]

    assert _error(fn, capfd) == (
        "a tensor's data becomes a Python number (`.item()`, `.tolist()`, `.numpy()`, `int(tensor)`)\n"
        f"  in module 'block' at FILE:{_line(fn)} `return x[: int(x.max().item())]`\n"
        f"  fix: keep it a tensor, or pass the number as an argument of the call{WAY_OUT}"
    )


def test_error_selection_by_data(capfd: Any) -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.lin(x)[torch._unique2((x > 0).long())[0]].sum()

    assert _error(fn, capfd).splitlines()[0] == (
        "the shape of the result of <built-in function getitem> depends on the data of a tensor"
    )


def test_error_in_the_model_itself(capfd: Any) -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ m.lin.weight[:, :3].T

    text_of = _error(fn, capfd)
    assert "RuntimeError" in text_of
    assert f"in module 'block' at FILE:{_line(fn)} `return x @ m.lin.weight[:, :3].T`" in text_of


def test_error_inputs_of_another_dtype() -> None:
    """Eager mode ends there as well, fakes go on. Under autocast it is no error."""
    model = Lambda(lambda m, x: m.lin(x)).bfloat16()
    with pytest.raises(CaptureError) as caught:
        capture_call(model, *_x(2, 6))
    assert "aten.linear.default of different dtypes (float32, bfloat16, bfloat16)" in str(caught.value)
    assert "functions.py" in str(caught.value) and "`x.to(dtype)`" in str(caught.value)
    with torch.autocast("cpu"):
        capture_call(model, *_x(2, 6))


def test_error_vmap(capfd: Any) -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: (row * row).sum())(m.lin(x))

    text_of = _error(fn, capfd)
    assert text_of.startswith(
        "a transform of torch.func (vmap, grad, vjp, jvp) inside of the model\n  in module 'block' at "
    )
    assert "  fix: write the function for all rows at once (broadcasting, einsum)" in text_of and text_of.endswith(
        WAY_OUT
    )


def test_error_random_op(capfd: Any) -> None:
    text_of = _error(lambda m, x: torch.poisson(x.exp()), capfd)
    assert text_of.startswith(
        "aten.poisson.default draws random numbers that depend on the process\n  in module 'block'"
    )
    assert text_of.endswith(
        "fix: use torch.nn.functional.dropout, or draw the numbers outside of the model and pass them as an input"
    )


DOUBLED = torch.ones(D).mul_  # a tensor that no path leads to


def test_error_write_to_a_constant(capfd: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.lin(x * DOUBLED(2))

    assert _error(forward, capfd).startswith(
        "the model writes into one of its inputs, which cannot be made functional\n  in module 'block'"
    )


def test_error_argument_type() -> None:
    with pytest.raises(CaptureError) as caught:
        capture_call(Lambda(lambda m, x, y: x), (torch.randn(2, 6, D), object()))
    assert str(caught.value) == (
        "argument args[1] is a builtins.object, which cannot enter a graph\n"
        "  fix: pass tensors, numbers, strings, or lists, tuples and dicts of them"
    )


def test_error_loss_inputs_without_loss_fn() -> None:
    with pytest.raises(CaptureError, match="loss_inputs without a loss_fn"):
        capture_call(Lambda(lambda m, x: x), *_x(2, 6), loss_inputs={"labels": torch.zeros(2)})


def test_error_result_whose_sizes_depend_on_values(capfd: Any) -> None:
    """The sizes of lstsq's residuals do."""

    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.lstsq(m.lin(x), x).solution.square().sum()

    text_of = _error(fn, capfd)
    assert "whether it returns residuals depends on the data" in text_of and "`return torch.linalg.lstsq(" in text_of
    assert "torch.linalg.pinv(a) @ b" in text_of


def test_a_lazy_module_is_to_be_called_first() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.LazyBatchNorm1d())
    with pytest.raises(
        CaptureError, match="'1.weight' has no shape yet: a lazy module takes it from its first call"
    ) as caught:
        capture_call(model, (torch.randn(3, 6),))
    assert "module '1'" in str(caught.value) and "call the model once" in str(caught.value)
    model(torch.randn(3, 6))
    capture_call(model, (torch.randn(3, 6),))


def test_a_list_of_modules_is_no_part_to_leave_eager(capfd: Any) -> None:
    """Its `__getitem__` was on the stack; nothing calls the list."""

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[torch.randint(3, ()).item()](x)  # type: ignore[no-any-return,index]  # as users write it

    with pytest.raises(CaptureError, match="becomes a Python number") as caught:
        capture_call(Chosen(), (torch.randn(2, 4),))
    assert not caught.value.module and "eager_modules" not in str(caught.value)
