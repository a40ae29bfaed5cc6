"""Let ops write their result into an operand that nothing else reads.

Before:  %c = addmm(%a, %x, %w)              # %a is made by this graph, or kept for it alone, and used nowhere else
After:   %c = addmm_(%a, %x, %w)
Legal because: the op reads each element of the operand only to write the same element, and the operand has no other reader.

Applies to ops with `inplace` facts.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from megafx.analysis.communication import is_wait
from megafx.ir.facts import declare, facts_of
from megafx.ir.nodes import changed_copy, readers_of, storage_of
from megafx.ir.program import VAL, Phase, Program
from megafx.planner.context import CompileContext

declare("aten.addmm.default", inplace=(0, torch.ops.aten.addmm_.default))
declare("aten.add.Tensor", inplace=(0, torch.ops.aten.add_.Tensor))

REQUIRES, ENSURES = Phase.PARTITIONED, Phase.PARTITIONED


def reuse_buffers(program: Program, context: CompileContext) -> int:
    """Return the number of calls that write in place. A backward that may run again stays as it is."""
    parts = program.partition
    if parts is None:
        return 0
    forward, changes = write_in_place(parts.forward)
    last = parts.backward
    if last is not None:
        owned = {s.name for s in parts.saved if s.kind == "value" and not s.shared}
        owned |= {node.name for node, spec in program.input_nodes() if spec.kind == "pending"}
        last, more = write_in_place(last, owned)
        changes += more
    program.partition = replace(parts, forward=forward, last_backward=last)
    return changes


def write_in_place(gm: fx.GraphModule, given: Container[str] = ()) -> tuple[fx.GraphModule, int]:
    """(the same code with calls that write in place where that is legal, their number); `gm` itself where there are none.

    given: names of placeholders whose memory is the graph's to overwrite, as values kept for one backward are.
    """

    def change(node: fx.Node) -> bool:
        inplace = facts_of(node.target).inplace
        if inplace is None or not _may_write(node, node.args[inplace[0]], given):
            return False
        node.target = inplace[1]
        return True

    return changed_copy(gm, change)


def _may_write(node: fx.Node, operand: Any, given: Container[str]) -> bool:
    if not isinstance(operand, fx.Node):
        return False
    base = storage_of(operand)
    old, new = operand.meta[VAL], node.meta[VAL]
    source: Any = base.args[0] if is_wait(base) else base  # what was waited for may be an input that others have too
    owned = source.name in given if source.op == "placeholder" else source.op == "call_function"
    alike = old.dtype == new.dtype and list(map(str, old.shape)) == list(map(str, new.shape))
    alike = alike and old.is_contiguous() and new.is_contiguous()
    others = [x for x in node.all_input_nodes if x is not operand and storage_of(x) is base]
    return owned and alike and not others and readers_of(base) == {node}
