"""Grouped matmuls: values against one matmul a group, gradients, rules, and what models write ends up as this op.

Covers: kernels/experts/grouped_mm.py, and passes/canonicalize/names.py where it meets grouped matmuls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megafx.capture.export import capture_call
from megafx.kernels.experts import grouped_mm as module
from megafx.passes.canonicalize.canonicalize import canonicalize_program

ops = torch.ops.megafx


def operands(
    ends: list[int], rows: int = 11, k: int = 5, n: int = 7
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, k, dtype=torch.float64), torch.randn(len(ends), k, n, dtype=torch.float64)
    return x.requires_grad_(), weight.requires_grad_(), torch.tensor(ends)


@pytest.mark.parametrize("ends", [[3, 3, 8, 11], [11, 11], [0, 0, 11], [2, 5, 9]])
def test_each_row_meets_the_weight_of_its_group(ends: list[int]) -> None:
    """Also with empty groups, and with rows after the last end: those are 0."""
    x, weight, last = operands(ends)
    y = ops.grouped_mm(x, weight, last)
    group = torch.searchsorted(last, torch.arange(11), right=True)
    for s in range(11):
        wanted = x[s] @ weight[group[s]] if group[s] < len(ends) else torch.zeros(7, dtype=torch.float64)
        torch.testing.assert_close(y[s], wanted)


def test_gradients() -> None:
    x, weight, ends = operands([2, 2, 7, 9])
    assert torch.autograd.gradcheck(lambda a, b: ops.grouped_mm(a, b, ends), (x, weight))
    dy = torch.randn(11, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: ops.grouped_mm_weight(a, b, ends), (x, dy))
    torch.library.opcheck(ops.grouped_mm.default, (x, weight, ends))
    torch.library.opcheck(ops.grouped_mm_weight.default, (x, dy, ends))


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, weight, _ = operands([3, 11])
    with pytest.raises(ValueError, match=r"3 ends of groups for 2 weights"):
        module.grouped_mm(x, weight, torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"needs x \[S, K\]"):
        module.grouped_mm(x, weight[0], torch.tensor([1, 2]))


def test_the_librarys_grouped_matmul_is_this_op() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8, 16, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> Any:
            return torch._grouped_mm(x, self.weight, offs=ends).float().sum()

    x = torch.randn(12, 8, dtype=torch.bfloat16)
    program = capture_call(Experts(), (x, torch.tensor([3, 6, 6, 12], dtype=torch.int32)))
    canonicalize_program(program)
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert "megafx.grouped_mm.default" in targets and "aten._grouped_mm.default" not in targets


def test_the_librarys_result_is_the_only_memory_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """No result is made and filled with zeros beside the one that the library makes."""
    made: list[str] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made.append(str(func).removesuffix(".default"))
            return func(*args, **(kwargs or {}))

    x, weight = torch.randn(12, 8), torch.randn(4, 8, 16)
    ends = torch.tensor([3, 6, 6, 12], dtype=torch.int32)
    grad = torch.randn(12, 16)
    wanted = module.grouped_mm(x, weight, ends), module.grouped_mm_weight(x, grad, ends)
    monkeypatch.setattr(module, "_library_takes", lambda *_: True)
    monkeypatch.setattr(module, "_without_tail", lambda y, _: y)
    monkeypatch.setattr(torch, "_grouped_mm", torch.ops.aten._grouped_mm.default)
    with Calls():
        found = module.grouped_mm(x, weight, ends), module.grouped_mm_weight(x, grad, ends)
    torch.testing.assert_close(found, wanted)
    assert made == ["aten._grouped_mm", "aten.t", "aten._grouped_mm"]
