"""Put what the graph runs into profiler ranges that are named after the modules.

Before:  %y = mm(%x, %w)                                                        # of module h.0.mlp.up
After:   %r = enter_range('megafx forward h.0.mlp.up'); %y = mm(%x, %w); leave_range(%r)
Legal because: a range changes no value. It costs a microsecond or two, so it is made only if asked for
(Config.profiler_ranges).
"""

from __future__ import annotations

from itertools import groupby

from torch import fx

from megafx.ir.program import Phase, Program, copied_graph, fqn_of, graph_module
from megafx.ops.ranges import PREFIX, enter_range, leave_range
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.PARTITIONED, Phase.PARTITIONED


def name_ranges(program: Program, context: CompileContext) -> int:
    """Return the number of ranges."""
    parts = program.partition
    if not context.config.profiler_ranges or parts is None:
        return 0
    program.partition, count = parts.changed(with_ranges)
    return count


def with_ranges(gm: fx.GraphModule, direction: str) -> tuple[fx.GraphModule, int]:
    """(the same code, each run of nodes of one module within a range; the number of ranges)."""
    graph = copied_graph(gm.graph)
    calls = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    count = 0
    for fqn, nodes in groupby(calls, fqn_of):
        run = list(nodes)
        with graph.inserting_before(run[0]):
            begun = graph.call_function(enter_range, (f"{PREFIX}{direction} {fqn or '<root>'}",))
        with graph.inserting_after(run[-1]):
            graph.call_function(leave_range, (begun,))
        count += 1
    return graph_module(gm, graph), count
