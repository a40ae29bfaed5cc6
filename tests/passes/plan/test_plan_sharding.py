"""The planner finds Megatron's tensor- and sequence-parallel layouts, by rules, costs and policies alone.

Models at the widths of published ones, two layers deep, on the meta device (real_sizes.py), bf16, 8 ranks. Counts are
Megatron's: 2L + 1 pairs of activation collectives each way for decoders, 12 for T5, 5 for BERT.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
import real_sizes
import torch
from torch import nn

import megafx
from megafx.errors import PlanError
from megafx.ir.program import PLACEMENT, VAL, Program
from megafx.passes.plan.insert_transitions import insert_transitions
from megafx.passes.plan.plan_sharding import plan_sharding
from megafx.placements.types import I, Layout, S
from megafx.planner.context import CompileContext
from megafx.planner.plan import Plan
from megafx.planner.policy import WEIGHTS_STAY
from megafx.report.describe import describe
from megafx.report.report import Report

T = 8
COLUMN, ROW, VOCAB, HIDDEN = "column-parallel", "row-parallel", "vocab-parallel", "hidden-parallel"

# The style of each op with a weight: {end of its module path: style}
STYLES = {
    "nanogpt": {"wte": VOCAB, "wpe": VOCAB, "attn.qkv": COLUMN, "attn.proj": ROW, "mlp.fc": COLUMN, "mlp.proj": ROW,
                "lm_head": COLUMN},
    "gpt2": {"wte": VOCAB, "wpe": VOCAB, "c_attn": COLUMN, "attn.c_proj": ROW, "mlp.c_fc": COLUMN, "mlp.c_proj": ROW,
             "lm_head": COLUMN},
    "llama": {"embed_tokens": VOCAB, "q_proj": COLUMN, "k_proj": COLUMN, "v_proj": COLUMN, "o_proj": ROW,
              "gate_proj": COLUMN, "up_proj": COLUMN, "down_proj": ROW, "lm_head": COLUMN},
    "bert": {"word_embeddings": VOCAB, "token_type_embeddings": VOCAB, "position_embeddings": VOCAB, "self.query": COLUMN,
             "self.key": COLUMN, "self.value": COLUMN, "attention.output.dense": ROW, "intermediate.dense": COLUMN,
             "output.dense": ROW, "decoder": COLUMN},
    "t5": {"embed_tokens": VOCAB, ".q": COLUMN, ".k": COLUMN, ".v": COLUMN, ".o": ROW, "wi": COLUMN, "wo": ROW,
           "relative_attention_bias": HIDDEN, "lm_head": COLUMN},
}  # fmt: skip
PAIRS = {"nanogpt": 5, "gpt2": 5, "llama": 5, "bert": 5, "t5": 12}  # 2 layers
WEIGHTED = {"nanogpt": 11, "gpt2": 11, "llama": 16, "bert": 17, "t5": 37}  # ops with a weight matrix
# Replicated parameters used on sequence shards, whose gradients are summed over ranks: norms' weights and biases, and of
# BERT the MLM head's dense layer (whose result is normalised, so it stays whole).
SUMMED = {"nanogpt": 10, "gpt2": 10, "llama": 5, "bert": 14, "t5": 12}
RANK0_BIASES = {"nanogpt": 4, "gpt2": 4, "llama": 0, "bert": 4, "t5": 0}  # of row-parallel linears
DENSE_HEAD = {False: "replicated", True: "on a shard of the sequence"}  # BERT's MLM transform


NAMES = [pytest.param(n, marks=() if n in ("nanogpt", "llama") else pytest.mark.slow) for n in STYLES]


@cache
def _placed(name: str, sequence_parallel: bool | str) -> tuple[Program, CompileContext, Report]:
    program, context = real_sizes.planned(name, T, sequence_parallel=sequence_parallel)
    insert_transitions(program, context)
    return program, context, describe(program, context)


def _plan(name: str, sequence_parallel: bool | str) -> Plan:
    return _placed(name, sequence_parallel)[1].solved


def _transitions(program: Program, *, of_parameters: bool) -> Counter[str]:
    """'P->I' etc.: how many transitions of parameters, or of computed values that have a placement."""
    counts: Counter[str] = Counter()
    for node in program.graph.nodes:
        if str(node.target) != "megafx.transition.default" or PLACEMENT not in node.args[0].meta:
            continue
        if (node.args[0].op == "placeholder") == of_parameters:
            counts[f"{node.args[1][0]}->{node.args[2][0]}"] += 1
    return counts


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", list(STYLES))
def test_styles_of_all_weights(name: str, sequence_parallel: bool) -> None:
    report = _placed(name, sequence_parallel)[2]
    weighted = [r for r in report.rows if r.weight and r.op in ("linear", "embedding")]
    assert len(weighted) == WEIGHTED[name]
    for row in weighted:
        wanted = [style for end, style in STYLES[name].items() if row.fqn.endswith(end)]
        if row.fqn == "cls.predictions.transform.dense":
            wanted = [DENSE_HEAD[sequence_parallel]]
        assert wanted, f"{row.fqn} is not in the test's table"
        assert row.style == wanted[0], f"{row.fqn} is {row.style}"


@pytest.mark.parametrize("name", NAMES)
def test_tensor_parallel_collectives(name: str) -> None:
    """Megatron's f before each column-parallel region, g after each row-parallel linear, nothing else."""
    program = _placed(name, False)[0]
    assert _transitions(program, of_parameters=False) == {"I->R": PAIRS[name], "P->I": PAIRS[name]}
    assert _transitions(program, of_parameters=True) == Counter({"I->P": RANK0_BIASES[name]})


@pytest.mark.parametrize("name", NAMES)
def test_sequence_parallel_collectives(name: str) -> None:
    """One gather before each column-parallel region (shared by q, k and v), one reduce-scatter after each row-parallel."""
    program, context, _ = _placed(name, True)
    assert context.solved.sequence_parallel
    assert _transitions(program, of_parameters=False) == {"S->R": PAIRS[name], "P->S": PAIRS[name]}
    assert _transitions(program, of_parameters=True) == Counter({"I->R": SUMMED[name], "I->P": RANK0_BIASES[name]})


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_residual_stream_is_whole_or_on_the_sequence(name: str, sequence_parallel: bool) -> None:
    """Norms, dropouts and residual sums: invariant without sequence parallelism, a shard of dim 1 with it."""
    program, context, _ = _placed(name, sequence_parallel)
    ids = next(n for n, spec in program.input_nodes() if spec.kind == "user")
    batch = program.sizes.shape(ids.meta[VAL])[0]
    hidden = {"nanogpt": 4096, "llama": 4096}.get(name, 1024)
    seen = 0
    for node in program.graph.nodes:
        where = node.meta.get(PLACEMENT)
        if node not in context.rules or where is None or where.kind == "P" or node.meta[VAL].ndim != 3:
            continue
        shape = program.sizes.shape(node.meta[VAL])
        if (
            shape[0] == batch
            and shape[2] == hidden
            and str(node.target).split(".")[1] in ("add", "layer_norm", "dropout")
        ):
            assert where == (S(1, Layout.contiguous(shape[1], T)) if sequence_parallel else I), node.format_node()
            seen += 1
    assert seen >= 4


def test_fused_qkv_is_cut_in_three_blocks_by_heads() -> None:
    plan = _plan("gpt2", False)
    wanted = Layout.of([(16, 64)] * 3, T)
    assert plan.params["transformer.h.0.attn.c_attn.weight"] == S(1, wanted)  # Conv1D stores [in, out]
    assert plan.params["transformer.h.0.attn.c_attn.bias"] == S(0, wanted)


def test_grouped_queries_are_cut_by_whole_groups() -> None:
    plan = _plan("llama", True)
    layer = "model.layers.1.self_attn"
    assert plan.params[f"{layer}.q_proj.weight"] == S(0, Layout.of([(32, 128)], T))
    assert plan.params[f"{layer}.k_proj.weight"] == S(0, Layout.of([(8, 128)], T))
    assert plan.params[f"{layer}.o_proj.weight"] == S(1, Layout.of([(32, 128)], T))
    assert plan.params["model.embed_tokens.weight"].dim == plan.params["lm_head.weight"].dim == 0


@pytest.mark.parametrize(("name", "chosen"), [("llama", True), ("nanogpt", True), ("bert", False)])
def test_auto_takes_the_cheaper_of_both(name: str, chosen: bool) -> None:
    """Wide models on long sequences run sequence-parallel; BERT at 512 tokens would pay latency for it."""
    auto, without, with_ = (_plan(name, sp) for sp in ("auto", False, True))
    assert auto.sequence_parallel is chosen
    assert auto.cost_us <= min(without.cost_us, with_.cost_us) * (1 + 1e-9)
    assert auto.params == (with_ if chosen else without).params


def test_layers_are_planned_alike() -> None:
    for name in ("llama", "t5"):
        params = _plan(name, True).params
        for fqn, placement in params.items():
            other = re.sub(r"(layers|block)\.0\.", r"\1.1.", fqn)
            assert params.get(other, placement) == placement


def test_the_same_graph_gives_the_same_plan() -> None:
    for name in ("llama", "bert"):
        first = _plan(name, "auto")
        again = real_sizes.planned(name, T, sequence_parallel="auto")[1].solved
        assert first.diff(again) == ""
        assert first.cost_us == again.cost_us


def test_reasons_of_what_is_stored_whole() -> None:
    gpt, llama, bert = (_plan(n, False).replicated for n in ("gpt2", "llama", "bert"))
    assert gpt["transformer.h.0.ln_1.weight"] == "the norm runs over the dim"
    assert gpt["transformer.h.1.mlp.c_proj.bias"] == "added once, on rank 0, to the partial result of a row-parallel op"
    normalised = "a norm normalises over this dim, so the activation keeps it whole"
    assert llama["model.norm.weight"] == normalised
    assert bert["cls.predictions.transform.dense.weight"] == normalised
    assert "model.layers.0.mlp.up_proj.weight" not in llama


def test_more_ranks_than_heads_falls_back_and_says_so() -> None:
    """BERT-large has 16 heads; on 32 ranks q, k and v are cut inside heads, gathered, or kept whole, and it still plans."""
    plan = real_sizes.planned("bert", 32, sequence_parallel=False)[1].solved
    assert plan.params["bert.encoder.layer.0.intermediate.dense.weight"].is_shard
    query = plan.params["bert.encoder.layer.0.attention.self.query.weight"]
    assert query.is_shard and query.cut.padded(32), "whole heads on 16 of the ranks, pads on the others"


def test_too_wide_a_graph_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a recurrence written as a loop: the plan is the exact one, or as cheap."""
    monkeypatch.setattr("megafx.planner.solver.LARGEST", 10)
    program, context = (
        real_sizes.program("nanogpt").copy(),
        real_sizes.context_of("nanogpt", T, sequence_parallel=False),
    )
    plan_sharding(program, context)
    exact = real_sizes.planned("nanogpt", T, sequence_parallel=False)[1].solved
    assert context.solved.cost_us == pytest.approx(exact.cost_us, rel=1e-3)
    (note,) = [n.message for n in program.notes if n.topic == "plan"]
    assert note.startswith("too many values depend on one another for all plans to be compared: the one found")


def test_where_a_search_finds_nothing_the_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megafx.planner.solver.LARGEST", 10)
    monkeypatch.setattr("megafx.planner.solver.search", lambda *_, **__: None)
    monkeypatch.setattr("megafx.planner.solver.SECONDS", 0.0)
    monkeypatch.setattr("megafx.planner.solver.PATIENCE", 0)
    program, context = (
        real_sizes.program("nanogpt").copy(),
        real_sizes.context_of("nanogpt", T, sequence_parallel=False),
    )
    with pytest.raises(PlanError, match="no plan was found in") as error:
        plan_sharding(program, context)
    assert error.value.module and error.value.source
    assert f'eager_modules=["{error.value.module}"]' in str(error.value)


def test_fixed_storage_is_kept() -> None:
    program, context = real_sizes.program("llama").copy(), real_sizes.context_of("llama", T, sequence_parallel=False)
    sharded = _plan("llama", False).params
    up, norm = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    context.fixed = {up: S(1, Layout.contiguous(4096, T)), norm: I}
    plan_sharding(program, context)  # a weight cut on the hidden dim, which a norm keeps whole
    assert context.solved.params[up] == context.fixed[up]
    assert [n.message for n in program.notes if n.topic == "policy"] == [
        f"{WEIGHTS_STAY}: not so at {up}, where no plan would be left"
    ]
    context.fixed = {name: p for name, p in sharded.items() if "layers.0" in name}
    plan_sharding(program, context)
    assert context.solved.params == sharded


def test_where_every_policy_has_given_way_there_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megafx.planner.policy.YIELDING", ())
    program, context = real_sizes.program("llama").copy(), real_sizes.context_of("llama", T, sequence_parallel=False)
    context.fixed = {"model.layers.0.mlp.up_proj.weight": S(1, Layout.contiguous(4096, T))}
    with pytest.raises(PlanError, match="no plan satisfies every policy and override: the conflict is among"):
        plan_sharding(program, context)


def test_free_policy_is_never_dearer() -> None:
    for name in ("gpt2", "llama"):
        _, context = real_sizes.planned(name, T, sequence_parallel="auto", planner_policy="free")
        assert context.solved.cost_us <= _plan(name, "auto").cost_us * (1 + 1e-9)
        assert not context.solved.removals


def test_a_given_plan_is_applied_as_it_is() -> None:
    program = real_sizes.program("gpt2").copy()
    context = real_sizes.context_of("gpt2", T, sequence_parallel=False)
    given = Plan.from_json(_plan("gpt2", True).to_json())  # another plan than this config would choose
    context.given = given
    plan_sharding(program, context)
    assert context.solved.diff(_plan("gpt2", True)) == ""
    assert insert_transitions(program, context) > 0
    assert _transitions(program, of_parameters=False) == {"S->R": 5, "P->S": 5}


def test_one_rank_communicates_nothing() -> None:
    program, context = real_sizes.planned("llama", 1, sequence_parallel=True, overrides={"lm_head": "colwise"})
    assert insert_transitions(program, context) == 0
    assert set(context.solved.params.values()) == {I}


def test_removals_are_reported_with_reasons() -> None:
    removed: Any = _placed("llama", False)[2].removed
    assert set(removed) == {
        "the batch is not sharded on the tensor-parallel axis",
        "sequence_parallel=False: the sequence is not sharded",
        "a norm normalises over this dim, so the activation keeps it whole",
        "a matmul weight is sharded where it can be",
    }


class _Stack(nn.Module):
    """Norms on a float input, whose second dim is as long as a table: a number in the graph, and of no input of token ids."""

    def __init__(self, normalised: tuple[int, ...]) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(12, 16))
        self.norm, self.up, self.down = nn.LayerNorm(normalised), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.positions
        return self.norm(x + self.down(torch.relu(self.up(self.norm(x))))).square().mean()


@pytest.mark.parametrize("wanted, said", [(True, 1), (False, 0), ("auto", 0)])
def test_sequence_parallelism_that_is_not_had_is_told(wanted: bool | str, said: int) -> None:
    config = megafx.Config(tensor_model_parallel_size=2, sequence_parallel=wanted, hardware="h100-nvlink")
    plan = megafx.plan(_Stack((12, 16)), config, example_inputs=(torch.zeros(3, 12, 16),))
    assert not plan.sequence_parallel
    notes = [n for n in megafx.explain(plan).notes if n.startswith("sequence parallel")]
    assert len(notes) == said
    for note in notes:
        assert "[norm]" in note and "sequence_parallel=True has no effect on aten.layer_norm.default and 1 more" in note
        assert "it normalises over more than the last dim of its input" in note


def test_a_sequence_of_fixed_length_is_cut_too() -> None:
    config = megafx.Config(tensor_model_parallel_size=2, sequence_parallel=True, hardware="h100-nvlink")
    plan = megafx.plan(_Stack((16,)), config, example_inputs=(torch.zeros(3, 12, 16),))
    assert plan.sequence_parallel and plan.flat_tokens
    report = megafx.explain(plan)
    assert report.header["tokens"] == "in one dim, so that gathers and scatters copy nothing"
    assert not [n for n in report.notes if n.startswith(("sequence parallel", "tokens"))]


def test_sequence_parallelism_that_is_had_is_no_note() -> None:
    assert not [n for n in _placed("nanogpt", True)[2].notes if n.startswith("sequence parallel")]
