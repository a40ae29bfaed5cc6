"""How the values of one call fit into FP8: `megafx.fp8_health`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from megafx.ir.facts import facts_of
from megafx.ir.nodes import RESHAPES, behind
from megafx.ir.program import VAL, Program, ancestors, fqn_of
from megafx.kernels.fp8.quantize import FORMATS, TOP, quantize, quantize_both
from megafx.runtime.keys import Call
from megafx.runtime.op_by_op import run_op_by_op


@dataclass(frozen=True)
class CastHealth:
    """One cast of a call, over all ranks."""

    module: str  # of the product that reads it
    operand: str  # 'input', 'weight' or 'gradient' (of the output)
    format: str
    scales: str  # 'one', 'rows' or 'columns'
    largest: float  # the largest magnitude
    # zero, saturated: shares of the elements that are not 0 which become 0, and which become the largest number of the
    # format
    zero: float
    saturated: float


@dataclass(frozen=True)
class Fp8Health:
    """Of each value that one call casts to FP8, in the order of the casts. str() is a table."""

    casts: tuple[CastHealth, ...]

    def __str__(self) -> str:
        if not self.casts:
            return "no product of this call runs in FP8"
        titles = ("module", "operand", "format", "scales", "largest", "become 0", "at the top")
        rows = [titles]
        for c in self.casts:
            numbers = f"{c.largest:.4g}", f"{c.zero:.3%}", f"{c.saturated:.4%}"
            rows.append((c.module, c.operand, c.format, c.scales, *numbers))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def measure(runtime: Any, call: Call) -> Fp8Health:
    """runtime: the `Runtime` of a model. Runs the graph of the call, and its backward, op by op; nothing else changes."""
    found: dict[tuple[str, ...], Tensor] = {}
    run_op_by_op(runtime, call, lambda program: functools.partial(_watch, _operands(program), found))
    rows = [row for row in found.values()]
    if rows and runtime.everyone is not None:
        counts, largest = torch.stack(rows)[:, :3].contiguous(), torch.stack(rows)[:, 3].contiguous()
        dist.all_reduce(counts, group=runtime.everyone)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=runtime.everyone)
        rows = [*torch.cat([counts, largest[:, None]], 1)]
    return Fp8Health(tuple(_health(key, row) for key, row in zip(found, rows, strict=True)))


def _operands(program: Program) -> dict[str, str]:
    """Name of each cast -> what it is of."""
    kinds = {node: spec.kind for node, spec in program.input_nodes()}
    found = {}
    for node in program.graph.nodes:
        if node.target in (quantize, quantize_both):
            read = {kinds[n] for n in ancestors([node.args[0]]) if n in kinds}
            is_gradient = "tangent" in read and not _is_recomputed(node.args[0])
            found[node.name] = "weight" if read == {"param"} else "gradient" if is_gradient else "input"
    return found


def _is_recomputed(value: Any) -> bool:
    """True if it is the output of forward that a gradient op gives as its last result (`facts.recompute`)."""
    made = behind(value, RESHAPES)
    if made.target is not operator.getitem:
        return False
    source = made.args[0]
    return bool(facts_of(source.target).recompute) and made.args[1] == len(source.meta[VAL]) - 1


def _watch(
    operands: dict[str, str], found: dict[tuple[str, ...], Tensor], n: fx.Node, args: Sequence[Any], result: Any
) -> None:
    """Count what a cast does: (elements that are not 0, those that become 0, at the top; largest)."""
    if n.target in (quantize, quantize_both):
        bytes, format = result[0] if n.target is quantize_both or args[5] else result[1], args[3]
        kept: tuple[int, ...] = (args[2],) if n.target is quantize else (0, 1)
        for i, each in enumerate(kept):
            scales = ("one", "rows", "columns")[each + 1]
            key = fqn_of(n), operands[n.name], format, scales
            if key not in found:
                found[key] = _counts(args[0], bytes if i == 0 else result[1], args[1 + i], format)


def _counts(x: Tensor, bytes: Tensor, largest: Tensor, format: str) -> Tensor:
    magnitude = bytes & 0x7F
    top = torch.tensor(TOP[format], dtype=torch.float32).to(FORMATS[format]).view(torch.uint8).item()
    there, zero = (x != 0).sum(), (magnitude == 0).sum()
    became = zero - (x.numel() - there)
    most = largest.max() if largest.numel() else largest.new_zeros(())
    return torch.stack([there, became, (magnitude == top).sum(), most]).double()


def _health(key: tuple[str, ...], row: Tensor) -> CastHealth:
    there, zero, top, largest = row.tolist()
    module, operand, format, scales = key
    return CastHealth(module, operand, format, scales, largest, zero / max(there, 1), top / max(there, 1))
