"""Overrides are honoured, right, and never silently ignored."""

from __future__ import annotations

from functools import cache
from typing import Any

import harness
import pytest

from megafx.config import Config
from megafx.errors import PlanError
from megafx.passes.canonicalize.canonicalize import canonicalize_program
from megafx.passes.plan.insert_transitions import insert_transitions
from megafx.passes.plan.plan_sharding import plan_sharding
from megafx.planner.overrides import Overrides
from megafx.planner.plan import Plan
from megafx.report.describe import describe
from megafx.testing import make_context


@cache
def _case(name: str) -> Any:
    return harness.Case.of(name)


@cache
def _wanted(name: str) -> Any:
    return _case(name).reference(_case(name).inputs(2, 13))


def _style(plan: Plan, module: str) -> str:
    return next(r.style for r in plan.report.rows if r.fqn == module and r.weight)


@cache
def _canonical(name: str) -> Any:
    program = _case(name).program.copy()
    canonicalize_program(program)
    return program


def _planned(name: str, overrides: dict[str, str], t: int = 2, **config: Any) -> Plan:
    """The plan under these overrides, with its report."""
    program = _canonical(name).copy()
    context = make_context(t, Config(overrides=overrides, **config))
    plan_sharding(program, context)
    insert_transitions(program, context)
    context.solved.report = describe(program, context)
    return context.solved


BLOCK = "model.layers.0"
WHOLE = ["replicated", "on a shard of the sequence"]  # styles of a linear whose weight is whole


@pytest.mark.parametrize(
    ("pattern", "style", "module", "found"),
    [
        ("*.up_proj", "rowwise", f"{BLOCK}.mlp.up_proj", "row-parallel"),
        ("*.down_proj", "colwise", f"{BLOCK}.mlp.down_proj", "column-parallel"),
        (f"{BLOCK}.self_attn.q_proj.weight", "colwise", f"{BLOCK}.self_attn.q_proj", "column-parallel"),
        ("lm_head", "replicate", "lm_head", "whole"),
        ("model.embed_tokens", "RowwiseParallel", "model.embed_tokens", "vocab-parallel"),
        ("model.embed_tokens", "colwise", "model.embed_tokens", "hidden-parallel"),
        (f"{BLOCK}.mlp", "sequence", f"{BLOCK}.mlp.down_proj", "on a shard of the sequence"),
    ],
)
def test_styles_are_honoured(pattern: str, style: str, module: str, found: str) -> None:
    for sequence_parallel in (False, True):
        plan = _planned("llama", {pattern: style}, sequence_parallel=sequence_parallel)
        assert _style(plan, module) in (WHOLE if found == "whole" else [found])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_they_make_is_right(sequence_parallel: bool) -> None:
    """Every projection against Megatron's habit, and a module that runs on the sequence."""
    case = _case("llama")
    overrides = {
        "*.up_proj": "rowwise",
        "*.down_proj": "colwise",
        "*.v_proj": "replicate",
        "model.embed_tokens": "colwise",
        f"{BLOCK}.input_layernorm": "sequence",
        "lm_head": "replicate",
    }
    compiled = case.compile(2, overrides=overrides, sequence_parallel=sequence_parallel)
    harness.assert_equal(case.run(compiled, case.inputs(2, 13)), _wanted("llama"))


def test_an_override_changes_the_plan() -> None:
    plain = _planned("llama", {}, sequence_parallel=False)
    assert _style(plain, f"{BLOCK}.mlp.up_proj") == "column-parallel"
    assert not any(r.reason.startswith("override") for r in plain.removals)
    overridden = _planned("llama", {"*.up_proj": "rowwise"}, sequence_parallel=False)
    assert plain.diff(overridden)
    reasons = {r.reason for r in overridden.removals if r.fqn == f"{BLOCK}.mlp.up_proj"}
    assert f"override: {BLOCK}.mlp.up_proj.weight is rowwise" in reasons


def test_a_norm_on_the_sequence_without_sequence_parallelism() -> None:
    """Only the named module leaves the residual stream's placement."""
    plan = _planned("llama", {f"{BLOCK}.input_layernorm": "sequence"}, sequence_parallel=False)
    on_sequence = {o.fqn for o in plan.ops.values() if o.out.is_shard and o.fqn.endswith("layernorm")}
    assert on_sequence == {f"{BLOCK}.input_layernorm"}


def test_a_tied_weight_follows_the_module_that_is_named() -> None:
    """The head's weight is the embedding's: both on the vocabulary, whichever of the two is named."""
    for overrides in ({"lm_head": "colwise"}, {"wte": "rowwise"}):
        plan = _planned("nanogpt", overrides, sequence_parallel=False)
        assert plan.params["wte.weight"].dim == 0
        assert _style(plan, "lm_head") == "column-parallel"
    replicated = _planned("nanogpt", {"lm_head": "replicate"}, sequence_parallel=False)
    assert not replicated.params["wte.weight"].is_shard


def test_the_last_matching_pattern_holds() -> None:
    plan = _planned("llama", {"model.layers.*": "replicate", "*.gate_proj": "colwise", "*.up_proj": "colwise"})
    sharded = {n for n, p in plan.params.items() if p.is_shard and ".layers." in n}
    assert sharded == {f"{BLOCK}.mlp.gate_proj.weight", f"{BLOCK}.mlp.up_proj.weight"}


def test_one_rank_follows_every_style() -> None:
    plan = _planned("llama", {"*.up_proj": "rowwise", "model.norm": "sequence"}, t=1)
    assert not any(p.is_shard for p in plan.params.values())


def _refusal(name: str, overrides: dict[str, str], **config: Any) -> str:
    with pytest.raises(PlanError) as raised:
        _planned(name, overrides, **config)
    return str(raised.value)


def test_a_pattern_that_matches_nothing() -> None:
    assert _refusal("llama", {"model.layers.*.mlp.up_prj": "colwise"}) == (
        "override 'model.layers.*.mlp.up_prj' matches no parameter and no module of the model\n"
        "  fix: did you mean model.layers.0.mlp.up_proj, model.layers.0.mlp.gate_proj, model.layers.0.mlp.down_proj?"
    )
    with pytest.raises(PlanError, match="matches no parameter"):
        _planned("llama", {"nothing": "colwise"}, t=1)


def test_a_style_that_nothing_can_follow() -> None:
    assert _refusal("llama", {"model.norm": "colwise"}) == (
        "override 'model.norm' is colwise, but nothing that it matches can be colwise: "
        "it matches model.norm, model.norm.weight\n"
        "  fix: colwise and rowwise are for weights of linears and embeddings, expert for stacks of experts' weights "
        "and lists of experts, sequence for modules whose values have a sequence dim"
    )


def test_styles_that_contradict_each_other() -> None:
    """One tied weight cannot be cut on both dims, and weights are never gathered."""
    text = _refusal("nanogpt", {"wte": "colwise", "lm_head": "colwise"}, sequence_parallel=False)
    assert text.startswith("no plan satisfies every policy and override: the conflict is among ")
    assert "wte_weight" in text.splitlines()[0]


def test_an_op_that_cannot_be_cut_as_asked() -> None:
    """A parameter is no module: its ops are not those of a region."""
    text = _refusal("llama", {f"{BLOCK}.self_attn.q_proj.weight": "sequence"})
    assert text.startswith(
        f"override '{BLOCK}.self_attn.q_proj.weight' is sequence, but nothing that it matches can be on a "
    )


def test_filters_leave_domains_alone_without_overrides() -> None:
    program = _case("llama").program
    overrides = Overrides(program, {}, set(), 2)
    domain: list[Any] = [object()]
    node = next(iter(program.graph.nodes))
    assert overrides.filter_op(node, None, domain, bool) == (domain, {})  # type: ignore[arg-type]
    assert overrides.filter_parameter(program.inputs[0], domain) == (domain, {})
    overrides.check_used()
