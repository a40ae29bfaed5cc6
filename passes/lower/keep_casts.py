"""Casts of weights to FP8 are made before forward, given to forward and backward, and kept until a weight changes.

Before:  %a = fp8_amax(%w); %q, _, %s = fp8_quantize(%w, %a); ... ; _, %qt, _ = fp8_quantize(%w, %a)      # in backward
After:   the same nodes, marked as GIVEN: `partition` puts them into a graph of their own
Legal because: they are made of parameters alone, on every rank alike. A call on other values of these makes them again.

It has effect in the form of a call that runs once weights have served two calls (`CompileContext.keeps_casts`): with one
micro-batch a step, casts that are kept would cost two bytes of each element, and save nothing. Of weights that ranks gather for
a layer at a time (fsdp), the casts of this rank's rows are kept (`gather_casts`), not those of what is gathered.
"""

from __future__ import annotations

from megafx.analysis.casts import casts_of_weights
from megafx.ir.program import GIVEN, Phase, Program
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.BOUND, Phase.BOUND


def keep_casts(program: Program, context: CompileContext) -> int:
    """Return the number of values that are given."""
    if not context.keeps_casts:
        return 0
    casts = casts_of_weights(program)
    for place, (node, names) in enumerate(casts.items()):
        node.meta[GIVEN] = place, names
    return len(casts)
