"""Context parallelism that exchanges heads for tokens around attention (`cp_comm_type="a2a"`): a step is that of one process
whatever the ranks, heads, lengths and masks; "auto" chooses for each attention what costs less."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megafx
from megafx.config import Config
from megafx.ir.contracts import is_transition
from megafx.ir.nodes import argument
from megafx.ir.program import Program
from megafx.placements.types import Layout
from megafx.planner.context import CompileContext

CHECKED = {"tolerance": 1e-10}
A2A = {"cp_comm_type": "a2a"}


class GPT(nn.Module):
    """Attentions of (query heads, key-value heads) one after the other, each causal, with `mask` beside it and dropout."""

    def __init__(self, *heads: tuple[int, int], drop: float = 0.0, mask: str = "", width: int = 2) -> None:
        super().__init__()
        self.heads, self.drop, self.mask, self.width = heads, drop, mask, width
        self.tokens, self.norm, self.rel = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Embedding(9, heads[0][0])
        self.qkv = nn.ModuleList(nn.Linear(6, (n + 2 * k) * width) for n, k in heads)
        self.out = nn.ModuleList(nn.Linear(n * width, 6) for n, _ in heads)
        self.sinks = nn.Parameter(torch.randn(heads[0][0])) if mask == "sinks" else None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        i = torch.arange(ids.shape[1], device=ids.device)
        before, given = i[None] <= i[:, None], None
        match self.mask:
            case "window":
                given = before & (i[:, None] - i[None] < 3)
            case "alibi":
                slopes = q.new_tensor([2.0**-n for n in range(q.shape[1])])[:, None, None]
                given = (slopes * (i[None] - i[:, None])).masked_fill(~before, float("-inf"))
            case "relative":
                given = self.rel((i[:, None] - i[None]).clamp(-4, 4) + 4).permute(2, 0, 1)[None]
            case "padding":
                given = (ids > 1)[:, None, None]
            case "documents":
                document = (ids == 0).cumsum(-1)
                given = (document[:, :, None] == document[:, None])[:, None] & before
        if self.sinks is not None:
            scores = (q @ k.transpose(-1, -2) / math.sqrt(self.width)).masked_fill(~before, float("-inf"))
            sinks = self.sinks.reshape(1, -1, 1, 1).expand(ids.shape[0], -1, ids.shape[1], -1)
            return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v
        p = self.drop if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, given, p, given is None, enable_gqa=q.shape[1] != k.shape[1])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.dropout(self.tokens(ids), self.drop)
        for (n, kv), qkv, out in zip(self.heads, self.qkv, self.out, strict=True):
            sizes = (n * self.width, kv * self.width, kv * self.width)
            q, k, v = (y.unflatten(-1, (-1, self.width)).transpose(1, 2) for y in qkv(self.norm(x)).split(sizes, -1))
            x = x + out(self.attend(q, k, v, ids).transpose(1, 2).flatten(2))
        logits = x @ self.tokens.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def a_call(length: int, rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.randint(11, (rows, length), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    labels[:, -1], labels[0, :2] = -100, -100
    return {"ids": ids, "labels": labels}


def exact(model: nn.Module, mesh: dict[str, int], length: int, **options: Any) -> Program:
    """Verify the model, and return the program of one context-parallel rank, as it is planned next."""
    kept: list[Program] = []

    def keep(program: Program, context: CompileContext) -> int:
        kept.append(program.copy())
        return 0

    config = Config(**A2A | options, passes=(("after cut_sequence", keep),))
    with megafx.debug(check=1):
        call = a_call(length, 2 * mesh.get("dp", 1))
        verdict = megafx.verify(model.double(), config, example_inputs=call, mesh=mesh, **CHECKED)
    assert verdict, str(verdict)
    return kept[0]


def exchanges(program: Program) -> list[tuple[Any, ...]]:
    moves = [n.args[1:3] for n in program.graph.nodes if is_transition(n, "cp")]
    return [move for move in moves if move[0][0] == move[1][0] == "S"]


@pytest.mark.parametrize(
    ("heads", "mesh", "length", "options"),
    [
        ((4, 2), {"cp": 2}, 7, {}),
        ((3, 3), {"cp": 3}, 7, {}),
        ((8, 4), {"cp": 4}, 3, {}),  # a rank has padding alone where tokens are cut
        ((5, 5), {"cp": 2}, 7, {}),  # and where heads are
        ((8, 4), {"cp": 2, "tp": 2}, 7, {"sequence_parallel": True}),
        ((6, 6), {"cp": 2, "tp": 2}, 5, {}),  # three heads, of which one rank of two has padding
        ((4, 2), {"dp": 2, "cp": 2}, 5, {"data_parallel": "fsdp"}),
    ],
)
def test_all_ranks_compute_what_one_process_does(heads, mesh, length, options):
    found = exchanges(exact(GPT(heads), mesh, length, **options))
    assert sorted(found) == [*[("S1", "S2")] * 3, ("S2", "S1")]  # of [b, s, heads, d], as they lie in memory


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"cp": 3}, {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}])
def test_dropout_draws_one_mask_for_all_ranks(mesh):
    model = GPT((6, 6) if "tp" in mesh else (3, 3), drop=0.4)
    assert len(exchanges(exact(model, mesh, 5))) == 4


@pytest.mark.parametrize("mask", ["window", "alibi", "relative", "padding", "documents", "sinks"])
@pytest.mark.parametrize("mesh", [{"cp": 2, "tp": 2}, {"cp": 2}])
def test_masks_are_of_the_heads_that_a_rank_has(mesh, mask):
    if "tp" not in mesh:
        exact(GPT((4, 4), mask=mask), mesh, 7)
        return
    found = exchanges(exact(GPT((8, 8), mask=mask), mesh, 5))
    assert len(found) >= 4  # a bias that is computed by tokens is exchanged too


def test_tensor_parallel_ranks_have_the_heads_of_each_rank_that_exchanges_them():
    """Each of two tensor-parallel ranks has half of the heads that go to each context-parallel rank, and gathers none."""
    config = Config(**A2A, context_parallel_size=2, tensor_model_parallel_size=2)
    plan = megafx.plan(GPT((8, 4)), config, example_inputs=a_call(8))
    text = str(megafx.explain(plan))
    assert "S0/2x4+2x4+2x2+2x2+2x2+2x2" in text  # q, k and v: two parts of each, of which a rank has half
    assert "S2->S1@cp fwd all_to_all" in text and "S1->S2@cp fwd all_to_all" in text
    assert "1 of 1 attentions have some of the heads on each rank" in text
    (linear,) = (choice for name, choice in plan.ops.items() if choice.fqn == "qkv.0" and "linear" in name)
    assert linear.out.is_shard and linear.out.cut == Layout.of([(2, 4), (2, 4), *[(2, 2)] * 4], 2)


@pytest.mark.slow
def test_whole_ranges_are_exchanged_where_no_queries_are_cut():
    program = exact(GPT((4, 4)), {"cp": 2}, 8)
    cuts = [n for n in program.graph.nodes if is_transition(n, "cp") and n.args[1] == "S1"]
    assert cuts and all(len(n.args[3]) == 3 for n in cuts)  # no head-tail layout, whose form ends in a 2
    program = exact(GPT((4, 4), (2, 1)), {"cp": 2}, 8)  # the second attention has its queries cut
    assert [argument(n, "shard_dim") for n in attentions(program)] == [-1, 2]
    cuts = [n for n in program.graph.nodes if is_transition(n, "cp") and n.args[1] == "S1"]
    assert cuts and all(len(n.args[3]) == 4 for n in cuts)


def attentions(program: Program) -> list[Any]:
    return program.graph.find_nodes(op="call_function", target=torch.ops.megafx.attention.default)


@pytest.mark.slow
def test_what_costs_less_is_chosen_for_each_attention():
    """Grouped keys are few bytes, so that to gather them costs less; with as many key-value heads, heads are exchanged."""
    config = Config(context_parallel_size=4, tensor_model_parallel_size=1, hardware="h100-nvlink", seq_length=131072)
    found = []
    for heads in ([(8, 8), (8, 4)], [(32, 4), (32, 4)], [(8, 8), (8, 1)]):
        notes = megafx.plan(GPT(*heads, width=128), config, example_inputs=a_call(8)).report.notes
        found += [[note for note in notes if "have some of the heads" in note]]
    assert "2 of 2 attentions" in found[0][0] and not found[1] and "1 of 2 attentions" in found[2][0]
    gathered = megafx.plan(GPT((8, 8)), config.replace(cp_comm_type="all_gather"), example_inputs=a_call(8))
    assert not [note for note in gathered.report.notes if "have some of the heads" in note]


def test_heads_that_ranks_do_not_divide_have_a_note():
    def notes(heads: tuple[int, int]) -> str:
        config = Config(**A2A, context_parallel_size=2, tensor_model_parallel_size=1)
        return str(megafx.plan(GPT(heads), config, example_inputs=a_call(8)).report.notes)

    assert "3 key-value heads on 2 ranks: each computes 2, some of them padding" in notes((6, 3))
    assert "1 key-value head, fewer than the 2 ranks of 'cp': keys and values are gathered" in notes((6, 1))
    assert not exchanges(exact(GPT((6, 1)), {"cp": 2}, 7))
    auto = Config(context_parallel_size=2, tensor_model_parallel_size=1)
    assert "padding" not in str(megafx.plan(GPT((6, 3)), auto, example_inputs=a_call(8)).report.notes)


@pytest.mark.parametrize("t", [1, 2])
def test_each_exchange_matters(t):
    config = Config(**A2A, context_parallel_size=2, tensor_model_parallel_size=t)
    found = megafx.sabotage(GPT((4, 4)).double(), config, example_inputs=a_call(5))
    assert found, str(found)
    tried = [one for one in found.tried if "all_to_all" in str(one) or "S2->S1" in str(one)]
    assert len(tried) >= 6, str(found)
