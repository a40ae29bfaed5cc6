"""Whether a match is worth replacing on this device, by what was measured there (`fusion_profile`)."""

from __future__ import annotations

from megafx.fusion_profile import mode_of
from megafx.ir import Program
from megafx.pattern import registered_patterns
from megafx.planning import Planning, price_workload
from megafx.rewrite import Declines
from megafx.rewrite_found import Match


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
