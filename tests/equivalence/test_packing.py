"""Several documents packed in a row: masks as models write them are segments of attention, nothing of [s, s] is left, and a
step is that of one process and that of each document alone, whatever the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megafx
from megafx.checks.types import check_batch_types
from megafx.config import Config
from megafx.errors import PlacementError
from megafx.ir.nodes import argument, set_arguments
from megafx.ir.program import Program
from megafx.planner.context import CompileContext

LOWEST = torch.finfo(torch.float32).min


def _same(ids: Tensor) -> Tensor:
    return ids[:, :, None] == ids[:, None, :]


def _causal(ids: Tensor) -> Tensor:
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()


def _weighed(q: Tensor, k: Tensor, v: Tensor, change: Callable[[Tensor], Tensor], drop: float = 0.0) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    weights = F.dropout(change(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1), drop)
    return weights @ v


def _ends(ids: Tensor) -> Tensor:
    """Documents counted where the number changes."""
    return F.pad((ids[:, 1:] != ids[:, :-1]).long().cumsum(1), (1, 0))


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "boolean, of the library": lambda q, k, v, d: F.scaled_dot_product_attention(
        q, k, v, attn_mask=(_same(d) & _causal(d))[:, None], enable_gqa=True
    ),
    "filled": lambda q, k, v, d: _weighed(
        q, k, v, lambda z: z.masked_fill(~(_same(d) & _causal(d))[:, None], -math.inf)
    ),
    "other or later, filled": lambda q, k, v, d: _weighed(
        q, k, v, lambda z: z.masked_fill((d[:, None, :, None] != d[:, None, None, :]) | (_causal(d) == 0), LOWEST)
    ),
    "added": lambda q, k, v, d: _weighed(
        q, k, v, lambda z: z + torch.where(_same(_ends(d)) & _causal(d), 0.0, LOWEST)[:, None]
    ),
    "added, with a window": lambda q, k, v, d: _weighed(
        q,
        k,
        v,
        lambda z: z + torch.zeros_like(z).masked_fill(~(_same(d) & _causal(d) & _causal(d).triu(-2))[:, None], -1e9),
    ),
    "both ways": lambda q, k, v, d: _weighed(q, k, v, lambda z: z.masked_fill(~_same(d)[:, None], LOWEST)),
    "both ways, dropped": lambda q, k, v, d: _weighed(
        q, k, v, lambda z: z.masked_fill(~_same(d)[:, None], LOWEST), 0.3
    ),
    "with padding": lambda q, k, v, d: F.scaled_dot_product_attention(
        q, k, v, attn_mask=(_same(d) & _causal(d) & (d > 0)[:, None, :])[:, None], enable_gqa=True
    ),
}

STAY: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "padding by a finite number": lambda q, k, v, d: _weighed(
        q, k, v, lambda z: z.masked_fill(~(_same(d) & _causal(d) & (d > 0)[:, None, :])[:, None], LOWEST)
    ),
    "or the first": lambda q, k, v, d: _weighed(
        q, k, v, lambda z: z.masked_fill(~(_same(d) | (d == 1)[:, None, :])[:, None], LOWEST)
    ),
    "other than mine": lambda q, k, v, d: _weighed(
        q, k, v, lambda z: z + (_same(d) & ~_same(_ends(d)))[:, None] + torch.where(_same(d + 1), 0.0, -3.0)[:, None]
    ),
}
ATTENTION = torch.ops.megafx.attention_forward.default


class Packed(nn.Module):
    """Two layers, four heads on two; positions start again with each document."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.tokens, self.places = form, nn.Embedding(11, 8), nn.Embedding(16, 8)
        self.qkv, self.out = nn.ModuleList(nn.Linear(8, 16) for _ in "ab"), nn.ModuleList(nn.Linear(8, 8) for _ in "ab")

    def forward(self, ids: Tensor, places: Tensor, documents: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(places)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (y.unflatten(-1, (-1, 2)).transpose(1, 2) for y in qkv(x).split((8, 4, 4), -1))
            x = x + out((FORMS | STAY)[self.form](q, k, v, documents).transpose(1, 2).flatten(2))
        loss: Tensor = F.cross_entropy((x @ self.tokens.weight.t()).flatten(0, 1), labels.flatten(), reduction="sum")
        return loss


LENGTHS = ((3, 1, 5), (4, 5))


def a_call() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(11, (2, 9), generator=draw) for _ in range(2))
    rows = [[(place, 1 + i) for i, n in enumerate(row) for place in range(n)] for row in LENGTHS]
    places, documents = torch.tensor(rows).unbind(-1)
    return {"ids": ids, "places": places, "documents": documents, "labels": labels}


@pytest.mark.parametrize("axes", ["cp and tp", "tp", "none"])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "both ways"])
def test_documents_are_segments_on_any_ranks(form: str, axes: str) -> None:
    call, kept = a_call(), list[Program]()

    def keep(program: Program, context: CompileContext) -> int:
        kept.append(program.copy())
        return 0

    if form == "with padding":
        call["documents"][0, 6:] = 0
        call["labels"][0, 6:] = -100
    config = Config(passes=(("after scaled_products", keep),))
    torch.manual_seed(0)
    model = Packed(form).double()
    t = 2 + list(FORMS).index(form) % 3
    mesh = {"none": {"tp": 1}, "tp": {"tp": t}, "cp and tp": {"cp": 2, "tp": 5 - min(t, 3)}}[axes]
    verdict = megafx.verify(model, config, example_inputs=call, mesh=mesh, tolerance=1e-10)
    assert verdict, str(verdict)
    assert kept
    for program in kept:
        found = program.graph.find_nodes(op="call_function", target=ATTENTION)
        assert len(found) == 2 and all(argument(node, "segments") is not None for node in found)
        for node in program.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                assert list(value.shape[-2:]) != [9, 9], f"{node} {tuple(value.shape)}"


def test_a_document_that_is_packed_is_a_document_alone() -> None:
    """Loss and every gradient of rows with several documents are the sums of those of each document in a row of its own."""
    call, form = a_call(), "boolean, of the library"
    torch.manual_seed(0)
    model = Packed(form).double()
    compiled = megafx.parallelize(model, Config(tensor_model_parallel_size=1, compile=False))
    loss = compiled(**call)
    loss.backward()
    alone, parameters = torch.zeros((), dtype=torch.float64), dict(model.named_parameters())
    for row, lengths in enumerate(LENGTHS):
        for part in zip(*(call[name][row].split(lengths) for name in call), strict=True):
            alone = alone + model(*(x[None] for x in part))
    wanted = torch.autograd.grad(alone, [*parameters.values()])
    torch.testing.assert_close(loss.detach(), alone.detach(), rtol=1e-10, atol=0)
    for (name, parameter), grad in zip(compiled.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-9, atol=1e-11, msg=name)


def test_a_rank_that_is_not_told_which_queries_it_has_is_noticed() -> None:
    kept = list[Program]()

    def keep(program: Program, context: CompileContext) -> int:
        kept.append(program.copy())
        return 0

    config = Config(passes=(("after scaled_products", keep),))
    model = Packed("both ways").double()
    assert megafx.verify(model, config, example_inputs=a_call(), mesh={"cp": 2}, types=True)
    (joint,) = kept
    check_batch_types(joint)
    for node in joint.graph.find_nodes(op="call_function", target=ATTENTION):
        assert argument(node, "shard_dim") == 2 and (argument(node, "causal"), argument(node, "window")) == (
            False,
            0,
        )  # queries are cut, and nothing but segments counts them
        set_arguments(node, shard_dim=-1, layout=[], axis="tp")
    with pytest.raises(PlacementError, match="counts queries that are whole"):
        check_batch_types(joint)


def test_what_segments_cannot_say_stays_a_mask() -> None:
    """Ids of other tensors, documents that see another, and rows that see nothing beside a finite number: exact as before."""
    call = a_call()
    call["documents"][0, 6:] = 0
    for form in STAY:
        kept = list[Program]()

        def keep(program: Program, context: CompileContext) -> int:
            kept.append(program.copy())  # noqa: B023  called within the loop
            return 0

        config = Config(passes=(("after scaled_products", keep),))
        verdict = megafx.verify(Packed(form).double(), config, example_inputs=call, mesh={"tp": 2}, tolerance=1e-10)
        assert verdict, str(verdict)
        ops = [n for p in kept for n in p.graph.find_nodes(op="call_function", target=ATTENTION)]
        assert all(argument(node, "segments") is None for node in ops), form
