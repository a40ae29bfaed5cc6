"""Covers: `megafx.search` over ranks that share out experts, and what their collectives cost."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from capacity_mixtures import Model as Capacity
from capacity_mixtures import a_call
from index_dispatch import HIDDEN
from listed_mixtures import Model as Listed

import megafx
from megafx.analysis.communication import collective_nodes
from megafx.analysis.prices import seconds
from megafx.api import _compiled
from megafx.example_call import ExampleCall
from megafx.ir.program import VAL
from megafx.placements.data_axis import EXPERT_GRADIENT_AXIS
from megafx.placements.types import ALL_REDUCE, payload
from megafx.planner.cost import library_seconds
from megafx.what_if import Candidate, SearchResult

CONFIG = megafx.Config(hardware="h100-nvlink", seq_length=4096, sequence_parallel=False)
QWEN: dict[str, Any] = {  # a layer of Qwen3-30B-A3B
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 8192, "intermediate_size": 6144,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {  # a layer of Mixtral 8x7B
    "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 8192,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip


def call_of(name: str) -> tuple[Any, Any]:
    made: Any = transformers.Qwen3MoeConfig if name == "qwen" else transformers.MixtralConfig
    config = made(num_hidden_layers=2, use_cache=False, **(QWEN if name == "qwen" else MIXTRAL))
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()
        ids = torch.zeros(2, 4096, dtype=torch.long)
    return model, ((), {"input_ids": ids, "labels": ids})


@cache
def found(name: str, gpus: int = 8, size: int = 1) -> SearchResult:
    model, call = call_of(name)
    options = CONFIG.replace(expert_model_parallel_size=size)
    return megafx.search(model, gpus, "78GiB", options, example_inputs=call, batches=(2,), shown=1000)


def every(tried: SearchResult) -> list[Candidate]:
    """Twins too."""
    return [c for row in tried.best for c in (row, *row.twins)]


def sizes(tried: SearchResult) -> set[tuple[int, int]]:
    return {(c.config.tensor_model_parallel_size or 1, c.config.expert_model_parallel_size) for c in every(tried)}


def test_experts_of_a_list_are_tried() -> None:
    model = Listed("one_hot_of_hugging_face", bias=False)
    tried = megafx.search(
        model, 2, "78GiB", CONFIG, example_inputs=(torch.randn(2, 5, HIDDEN),), batches=(2,), shown=100
    )
    assert (1, 2) in sizes(tried), str(tried)


def test_experts_with_a_capacity_are_tried() -> None:
    tried = megafx.search(Capacity().double(), 2, "78GiB", CONFIG, example_inputs=a_call(), batches=(4,), shown=100)
    assert (1, 2) in sizes(tried) and not tried.refused, str(tried)
    forms = {
        c.config.expert_model_parallel_size: c
        for c in every(tried)
        if c.config.tensor_model_parallel_size == 1 and c.config.data_parallel == "ddp"
    }
    experts = sum(8 * p.numel() for n, p in Capacity().named_parameters() if n in ("moe.up", "moe.down"))
    saved = forms[1].memory["parameters"] - forms[2].memory["parameters"]
    assert saved == pytest.approx(experts / 2, abs=4), "their biases are repeated, and whole on each rank"
    assert forms[2].parts["data-parallel collectives"] > 0


def test_ranks_that_share_out_experts_are_tried_and_win_where_experts_are_many_and_small() -> None:
    tried = found("qwen")
    assert sizes(tried) == {(8, 1), (4, 1), (4, 2), (2, 1), (2, 2), (2, 4), (1, 1), (1, 2), (1, 4), (1, 8)}
    best = tried.best[0]
    assert best.config.expert_model_parallel_size > 1 and not tried.refused
    assert f"8, ep={best.config.expert_model_parallel_size}" in str(tried)
    assert eval(best.text(), {"megafx": megafx}) == best.config


def test_experts_are_counted_once_in_a_group() -> None:
    """The model's parameters but for experts are whole on each rank with ddp, and an ep-th of the experts."""
    forms = {
        c.config.expert_model_parallel_size: c
        for c in every(found("qwen"))
        if c.config.tensor_model_parallel_size == 1 and c.config.data_parallel == "ddp"
    }
    experts = 2 * 2 * 128 * 3 * 2048 * 768  # bytes of two layers
    parameters = {size: c.memory["parameters"] for size, c in forms.items()}
    for size in (2, 4, 8):
        assert parameters[1] - parameters[size] == pytest.approx(experts * (1 - 1 / size), abs=4)
        assert forms[size].memory["AdamW's moments"] == pytest.approx(2 * parameters[size], abs=8)
    others = parameters[1] - experts
    assert forms[8].parts["data-parallel collectives"] < forms[1].parts["data-parallel collectives"]
    (sharded,) = [
        c for c in every(found("qwen"))
        if (c.config.tensor_model_parallel_size, c.config.expert_model_parallel_size, c.config.data_parallel) == (1, 2, "zero1")
    ]  # fmt: skip
    assert sharded.memory["gradients"] == pytest.approx(others / 8 + experts / 2 / 4, abs=16)


@pytest.mark.parametrize("t", [1, 2])
def test_a_layout_with_shared_experts_is_priced_as_its_plan(t: int) -> None:
    model, call = call_of("mixtral")
    options = CONFIG.replace(
        tensor_model_parallel_size=t, data_parallel_size=4 // t, expert_model_parallel_size=2, micro_batch_size=2
    )
    report = megafx.explain(megafx.plan(model, options, example_inputs=call))
    (same,) = [
        c for c in every(found("mixtral", 4, 2))
        if (c.config.tensor_model_parallel_size, c.config.data_parallel, c.config.sequence_parallel) == (t, "ddp", False)
    ]  # fmt: skip
    assert {c.config.expert_model_parallel_size for c in every(found("mixtral", 4, 2))} == {2}
    step, costed = report.step, report.costed
    exchanged = [n.move for n in costed.nodes if n.move is not None and n.move.axis == "ep"]
    assert exchanged and all(m.forward_bytes and m.forward_bytes == m.backward_bytes for m in exchanged)
    tokens = exchanged[0].forward_bytes
    chosen = 2 * (1 - (1 - 1 / 2) ** 2)  # ranks that a token with two choices goes to, of two
    assert tokens == pytest.approx(2 * 4096 * 2 * 4096 * chosen / 2, rel=0.01), "bf16 rows of 4096, half of them leave"
    assert same.parts["computing"] + same.parts["the optimizer"] == pytest.approx(step.compute_us + step.host_us)
    assert same.memory["parameters"] == pytest.approx(costed.memory["parameters"], abs=2)
    assert same.parts["data-parallel collectives"] >= step.exposed_by_axis["ep"]


def test_gradients_of_experts_are_priced_by_the_ranks_that_have_the_same_ones() -> None:
    """Four data-parallel ranks, of which two have the same experts, two ranks apart."""
    model, call = call_of("qwen")
    options = CONFIG.replace(tensor_model_parallel_size=1, data_parallel_size=4, expert_model_parallel_size=2)
    compiled = _compiled(ExampleCall.of(model, options, call, None, runs=False))
    program, hardware = compiled.program, compiled.context.hardware
    sums = [n for n in collective_nodes(program.graph) if n.args[-1] == EXPERT_GRADIENT_AXIS]
    assert sums
    for node in sums:
        sent = payload(ALL_REDUCE, node.meta[VAL].numel(), 2) * node.meta[VAL].element_size()
        assert seconds(program, node, hardware, 1) == library_seconds(ALL_REDUCE, sent, hardware, 2, 2)
