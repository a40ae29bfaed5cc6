"""What one node of a rank's graph holds and takes, at the workload: elements, bytes, and seconds of one run.

Shapes are local. Seconds are those of `planner/cost.py`: products by their shape, attention, collectives by their ranks, and
for other ops the bytes that they read and write. Recompute, offload, the order of collectives and Inductor's chains ask here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.analysis.communication import MOVES_TOKENS, STARTS, exchanged_bytes, is_start, is_wait
from megafx.ir.facts import ATTENTION, MATMUL, facts_of
from megafx.ir.nodes import argument, op_name, shows_operand
from megafx.ir.program import VAL, Program, tensors_of
from megafx.kernels.fp8.scaled_mm import mm as scaled_mm
from megafx.kernels.loss import scaled_head
from megafx.ops.offload import is_on_host
from megafx.placements.data_axis import EXPERT_AXIS, OUTER_AXES, TENSOR_AXIS, inner_ranks, ranks_of
from megafx.placements.types import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER
from megafx.planner.cost import (
    DTYPE_OF_ITEMSIZE,
    attention_seconds,
    collective_bytes,
    cost_kind,
    grouped_seconds,
    library_seconds,
    matmul_seconds,
    memory_seconds,
    op_bytes,
    op_flops,
    product_seconds,
)
from megafx.planner.hardware import FLOAT8, Hardware

aten = torch.ops.aten
_LEFT = {"addmm": 1, "baddbmm": 1}  # position of the product's left operand, where it is not the first
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")  # what torch's attention becomes


def bytes_of(program: Program, node: fx.Node) -> int:
    """Bytes of a node's tensors on the device, at the workload."""
    return 0 if is_on_host(node) else sum(map(program.sizes.bytes, tensors_of(node)))


def seconds(program: Program, node: fx.Node, hardware: Hardware, t: int) -> float:
    """Modelled time of one run of a node on one rank, at the workload. t: ranks of the tensor-parallel axis."""
    if node.op != "call_function" or is_wait(node):
        return 0.0
    results = tensors_of(node)
    if not results:
        return 0.0
    if node.target in MOVES_TOKENS:
        return exchange_seconds(program, node, hardware, t)
    if is_start(node):
        return _collective_seconds(program, node, hardware, t)
    name = op_name(node)
    operands = [v for n in node.all_input_nodes for v in tensors_of(n)]
    if name == "getitem" or (shows_operand(node) and not copies(node)):
        return 0.0
    name = "scaled_dot_product_attention" if name.startswith(_ATTENTION) else name
    # by an operand: a fused loss in fp32 has products of bf16 inside
    factor = next((v for v in operands if v.is_floating_point()), results[0])
    dtype, kind, made = DTYPE_OF_ITEMSIZE.get(factor.element_size(), "float32"), cost_kind(name), results[0]
    terms = _terms(program, node, name, operands) if kind in (MATMUL, ATTENTION) else 0
    if node.target is scaled_mm or node.target in scaled_head.OPS:
        dtype, factor = FLOAT8, operands[0]
    groups = products_in(program, node)
    if kind == MATMUL and made.ndim and (groups or facts_of(node.target).terms is None or node.target is scaled_mm):
        n = max(_workload(program, made.shape[-1]), 1)
        if groups:
            m = program.sizes.numel(made) / n / groups
            return grouped_seconds(groups, m, n, terms, dtype, factor.element_size(), hardware)
        return product_seconds(program.sizes.numel(made) / n, n, terms, dtype, factor.element_size(), hardware)
    flops = op_flops(name, program.sizes.numel(made), terms)
    if kind == ATTENTION:
        dropout = float(argument(node, "dropout_p", 0.0) or 0.0) > 0
        return attention_seconds(flops, dtype, hardware, dropout=dropout, keys=terms)[0]
    moved = op_bytes(name, bytes_of(program, node), [*map(program.sizes.bytes, operands)])
    once = max(matmul_seconds(flops, dtype, hardware), memory_seconds(moved, hardware))
    return once + (hardware.kernel_seconds if moved else 0.0)


def products_in(program: Program, node: fx.Node) -> int:
    """How many products a grouped one does, one for each expert; 0: it is none."""
    at = facts_of(node.target).groups
    weights: Any = None if at is None else node.args[at]
    return 0 if weights is None else _workload(program, weights.meta[VAL].shape[0])


def copies(node: fx.Node) -> bool:
    """True if what its schema calls a view is a copy: of an operand that lies otherwise in memory."""
    if node.target is not aten.contiguous.default:
        return False
    return not node.args[0].meta[VAL].is_contiguous()


def _collective_seconds(program: Program, node: fx.Node, hardware: Hardware, t: int) -> float:
    kind, operands = STARTS[node.target], node.all_input_nodes
    args = node.args
    inner = 1
    if args[-1] in OUTER_AXES:
        sizes = axes_of(program, t)
        t, inner = ranks_of(args[-1], sizes), inner_ranks(args[-1], sizes)
    given: Any = {ALL_GATHER: lambda: args[1], REDUCE_SCATTER: lambda: args[2], ALL_TO_ALL: lambda: len(args[1])}
    ranks = given[kind]() if kind in given else t
    whole = sum(program.sizes.numel(n.meta[VAL]) for n in operands) * (ranks if kind in (ALL_GATHER, ALL_TO_ALL) else 1)
    sent = collective_bytes(kind, whole, operands[0].meta[VAL].element_size(), ranks)
    return library_seconds(kind, sent, hardware, ranks, inner)


def axes_of(program: Program, t: int) -> dict[str, int]:
    """Sizes of the axes of the mesh. t: of the tensor-parallel one."""
    return {**(program.batch.axes if program.batch is not None else {}), TENSOR_AXIS: t}


def exchange_seconds(program: Program, node: fx.Node, hardware: Hardware, t: int) -> float:
    """Tokens are read, sent, and written for each of their rows; of sums the other way round."""
    places: Any = argument(node, "places")
    ranks = int(places.meta[VAL].shape[1])
    sent = exchanged_bytes(program, node, ranks)
    operand = node.args[0]
    moved = 2 * sent * ranks // (ranks - 1) + sum(bytes_of(program, n) for n in (node, operand))
    inner = inner_ranks(EXPERT_AXIS, axes_of(program, t))
    return library_seconds(ALL_TO_ALL, sent, hardware, ranks, inner) + memory_seconds(moved, hardware)


def _workload(program: Program, size: int | torch.SymInt) -> int:
    return program.sizes.workload(program.sizes.of(size))


def _terms(program: Program, node: fx.Node, name: str, operands: list[torch.Tensor]) -> int:
    """Terms summed for an element of a product; keys of attention."""
    terms = facts_of(node.target).terms
    if terms is not None:
        shapes = fx.map_arg(node.args, lambda n: tuple(_workload(program, k) for k in n.meta[VAL].shape))
        return int(terms(*shapes))
    if cost_kind(name) == ATTENTION:
        return _workload(program, operands[1].shape[-2])
    left = node.args[_LEFT.get(name, 0)]
    return _workload(program, left.meta[VAL].shape[-1]) if isinstance(left, fx.Node) else 1
