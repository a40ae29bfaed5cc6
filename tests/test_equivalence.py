"""t ranks compute what one computes: loss, every output and every gradient at fp64, rtol 1e-10.

Covers the whole pipeline on five models at t = 2, 3, 4, with and without sequence parallelism, with sizes that do not divide
(4 heads, 2 KV heads, vocab 67, ffn 50, odd sequences), dropout off against autograd, dropout on against megafx at t = 1.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest


def _load(name: str) -> Any:
    if name not in sys.modules:
        path = Path(__file__).resolve().parent / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


harness = _load("harness")
MODELS = ("nanogpt", "gpt2", "llama", "bert", "t5")


@cache
def _case(name: str, dropout: float) -> Any:
    return harness.Case.of(name, dropout=dropout)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("t", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_sharded_equals_one_process(name: str, t: int, sequence_parallel: bool) -> None:
    case = _case(name, 0.0)
    compiled = case.compile(t, sequence_parallel=sequence_parallel)
    assert any(p.is_shard for p in compiled.plan.params.values())
    for batch, seq in ((2, 16), (3, 13)):  # one graph: no recapture, and 13 divides by none of the degrees
        inputs = case.inputs(batch, seq)
        harness.assert_equal(case.run(compiled, inputs), case.reference(inputs))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("name", "t"), [("nanogpt", 2), ("nanogpt", 3), ("gpt2", 4), ("llama", 3), ("bert", 2), ("t5", 2)]
)
def test_dropout_draws_the_same_masks_at_any_degree(name: str, t: int, sequence_parallel: bool) -> None:
    case = _case(name, 0.1)
    inputs = case.inputs(2, 13)
    alone = case.run(case.compile(1), inputs)
    together = case.run(case.compile(t, sequence_parallel=sequence_parallel), inputs)
    harness.assert_equal(together, alone)
    without = _case(name, 0.0).reference(inputs)
    loss = harness.loss_name(case.program)
    assert abs(float(alone.outputs[loss]) - float(without.outputs[loss])) > 1e-6, "dropout did nothing"


@pytest.mark.parametrize(
    ("name", "t", "options"),
    [
        ("nanogpt", 4, {"heads": 25, "embd": 50}),  # 25 heads on 4 ranks: 7, 7, 7, 4
        ("llama", 4, {"heads": 8, "kv": 2}),  # fewer KV heads than ranks
        ("llama", 4, {"heads": 6, "kv": 1}),  # one KV head
        ("nanogpt", 3, {"vocab": 257}),
        ("nanogpt", 4, {"heads": 2}),  # more ranks than heads
        ("gpt2", 2, {"attn": "eager"}),
        ("llama", 3, {"attn": "eager"}),
        ("llama", 2, {"layers": 3}),
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

    for name in ("llama", "gpt2"):
        model, inputs = harness.zoo.build(name)
        verdict = megafx.verify(
            model, megafx.Config(tensor_model_parallel_size=2), example_inputs=inputs(2, 13), tolerance=1e-6
        )
        assert verdict.ok, str(verdict)
