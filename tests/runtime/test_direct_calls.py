"""Covers: direct calls of submodules of a parallelized model, graphs of their own, on simulated ranks. (On real ones:
dist/on_ranks/call_forms.py and runtime/test_generation.py.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import zoo
from harness import Case, assert_equal, promote_casts
from torch import Tensor

from megafx.capture.export import capture_call
from megafx.checks.simulate import run_logical
from megafx.compiler.pipeline import compile_program
from megafx.config import Config
from megafx.ir.program import Program
from megafx.testing import make_context


def _hidden(batch: int, seq: int) -> Tensor:
    return torch.randn(batch, seq, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


# Model, submodule, its call, what of its result is compared.
PARTS: dict[str, tuple[str, str, Callable[[int, int], dict[str, Any]]]] = {
    "encoder": ("t5", "encoder", lambda b, s: {"input_ids": zoo._ids(67, b, s), "return_dict": True}),
    "decoder": ("llama", "model", lambda b, s: {"input_ids": zoo._ids(67, b, s), "return_dict": True}),
    "head": ("llama", "lm_head", lambda b, s: {"input": _hidden(b, s)}),
    "block": ("nanogpt", "h.0", lambda b, s: {"x": _hidden(b, s)}),
}


@cache
def planned(name: str) -> Case:
    return Case.of(name)


def captured(case: Case, part: str, call: dict[str, Any]) -> Program:
    return capture_call(case.model, (), call, part=part)


@pytest.mark.parametrize("t", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", PARTS)
def test_a_part_on_simulated_ranks(what: str, t: int) -> None:
    """Outputs and every gradient, with the parameters as the whole model's plan cuts them."""
    name, part, inputs = PARTS[what]
    case = planned(name)
    call = inputs(3, 13)
    program = captured(case, part, inputs(2, 16))
    names = {i.name for i in program.inputs if i.kind == "param"}
    own = {n for n, _ in case.model.get_submodule(part).named_parameters(prefix=part)}
    tied = {id(p) for n, p in case.model.named_parameters(remove_duplicate=False) if n in own}
    assert names == {n for n, p in case.model.named_parameters() if id(p) in tied}
    params = case.compile(t).plan.params
    results = {}
    for ranks in (1, t):
        config, fixed = Config(passes=(("after canonicalize", promote_casts),)), dict(params) if ranks > 1 else {}
        compiled = compile_program(program.copy(), make_context(ranks, config, fixed=fixed))
        values = case.values(compiled.program, call)
        for i, spec in enumerate(compiled.program.inputs):
            if spec.kind == "tangent":
                wanted = compiled.program.placeholders()[i].meta["val"]
                shape = (*next(iter(call.values())).shape[:2], *wanted.shape[2:])
                values[spec.name] = torch.randn(shape, dtype=wanted.dtype, generator=torch.Generator().manual_seed(2))
        results[ranks] = run_logical(compiled.program, values, params if ranks > 1 else {}, ranks)
        if ranks > 1:
            assert all(params[n] == compiled.plan.params[n] for n in names)
            cut = [n for n in names if params[n].is_shard]
            assert cut
    assert len(results[t].gradients) >= len(names)
    assert_equal(results[t], results[1])
