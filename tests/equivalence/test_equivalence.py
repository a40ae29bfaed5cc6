"""t ranks compute what one computes: loss, every output and every gradient at fp64, rtol 1e-10.

Covers the whole pipeline on five models at t = 2, 3, 4, with and without sequence parallelism, with sizes that do not divide
(4 heads, 2 KV heads, vocab 67, ffn 50, odd sequences), dropout off against autograd, dropout on against megafx at t = 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import harness
import pytest

MODELS = ("nanogpt", "gpt2", "llama", "bert", "t5")


SIZES = ((2, 16), (3, 13))  # batch and sequence: one graph serves both, and 13 divides by none of the degrees


@cache
def _case(name: str, dropout: float) -> Any:
    return harness.Case.of(name, dropout=dropout)


@cache
def _reference(name: str, batch: int, seq: int) -> Any:
    case = _case(name, 0.0)
    return case.reference(case.inputs(batch, seq))


@cache
def _alone(name: str) -> Any:
    """One rank with dropout."""
    case = _case(name, 0.1)
    return case.run(case.compile(1), case.inputs(*SIZES[1]))


def each() -> Iterator[Any]:
    """(name, t, sequence_parallel): all; every model at three of the six, the others marked slow."""
    for i, name in enumerate(MODELS):
        for t, sp in itertools.product((2, 3, 4), (False, True)):
            yield pytest.param(name, t, sp, marks=pytest.mark.slow if (i + t + sp) % 2 else ())


@pytest.mark.parametrize(("name", "t", "sequence_parallel"), list(each()))
def test_sharded_equals_one_process(name: str, t: int, sequence_parallel: bool) -> None:
    case = _case(name, 0.0)
    compiled = case.compile(t, sequence_parallel=sequence_parallel)
    assert any(p.is_shard for p in compiled.plan.params.values())
    for batch, seq in SIZES:
        harness.assert_equal(case.run(compiled, case.inputs(batch, seq)), _reference(name, batch, seq))


@pytest.mark.parametrize(
    ("name", "t", "sequence_parallel"),
    [
        ("nanogpt", 2, False),
        ("nanogpt", 3, True),
        ("gpt2", 4, True),
        ("llama", 3, False),
        ("bert", 2, True),
        ("bert", 3, False),
        ("t5", 2, True),
    ],
)
def test_dropout_draws_the_same_masks_at_any_degree(name: str, t: int, sequence_parallel: bool) -> None:
    case, alone = _case(name, 0.1), _alone(name)
    harness.assert_equal(case.run(case.compile(t, sequence_parallel=sequence_parallel), case.inputs(*SIZES[1])), alone)
    loss = harness.loss_name(case.program)
    assert abs(float(alone.outputs[loss]) - float(_reference(name, *SIZES[1]).outputs[loss])) > 1e-6, "nothing dropped"


@pytest.mark.parametrize(
    ("name", "t", "options"),
    [
        ("nanogpt", 4, {"heads": 25, "embd": 50, "vocab": 257}),  # 25 heads on 4 ranks: 7, 7, 7, 4
        ("nanogpt", 4, {"heads": 2}),  # more ranks than heads
        ("nanogpt", 3, {"vocab": 50257}),  # GPT-2's vocabulary: 16753, 16753, 16751
        ("llama", 4, {"heads": 8, "kv": 2}),  # fewer KV heads than ranks
        ("llama", 3, {"heads": 6, "kv": 1, "attn": "eager"}),  # one KV head
        ("llama", 2, {"layers": 3}),
        ("gpt2", 2, {"attn": "eager"}),
    ],
)
def test_awkward_shapes(name: str, t: int, options: dict[str, Any]) -> None:
    case = harness.Case.of(name, **options)
    inputs = case.inputs(2, 11)
    wanted = case.reference(inputs)
    for sequence_parallel in (False, True):
        compiled = case.compile(t, sequence_parallel=sequence_parallel)
        harness.assert_equal(case.run(compiled, inputs), wanted)


def test_as_written_the_models_own_casts_to_fp32_are_kept() -> None:
    """Without promoting casts, the sharded model equals eager to fp32 rounding."""
    import megafx

    model, inputs = harness.zoo.build("llama")
    config = megafx.Config(tensor_model_parallel_size=2)
    verdict = megafx.verify(model, config, example_inputs=inputs(2, 13), tolerance=1e-6)
    assert verdict.ok, str(verdict)
