"""A BlockMask that forward is given: what its mask_mod reads from around it are inputs of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention

import megafx
from megafx.config import Config
from megafx.errors import CaptureError
from megafx.ir.nodes import argument
from megafx.ir.program import Program
from megafx.planner.context import CompileContext


class Flex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv = nn.Embedding(11, 8), nn.Linear(8, 24)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, masks: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, mask = self.tokens(ids), masks["full"] if isinstance(masks, dict) else masks
        q, k, v = (y.unflatten(-1, (4, 2)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        x = x + flex_attention(q, k, v, block_mask=mask).transpose(1, 2).flatten(2)
        logits = x @ self.tokens.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def documents(ids: torch.Tensor) -> Callable[..., Any]:
    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ids[b, q] == ids[b, k]

    return and_masks(same, causal)


def window(length: int) -> Callable[..., Any]:
    return lambda b, h, q, k: (q >= k) & (q - k < length)


GLOBAL = torch.zeros(2, 9, dtype=torch.long)


def of_a_global(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (GLOBAL[b, q] == GLOBAL[b, k]) & causal(b, h, q, k)


def made(mask_mod: Any, length: int, rows: int | None = 2) -> BlockMask:
    return create_block_mask(mask_mod, rows, None, length, length, device="cpu")


def drawn(length: int, seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(11, (2, length), generator=generator)
    starts = torch.randint(2, (2, length), generator=generator).cumsum(-1)
    return {"ids": ids, "labels": ids.roll(-1, 1)}, starts


@pytest.mark.parametrize(
    ("kind", "mesh", "length"),
    [
        ("documents", {"tp": 2}, 7),
        ("documents", {"cp": 3}, 7),
        ("documents", {"cp": 2, "tp": 2}, 5),
        ("documents", {"dp": 2}, 5),
        ("causal", {"cp": 2}, 7),
        ("dict", {"cp": 2}, 7),
    ],
)
def test_all_ranks_compute_what_one_process_does(kind, mesh, length):
    kept: list[Program] = []

    def keep(program: Program, context: CompileContext) -> int:
        kept.append(program.copy())
        return 0

    call, starts = drawn(length)
    mask = made(causal, length, None) if kind == "causal" else made(documents(starts), length)
    call = call | {"masks": {"full": mask} if kind == "dict" else mask}
    config = Config(passes=(("after cut_sequence", keep),))
    verdict = megafx.verify(Flex().double(), config, example_inputs=call, mesh=mesh, tolerance=1e-10)
    assert verdict, str(verdict)
    (node,) = kept[0].graph.find_nodes(op="call_function", target=torch.ops.megafx.attention.default)
    assert argument(node, "mask") is None and argument(node, "causal")  # nothing of [s, s] is made
    assert (argument(node, "segments") is None) == (kind == "causal")


def eager(model: nn.Module, call: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():  # torch's has no gradients on CPUs
        loss: torch.Tensor = model(**call)[0]
    return loss


def test_other_documents_and_lengths_have_the_same_graph_and_other_numbers_another(monkeypatch):
    torch.manual_seed(0)
    plain = Flex().double()
    model = megafx.parallelize(Flex().double(), Config())
    model.load_state_dict(plain.state_dict())

    def graphs(*masks: tuple[int, int, Any]) -> int:
        for length, seed, of in masks:
            call, starts = drawn(length, seed)
            call = call | {"masks": made(of(starts), length)}
            loss = model(**call)[0]
            assert torch.allclose(loss, eager(plain, call), rtol=1e-10)
            loss.backward()
        return model.megafx.captures

    assert graphs((7, 0, documents), (7, 1, documents), (9, 2, documents)) == 1
    assert graphs((7, 0, lambda _: window(2)), (9, 0, lambda _: window(2))) == 2
    assert graphs((7, 0, lambda _: window(3))) == 3

    def replaced(starts: torch.Tensor) -> Any:
        monkeypatch.setitem(globals(), "GLOBAL", starts)  # a tensor of the module: what it is at this call
        return of_a_global

    assert graphs((7, 0, replaced), (7, 1, replaced)) == 4

    def by_default(starts: torch.Tensor) -> Any:
        return lambda b, h, q, k, ids=starts: ids[b, q] == ids[b, k]

    assert graphs((7, 0, by_default), (7, 1, by_default)) == 5


class Documents:
    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids


class Reads(Flex):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor, masks: Any) -> Any:
        return super().forward(ids, labels, masks)[0] * masks.kv_num_blocks.sum()


def test_what_is_refused_and_the_advice():
    call, starts = drawn(7)
    held = Documents(starts)
    reads = made(lambda b, h, q, k: held.ids[b, q] == held.ids[b, k], 7)
    with pytest.raises(CaptureError, match=r"has a mask_mod with 'held', a .*Documents"):
        megafx.verify(Flex(), example_inputs=call | {"masks": reads}, mesh={"tp": 2})
    ids = held.ids
    mended = call | {"masks": made(lambda b, h, q, k: ids[b, q] == ids[b, k], 7)}
    assert megafx.verify(Flex(), example_inputs=mended, mesh={"tp": 2})
    with pytest.raises(CaptureError, match="forward reads 'kv_num_blocks' of a BlockMask"):
        megafx.verify(Reads(), example_inputs=mended, mesh={"tp": 2})
