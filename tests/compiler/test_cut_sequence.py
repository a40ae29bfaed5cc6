"""The graph of one context-parallel rank, as the next axis finds it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from megafx.capture.export import capture_call
from megafx.compiler.cut_sequence import cut_sequence
from megafx.ir.contracts import is_transition
from megafx.ir.program import Phase, Program
from megafx.passes.canonicalize.canonicalize import canonicalize_program
from megafx.placements.data_axis import DataAxis
from megafx.testing import expect, make_context


class Block(nn.Module):
    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.embed, self.kv = nn.Embedding(11, 4), nn.Linear(4, 4, bias=False)
        self.causal = causal

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).unsqueeze(1)
        y = self.kv(x)
        return F.scaled_dot_product_attention(x, y, y, is_causal=self.causal)


CUT = """\
%0 = embed.weight                                            # f32[11 4] param
%1 = kv.weight                                               # f32[4 4] param
%2 = args[0]                                                 # i64[batch seq]
%3 = sym_size.int(%2, 1)                                     # int seq
%4 = transition(%2, 'I', 'S1', [], [1, %3, 1, 2], 'cp', 2)   # i64[batch 2*(((seq+3)//4))]
%5 = embedding(%0, %4)                                       # f32[batch 2*(((seq+3)//4)) 4]
%6 = unsqueeze(%5, 1)                                        # f32[batch 1 2*(((seq+3)//4)) 4]
%7 = linear(%6, %1)                                          # f32[batch 1 2*(((seq+3)//4)) 4]
%8 = transition(%7, 'S2', 'R', [1, %3, 1, 2], [], 'cp', 2)   # f32[batch 1 seq 4]
%9 = attention(%6, %8, %8, None, None, None, None, None, 0.5, True, 0, 0.0, 0, 0.0, 0, 2, [1, %3, 1, 2], 'cp')  \
# f32[batch 1 2*(((seq+3)//4)) 4]
%10 = transition(%9, 'S2', 'I', [1, %3, 1, 2], [], 'cp', 2)  # f32[batch 1 seq 4]
return %10"""


def cut(ranks: int, length: int = 6, causal: bool = True) -> tuple[Program, int]:
    program = capture_call(Block(causal), (torch.zeros(2, length, dtype=torch.long),), {})
    canonicalize_program(program)
    return program, cut_sequence(program, make_context(data=DataAxis(1, cp=ranks)))


def test_keys_and_values_are_gathered_for_some_of_the_queries():
    program, count = cut(2)
    assert count == 3 and program.phase == Phase.CANONICAL
    assert program.batch is not None and (program.batch.ranks, program.batch.cp) == (1, 2)
    expect(program, CUT)


def test_without_causality_a_rank_has_one_range():
    program, _ = cut(2, causal=False)
    layouts = {len(node.args[k]) for node in program.graph.nodes if is_transition(node, "cp") for k in (3, 4)}
    assert layouts == {0, 3}


def test_one_rank_is_left_as_it_is():
    program = capture_call(Block(), (torch.zeros(2, 6, dtype=torch.long),), {})
    canonicalize_program(program)
    before = str(program.graph)
    assert cut_sequence(program, make_context()) == 0
    assert cut_sequence(program, make_context(data=DataAxis(2))) == 0
    assert str(program.graph) == before and program.batch is None
