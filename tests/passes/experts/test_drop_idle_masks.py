"""Masks of rows without an expert, as transformers 5.17 writes them: gone where each row has one, and as in eager mode.

Covers: passes/experts/drop_idle_masks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sorted_mixtures import EXPERTS, HIDDEN, Mixture, Model, a_call, grouped_mm
from torch import Tensor
from torch.nn import functional as F

import megafx
from megafx.config import Config
from megafx.ir.nodes import op_name
from megafx.ir.program import Program
from megafx.planner.context import CompileContext


def masked(of: Mixture, x: Tensor, weights: Tensor, chosen: Tensor, experts: int = EXPERTS) -> Tensor:
    """experts: rows of experts from this one on are masked."""
    choices = chosen.shape[1]
    ids, order = torch.sort(chosen.flatten())
    ends = torch.histc(ids.double(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    none = (ids >= experts).unsqueeze(-1)
    ids.clamp_(max=experts - 1)
    rows = x[order // choices]
    rows.masked_fill_(none, 0.0)
    gate, up = grouped_mm(rows, of.up, ends).masked_fill(none, 0.0).chunk(2, -1)
    y = torch.where(none, 0.0, grouped_mm(F.silu(gate) * up, of.down, ends) + of.bias[ids])
    y = y * weights.flatten()[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return y[back].view(-1, choices, HIDDEN).sum(1)


def some_masked(of: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    return masked(of, x, weights, chosen, EXPERTS - 1)


def compiled(form: Callable[..., Tensor], **options: Any) -> Program:
    """After the pass; the model is that of eager mode."""
    programs: list[Program] = []

    def keep(program: Program, context: CompileContext) -> int:
        programs.append(program.copy())
        return 0

    config = Config(passes=(("after drop_idle_masks", keep),), **options)
    mesh = {"dp": 2} if options else {"tp": 2}
    verdict = megafx.verify(Model(form).double(), config, example_inputs=a_call(4), mesh=mesh, tolerance=1e-10)
    assert verdict, str(verdict)
    return programs[0]


def masks_of(program: Program) -> list[str]:
    return [name for n in program.graph.nodes if (name := op_name(n)) in ("masked_fill", "where", "clamp", "ge")]


@pytest.mark.parametrize("options", [{}, {"expert_model_parallel_size": 2}])
def test_masks_that_hold_nowhere_are_gone(options: dict[str, Any]) -> None:
    program = compiled(masked, **options)
    assert masks_of(program) == []
    (bias,) = [n for n, spec in program.input_nodes() if spec.name.endswith("bias")]
    (lookup,) = bias.users
    assert op_name(lookup) == "index" and lookup.args[1][0].args[1] == 0  # by the sorted ids themselves


def test_masks_that_hold_somewhere_stay() -> None:
    assert masks_of(compiled(some_masked)) == ["ge", "clamp", "masked_fill", "masked_fill", "where"]


def test_rows_then_come_home_as_sums() -> None:
    """The mask of the result hid that."""
    found: list[list[Any]] = []

    def look(program: Program, context: CompileContext) -> int:
        found.append([n.args[6] for n in program.graph.nodes if op_name(n) in ("dispatch_rows", "combine_rows")])
        return 0

    config = Config(passes=(("after dispatch_experts", look),), expert_model_parallel_size=2)
    assert megafx.verify(Model(masked).double(), config, example_inputs=a_call(4), mesh={"dp": 2}, tolerance=1e-10)
    assert found[0] == [False, True, False]


@pytest.mark.parametrize(
    ("mask", "gone"),
    [
        (lambda ids: ids >= EXPERTS, True),
        (lambda ids: ids > EXPERTS - 1, True),
        (lambda ids: ids < 0, True),
        (lambda ids: ids > EXPERTS - 2, False),
        (lambda ids: ids < 1, False),
        (lambda ids: ids >= -1, False),
    ],
)
def test_what_indices_of_topk_can_be(mask: Callable[[Tensor], Tensor], gone: bool) -> None:
    def form(of: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return x * weights.masked_fill(mask(chosen), 0.5).sum(1, keepdim=True)

    assert ("masked_fill" not in masks_of(compiled(form))) == gone
