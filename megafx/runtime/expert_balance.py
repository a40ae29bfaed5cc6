"""How the rows of one call fall on experts, for `megafx.profile`: of mixtures that are computed by grouped products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from megafx.ir.nodes import CASTS, COPIES, behind, in_backward
from megafx.ir.program import Program, fqn_of
from megafx.kernels.experts import dispatch_rows, group_rows, grouped_mm  # noqa: F401  registers the ops
from megafx.report.report import Balance
from megafx.runtime.keys import Call
from megafx.runtime.op_by_op import Watch, run_op_by_op

ops = torch.ops.megafx
_COUNTED = {ops.room.default, ops.room_needed.default}


def expert_balance(runtime: Any, call: Call) -> list[Balance]:
    """Collective over the ranks of a model, whose rows count together. Runs the call once more, op by op, where it has such
    mixtures."""
    found: dict[str, tuple[str, Tensor]] = {}  # by the name of what gives the ends

    def watch_of(program: Program) -> Watch | None:
        ends = _ends(program)

        def watch(node: fx.Node, args: Sequence[Any], result: Any) -> None:
            if node.name in ends and node.name not in found:
                last = result.long()
                found[node.name] = ends[node.name], last.diff(prepend=last.new_zeros(1))

        return watch if ends else None

    run_op_by_op(runtime, call, watch_of)
    if found and runtime.everyone is not None:
        for _, counts in found.values():
            dist.all_reduce(counts, group=runtime.everyone)
    return [Balance(module, tuple(counts.tolist())) for module, counts in found.values()]


def _ends(program: Program) -> dict[str, str]:
    """What gives the ends of the groups of all experts in forward -> the module of their first product. Where ranks share out
    experts, the ends of a product are of one rank's: those by which its tokens were sent count all."""
    found: dict[str, str] = {}
    for node in program.graph.find_nodes(op="call_function", target=ops.grouped_mm.default):
        if in_backward(node):
            continue
        end = behind(node.args[2], COPIES | CASTS)
        if end.target is ops.ends_received.default:
            places = end.args[0].args[1]
            end = behind(places.args[1], _COUNTED).args[0]  # of counts_sent
        found.setdefault(end.name, fqn_of(node))
    return found
