"""Transitions of transposed values move the values as they lie in memory.

Covers: passes/plan/turn_transitions.py, megafx::split_head_tail, megafx::join_head_tail.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megafx
from megafx import Config
from megafx.ir.contracts import is_transition
from megafx.ir.nodes import op_name
from megafx.ir.program import Program
from megafx.placements.moves import TENSORS
from megafx.planner.context import CompileContext


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(11, 8), nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        q, k, v = (y.unflatten(-1, (-1, 2)).transpose(-3, -2) for y in self.qkv(x).split((8, 4, 4), -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


def _lowered(comm: str) -> list[str]:
    """Names of the ops of a step's graph that move or copy, in order."""
    kept: list[Program] = []

    def keep(program: Program, context: CompileContext) -> int:
        kept.append(program.copy())
        return 0

    config = Config(cp_comm_type=comm, passes=(("after expand_transitions", keep),))
    ids = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = Attention().double()
    verdict = megafx.verify(model, config, example_inputs=(ids,), mesh={"cp": 2}, tolerance=1e-10)
    assert verdict, str(verdict)
    (program, *_) = kept
    assert not any(is_transition(n) for n in program.graph.nodes)
    names = [op_name(n) for n in program.graph.nodes if n.op == "call_function"]
    moving = (
        "head_tail",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "flip",
        "clone",
        "contiguous",
        "cat",
        "attention_",
    )
    return [name for name in names if any(word in name for word in moving)]


def test_gathered_keys_are_copied_once_each_way() -> None:
    """The slice of a projection before they are sent, the ranges of all ranks afterwards; gradients: their ranges alone."""
    found = _lowered("all_gather")
    forward, backward = found[: found.index("attention_forward")], found[found.index("attention_backward") :]
    assert (
        forward.count("join_head_tail") == forward.count("all_gather_into_tensor") == forward.count("contiguous") == 2
    )
    assert backward.count("split_head_tail") == backward.count("reduce_scatter_tensor") == 2
    assert not {"flip", "clone"} & {*found} and "contiguous" not in backward


def test_exchanged_heads_are_copied_before_and_after() -> None:
    found = _lowered("a2a")
    assert found.count("all_to_all_single") == 8 and "clone" not in found


@pytest.mark.parametrize(("n", "t", "local"), [(16, 2, 8), (13, 2, 8), (3, 2, 2), (5, 4, 2), (2, 4, 2)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_ranges_of_ranks_are_those_of_the_whole(n: int, t: int, local: int, dim: int) -> None:
    x = torch.randn([n if i == dim else 3 for i in range(3)]).transpose(0, 2).contiguous().transpose(0, 2)
    parts = torch.ops.megafx.split_head_tail(x, dim, t, local)
    half = local // 2
    padded = torch.cat([x, x.new_zeros([2 * t * half - n if i == dim else 3 for i in range(3)])], dim)
    for rank in range(t):
        ranges = [padded.narrow(dim, half * i, half) for i in (rank, 2 * t - 1 - rank)]
        assert torch.equal(parts[rank], torch.cat(ranges, dim))
    assert parts.is_contiguous()
    assert torch.equal(torch.ops.megafx.join_head_tail(parts, dim, n), x)
    assert torch.equal(TENSORS.join_head_tail(parts, dim, n), x)
    torch.library.opcheck(
        torch.ops.megafx.split_head_tail, (x, dim, t, local), test_utils=("test_schema", "test_faketensor")
    )
    torch.library.opcheck(
        torch.ops.megafx.join_head_tail, (parts, dim, n), test_utils=("test_schema", "test_faketensor")
    )
