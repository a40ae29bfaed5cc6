"""Context parallelism in the simulator: whatever the ranks, the lengths and the ways in which tokens meet, a step is that of
one process in outputs, loss and every gradient; and each transition and collective of the axis matters."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megafx
from megafx.checks.types import check_batch_types
from megafx.config import Config
from megafx.errors import PlacementError, PlanError
from megafx.ir.nodes import argument, set_arguments
from megafx.ir.program import Program
from megafx.planner.context import CompileContext

CHECKED = {"tolerance": 1e-10}


class GPT(nn.Module):
    """Learned positions, grouped causal attention of 3 heads on 1, dropout, labels some of which are left out."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions, self.drop = nn.Embedding(11, 6), nn.Embedding(16, 6), drop
        self.norm, self.after = nn.LayerNorm(6), nn.LayerNorm(6)
        self.qkv, self.out, self.up, self.down = nn.Linear(6, 10), nn.Linear(6, 6), nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b, s = ids.shape
        x = F.dropout(self.tokens(ids) + self.positions(torch.arange(s, device=ids.device)), self.drop)
        q, k, v = self.qkv(self.norm(x)).split((6, 2, 2), -1)
        q, k, v = (y.view(b, s, -1, 2).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, dropout_p=self.drop)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.after(x))))
        logits = x @ self.tokens.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def a_call(length: int, rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.randint(11, (rows, length), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    labels[:, -1], labels[0, :2] = -100, -100
    return {"ids": ids, "labels": labels}


@pytest.mark.parametrize(
    ("mesh", "length", "options"),
    [
        ({"cp": 3}, 7, {}),
        ({"cp": 4}, 3, {}),  # one rank has padding alone
        ({"cp": 2, "tp": 2}, 7, {"sequence_parallel": True}),
        ({"dp": 2, "cp": 2, "tp": 2}, 5, {"data_parallel": "fsdp"}),
        ({"cp": 3}, 7, {"data_parallel": "fsdp"}),
        ({"dp": 4, "cp": 2}, 5, {"data_parallel": "zero1", "data_parallel_shard_size": 2}),
    ],
)
def test_all_ranks_compute_what_one_process_does(mesh, length, options):
    call = a_call(length, 2 * mesh.get("dp", 1))
    with megafx.debug(check=1):
        verdict = megafx.verify(GPT().double(), Config(**options), example_inputs=call, mesh=mesh, **CHECKED)
    assert verdict, str(verdict)
    assert len(verdict.gradients) == 14 and f"cp {mesh['cp']}" in str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [({"dp": 2, "cp": 2}, {}), ({"cp": 2, "tp": 2}, {}), ({"cp": 2, "tp": 3}, {"sequence_parallel": True})],
)
def test_dropout_draws_one_mask_for_all_ranks(mesh, options):
    call = a_call(5, 4)
    with megafx.debug(check=1):
        verdict = megafx.verify(GPT(0.4).double(), Config(**options), example_inputs=call, mesh=mesh, **CHECKED)
    assert verdict, str(verdict)
    assert verdict.reference == "megafx at t=1"


class Mixed(nn.Module):
    """Tokens that meet otherwise than in causal attention, as `kinds` say, one after the other."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds, self.tokens, self.rel = kinds, nn.Embedding(11, 6), nn.Embedding(9, 3)
        self.qkv, self.head = nn.Linear(6, 18), nn.Linear(6, 11)
        self.conv, self.norm = nn.Conv1d(6, 6, 3, padding=1), nn.BatchNorm1d(6)

    def mask(self, kind: str, ids: torch.Tensor) -> torch.Tensor | None:
        i = torch.arange(ids.shape[1], device=ids.device)
        before = i[None] <= i[:, None]
        match kind:
            case "alibi":
                slopes = self.head.weight.new_tensor([0.5, 0.25, 0.125])[:, None, None]
                return (slopes * (i[None] - i[:, None])).masked_fill(~before, float("-inf"))
            case "window":
                return before & (i[:, None] - i[None] < 3)
            case "prefix":
                return before | (i[None] < 3)
            case "relative":
                return self.rel((i[:, None] - i[None]).clamp(-4, 4) + 4).permute(2, 0, 1)[None]
            case "padding":
                return (ids > 1)[:, None, None]
            case "documents":
                document = (ids == 0).cumsum(-1)
                return (document[:, :, None] == document[:, None])[:, None] & before
        return None

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        b, s, h = x.shape
        for kind in self.kinds:
            if kind == "convolution":
                x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
            elif kind == "batch norm":
                x = self.norm(x.transpose(1, 2)).transpose(1, 2)
            elif kind == "sums":
                x = x + x.cumsum(1) / 4 + x.mean(1, keepdim=True) + x.amax(1, keepdim=True)
            elif kind == "fourier":
                x = x + torch.fft.fft(x, dim=1).real
            elif kind == "shift":
                x = x + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
            else:
                q, k, v = (y.view(b, s, 3, 2).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(kind, ids))
                x = x + y.transpose(1, 2).reshape(b, s, h)
        if "last" in self.kinds:
            return F.cross_entropy(self.head(x[:, -1]), labels[:, 0])
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize(
    "kinds",
    [
        ("alibi", "window", "prefix"),
        ("relative", "padding", "documents"),
        ("convolution", "batch norm", "sums", "fourier", "shift", "last"),
    ],
)
def test_tokens_may_meet_in_other_ways(kinds):
    call = a_call(7)
    with megafx.debug(check=1):
        verdict = megafx.verify(Mixed(*kinds).double(), example_inputs=call, mesh={"cp": 2}, **CHECKED)
    assert verdict, str(verdict)


class Sunk(nn.Module):
    """Scores of heads that take weight and give nothing: learned (GPT-OSS), or a softmax off by one."""

    def __init__(self, learned: bool, window: int) -> None:
        super().__init__()
        self.learned, self.window = learned, window
        self.tokens, self.qkv, self.sinks = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Parameter(torch.randn(4))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        q, k, v = (y.unflatten(-1, (4, 2)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        i = torch.arange(ids.shape[1], device=ids.device)
        apart = i[:, None] - i[None]
        scores = (q @ k.transpose(-1, -2)).masked_fill((apart < 0) | (apart >= self.window), float("-inf"))
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(ids.shape[0], -1, ids.shape[1], -1)
        scores = torch.cat([scores, sinks], -1) if self.learned else F.pad(scores, (0, 1))
        x = x + (scores.softmax(-1)[..., :-1] @ v).transpose(1, 2).flatten(2)
        return F.cross_entropy((x @ self.tokens.weight.t()).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("window", "tokens", "mesh"),
    [(99, 7, {"cp": 2, "tp": 2}), (99, 7, {"cp": 2}), (3, 5, {"cp": 3}), (99, 3, {"cp": 4})],
)
@pytest.mark.parametrize("learned", [True, False])
def test_sinks_are_of_all_keys(learned, window, tokens, mesh):
    """Each rank's queries see the sink once, however their keys come."""
    kept: list[Program] = []

    def keep(program: Program, context: CompileContext) -> int:
        kept.append(program.copy())
        return 0

    config = Config(passes=(("after scaled_products", keep),))
    torch.manual_seed(0)
    verdict = megafx.verify(Sunk(learned, window).double(), config, example_inputs=a_call(tokens), mesh=mesh, **CHECKED)
    assert verdict, str(verdict)
    nodes = kept[0].graph.find_nodes(op="call_function", target=torch.ops.megafx.attention_forward.default)
    assert len(nodes) == 1 and argument(nodes[0], "sink") is not None and argument(nodes[0], "shard_dim") == 2


@pytest.mark.parametrize("learned", [True, False])
def test_each_collective_of_attention_with_a_sink_matters(learned):
    alone = Config(context_parallel_size=2, tensor_model_parallel_size=1)
    torch.manual_seed(0)
    found = megafx.sabotage(Sunk(learned, 99).double(), alone, example_inputs=a_call(5))
    assert found and len(found.tried) >= 8, str(found)


class Packed(nn.Module):
    """Token ids [t] of documents one after the other, without a batch dim; attention of [1, heads, t, d] or [heads, t, d]."""

    def __init__(self, kind: str, drop: float = 0.0) -> None:
        super().__init__()
        self.kind, self.drop = kind, drop
        self.tokens, self.norm, self.qkv = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 24)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x, t = F.dropout(self.tokens(ids), self.drop), ids.shape[0]
        q, k, v = (y.view(t, 4, 2).transpose(0, 1) for y in self.qkv(self.norm(x)).chunk(3, -1))
        if self.kind == "causal":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            document, i = (positions == 0).cumsum(0), torch.arange(t, device=ids.device)
            mask = (document[:, None] == document[None]) & (i[None] <= i[:, None])
            y = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, self.drop)[0]
        x = x + y.transpose(0, 1).flatten(1)
        return F.cross_entropy(x @ self.tokens.weight.t(), labels)


def packed_call(length: int) -> dict[str, torch.Tensor]:
    ids = a_call(length, 1)["ids"][0]
    labels, positions = ids.roll(-1), torch.arange(length) % 4
    labels[-1] = -100
    return {"ids": ids, "labels": labels, "positions": positions}


@pytest.mark.parametrize(
    ("mesh", "length", "drop", "options"),
    [
        ({"cp": 2, "tp": 2}, 7, 0.0, {}),
        ({"cp": 2, "tp": 2}, 9, 0.0, {"cp_comm_type": "a2a"}),
        ({"cp": 2}, 9, 0.0, {}),
        ({"cp": 4}, 3, 0.0, {}),
        ({"cp": 3}, 7, 0.3, {}),
    ],
)
@pytest.mark.parametrize("kind", ["causal", "documents"])
def test_ids_may_have_no_batch_dim(kind, mesh, length, drop, options):
    kept: list[Program] = []

    def keep(program: Program, context: CompileContext) -> int:
        kept.append(program.copy())
        return 0

    config = Config(passes=(("after cut_sequence", keep),), **options)
    model = Packed(kind, drop).double()
    verdict = megafx.verify(model, config, example_inputs=packed_call(length), mesh=mesh, **CHECKED)
    assert verdict, str(verdict)
    if not options:
        (node,) = kept[0].graph.find_nodes(op="call_function", target=torch.ops.megafx.attention.default)
        assert argument(node, "shard_dim") == 2 and argument(node, "mask") is None  # nothing of [t, t] is made
        assert (argument(node, "segments") is None) == (kind == "causal")


class Cross(nn.Module):
    """A decoder of targets that reads what an encoder makes of the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.q, self.kv, self.head = (
            nn.Embedding(11, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 12),
            nn.Linear(6, 11),
        )

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x, y = self.tokens(ids), self.tokens(targets)
        k, v = (z.unflatten(-1, (3, 2)).transpose(1, 2) for z in self.kv(x).chunk(2, -1))
        q = self.q(y).unflatten(-1, (3, 2)).transpose(1, 2)
        y = y + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(y).flatten(0, 1), targets.flatten())


def test_queries_and_keys_may_be_of_two_sequences():
    ids, targets = a_call(7)["ids"], a_call(5)["ids"]
    call = {"ids": ids, "targets": targets}
    verdict = megafx.verify(Cross().double(), example_inputs=call, mesh={"cp": 2}, **CHECKED)
    assert verdict, str(verdict)


def test_each_transition_and_each_collective_of_the_axis_matters():
    config = Config(context_parallel_size=2, tensor_model_parallel_size=1)
    found = megafx.sabotage(GPT().double(), config, example_inputs=a_call(5))
    assert found, str(found)
    by = Counter(one.by for one in found.tried)
    # keys and values, the loss, logits, and their gradients
    assert by["types"] >= 6 and by["numbers"] >= 12, str(found)


def test_attention_that_is_not_told_its_queries_is_noticed():
    kept: list[Program] = []

    def keep(program: Program, context: CompileContext) -> int:
        kept.append(program.copy())
        return 0

    config = Config(passes=(("after scaled_products", keep),))
    assert megafx.verify(GPT(), config, example_inputs=a_call(5), mesh={"cp": 2}, types=True)
    (joint,) = kept
    check_batch_types(joint)
    op = torch.ops.megafx.attention_forward.default
    (node,) = joint.graph.find_nodes(op="call_function", target=op)
    set_arguments(node, shard_dim=-1, layout=[], axis="tp")
    with pytest.raises(PlacementError, match="counts queries that are whole"):
        check_batch_types(joint)


def test_the_loss_is_computed_without_logits_and_memory_is_predicted():
    kept: list[Program] = []

    def keep(program: Program, context: CompileContext) -> int:
        kept.append(program.copy())
        return 0

    config = Config(context_parallel_size=2, passes=(("after fuse_linear_loss", keep),))
    memory = [
        megafx.predict_memory(GPT(), config.replace(context_parallel_size=n), example_inputs=a_call(16, 4))
        for n in (1, 2)
    ]
    assert [spec.lazy for spec in kept[1].outputs] == [False, True]
    assert "linear_cross_entropy" in {f.pattern for f in kept[1].fusions}
    assert memory[1].peak < memory[0].peak


def test_the_report_says_what_is_gathered_and_why():
    config = Config(context_parallel_size=2)
    text = str(megafx.plan(Mixed("window", "convolution"), config, example_inputs=a_call(6)).report)
    assert "of the sequence over 'cp'" in text
    assert "conv1d has the sequence whole" in text and "are gathered" in text


def test_what_cannot_be_cut_is_refused_and_the_advice_works():
    call = a_call(6)
    assert megafx.plan(GPT(), Config(context_parallel_size=2), example_inputs=call).report
    images, example = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), (torch.randn(2, 3, 4),)
    with pytest.raises(PlanError, match="no size that may vary"):
        megafx.verify(images, example_inputs=example, mesh={"cp": 2})
    assert megafx.verify(images, example_inputs=example, mesh={"tp": 2})
    labelled = Labelled()  # ids [t] beside images are labels, and no tokens
    with pytest.raises(PlanError, match="no size that may vary"):
        megafx.verify(labelled, example_inputs=(*example, torch.tensor([0, 2])), mesh={"cp": 2})


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classes, self.out = nn.Embedding(3, 12), nn.Linear(12, 3)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.out(images.flatten(1) + self.classes(labels))
