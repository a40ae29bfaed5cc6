"""The log-sum-exp of logits that a cross entropy reads too comes out of the loss: z-loss costs no pass over the logits.

Before:  %c = cross_entropy(%y, %target, lse=False); %z = logsumexp(%y, [-1])
After:   %p = cross_entropy(%y, %target, lse=True); %c = select(%p, 0, 0); %z = select(%p, 0, 1)
Legal because: the loss makes the log-sum-exp of every row on the way, of the same logits in fp32, and its backward adds the
gradient of both in one pass. Views of rows and casts to fp32 may be between the logits and either of the two.

Source of z-loss: coef * logsumexp(logits)**2, Chowdhery et al. 2022, 2204.02311, section 5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import megafx.kernels.loss.cross_entropy  # noqa: F401  registers the ops
from megafx.debugging import current, say
from megafx.ir.program import VAL, Builder, Fusion, Phase, Program, fqn_of, source_of
from megafx.ir.sizes import SizeEmitter
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.CANONICAL, Phase.CANONICAL
NAME = "share_logsumexp"
FUSION = "cross_entropy_with_logsumexp"
aten, ops = torch.ops.aten, torch.ops.megafx


def share_logsumexp(program: Program, context: CompileContext) -> int:
    """Return the number of log-sum-exps that a loss gives."""
    if not context.config.cross_entropy_fusion:
        return 0
    sums = program.graph.find_nodes(op="call_function", target=aten.logsumexp.default)
    losses = program.graph.find_nodes(op="call_function", target=ops.cross_entropy.default) if sums else []
    count = 0
    for loss in (n for n in losses if not n.args[-1]):
        root = _root(program, loss.args[0])
        alike = [s for s in sums if _of_rows(s) and _root(program, s.args[0]) is root]
        if alike:
            _share(program, loss, alike, root)
            sums = [s for s in sums if s not in alike]
            count += len(alike)
    if count:
        program.erase_unused()
        if current().level >= 2:
            say(f"megafx {NAME}: {FUSION} matches {count}")
    return count


def _of_rows(node: fx.Node) -> bool:
    """True if it sums over the last dim."""
    source, dims = node.args[:2]
    return [d % source.meta[VAL].dim() for d in dims] == [source.meta[VAL].dim() - 1]


def _root(program: Program, node: Any) -> fx.Node:
    """The logits behind views that keep every row and casts to fp32."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        before, after = node.args[0].meta[VAL], node.meta[VAL]
        view = node.target is aten.reshape.default and before.dim() and after.dim()
        rows = view and program.sizes.of(before.shape[-1]) == program.sizes.of(after.shape[-1])
        cast = node.target is aten.to.dtype and after.dtype == torch.float32 and before.dtype.itemsize == 2
        if not (rows or cast):
            break
        node = node.args[0]
    return node


def _share(program: Program, loss: fx.Node, sums: list[fx.Node], root: fx.Node) -> None:
    first = min([loss, *sums])
    target: Any
    _, target, *rest, _ = loss.args
    late = [target] if target > first else []  # it depends on no logits: it, and what it is made of, go to the front
    for n in late:
        late += [a for a in n.all_input_nodes if a > first and a not in late]
    for n in sorted(late):
        first.prepend(n)
    emit = Builder(program, first, loss, NAME)
    size = SizeEmitter(program.graph, program.sizes)
    tokens = size(program.sizes.of(loss.meta[VAL].shape[0]))
    logits = root
    if root.meta[VAL].dim() != 2:
        logits = emit(aten.reshape.default, root, [tokens, size(program.sizes.of(root.meta[VAL].shape[-1]))])
    pair = emit(ops.cross_entropy.default, logits, target, *rest, True)
    parts = [emit(aten.select.int, pair, 0, i) for i in range(2)]
    made = [(loss, _as(loss, parts[0], emit))]
    for node in sums:
        shape = [size(program.sizes.of(n)) for n in node.meta[VAL].shape]
        shaped = parts[1] if len(shape) == 1 else emit(aten.reshape.default, parts[1], shape)
        made.append((node, _as(node, shaped, emit)))
        program.fusions.append(Fusion(FUSION, fqn_of(node), source_of(node), NAME))
    for node, new in made:
        node.replace_all_uses_with(new)
        program.graph.erase_node(node)


def _as(node: fx.Node, new: fx.Node, emit: Builder) -> fx.Node:
    """The new value in the dtype of the one that it replaces."""
    dtype = node.meta[VAL].dtype
    return new if new.meta[VAL].dtype == dtype else emit(aten.to.dtype, new, dtype)
