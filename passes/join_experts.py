"""Put the MLPs of a mixture's experts into one op where the experts are to be split over the ranks (expert parallelism).

Before:  %h = grouped_mm(%x, %up, %ends); %a = glu_packed(%h, None, "silu"); %y = grouped_mm(%a, %down, %ends)
After:   %y = grouped_mlp(%x, %up, %down, %starts, %ends, "silu")      # starts: the ends of the experts before
Legal because: it is the same formula. The planner then shards `up` and `down` over experts, and %y is partial.

Where: the user's override says 'expert' of both weights, or neither weight has an override and splitting experts gives the
busiest rank less to do than splitting every expert's ffn does: ceil(E/t)/E of the products against ceil(F/t)/F. Both ways
communicate the same. The op computes its first product again for the gradient, which counts as part of its price. Weights
that an earlier graph has settled stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.ir import VAL, Builder, Phase, Program, fqn_of
from megafx.kernels import grouped_mlp as _defines_the_op  # noqa: F401
from megafx.overrides import Overrides
from megafx.planning import Planning
from megafx.policy import weight_values

REQUIRES, ENSURES = Phase.CANONICAL, Phase.CANONICAL
NAME = "join_experts"
aten, ops = torch.ops.aten, torch.ops.megafx

# Products of a training step, in units of F K S: up and down (2F K + F K) forward and twice backward are 9; up again is 2.
AGAIN = 11 / 9


def join_experts(program: Program, planning: Planning) -> int:
    """Returns the number of mixtures whose experts are joined."""
    found = program.graph.find_nodes(op="call_function", target=ops.grouped_mm.default)
    if planning.t == 1 or not found:
        return 0
    weights = weight_values(program, set(program.graph.nodes))
    overrides = Overrides(program, planning.config.overrides, weights, planning.t)
    return sum(_join(program, planning, overrides, weights, node) for node in found)


def _join(program: Program, planning: Planning, overrides: Overrides, weights: set[fx.Node], node: fx.Node) -> bool:
    arguments: Any = node.args
    hidden, down, ends = arguments
    if not isinstance(hidden, fx.Node) or hidden.target is not ops.glu_packed.default or hidden.args[1] is not None:
        return False
    first: Any = hidden.args[0]
    if (
        first.target is not ops.grouped_mm.default
        or first.args[2] is not ends
        or len(first.users) + len(hidden.users) > 2
    ):
        return False
    x, up, _ = first.args
    if up not in weights or down not in weights:
        return False
    styles = {overrides.style_of(up, first), overrides.style_of(down, node)}
    stored = [planning.fixed[n] for n in overrides.names_of(down, node) if n in planning.fixed]
    if stored:  # by an earlier graph of the model
        wanted = stored[0].is_shard and stored[0].dim == 0
    else:
        wanted = styles == {"expert"} or (styles == {""} and _cheaper(down, planning.t))
    if not wanted:
        return False
    emit = Builder(program, node, node, NAME)
    before = emit(aten.slice.Tensor, ends, 0, 0, ends.meta[VAL].shape[0] - 1)
    starts = emit(aten.constant_pad_nd.default, before, [1, 0], 0)
    y = emit(ops.grouped_mlp.default, x, up, down, starts, ends, hidden.args[2])
    node.replace_all_uses_with(y)
    for old in (node, hidden, first):
        program.graph.erase_node(old)
    program.note("experts", f"experts of '{fqn_of(y)}' are split over the ranks, each whole", y)
    return True


def _cheaper(down: Any, t: int) -> bool:
    """Also of a graph without gradients: the model's other graphs use the same weights."""
    experts, ffn, _ = down.meta[VAL].shape
    share = lambda n: -(-n // t) / n  # noqa: E731  of the busiest rank
    return bool(share(experts) * AGAIN < share(ffn))
