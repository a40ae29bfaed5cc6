"""Replace chains of ops by fused ones, before planning: so the planner prices what will run.

Before:  %y = linear(%x, %w, %b); %z = gelu(%y)
After:   %y = linear(%x, %w); %z = megafx.bias_act(%y, %b, "gelu")
Legal because: what a pattern makes computes what it matches (each pattern's test), and no interior value has another user.

Patterns are those of patterns/ and users' own (`megafx.register_pattern`) that have one result; fuse_local has the others. A
match that is slower fused, as measured on this device, is left as it is, with a note (`Config.fusion_profile`).
"""

from __future__ import annotations

import megafx.patterns  # noqa: F401  registers the patterns
from megafx.ir.program import Phase, Program
from megafx.planner.context import CompileContext, declines
from megafx.rewrite.driver import patterns_of, rewrite
from megafx.rewrite.pattern import registered_patterns

REQUIRES, ENSURES = Phase.CANONICAL, Phase.CANONICAL


def fuse(program: Program, context: CompileContext) -> int:
    """Return the number of matches."""
    chosen = patterns_of(registered_patterns(), context.config, local=False)
    unwanted = declines(program, context)
    return sum(rewrite(program, chosen, "fuse", declines=unwanted).counts.values())
