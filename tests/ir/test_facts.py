"""Covers: ir/facts.py, and that the facts of megafx's own ops are complete."""

import pytest
import torch

import megafx  # noqa: F401  defines the ops
from megafx.ir import facts
from megafx.ir.facts import OpFacts, declare, declared, facts_of

FUSED = {op: known for op, known in declared().items() if op.startswith("megafx.")}


def test_facts_add_up(monkeypatch):
    monkeypatch.setattr(facts, "_facts", {})
    assert facts_of("tests.none.default") == OpFacts()
    declare("tests.none.default", rule="lin: ... -> ...")
    declare("tests.none.default", cost=facts.FREE)
    assert facts_of("tests.none.default") == OpFacts(rule="lin: ... -> ...", cost=facts.FREE)
    with pytest.raises(TypeError, match="colour"):
        declare("tests.none.default", colour="red")


def test_an_op_is_found_by_its_overload():
    assert facts_of(torch.ops.aten.addmm.default).inplace == (0, torch.ops.aten.addmm_.default)
    assert facts_of(len) == OpFacts()


def test_every_rule_has_samples_to_try_it_on():
    assert not {op for op, known in FUSED.items() if known.rule and not known.samples}


@pytest.mark.parametrize("op", sorted(op for op, known in FUSED.items() if known.inplace))
def test_the_form_in_place_writes_over_its_operand(op):
    at, writing = FUSED[op].inplace
    plain = getattr(torch.ops.megafx, op.split(".")[1]).default
    assert [a.name for a in writing._schema.arguments] == [a.name for a in plain._schema.arguments]
    assert [i for i, a in enumerate(writing._schema.arguments) if a.alias_info is not None] == [at]
    assert writing._schema.is_mutable and not plain._schema.is_mutable


def test_what_a_gradient_makes_again_is_an_op():
    for known in FUSED.values():
        if known.recompute:
            assert facts_of(f"megafx.{known.recompute}.default").rule
