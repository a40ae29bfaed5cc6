"""Replace chains of ops by fused ones, before planning: so the planner prices what will run.

Before:  %y = linear(%x, %w, %b); %z = gelu(%y)
After:   %y = linear(%x, %w); %z = megafx.bias_act(%y, %b, "gelu")
Legal because: what a pattern makes computes what it matches (each pattern's test), and no interior value has another user.

Patterns are those of patterns/ and users' own (`megafx.register_pattern`) that have one result; fuse_local has the others. A
match that is slower fused, as measured on this device, is left as it is, with a note (`Config.fusion_profile`).
"""

from __future__ import annotations

from megafx import patterns  # noqa: F401  registers the patterns
from megafx.ir.program import Phase, Program
from megafx.planner.context import Planning, declines
from megafx.rewrite.driver import patterns_of, rewrite
from megafx.rewrite.pattern import registered_patterns
from megafx.rewrite.replace import Respell
from megafx.rewrite.trace import Canonicalize

REQUIRES, ENSURES = Phase.CANONICAL, Phase.CANONICAL


def fuse(program: Program, planning: Planning, canonicalize: Canonicalize, respell: Respell) -> int:
    """Returns the number of matches. canonicalize: what patterns go through, as models do; respell: the same for new nodes."""
    chosen = patterns_of(registered_patterns(), planning.config, local=False)
    unwanted = declines(program, planning)
    return sum(rewrite(program, chosen, canonicalize, respell, "fuse", declines=unwanted).counts.values())
