"""Sharded against whole, in the simulator, at fp64: what the equivalence tests share.

`Case` captures a model once; `run(t, ...)` compiles a copy of the program for t ranks and simulates them; `reference` is plain
autograd on the canonical graph in one process.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import zoo
from interpret import bind_inputs
from torch import fx, nn

from megafx.capture.export import capture_call
from megafx.checks.simulate import Logical, relative_errors
from megafx.compiler.all_ranks import run_ranks
from megafx.compiler.compiled import Compiled
from megafx.compiler.pipeline import compile_program, plan_only
from megafx.config import Config
from megafx.equivalence import input_values
from megafx.ir.program import VAL, Program, recompute_val
from megafx.passes.canonicalize.canonicalize import canonicalize_program
from megafx.passes.recompute.choose_kept import choose_kept
from megafx.planner.context import CompileContext
from megafx.planner.plan import Plan
from megafx.testing import make_context

RTOL = 1e-10
SEED = 1234


def promote_casts(program: Program, context: CompileContext | None = None) -> int:
    """Casts to fp32 inside a model become casts to fp64, so that fp64 runs can be compared to 1e-10; those of fp64 go."""

    def promoted(a: Any) -> Any:
        return torch.float64 if a is torch.float32 else a

    changed, stale = 0, set()  # stale: nodes whose dtype may have changed
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = fx.node.map_aggregate(node.args, promoted), fx.node.map_aggregate(dict(node.kwargs), promoted)
        cast = (args, kwargs) != (node.args, dict(node.kwargs))
        if cast:
            changed += 1
            node.args, node.kwargs = args, kwargs
        if cast or node in stale or stale.intersection(node.all_input_nodes):
            stale.add(node)
            recompute_val(program, node)
            if node.target is torch.ops.aten.to.dtype and node.args[0].meta[VAL].dtype == node.meta[VAL].dtype:
                stale.update(node.users)
                node.replace_all_uses_with(node.args[0])  # no cast any more: patterns match without it
                program.graph.erase_node(node)
    return changed


def values_of(program: Program, model: nn.Module, call: Mapping[str, Any]) -> dict[str, Any]:
    """Logical values of the program's inputs by name."""
    values = input_values(program, model, (), call, seed=SEED)
    return {n: v.detach() if isinstance(v, nn.Parameter) else v for n, v in values.items()}


@dataclass
class Case:
    """One model, captured once. inputs(batch, seq): kwargs of a call."""

    model: nn.Module
    inputs: Any
    program: Program

    @staticmethod
    def of(name: str, **options: Any) -> Case:
        model, inputs = zoo.build(name, **options)
        return Case(model, inputs, capture_call(model, (), inputs(2, 16)))

    def compile(self, t: int, *, given: Plan | None = None, **config: Any) -> Compiled:
        """The joint graph for t ranks."""
        return compile_program(self.program.copy(), self._context(t, given, config))

    def plan(self, t: int, **config: Any) -> Plan:
        """The plan of `compile`, without a joint graph."""
        return plan_only(self.program.copy(), self._context(t, None, config))

    @staticmethod
    def _context(t: int, given: Plan | None, config: dict[str, Any]) -> CompileContext:
        options = Config(passes=(("after canonicalize", promote_casts),), **config)
        return make_context(t, options, given=given, wants_grad=lambda spec: spec.kind == "param")

    def run(self, compiled: Compiled, inputs: Mapping[str, Any]) -> Logical:
        return self.run_values(compiled, self.values(compiled.program, inputs))

    def run_values(self, compiled: Compiled, values: Mapping[str, Any]) -> Logical:
        return run_ranks(compiled, values)

    def values(self, program: Program, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return values_of(program, self.model, inputs)

    def reference(self, inputs: Mapping[str, Any]) -> Logical:
        """Losses and gradients of the canonical graph under plain autograd (dropout must be off)."""
        program = self.program.copy()
        canonicalize_program(program)
        promote_casts(program)
        outputs = fx.Interpreter(program.gm).run(*bind_inputs(program, self.model, (), inputs))
        named = {o.name: v for o, v in zip(program.outputs, outputs, strict=True) if o.kind == "user"}
        self.model.zero_grad()
        # The outputs that the graph differentiates: the loss, and losses that modules keep for later.
        torch.autograd.backward([named[o.name] for o in program.outputs if o.loss])
        gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        return Logical({n: v.detach() for n, v in named.items()}, gradients)


def chosen(made: Compiled, **options: Any) -> Compiled:
    """The same with what backward makes again under these options."""
    program, context = made.program.copy(), copy.copy(made.context)
    context.config = context.config.replace(**options)
    choose_kept(program, context)
    return Compiled(program, context)


def loss_name(program: Program) -> str:
    return next(o.name for o in program.outputs if o.loss)


def errors(found: Logical, wanted: Logical) -> dict[str, float]:
    """Relative error of each output and gradient: ||a - b|| / max(||b||, eps * scale)."""
    outputs, gradients = relative_errors(found, wanted)
    return {f"output {n}": e for n, e in outputs.items()} | gradients


def assert_equal(found: Logical, wanted: Logical, rtol: float = RTOL) -> None:
    """Every output, the loss and every gradient within rtol; the message names the worst."""
    off = errors(found, wanted)
    assert off, "nothing was compared"
    worst = max(off, key=lambda n: off[n])
    assert off[worst] <= rtol, f"{worst} is off by {off[worst]:.1e}"


def value_numel(node: fx.Node) -> int:
    return int(node.meta[VAL].numel())
