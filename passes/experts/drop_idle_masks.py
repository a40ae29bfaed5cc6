"""Drop masks of rows that have no expert, where each has one.

Before:  %i = topk(%probabilities, 2)[1]  # of 5; %s = sort(%i)[0]; %n = unsqueeze(ge(%s, 5), 1); %c = clamp(%s, None, 4)
         %b = index(%bias, [%c]); %y = masked_fill(grouped_mm(%x, %up, %ends), %n, 0)
After:   %b = index(%bias, [%s]); %y = grouped_mm(%x, %up, %ends)
Legal because: an index that topk, sort or argmax gives along a dim of n is at least 0 and at most n - 1. So a comparison with n
holds for none, and a clamp to n - 1 changes none.

Some versions of transformers (5.17) mark rows of experts that other ranks have so, on one rank too. A mask reads and writes all
rows, and hides from later passes that a row of the result is one of the product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.ir.nodes import PASS_ON, argument, behind
from megafx.ir.program import Phase, Program
from megafx.passes.experts.expert_units import chosen_among
from megafx.planner.context import CompileContext
from megafx.rules.families import VIEWS

REQUIRES, ENSURES = Phase.CANONICAL, Phase.CANONICAL
aten = torch.ops.aten
# Where a mask holds the second value, else the first: positions of the mask and of the first.
_FILLS = {
    aten.masked_fill.Scalar: (1, 0),
    aten.masked_fill.Tensor: (1, 0),
    aten.where.self: (0, 2),
    aten.where.ScalarSelf: (0, 2),
}


def drop_idle_masks(program: Program, context: CompileContext) -> int:
    """Return the number of masks and clamps that are gone."""
    found = {node: kept for node in program.graph.nodes if (kept := _kept(node)) is not None}
    for node, kept in found.items():
        node.replace_all_uses_with(kept)
    if found:
        program.erase_unused()
    return len(found)


def _kept(node: fx.Node) -> fx.Node | None:
    """The operand that a node gives back as it is; None where it may not."""
    if node.target in _FILLS:
        mask, value = (node.args[i] for i in _FILLS[node.target])
        same = isinstance(value, fx.Node) and value.meta["val"].shape == node.meta["val"].shape
        return value if same and value.meta["val"].dtype == node.meta["val"].dtype and _holds_nowhere(mask) else None
    if node.target is aten.clamp.default:
        ids, least, most = node.args[0], argument(node, "min"), argument(node, "max")
        among = chosen_among(ids)
        return ids if among and _at_most(0, least) and _at_least(among - 1, most) else None
    return None


def _at_most(number: int, bound: Any) -> bool:
    return bound is None or (isinstance(bound, int) and bound <= number)


def _at_least(number: int, bound: Any) -> bool:
    return bound is None or (isinstance(bound, int) and bound >= number)


def _holds_nowhere(mask: Any) -> bool:
    while isinstance(mask, fx.Node) and (str(mask.target) in VIEWS or mask.target in PASS_ON):
        mask = behind(mask.args[0], PASS_ON)
    if not isinstance(mask, fx.Node) or mask.target not in (aten.ge.Scalar, aten.gt.Scalar, aten.lt.Scalar):
        return False
    ids, bound = mask.args
    among = chosen_among(ids)
    if not among or not isinstance(bound, int):
        return False
    if mask.target is aten.lt.Scalar:
        return bound <= 0
    return bound >= (among if mask.target is aten.ge.Scalar else among - 1)
