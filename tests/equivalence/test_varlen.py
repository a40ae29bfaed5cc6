"""torch.nn.attention.varlen and ATen's attention of packed rows: read as attention with segments, or sharded over heads.

Eager mode has kernels for GPUs alone: tests/support/flash_attention.py computes one document after the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import megafx
import megafx.kernels.attention.attention  # registers the op
from megafx.config import Config
from megafx.errors import CaptureError
from megafx.ir.contracts import is_transition
from megafx.ir.nodes import argument, op_name
from megafx.ir.program import Program
from megafx.planner.context import CompileContext
from tests.support.flash_attention import on_cpu

Call = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
flash, efficient = torch.ops.aten._flash_attention_forward, torch.ops.aten._efficient_attention_forward
ATTENTION = torch.ops.megafx.attention_forward.default
NAMES = ("_flash_attention_forward", "_efficient_attention_forward")
TOKENS = 14
# torch 2.11 asks for no word that heads of keys are fewer
GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
CAUSAL = {"window_size": (-1, 0), **GQA}


def _varlen(**options: object) -> Call:
    return lambda q, k, v, ends: varlen_attn(q, k, v, ends, ends, TOKENS, TOKENS, **(GQA | options))


def _with_statistics(**options: object) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        y, lse = varlen_attn(q, k, v, ends, ends, TOKENS, TOKENS, return_aux=AuxRequest(lse=True), **(GQA | options))
        return y * (1 + lse.detach().mul(64).round().t()[..., None])  # fp32, of which the last bits may differ

    return call


def _flash_with_statistics(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    y, lse, *_ = flash(q, k, v, ends, ends, TOKENS, TOKENS, 0.0, False, False, window_size_left=3, window_size_right=3)
    return y * (1 + lse.detach().mul(64).round().t()[..., None])


def _efficient(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *more: object) -> Tensor:
    q, k, v = (x.repeat_interleave(4 // x.shape[1], 1)[None] for x in (q, k, v))
    return efficient(q, k, v, None, ends, *(more or (ends,)), TOKENS, TOKENS, 0.0, 2, True)[0][0]


def _efficient_with_statistics(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    q, k, v = (x.repeat_interleave(4 // x.shape[1], 1)[None] for x in (q, k, v))
    y, lse, *_ = efficient(q, k, v, None, ends, ends, TOKENS, TOKENS, 0.0, 2, True)
    return y[0] * (1 + lse.mean().mul(64).round())


READ: dict[str, Call] = {
    "all of a document": _varlen(),
    "causal": _varlen(window_size=(-1, 0)),
    "a window": lambda q, k, v, ends: varlen_attn(
        q, k, v, ends.int(), ends.int(), TOKENS, TOKENS, window_size=(2, 0), scale=0.3, **GQA
    ),
    "a window both ways": _varlen(window_size=(2, 2)),
    "flash": lambda q, k, v, ends: flash(q, k, v, ends, ends, TOKENS, TOKENS, 0.0, True, False)[0],
    "efficient": _efficient,
    "log-sum-exps": _with_statistics(window_size=(-1, 0)),
    "log-sum-exps of flash": _flash_with_statistics,
}
KEPT: dict[str, Call] = {
    "a window that is not the same both ways": _varlen(window_size=(2, 1)),
    "flash, of other keys": lambda q, k, v, ends: flash(
        q, k[1:], v[1:], ends, (ends - 1).clamp(min=0), TOKENS, TOKENS, 0.0, False, False
    )[0],
    "efficient, of ends that may differ": lambda q, k, v, ends: _efficient(q, k, v, ends, ends * 1),
}


class Packed(nn.Module):
    """Four heads on two."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self.tokens, self.qkv, self.out = nn.Embedding(11, 8), nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, ids: Tensor, ends: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        q, k, v = (y.unflatten(-1, (-1, 2)) for y in self.qkv(x).flatten(0, 1).split((8, 4, 4), -1))
        y = self.call(q, k, v, ends).flatten(1).view(x.shape)
        return F.cross_entropy(((x + self.out(y)) @ self.tokens.weight.t()).flatten(0, 1), labels.flatten())


def a_call(rows: int = 1) -> dict[str, Tensor]:
    """Documents of 3, 2, no and 9 tokens."""
    draw = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(11, (rows, TOKENS // rows), generator=draw) for _ in range(2))
    return {"ids": ids, "ends": torch.tensor([0, 3, 5, 5, TOKENS], dtype=torch.int32), "labels": labels}


def _programs(model: nn.Module, call: dict[str, Tensor], *meshes: dict[str, int], **options: Any) -> list[Program]:
    """The graphs of a step, each of which is compared with eager mode."""
    kept: list[Program] = []

    def keep(program: Program, context: CompileContext) -> int:
        kept.append(program.copy())
        return 0

    config = Config(passes=(("after scaled_products", keep),), **options)
    for mesh in meshes:
        with on_cpu():
            verdict = megafx.verify(model, config, example_inputs=call, mesh=mesh, tolerance=1e-10)
        assert verdict, str(verdict)
    return kept


@pytest.mark.parametrize("form", READ)
def test_packed_rows_are_attention_with_segments(form: str) -> None:
    torch.manual_seed(0)
    model, t = Packed(READ[form]).double(), 2 + list(READ).index(form) % 3
    meshes = [{"tp": 1}, {"tp": t}, {"cp": 2 + (t - 1) % 3, "tp": 2}]
    programs = _programs(model, a_call(1 + t % 2), *meshes)
    assert programs
    for program in programs:
        found = program.graph.find_nodes(op="call_function", target=ATTENTION)
        assert len(found) == 1 and argument(found[0], "segments") is not None
        assert not any("varlen" in str(n.target) or "_flash_attention_" in str(n.target) for n in program.graph.nodes)
        for node in program.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                assert list(value.shape[-2:]) != [TOKENS, TOKENS], f"{node} {tuple(value.shape)}"


@pytest.mark.parametrize("form", KEPT)
def test_what_segments_cannot_say_is_sharded_over_heads(form: str) -> None:
    torch.manual_seed(0)
    model, call = Packed(KEPT[form]).double(), a_call()
    _programs(model, call, {"cp": 2})
    programs = _programs(model, call, {"tp": 2}, {"tp": 3}, overrides={"qkv": "colwise"})
    sharded = [p for p in programs if any(is_transition(n) for n in p.graph.nodes)]
    found = [n for p in sharded for n in p.graph.nodes if n.op == "call_function" and op_name(n) in NAMES]
    assert [n.args[0].meta["val"].shape[-2] for n in found] == [2, 2]  # of four heads on two, on 2 ranks and on 3


@pytest.mark.parametrize("call", [_efficient_with_statistics, _with_statistics(window_size=(2, 1))])
def test_other_statistics_are_those_of_whole_heads(call: Call) -> None:
    torch.manual_seed(0)
    _programs(Packed(call).double(), a_call(), {"tp": 2}, {"cp": 2})


def _of_documents(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    """The same with a mask, of torch's own attention."""
    place = torch.arange(q.shape[0])
    document = torch.searchsorted(ends[1:].long(), place, right=True)
    seen = (document[:, None] == document) & (place[:, None] >= place)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, seen, 0.3, enable_gqa=True)[0].transpose(0, 1)


def test_dropout_draws_one_mask_for_all_ranks() -> None:
    """That of any attention with dropout; eager mode draws other bits."""

    def dropped(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        return flash(q, k, v, ends, ends, TOKENS, TOKENS, 0.3, True, False)[0]

    def dropped_too(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        q, k, v = (x.repeat_interleave(4 // x.shape[1], 1)[None] for x in (q, k, v))
        return efficient(q, k, v, None, ends, ends, TOKENS, TOKENS, 0.3, 2, True)[0][0]

    def unlike(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        return flash(q, k, v, ends, ends, TOKENS, TOKENS, 0.3, False, False, window_size_left=2, window_size_right=1)[0]

    losses = []
    for call in (dropped, dropped_too, _of_documents):
        torch.manual_seed(0)
        model = Packed(call).double()
        for program in _programs(model, a_call(), {"tp": 3}, {"cp": 3}) if call is dropped else ():
            (node,) = program.graph.find_nodes(op="call_function", target=ATTENTION)
            assert argument(node, "p") == 0.3 and argument(node, "segments") is not None
        model = megafx.parallelize(model, Config(tensor_model_parallel_size=1))
        torch.manual_seed(1)
        losses.append(model(**a_call()))
    torch.testing.assert_close(losses[0], losses[2], rtol=1e-10, atol=0)
    torch.testing.assert_close(losses[1], losses[2], rtol=1e-10, atol=0)
    with pytest.raises(CaptureError, match="draws random numbers that depend on the process"):
        megafx.parallelize(Packed(unlike).double(), Config(tensor_model_parallel_size=1))(**a_call())


def test_rows_that_are_not_packed_are_plain_attention() -> None:
    def rows(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        q, k, v = (x.view(*ids.shape, *x.shape[1:]) for x in (q, k, v))
        return flash(q, k, v, None, None, ids.shape[1], ids.shape[1], 0.0, True, False)[0].flatten(0, 1)

    call = a_call(2)
    for program in _programs(Packed(rows).double(), call | {"ends": call["ids"]}, {"tp": 2}):
        assert not any("_flash_attention_forward" in str(n.target) for n in program.graph.nodes)


@pytest.mark.parametrize(
    ("call", "config"),
    [
        (
            KEPT["a window that is not the same both ways"],
            Config(tensor_model_parallel_size=2, overrides={"qkv": "colwise"}),
        ),
        (READ["causal"], Config(tensor_model_parallel_size=2, overrides={"qkv": "colwise"})),
        (READ["causal"], Config(tensor_model_parallel_size=1, context_parallel_size=2)),
    ],
)
def test_every_collective_of_packed_rows_matters(call: Call, config: Config) -> None:
    with on_cpu():
        found = megafx.sabotage(Packed(call).double(), config, example_inputs=a_call())
    assert found and len(found.tried) >= 4, str(found)
