"""Replace chains of ops that have several results by fused ones, on one rank's shapes.

Before:  %h = megafx.bias_dropout_add(...); %y = megafx.layer_norm(%h, ...)        # %h is used further on
After:   %n = megafx.bias_dropout_add_layer_norm(...); %h = %n[0]; %y = %n[1]
Legal because: where two ops differ in placement there is a transition between them, which no pattern matches; so every op of a
match is local, and the fused op on shards gives the shards of its results. An op's rule places its operands together, which
what it replaces need not be (rotary embedding of a shard of q and of a partial k): such a match is refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import fx

import megafx.patterns  # noqa: F401  registers the patterns
from megafx.errors import PlacementError
from megafx.ir.program import PLACEMENT, Phase, Program
from megafx.placements.types import Placement, R
from megafx.planner.context import CompileContext, declines
from megafx.rewrite.driver import patterns_of, rewrite
from megafx.rewrite.pattern import registered_patterns
from megafx.rules.inference import infer

REQUIRES, ENSURES = Phase.LOCAL, Phase.LOCAL


def fuse_local(program: Program, context: CompileContext) -> int:
    """Return the number of matches."""
    chosen = patterns_of(registered_patterns(), context.config, local=True)
    refuse, unwanted = partial(_misplaced, program, context.t), declines(program, context)
    return sum(rewrite(program, chosen, "fuse_local", refuse, unwanted).counts.values())


def _misplaced(program: Program, t: int, new: list[fx.Node], results: list[tuple[fx.Node, fx.Node]]) -> str:
    """Why the new ops do not give what they replace on operands as these are placed, or ''."""
    facts: dict[fx.Node, Any] = {}
    for node in new:
        facts |= {n: n.meta[PLACEMENT] for n in node.all_input_nodes if PLACEMENT in n.meta}
        try:
            facts[node] = infer(node, facts, t, program.sizes)
        except PlacementError as error:
            return f"its operands are placed apart: {error.found}"
    for made, replaced in results:
        wanted = replaced.meta.get(PLACEMENT, R)
        if facts[made] != (R if wanted.kind == "I" else wanted):
            return f"it would give {facts[made]} where {wanted} is wanted"
    for node in new:
        if isinstance(facts[node], Placement) and facts[node] != R:  # what is R may be I: only the results know
            node.meta[PLACEMENT] = facts[node]
    return ""
