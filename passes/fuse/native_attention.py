"""Give attention with dropout to the library's kernels, with torch's own random numbers: attention_dropout_rng="native".

Before:  %y = megafx.attention(%q, %k, %v, None, None, %seed, 0.125, True, 0, 0.0, 0.1, 3, -1, [], "tp")
After:   %y = scaled_dot_product_attention(%q, %k, %v, None, 0.1, True, scale=0.125)
Legal because: the user asked for it. The bits come from the generator of each process, so the pass is for one rank only:
more would draw other masks for the same heads on each. What the library cannot do (window, soft-cap, causality together
with a mask) keeps megafx's kernel, and a note says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megafx.errors import ConfigError
from megafx.ir.nodes import draw_arguments
from megafx.ir.program import VAL, Builder, Phase, Program
from megafx.planner.context import Planner

REQUIRES, ENSURES = Phase.CANONICAL, Phase.CANONICAL
NAME = "native_attention"
aten = torch.ops.aten


def native_attention(program: Program, planner: Planner) -> int:
    """Return the number of attentions that were given to the library."""
    if planner.config.attention_dropout_rng != "native":
        return 0
    nodes = [
        n for n in program.graph.nodes if n.target is torch.ops.megafx.attention.default and draw_arguments(n)["p"]
    ]
    ranks = planner.t * (program.batch.ranks if program.batch is not None else 1)
    if nodes and ranks > 1:
        raise ConfigError(
            f"attention_dropout_rng='native' on {ranks} ranks: each would draw masks of its own",
            fix="leave it at 'counter', whose masks do not depend on the number of ranks",
        )
    return sum(_to_library(program, node) for node in nodes)


def _to_library(program: Program, node: fx.Node) -> bool:
    q, k, v, mask, key_mask, _, scale, causal, window, softcap, p = node.args[:11]
    if window or softcap or key_mask is not None or (causal and mask is not None):
        two = "a bias and a padding mask together" if key_mask is not None else "a causal and another mask together"
        what = "a window" if window else "a soft-cap" if softcap else two
        program.note("fuse", f"attention with {what} has no library kernel: its dropout stays megafx's", node)
        return False
    emit = Builder(program, node, node, NAME)
    visible: Any = mask
    if isinstance(mask, fx.Node) and mask.meta[VAL].dim() == 2:  # key padding
        visible = emit(aten.unsqueeze.default, emit(aten.unsqueeze.default, mask, 1), 1)
    grouped = q.meta[VAL].shape[1] != k.meta[VAL].shape[1]  # type: ignore[union-attr]
    new = emit(
        aten.scaled_dot_product_attention.default, q, k, v, visible, p, causal, scale=scale, enable_gqa=grouped
    )  # fmt: skip
    node.replace_all_uses_with(new)
    program.graph.erase_node(node)
    program.note("fuse", "attention's dropout is the library's: its bits depend on the process and its history", new)
    return True
