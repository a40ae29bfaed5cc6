"""Whether a match is worth replacing on this device, by what was measured there (`fusion_profile`)."""

from __future__ import annotations

from megafx import patterns  # noqa: F401  registers the patterns
from megafx.ir.program import Phase, Program
from megafx.planner.context import Planning, price_workload
from megafx.planner.fusion_profile import mode_of
from megafx.rewrite.driver import Declines, patterns_of, rewrite
from megafx.rewrite.match import Match
from megafx.rewrite.pattern import registered_patterns
from megafx.rewrite.replace import Respell
from megafx.rewrite.trace import Canonicalize


def declines(program: Program, planning: Planning) -> Declines | None:
    """For `rewrite`: the reason why a match is left as it is, or ''; None where nothing was measured.

    Judged at the workload that the planner prices: before planning that is the same on any number of ranks. Numbers do not
    depend on what is chosen: a dropout that would draw other bits when fused is fused whatever was measured.
    """
    profile = planning.fusions
    if profile is None:
        return None
    price_workload(program, planning.config)
    mode = mode_of(planning.config.compile, planning.training)
    redraw = {p.name for p in registered_patterns() if p.redraws}
    redraw |= profile.needed_by(redraw)

    def reason(match: Match) -> str:
        if match.pattern.name in redraw and any(d.seed is not None for d in match.drops):
            return ""
        elements = program.sizes.workload(match.elements)
        found = profile.slower(match.pattern.name, elements, mode)
        if found is None:
            return ""
        return f"slower by measurement on {profile.device} ({found[0]:.4g} ms against {found[1]:.4g} ms, {mode})"

    return reason


# -- fuse
#
# Replace chains of ops by fused ones, before planning: so the planner prices what will run.
#
# Before:  %y = linear(%x, %w, %b); %z = gelu(%y)
# After:   %y = linear(%x, %w); %z = megafx.bias_act(%y, %b, "gelu")
# Legal because: what a pattern makes computes what it matches (each pattern's test), and no interior value has another user.
#
# Patterns are those of patterns/ and users' own (`megafx.register_pattern`) that have one result; fuse_local has the others. A
# match that is slower fused, as measured on this device, is left as it is, with a note (`Config.fusion_profile`).

REQUIRES, ENSURES = Phase.CANONICAL, Phase.CANONICAL


def fuse(program: Program, planning: Planning, canonicalize: Canonicalize, respell: Respell) -> int:
    """Returns the number of matches. canonicalize: what patterns go through, as models do; respell: the same for new nodes."""
    chosen = patterns_of(registered_patterns(), planning.config, local=False)
    unwanted = declines(program, planning)
    return sum(rewrite(program, chosen, canonicalize, respell, "fuse", declines=unwanted).counts.values())
