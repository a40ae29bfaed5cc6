"""Covers: passes/communicate/coalesce_maxima.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from local_programs import local_program
from torch import Tensor, nn

import megafx.kernels.fp8.scaled_mm  # noqa: F401  registers the ops
from megafx.analysis.communication import collective_nodes
from megafx.checks.sabotage import changed_collective, without
from megafx.checks.simulate import run_logical
from megafx.ir.dump import text
from megafx.ir.program import Program
from megafx.passes.communicate.coalesce_maxima import coalesce_maxima
from megafx.passes.communicate.expand_transitions import expand_transitions
from megafx.placements.types import Layout, S
from megafx.testing import make_context

mfx = torch.ops.megafx
T = 3
ROWS = S(0, Layout.contiguous(2 * T, T))


def built(kept: int) -> tuple[Program, dict[str, Any]]:
    """Casts of two weights and of a value that is computed, with the largest magnitudes of all ranks."""
    local = {"x": torch.randn(2, 4).double()} | {n: nn.Parameter(torch.randn(2, 4).double()) for n in ("up", "down")}

    def function(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
        found = []
        for value in (x.relu(), up, down):
            largest = mfx.transition(mfx.fp8_amax(value, kept, -1, [], "tp"), "M", "R", [], [], "tp", T)
            found.append(mfx.fp8_quantize(value, largest, kept, "e4m3", False, True, False)[2])
        return tuple(found)

    program = local_program(function, local)
    expand_transitions(program, make_context(T))
    generator = torch.Generator().manual_seed(0)
    return program, {n: torch.randn(2 * T, 4, generator=generator).double() for n in local}


def scales(program: Program, whole: dict[str, Any]) -> list[Any]:
    found = run_logical(program, whole, dict.fromkeys(whole, ROWS), T)
    return [found.outputs[str(i)] for i in range(3)]


@pytest.mark.parametrize("kept", [-1, 1])
def test_those_of_weights_are_one_collective(kept: int) -> None:
    program, whole = built(kept)
    before = scales(program, whole)
    assert coalesce_maxima(program, make_context(T)) == 1
    starts: list[Any] = collective_nodes(program.graph)
    assert len(starts) == 2 and "cat" in str(starts[0].args[0].target)  # in front of what needs no weight
    for a, b, value in zip(
        scales(program, whole), before, (whole["x"].relu(), whole["up"], whole["down"]), strict=True
    ):
        assert torch.equal(a, b)
        wanted = value.abs().amax() if kept < 0 else value.abs().amax(0)
        torch.testing.assert_close(a * 448, wanted, rtol=1e-12, atol=0)
    with (
        changed_collective(program.graph, starts[0], T, without),
        pytest.raises(Exception, match="differs between ranks"),
    ):
        scales(program, whole)
    assert coalesce_maxima(program, make_context(T)) == 0


def test_golden() -> None:
    program, _ = built(-1)
    coalesce_maxima(program, make_context(T))
    lines = [re.sub(r"\s*#.*", "", line).strip() for line in text(program).splitlines()]
    assert "\n".join(line for line in lines if not re.search(r"getitem|quantize|return", line)) == GOLDEN


GOLDEN = """\
%0 = x
%1 = up
%2 = down
%3 = fp8_amax(%1, -1, -1, [], 'tp')
%4 = fp8_amax(%2, -1, -1, [], 'tp')
%5 = view(%3, [1])
%6 = view(%4, [1])
%7 = cat([%5, %6])
%8 = all_reduce(%7, 'max', 'tp')
%9 = wait_tensor(%8)
%10 = slice(%9, 0, 0, 1)
%11 = view(%10, [])
%12 = slice(%9, 0, 1, 2)
%13 = view(%12, [])
%14 = relu(%0)
%15 = fp8_amax(%14, -1, -1, [], 'tp')
%16 = all_reduce(%15, 'max', 'tp')
%17 = wait_tensor(%16)"""
