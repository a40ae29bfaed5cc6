"""Expert parallelism of Hugging Face mixtures, asked for by an override, against eager at fp64.

Covers: passes/experts/join_experts.py on graphs of whole models.
"""

from __future__ import annotations

import catalogue
import pytest
from eager import eager
from harness import RTOL, Case, errors
from matrix import captured

EXPERTS = {"*.experts.gate_up_proj": "expert", "*.experts.down_proj": "expert"}
ALL = {"*.experts": "expert"}


@pytest.mark.parametrize(
    ("name", "t", "overrides", "sequence_parallel"),
    [
        ("Mixtral", 2, EXPERTS, "auto"),
        pytest.param("Mixtral", 3, EXPERTS, "auto", marks=pytest.mark.slow),
        pytest.param("Mixtral", 4, EXPERTS, "auto", marks=pytest.mark.slow),
        pytest.param("Qwen2-MoE", 3, EXPERTS, "auto", marks=pytest.mark.slow),
        pytest.param("DeepSeek-V3", 4, EXPERTS, "auto", marks=pytest.mark.slow),
        ("GPT-OSS", 3, ALL, "auto"),
        pytest.param("GPT-OSS", 2, EXPERTS, False, marks=pytest.mark.slow),
        pytest.param("GPT-OSS", 3, EXPERTS, False, marks=pytest.mark.slow),
        pytest.param("GPT-OSS", 4, ALL, "auto", marks=pytest.mark.slow),
        pytest.param("GPT-OSS", 4, {}, False, marks=pytest.mark.slow),
    ],
)
def test_whole_experts_on_each_rank(
    name: str, t: int, overrides: dict[str, str], sequence_parallel: bool | str
) -> None:
    """5 or 6 experts: some ranks have fewer than others. Router losses are those of all tokens. Biases are split too, named
    or not; experts whose gate and up alternate are split without being asked for."""
    check(name, t, overrides, sequence_parallel)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "t"), [("GPT-OSS", 3), ("Mixtral", 2)])
def test_weights_looked_up_for_each_row(name: str, t: int) -> None:
    """The form in which transformers generates on GPUs."""
    check(name, t, ALL, "auto", experts="batched_mm")


def check(
    name: str, t: int, overrides: dict[str, str], sequence_parallel: bool | str, experts: str | None = None
) -> None:
    row = catalogue.rows()[name]
    model = row.build(attention=row.attention[-1])
    if experts is not None:
        model.config._experts_implementation = experts
    call = row.inputs(model)
    case = Case(model, None, captured(model, call, True))
    compiled = case.compile(t, overrides=overrides, sequence_parallel=sequence_parallel)
    params = compiled.plan.params
    stacks = {p: s for p, s in params.items() if ".experts." in p and "shared" not in p}
    assert len(stacks) >= (4 if name == "GPT-OSS" else 2) and all(s.tag == "S0" for s in stacks.values())
    assert any(
        n.target.__name__ == "grouped_mlp.default" for n in compiled.program.graph.nodes if n.op == "call_function"
    )
    off = errors(case.run(compiled, call), eager(model, case.program, call))
    worst = max(off, key=lambda n: off[n])
    assert off[worst] <= RTOL, f"{worst} is off by {off[worst]:.1e}"
