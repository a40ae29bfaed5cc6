"""Covers: passes/communicate/schedule_collectives.py, gather_parameters.py: how many layers of a mixture are whole at once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import fx

import megafx
from megafx.analysis.communication import is_region_gather, is_wait
from megafx.analysis.memory import Memory
from megafx.api import _compiled
from megafx.compiler.compiled import Compiled
from megafx.example_call import ExampleCall
from megafx.ir.nodes import shows_operand
from megafx.ir.program import VAL
from megafx.ops.axes import Mesh

SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
RANKS, LAYER = 4, 32 * 3 * 64 * 64  # elements of a layer's experts


@cache
def compiled(layers: int, form: str, copies: int = 1) -> Compiled:
    """Weights of experts are nearly all of the model, and larger than what a call makes."""
    config: Any = transformers.Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=64, num_experts=32, num_experts_per_tok=2, head_dim=16, vocab_size=64,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, num_hidden_layers=layers, use_cache=False,
    )  # fmt: skip
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    with torch.device("meta"):
        model, ids = transformers.Qwen3MoeForCausalLM(config).train(), torch.zeros(2, 8, dtype=torch.long)
    sizes: Any = {"data_parallel_size": RANKS, "data_parallel": form, "data_parallel_bucket_mib": 1}
    if copies > 1:
        sizes["data_parallel_shard_size"] = RANKS // copies
    call = ((), {"input_ids": ids, "labels": ids})
    return _compiled(ExampleCall.of(model, megafx.Config(**sizes), call, None, runs=False))


def backward(of: Compiled) -> list[fx.Node]:
    """What a rank runs."""
    assert of.context.data is not None
    parts = of.for_rank(Mesh({**of.context.data.mesh, "tp": 1}).ranks[0]).partition
    assert parts is not None and parts.last_backward is not None
    return [*parts.last_backward.graph.nodes]


def lives(nodes: list[fx.Node]) -> Iterator[tuple[str, int, int]]:
    """(kind, first and last place) of each layer's gathered weights, and of each layer's gradients that are sent."""
    place = {n: i for i, n in enumerate(nodes)}
    for node in nodes:
        if is_region_gather(node) and node.meta[VAL].numel() >= LAYER:
            last, todo = place[node], [*node.users]
            while todo:
                user = todo.pop()
                last = max(last, place[user])
                todo += user.users if is_wait(user) or shows_operand(user) else []
            yield "weights", place[node], last
        elif node.target is SCATTER:
            (wait,) = node.users
            sent: Any = node.args[0]
            while shows_operand(sent):
                sent = sent.args[0]
            if sent.meta[VAL].numel() >= LAYER:
                yield "gradients", place[sent], place[wait]


def most_at_once(nodes: list[fx.Node], kind: str) -> int:
    spans = [(first, last) for k, first, last in lives(nodes) if k == kind]
    return max((sum(a <= i <= b for a, b in spans) for i, _ in spans), default=0)


@pytest.mark.parametrize(("form", "copies"), [("fsdp", 1), ("fsdp", 2), ("zero1", 1)])
def test_two_layers_of_weights_and_one_of_gradients_are_whole(form: str, copies: int) -> None:
    nodes = backward(compiled(5, form, copies))
    assert most_at_once(nodes, "weights") == (2 if form == "fsdp" else 0)
    assert sum(kind == "gradients" for kind, *_ in lives(nodes)) == 5
    assert most_at_once(nodes, "gradients") == 1


def test_a_layers_gradients_are_sent_while_the_next_ones_are_made() -> None:
    """Of shards that have copies too: the sum over copies does not make the products wait."""
    for copies in (1, 2):
        nodes = backward(compiled(5, "fsdp", copies))
        for kind, first, last in lives(nodes):
            later = [n for n in nodes[last:] if "grouped_mm_weight" in str(n.target)]
            if kind == "gradients" and later:
                assert any("grouped_mm_weight" in str(n.target) for n in nodes[first:last])


def test_the_peak_grows_by_what_a_layer_keeps_and_its_shards_alone() -> None:
    """Of more layers no more are whole, in forward and backward."""
    few, many = (compiled(layers, "fsdp").memory("none") for layers in (3, 5))
    layer = RANKS * (many.parameters - few.parameters) // 2

    def more(part: str) -> int:
        return int(getattr(many, part).peak - getattr(few, part).peak)

    assert layer > 16 * (many.saved - few.saved) // 2
    assert more("forward") <= many.saved - few.saved + layer // 8
    assert more("backward") <= many.saved - few.saved + many.gradients - few.gradients + layer // 8
    assert whole_layers(few, layer) < 5.5


def whole_layers(memory: Memory, layer: int) -> float:
    """Of the peak beyond shards of gradients and what is kept, in whole layers: two of weights, one of gradients that are
    sent, one that is made."""
    assert memory.backward is not None
    return (memory.backward.peak - memory.saved - memory.gradients) / layer
