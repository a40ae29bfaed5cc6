"""Covers: passes/canonicalize/sizes.py and numbers.py. A number that is read from a tensor, and the check of what the trace
relies on; numbers that only leave the graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import megafx
from megafx.capture.export import capture_call
from megafx.ir.dump import text
from megafx.passes.canonicalize.canonicalize import canonicalize_program


class Cut(nn.Module):
    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        n = count.item()
        return x[:, :n] * torch.arange(n)


class Whole(nn.Module):
    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        return x * count


def test_a_number_is_the_size_of_a_length() -> None:
    program = capture_call(Cut(), (torch.randn(3, 5), torch.tensor(4)))
    assert canonicalize_program(program) > 0
    found = [line.split("#")[0].strip() for line in text(program).splitlines()]
    found = [
        line.partition("', ")[0] if "check_sizes" in line else line for line in found
    ]  # behind it is the source line
    assert found[2:6] == EXPECTED, found
    assert [o.kind for o in program.outputs] == ["user", "check"]


def test_no_number_leaves_the_graph_as_it_is() -> None:
    program = capture_call(Whole(), (torch.randn(3, 5), torch.tensor(4)))
    canonicalize_program(program)
    assert [o.kind for o in program.outputs] == ["user"] and "length" not in text(program)


class Logged(nn.Module):
    def forward(self, x: Tensor, count: Tensor) -> tuple[Tensor, float, int]:
        total = x.sum()
        return total, total.item() / 2, count.item()


def test_numbers_of_outputs_are_computed_behind_the_graph() -> None:
    call = (torch.randn(3, 5), torch.tensor(-4))
    program = capture_call(Logged(), call)
    canonicalize_program(program)
    found = [line.split("#")[0].strip() for line in text(program).splitlines()]
    assert found == ["%0 = args[0]", "%1 = args[1]", "%2 = sum(%0)", "%3 = detach(%2)", "return %2, %3, %1"], found
    assert program.call is not None
    assert program.call.unflatten([call[0].sum(), call[0].sum(), call[1]]) == Logged()(*call)


class Counts(nn.Module):
    def forward(self, load: Tensor, chosen: Tensor) -> Tensor:
        return load + torch.bincount(chosen, minlength=4)


def test_a_count_of_numbers_adds_ones() -> None:
    program = capture_call(Counts(), (torch.zeros(2, 4), torch.tensor([1, 3, 3, 0, 1])))
    canonicalize_program(program)
    found = [line.split("#")[0].strip() for line in text(program).splitlines()]
    assert [line for line in found if "check_sizes" not in line and "return" not in line] == COUNTED, found
    assert [o.kind for o in program.outputs] == ["user", "check"]  # no number is 4 or more


class Load(nn.Module):
    def forward(self, scores: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        chosen = scores.topk(2).indices.flatten()
        counts = torch.bincount(chosen, minlength=4)
        return (counts.double() / counts.sum()).max() * scores.sum(0), torch.bincount(
            chosen, weights.flatten(), minlength=4
        )


@pytest.mark.parametrize("mesh", [{"dp": 3}, {"tp": 2}, {"cp": 2}])
def test_choices_among_no_more_than_are_counted_at_least_need_no_greatest(mesh: dict[str, int]) -> None:
    """The length follows from topk, so that data-parallel ranks count their own choices: their greatest was refused."""
    call = (torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64))
    program = capture_call(Load(), call)
    canonicalize_program(program)
    assert "amax" not in text(program) and text(program).count("index_add") == 2
    verdict = megafx.verify(Load(), megafx.Config(), example_inputs=call, mesh=mesh, tolerance=1e-10)
    assert verdict, str(verdict)


COUNTED = [
    "%0 = args[0]",
    "%1 = args[1]",
    "%2 = full([1], 4, dtype=i64, device=cpu)",
    "%3 = add(%1, 1)",
    "%4 = cat([%3, %2])",
    "%5 = amax(%4)",
    "%6 = length(%5, 'u0')",
    "%9 = full([4], 0, dtype=i64, device=cpu)",
    "%10 = full([5], 1, dtype=i64, device=cpu)",
    "%11 = index_add(%9, 0, %1, %10)",
    "%12 = add(%0, %11)",
]
EXPECTED = [
    "%2 = length(%1, 'u0')",
    "%3 = check_sizes([%2], [0], [], 'n0 <= 5",
    "%4 = sym_size.int(%2, 0)",
    "%5 = slice(%0, 1, 0, %4)",
]
