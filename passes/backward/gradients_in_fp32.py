"""Gradients of bf16 and fp16 weights become fp32, summed over ranks and over calls as such.

Before:  %dw = mm(t(%dy), %x); %s = transition(%dw, P -> I)            # bf16
         return ..., %s
After:   %dw = mm_fp32(t(%dy), %x); %s = transition(%dw, P -> I)       # fp32
         return ..., %s
Legal because: a gradient's last reader is the caller, so nothing in the graph relies on its dtype; sums of products of bf16
values are fp32 before they are rounded, and this leaves the rounding out.

With `gradient_accumulation_fusion` that holds for products, sums over tokens, embeddings and the weight of a fused loss: no
bf16 gradient of them exists. Results of other ops are cast where they are made, as all but the sums are with
`accumulate_allreduce_grads_in_fp32` alone. Casts that autocast put in are the same, seen from their other end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.ir.nodes import BACKWARD, in_backward, mark, shows_operand
from megafx.ir.program import PHASE, PLACEMENT, VAL, Builder, Phase, Program, recompute_val
from megafx.kernels.loss import linear_cross_entropy, vocab_linear_cross_entropy  # noqa: F401  registers the ops
from megafx.kernels.products_fp32 import LOW, addmm_fp32, mm_fp32
from megafx.ops.embedding_of_rank import EMBEDDING_OF_RANK_GRADIENT
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.JOINT, Phase.JOINT
NAME = "gradients_in_fp32"
aten, mfx = torch.ops.aten, torch.ops.megafx

_LOOKUPS = (aten.embedding_dense_backward.default, EMBEDDING_OF_RANK_GRADIENT)
_PASSES_ON = (aten.clone.default, aten.contiguous.default, mfx.transition.default)
# Ops that give the gradient of a loss's weight -> (the form that gives it in fp32, its place among the results).
_LOSSES: dict[Any, tuple[Any, int]] = {
    mfx.linear_cross_entropy_forward.default: (mfx.linear_cross_entropy_forward_fp32.default, 2),
    mfx.linear_ce_loss_backward.default: (mfx.linear_ce_loss_fp32_backward.default, 1),
}


def gradients_in_fp32(program: Program, context: CompileContext) -> int:
    """Return the number of gradients that changed."""
    config = context.config
    if not config.gradients_in_fp32:
        return 0
    widen = _Widen(program, config.gradient_accumulation_fusion)
    output, results, changes = program.output_node(), list(program.results()), 0
    for i, node, _ in program.parameter_gradients():
        results[i] = widen(node)
        changes += results[i] is not node or node in widen.changed
    if changes:
        output.args = (tuple(results),)
        program.erase_unused()
    return changes


class _Widen:
    """Node of a gradient -> the node of the same in fp32."""

    def __init__(self, program: Program, products: bool) -> None:
        self.program, self.products = program, products
        self.made: dict[fx.Node, fx.Node] = {}
        self.changed: set[fx.Node] = set()  # nodes that are fp32 now

    def __call__(self, node: fx.Node) -> fx.Node:
        if node not in self.made:
            self.made[node] = self._made(node) if in_backward(node) else self._cast(node)
        return self.made[node]

    def _made(self, node: fx.Node) -> fx.Node:
        target, value = node.target, node.meta[VAL]
        if target is aten._to_copy.default and node.args[0].meta[VAL].is_floating_point():
            inner = self(node.args[0])
            return inner if inner.meta[VAL].dtype == torch.float32 else node
        if shows_operand(node) or target in _PASSES_ON:
            return self._again(node, [self(node.args[0])])
        if target is aten.add.Tensor and all(_is_float(a) for a in node.args):
            return self._again(node, [self(a) for a in node.args])
        if not isinstance(value, torch.Tensor) or value.dtype not in LOW:
            return node
        return self._leaf(node)

    def _leaf(self, node: fx.Node) -> fx.Node:
        """node: what makes a gradient in low precision."""
        target, args = node.target, node.args
        if target is aten.sum.dim_IntList:
            return self._emit(node, target, *args, dtype=torch.float32)
        if self.products:
            if target is aten.mm.default:
                return self._emit(node, mm_fp32, *args)
            if target is aten.addmm.default and args[0].meta[VAL].shape == node.meta[VAL].shape and len(args) == 3:
                return self._emit(node, addmm_fp32, self(args[0]), *args[1:])
            if target in _LOOKUPS:
                return self._emit(node, target, self._cast(args[0]), *args[1:])
            if self._widen_loss(node):
                return node
        return self._cast(node)

    def _widen_loss(self, node: fx.Node) -> bool:
        """True if the node is the gradient of the weight of a fused loss, which is fp32 now."""
        scaled = node.target is mfx.linear_cross_entropy_backward.default
        part: Any = node.args[0] if scaled else node
        source: Any = part.args[0] if part.op == "call_function" and part.args else None
        form = _LOSSES.get(getattr(source, "target", None))
        if form is None or part.args[1] != form[1] or (scaled and len(part.users) > 1):
            return False
        source.target = form[0]
        for changed in dict.fromkeys((source, *source.users, node)):
            recompute_val(self.program, changed)
        self.changed.add(node)
        return True

    def _again(self, node: fx.Node, operands: list[fx.Node]) -> fx.Node:
        """The same op on what its operands have become."""
        if all(a is b for a, b in zip(operands, node.args, strict=False)):
            if any(a in self.changed for a in operands):
                recompute_val(self.program, node)
                self.changed.add(node)
            return node
        kwargs = {k: v for k, v in node.kwargs.items() if k != "dtype"}
        return self._emit(node, node.target, *operands, *node.args[len(operands) :], **kwargs)

    def _cast(self, node: fx.Node) -> fx.Node:
        value = node.meta[VAL]
        if not isinstance(value, torch.Tensor) or value.dtype not in LOW:
            return node
        build = Builder(self.program, _behind(node), node, NAME)
        made = build(aten._to_copy.default, node, dtype=torch.float32)
        made.meta[PHASE] = BACKWARD
        return _placed(made, node)

    def _emit(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        build = Builder(self.program, node.next, node, NAME)
        return _placed(build(target, *args, **kwargs), node)


def _behind(node: fx.Node) -> fx.Node:
    """The first place where readers of the node may be."""
    found = node.next
    while found.op == "placeholder":
        found = found.next
    return found


def _placed(made: fx.Node, node: fx.Node) -> fx.Node:
    mark(made, node.meta.get(PLACEMENT))
    return made


def _is_float(node: Any) -> bool:
    value = node.meta.get(VAL) if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_floating_point()
