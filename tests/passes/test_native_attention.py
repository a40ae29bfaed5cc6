"""Covers: passes/fuse/native_attention.py."""

import harness
import pytest
import torch

from megafx.errors import ConfigError

aten = torch.ops.aten


@pytest.fixture(scope="module")
def case():
    return harness.Case.of("gpt2", dropout=0.1)


def targets(compiled):
    return [str(n.target) for n in compiled.program.graph.nodes]


def test_the_librarys_kernels_draw(case):
    compiled = case.compile(1, attention_dropout_rng="native")
    assert not any("megafx.attention" in t for t in targets(compiled))
    assert any("megafx.attention_forward" in t for t in targets(case.compile(1)))
    assert any("bits depend on the process" in str(n) for n in compiled.program.notes)
    inputs = case.inputs(2, 16)
    torch.manual_seed(0)
    first, again = (case.run(compiled, inputs) for _ in range(2))
    loss = harness.loss_name(case.program)
    assert not torch.equal(first.outputs[loss], again.outputs[loss])
    torch.manual_seed(0)
    harness.assert_equal(case.run(compiled, inputs), first)


def test_more_ranks_are_refused(case):
    with pytest.raises(ConfigError, match="each would draw masks of its own"):
        case.compile(2, attention_dropout_rng="native")


def test_without_dropout_nothing_changes():
    case = harness.Case.of("gpt2")
    assert targets(case.compile(1, attention_dropout_rng="native")) == targets(case.compile(1))
