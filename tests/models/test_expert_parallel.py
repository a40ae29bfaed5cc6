"""Expert parallelism of Hugging Face mixtures, asked for by an override, against eager at fp64.

Covers: passes/join_experts.py on graphs of whole models.
"""

from __future__ import annotations

import catalogue
import pytest
from eager import eager
from harness import RTOL, Case, errors
from matrix import captured

EXPERTS = {"*.experts.gate_up_proj": "expert", "*.experts.down_proj": "expert"}


@pytest.mark.parametrize(
    ("name", "t"),
    [
        ("Mixtral", 2),
        pytest.param("Mixtral", 3, marks=pytest.mark.slow),
        pytest.param("Mixtral", 4, marks=pytest.mark.slow),
        pytest.param("Qwen2-MoE", 3, marks=pytest.mark.slow),
        pytest.param("DeepSeek-V3", 4, marks=pytest.mark.slow),
    ],
)
def test_whole_experts_on_each_rank(name: str, t: int) -> None:
    """5 or 6 experts: some ranks have fewer than others. Router losses are those of all tokens."""
    row = catalogue.rows()[name]
    model = row.build(attention="sdpa")
    call = row.inputs(model)
    case = Case(model, None, captured(model, call, True))
    compiled = case.compile(t, overrides=EXPERTS)
    params = compiled.plan.params
    experts = {p: s for p, s in params.items() if ".experts." in p and "shared" not in p}
    assert len(experts) >= 2 and all(s.tag == "S0" for s in experts.values())
    assert any(
        n.target.__name__ == "grouped_mlp.default" for n in compiled.program.graph.nodes if n.op == "call_function"
    )
    off = errors(case.run(compiled, call), eager(model, case.program, call))
    worst = max(off, key=lambda n: off[n])
    assert off[worst] <= RTOL, f"{worst} is off by {off[worst]:.1e}"
