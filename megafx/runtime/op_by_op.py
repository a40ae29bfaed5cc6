"""One call of a parallelized model, forward and backward, op by op, for something that looks at values on their way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from megafx.ir.call_spec import no_autocast
from megafx.ir.program import Program
from megafx.ops.tapes import running
from megafx.passes.experts.drop_expert_values import drop_expert_values
from megafx.passes.lower.bind_mesh import bind_mesh
from megafx.passes.lower.partition import partition
from megafx.runtime.keys import Call

Watch = Callable[[fx.Node, Sequence[Any], Any], None]  # (node, its arguments, its result)


def run_op_by_op(runtime: Any, call: Call, watch_of: Callable[[Program], Watch | None]) -> None:
    """runtime: the `Runtime` of a model. watch_of(program of every rank): what looks; None: nothing runs. Changes nothing."""
    graph = runtime._graph(call)
    program: Program = graph.compiled.program.copy()
    watch = watch_of(program)
    if watch is None:
        return
    for step in (drop_expert_values, bind_mesh, partition):
        step(program, runtime.settled.last.context)
    device = runtime.state.device
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        for context in (torch.no_grad(), no_autocast(), graph.executable.context()):
            stack.enter_context(context)
        if graph.tapes:
            stack.enter_context(running(graph.running()))
        _run(graph, program, call, watch)


def _run(graph: Any, program: Program, call: Call, watch: Watch) -> None:
    parts, executable = program.partition, graph.executable
    assert parts is not None
    inputs, *_ = graph._inputs(replace(call, state=graph.state_inputs()))
    inputs = [x.contiguous() if isinstance(x, Tensor) else x for x in inputs]
    inputs += [join(inputs) for join in executable.joins]
    results = _Watched(parts.forward, watch).run(*inputs)
    if parts.backward is None or graph.tapes:
        return
    outputs = results[: executable.outputs]
    values = [s for s in parts.saved if s.kind != "input"]
    kept = [inputs[s.index] for s in parts.saved if s.kind == "input"]
    kept += results[executable.outputs :][: len(values)]
    losses = {*graph.losses}
    tangents = [(torch.ones_like if i in losses else torch.zeros_like)(outputs[i]) for i in executable.differentiated]
    _Watched(parts.backward, watch).run(*kept, *tangents)


class _Watched(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, watch: Watch) -> None:
        super().__init__(gm)
        self.watch = watch

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            self.watch(n, self.fetch_args_kwargs_from_env(n)[0], result)
        return result
