"""FlexAttention as its users write it, on a machine without a GPU: mask_mods are masks by position, score_mods are biases and
soft-caps of attention where they are; the rest is computed in full, with heads sharded.

Eager mode is torch's own plain form of it (`math_attention`), by vmap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    or_masks,
)

import megafx
import megafx.kernels.attention.attention  # registers the op
from megafx.capture.libraries.flex import flex_on_cpu
from megafx.config import Config
from megafx.errors import CaptureError
from megafx.ir.nodes import argument
from megafx.ir.program import Program
from megafx.planner.context import CompileContext

FORWARD = torch.ops.megafx.attention_forward.default
TOKENS = 9
compiled = torch.compile(flex_attention)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def _block(mask: Any, ids: Tensor, batch: int | None = None) -> BlockMask:
    return create_block_mask(mask, batch, None, ids.shape[1], ids.shape[1], device=ids.device)


class Flex(nn.Module):
    """Four heads on two. attend(self, q, k, v, documents) -> [b, heads, s, e]."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.tokens, self.qkv, self.out = nn.Embedding(11, 8), nn.Linear(8, 16), nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn(4, 2 * TOKENS) / 4)
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]))
        self.given: Any = None

    def forward(self, ids: Tensor, documents: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        q, k, v = (y.unflatten(-1, (-1, 2)).transpose(1, 2) for y in self.qkv(x).split((8, 4, 4), -1))
        y = self.attend(self, q, k, v, documents).transpose(1, 2).flatten(2)
        return F.cross_entropy(((x + self.out(y)) @ self.tokens.weight.t()).flatten(0, 1), labels.flatten())


def _masked(mask: Callable[[Flex, Tensor], Any], rows: bool = False, score: Any = None) -> Callable[..., Tensor]:
    def attend(net: Flex, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        blocks = _block(mask(net, documents), documents, q.shape[0] if rows else None)
        score_mod = None if score is None else score(net)
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=blocks, enable_gqa=True)

    return attend


def _documents(net: Flex, d: Tensor) -> Any:
    return and_masks(causal, lambda b, h, q, k: d[b, q] == d[b, k])


def _prefixes(net: Flex, d: Tensor) -> Any:
    lengths = (d == 1).sum(1)
    return or_masks(causal, lambda b, h, q, k: k < lengths[b])


# What attention's op has of each: causal, window, whether segments, whether a mask is left.
READ: dict[str, tuple[Callable[..., Tensor], tuple[bool, int, bool, bool]]] = {
    "causal": (_masked(lambda net, d: causal), (True, 0, False, False)),
    "window": (_masked(lambda net, d: lambda b, h, q, k: (q >= k) & (q - k < 3)), (True, 3, False, False)),
    "documents": (_masked(_documents, rows=True), (True, 0, True, False)),
    "padding": (_masked(lambda net, d: lambda b, h, q, k: (k <= q) & (d[b, k] < 3), rows=True), (True, 0, False, True)),
    "prefixes": (_masked(_prefixes, rows=True), (False, 0, False, True)),
    "alibi": (
        _masked(lambda net, d: causal, score=lambda net: lambda s, b, h, q, k: s + net.slopes[h] * (k - q)),
        (True, 0, False, True),
    ),
    "soft-cap": (
        _masked(lambda net, d: causal, score=lambda net: lambda s, b, h, q, k: 5 * torch.tanh(s / 5)),
        (True, 0, False, False),
    ),
    "relative": (
        _masked(lambda net, d: causal, score=lambda net: lambda s, b, h, q, k: s + net.table[h, q - k + TOKENS]),
        (True, 0, False, True),
    ),
    "hidden by the score": (
        lambda net, q, k, v, d: flex_attention(
            q,
            k,
            v,
            enable_gqa=True,
            score_mod=lambda s, b, h, i, j: torch.where(i >= j, 3 * torch.tanh(s), -float("inf")),
        ),
        (True, 0, False, False),
    ),
}


def a_call() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(11, (2, TOKENS), generator=draw) for _ in range(2))
    return {"ids": ids, "documents": torch.tensor([[1] * 3 + [2] * 6, [1] * 4 + [2] * 3 + [3] * 2]), "labels": labels}


def _programs(model: nn.Module, *meshes: dict[str, int]) -> list[Program]:
    kept: list[Program] = []

    def keep(program: Program, context: CompileContext) -> int:
        kept.append(program.copy())
        return 0

    for mesh in meshes:
        config = Config(passes=(("after scaled_products", keep),))
        verdict = megafx.verify(model, config, example_inputs=a_call(), mesh=mesh, tolerance=1e-10)
        assert verdict, str(verdict)
    return kept


@pytest.mark.parametrize("axes", ["cp and tp", "tp", "none"])
@pytest.mark.parametrize("form", READ)
def test_functions_of_elements_are_attention_by_position(form: str, axes: str) -> None:
    torch.manual_seed(0)
    attend, (of_causal, window, documents, masked) = READ[form]
    t = 2 + list(READ).index(form) % 3
    mesh = {"none": {"tp": 1}, "tp": {"tp": t}, "cp and tp": {"cp": 2 + (t - 1) % 3, "tp": 2}}[axes]
    programs = _programs(Flex(attend).double(), mesh)
    own = 0
    for program in programs:
        for node in program.graph.find_nodes(op="call_function", target=FORWARD):
            own += 1
            found = (argument(node, "causal"), argument(node, "window"), argument(node, "segments") is not None)
            assert (*found, argument(node, "mask") is not None) == (of_causal, window, documents, masked)
        if not masked:
            shapes = [n.meta["val"].shape for n in program.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
            assert all([*shape[-2:]] != [TOKENS, TOKENS] for shape in shapes)
    assert own or form in ("causal", "prefixes")  # the library's


@pytest.mark.parametrize("slope", [0.37, 2])
def test_a_bias_is_as_wide_as_the_scores(slope: float) -> None:
    """Torch adds in fp32 to the scores of bf16; whole numbers too."""
    kept: list[Program] = []

    def keep(program: Program, context: CompileContext) -> int:
        kept.append(program.copy())
        return 0

    attend = _masked(lambda net, d: causal, score=lambda net: lambda s, b, h, q, k: s + slope * (k - q))
    torch.manual_seed(0)
    config = Config(tensor_model_parallel_size=1, passes=(("after describe_masks", keep),))
    verdict = megafx.verify(Flex(attend).bfloat16(), config, example_inputs=a_call(), tolerance=2e-2)
    assert verdict, str(verdict)
    nodes = kept[0].graph.find_nodes(op="call_function", target=torch.ops.megafx.attention.default)
    assert [argument(node, "mask").meta["val"].dtype for node in nodes] == [torch.float32]
    assert argument(nodes[0], "causal")


def _gated(net: Flex, q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
    return flex_attention(
        q,
        k,
        v,
        score_mod=lambda s, b, h, i, j: s * net.table[h, (i - j).abs()],
        block_mask=_block(causal, d),
        enable_gqa=True,
    )


def _with_statistic(net: Flex, q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
    y, aux = flex_attention(q, k, v, block_mask=_block(causal, d), enable_gqa=True, return_aux=AuxRequest(lse=True))
    return y * aux.lse[..., None].sigmoid()


def _rows_that_see_nothing(net: Flex, q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
    blocks = _block(lambda b, h, i, j: i > j, d)
    return flex_attention(q, k, v, block_mask=blocks, enable_gqa=True) + _gated(net, q, k, v, d)


def _made_outside(net: Flex, q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
    return compiled(q, k, v, block_mask=net.given, enable_gqa=True)


def _by_a_mask(net: Flex, q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
    mask = create_mask(_documents(net, d), q.shape[0], None, q.shape[2], q.shape[2], device=d.device)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


@pytest.mark.parametrize("attend", [_gated, _with_statistic, _rows_that_see_nothing, _made_outside, _by_a_mask])
def test_other_functions_are_exact_too(attend: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = Flex(attend).double()
    model.given = create_block_mask(causal, None, None, TOKENS, TOKENS, device="cpu")
    _programs(model, {"tp": 2 + (attend is _gated)})
    if attend is not _made_outside:  # for one length of sequences, which is then no size that can be cut
        _programs(model, {"cp": 2})


def test_a_mask_that_is_replaced_is_noticed() -> None:
    """Documents that a BlockMask holds are read in each call."""
    torch.manual_seed(0)
    call = a_call()
    eager, ids = Flex(_made_outside).double(), call["documents"].clone()
    held = Flex(_made_outside).double()
    held.load_state_dict(eager.state_dict())
    eager.given = held.given = create_block_mask(_documents(eager, ids), 2, None, TOKENS, TOKENS, device="cpu")
    ours = megafx.parallelize(held, Config(tensor_model_parallel_size=1))
    losses = []
    with flex_on_cpu():
        for change in (None, "in place", "another"):
            if change == "in place":
                ids.copy_(ids.flip(0))
            if change == "another":
                other = create_block_mask(_documents(eager, ids // 2), 2, None, TOKENS, TOKENS, device="cpu")
                eager.given = ours.given = other
            losses.append(float(eager(**call).detach()))
            assert float(ours(**call).detach()) == pytest.approx(losses[-1], rel=1e-10)
    assert len({*losses}) == 3


def test_every_collective_matters() -> None:
    torch.manual_seed(0)
    model = Flex(READ["documents"][0]).double()
    for config in (Config(tensor_model_parallel_size=2), Config(context_parallel_size=2, tensor_model_parallel_size=1)):
        found = megafx.sabotage(model, config, example_inputs=a_call())
        assert found and len(found.tried) >= 4, str(found)


def _twice(net: Flex, q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + net.table[h][i - j + TOKENS], enable_gqa=True)


def _once(net: Flex, q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + net.table[h, i - j + TOKENS], enable_gqa=True)


def _given(net: Flex, q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
    return flex_attention(q, k, v, block_mask=net.given, enable_gqa=True)


def _of_its_blocks(net: Flex, q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
    blocks = _block(causal, d)
    return flex_attention(q, k, v, block_mask=blocks, enable_gqa=True) * (1 - blocks.sparsity() / 1000)


@pytest.mark.parametrize(
    ("attend", "text", "advised"),
    [
        (_twice, "'getitem' of an element", _once),
        (_given, "a BlockMask that was made from a table of blocks", READ["causal"][0]),
        (_of_its_blocks, "of a BlockMask, whose table of blocks a graph does not have", READ["causal"][0]),
    ],
)
def test_what_is_not_read_is_refused_and_the_advice_works(
    attend: Callable[..., Tensor], text: str, advised: Callable[..., Tensor]
) -> None:
    config = Config(tensor_model_parallel_size=1, uncaptured="error")
    model, one = Flex(attend), torch.ones(1, 1, 1, dtype=torch.int32)
    model.given = BlockMask.from_kv_blocks(one, one[..., None] - 1, seq_lengths=(TOKENS, TOKENS))
    with pytest.raises(CaptureError, match=text):
        megafx.plan(model, config, example_inputs=a_call())
    assert megafx.verify(Flex(advised).double(), config, example_inputs=a_call(), tolerance=1e-10)
