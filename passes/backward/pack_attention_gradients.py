"""The gradients of q, k and v are written side by side, where one linear made all three.

Before:  %d = attention_backward(...); %q = view(transpose(%d[0], 1, 2)), %k = ..., %v = ...
         %dx = cat([%q, %k, %v], 2)                          # join_slice_gradients made it; [b s n], or [b*s n] with dim 1
After:   %dx = attention_backward_packed(..., order=[0, 1, 2])
Legal because: it is the same kernel, given other memory to write to.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

import megafx.kernels.attention.attention  # noqa: F401  (defines the ops)
from megafx.ir.nodes import RESHAPES
from megafx.ir.program import VAL, Builder, Phase, Program
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.JOINT, Phase.JOINT
NAME = "pack_attention_gradients"
aten, ops = torch.ops.aten, torch.ops.megafx
OPERANDS = 11  # of attention_backward before its options: grad, q, k, v, mask, key_mask, segments, sink, seed, out, lse


def pack_attention_gradients(program: Program, context: CompileContext) -> int:
    """Return the number of concatenations saved."""
    changes = 0
    for node in list(program.graph.nodes):
        parts: Any = node.args[0] if node.target is aten.cat.default else ()
        found = [_gradient(part) for part in parts]
        if len(found) != 3 or None in found:
            continue
        last = node.meta[VAL].dim() - 1
        if last not in (1, 2) or node.args[1:] not in ((last,), (-1,)):
            continue
        sources, order = zip(*found, strict=True)
        if len(set(sources)) > 1 or sorted(order) != [0, 1, 2] or len(sources[0].users) != 3:
            continue
        source = sources[0]
        build = Builder(program, node, source, NAME)
        operands, options = source.args[:OPERANDS], source.args[OPERANDS:]
        packed = build(ops.attention_backward_packed.default, *operands, list(order), *options)
        if last == 1:  # tokens are one dim
            packed = build(aten.view.default, packed, [parts[0].args[1][0], packed.meta[VAL].shape[-1]])
        node.replace_all_uses_with(packed)
        changes += 1
    if changes:
        program.erase_unused()
    return changes


def _gradient(part: fx.Node) -> tuple[fx.Node, int] | None:
    """(attention_backward, which gradient): the value is that gradient with its heads joined, and nothing else reads it."""
    turned = part.args[0] if part.target in RESHAPES else None
    if not isinstance(turned, fx.Node) or turned.target is not aten.transpose.int or turned.args[1:] != (1, 2):
        return None
    result = turned.args[0]
    if not isinstance(result, fx.Node) or result.target is not operator.getitem:
        return None
    source, index = result.args
    shown, made = part.meta[VAL], result.meta[VAL]
    joined = shown.dim() in (2, 3) and made.dim() == 4 and shown.shape[-1] == made.shape[1] * made.shape[3]
    alone = all(len(n.users) == 1 for n in (part, turned, result))
    return (source, index) if source.target is ops.attention_backward.default and joined and alone else None
