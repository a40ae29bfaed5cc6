"""Put what only lazy outputs need at the end of the joint graph.

Before:  %y = mm(%h, %w)                       # a lazy output
         %dh = norm_backward(%g, %h)
After:   %dh = norm_backward(%g, %h)
         %y = mm(%h, %w)
Legal because: the nodes keep their order, and nothing else depends on them.

So an operand counts as used to the end of the step, as it is: somebody may read the output after backward.
"""

from __future__ import annotations

from megafx.analysis.lazy import only_for_lazy
from megafx.ir.program import Phase, Program
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.JOINT, Phase.JOINT


def postpone_lazy_outputs(program: Program, context: CompileContext) -> int:
    """Put the nodes that only lazy outputs need behind all others; return their number."""
    found = only_for_lazy(program)
    output = program.output_node()
    for node in found:
        output.prepend(node)
    return len(found)
