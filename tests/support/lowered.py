"""The last passes of the pipeline on a graph that did not go through the others: one rank's graph, its parts, what runs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from megafx.compiler.executable import Context, Executable
from megafx.config import Config
from megafx.ir.nodes import in_backward
from megafx.ir.program import RECOMPUTE, Partition, Program
from megafx.ir.sizes import Sizes
from megafx.ops.axes import AxisContext
from megafx.passes.experts.drop_expert_values import drop_expert_values
from megafx.passes.lower.bind_mesh import bind_mesh
from megafx.passes.lower.call_directly import call_directly
from megafx.passes.lower.partition import partition
from megafx.passes.lower.regather import regather
from megafx.passes.lower.reuse_buffers import reuse_buffers
from megafx.passes.lower.write_padded_rows import write_padded_rows
from megafx.testing import make_context


def bound(program: Program, axes: Mapping[str, AxisContext]) -> Program:
    """A copy for the rank that `axes` describes."""
    program, context = program.copy(), make_context(axes=axes)
    drop_expert_values(program, context)
    bind_mesh(program, context)
    return program


def tag_regathers(program: Program) -> int:
    """Tag (in a JOINT program) forward all-gathers of sharded values for repetition in backward; return their number.

    They are the transitions S -> R of values that are computed: gathered parameters are not sequence parallelism's.
    """
    count = 0
    for node in program.graph.nodes:
        if node.op != "call_function" or not str(node.target).startswith("megafx.transition") or in_backward(node):
            continue
        source, src, dst = node.args[:3]
        if str(src).startswith("S") and dst == "R" and source.op != "placeholder":  # type: ignore[union-attr]  # a node
            node.meta[RECOMPUTE] = True
            count += 1
    return count


def parts_of(program: Program) -> Partition:
    """The graphs that a program is cut into."""
    program, context = program.copy(), make_context()
    partition(program, context)
    regather(program, context)
    assert program.partition is not None
    return program.partition


def saved_bytes(parts: Partition, sizes: Sizes) -> dict[str, int]:
    """Module path -> bytes that its forward nodes keep for backward on one rank, at the workload."""
    total: dict[str, int] = {}
    for s in parts.saved:
        if s.numel:
            total[s.fqn] = total.get(s.fqn, 0) + sizes.workload(s.numel) * s.itemsize
    return total


def executable_of(program: Program, entered: Context = contextlib.nullcontext, **config: Any) -> Executable:
    program, context = program.copy(), make_context(1, Config(**config))
    for step in (partition, regather, write_padded_rows, reuse_buffers, call_directly):
        step(program, context)
    return Executable(program, entered)
