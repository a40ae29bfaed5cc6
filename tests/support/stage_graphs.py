"""Stages of a pipeline in one process: their graphs, run one after the other under plain autograd, and the whole graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from harness import promote_casts, values_of
from torch import Tensor, fx, nn

from megafx.capture.export import capture_call
from megafx.compiler.captured import capture
from megafx.compiler.cut_stages import Cut, StageGraph, Whole, cut_program, share_out, total_of
from megafx.compiler.pipeline import plan_only
from megafx.compiler.stages import before, passes_of, runner_of
from megafx.config import Config
from megafx.ir.program import Program
from megafx.ops.axes import microbatch
from megafx.passes.plan.place_axes import place_axes
from megafx.report.stages import pipeline_stages, stages_from
from megafx.testing import make_context

Found = tuple[Tensor, dict[str, Tensor]]  # loss, gradients


def cut(
    model: nn.Module, call: Mapping[str, Any], stages: int | Sequence[str], microbatches: int, **options: Any
) -> tuple[Whole, list[StageGraph]]:
    config = Config(**options)
    context = make_context(1, config, wants_grad=lambda spec: spec.kind == "param")
    whole = share_out(capture(model, config, (), call, data_ranks=microbatches), context, microbatches)
    report = plan_only(whole.program.copy(), context).report
    assert report is not None
    found = pipeline_stages(report, stages) if isinstance(stages, int) else stages_from(report, stages)
    named = dict(model.named_parameters(remove_duplicate=False))
    where = Cut([each.modules for each in found])
    return whole, cut_program(whole, where, {n for n, p in named.items() if p.requires_grad}, 0)


def run_stages(
    whole: Whole, graphs: list[StageGraph], model: nn.Module, call: Mapping[str, Any], microbatches: int
) -> Found:
    """The loss of all micro-batches, and the gradients that all stages have for a parameter together."""
    given = _values(whole.program, model, call)
    parts = [
        {n: x.chunk(microbatches, whole.rows[n])[i] if n in whole.rows else x for n, x in given.items()}
        for i in range(microbatches)
    ]
    for i, total in enumerate(whole.totals):
        summed = torch.stack([total_of(total, part) for part in parts]).sum(0)
        for part in parts:
            part[f"total[{i}]"] = summed
    loss = torch.zeros(())
    model.zero_grad()
    for i, part in enumerate(parts):
        with microbatch(i, microbatches):
            for graph in graphs:
                values = [
                    part[
                        graph.takes[spec.name[len("kwargs[") : -1]]
                        if spec.kind == "user"
                        else f"{spec.kind}:{spec.name}"
                    ]
                    for spec in graph.program.inputs
                ]
                made = fx.Interpreter(graph.program.gm).run(*values)
                part |= {f"value:{name}": x for name, x in zip(graph.made, made, strict=False)}
            summand = made[len(graphs[-1].made)]
            summand.backward()
        loss = loss + summand.detach()
    return loss, _gradients(model)


def run_whole(model: nn.Module, call: Mapping[str, Any]) -> Found:
    """The same of the whole graph with its fusions (one for a chain may draw otherwise), in which casts to fp32 are none."""
    program = capture_call(model, (), call)
    context = make_context(1, Config(passes=(("after canonicalize", promote_casts),)))
    runner_of(context, quiet=True).run(program, before(place_axes, passes_of(context, "planning")))
    given = _values(program, model, call)
    values = [given[spec.name if spec.kind == "user" else f"{spec.kind}:{spec.name}"] for spec in program.inputs]
    outputs = fx.Interpreter(program.gm).run(*values)
    loss = next(x for x, spec in zip(outputs, program.outputs, strict=True) if spec.loss)
    model.zero_grad()
    loss.backward()
    return loss.detach(), _gradients(model)


def _values(program: Program, model: nn.Module, call: Mapping[str, Any]) -> dict[str, Any]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    known = program.copy()
    known.inputs = [spec for spec in known.inputs if not spec.name.startswith("total[")]
    found = values_of(known, model, call)
    named = {
        spec.name if spec.kind == "user" else f"{spec.kind}:{spec.name}": found[spec.name] for spec in known.inputs
    }
    return named | {f"param:{n}": parameters[n] for n in parameters}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
