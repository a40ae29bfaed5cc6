"""Hugging Face mixtures against eager at fp64: expert parallelism, asked for by an override; data and context parallelism.

Covers: passes/experts/join_experts.py and passes/experts/group_by_expert.py on graphs of whole models.
"""

from __future__ import annotations

from typing import Any

import catalogue
import pytest
import torch
import transformers
from eager import default_dtype, eager
from harness import RTOL, Case, errors
from matrix import captured
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers.integrations import moe

import megafx

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


class InDoubles(nn.Module):
    """Casts to fp32 are casts to fp64 within, as in the eager model that the cells above are compared with."""

    class _Casts(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            func = torch.Tensor.double if func is torch.Tensor.float else func
            promoted = lambda a: torch.float64 if a is torch.float32 else a
            return func(*tree_map(promoted, args), **tree_map(promoted, kwargs or {}))

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **call: Any) -> Any:
        with self._Casts():
            return self.model(**call)


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("OLMoE", {"dp": 2, "tp": 2}, {}),  # without a mask of padding
        pytest.param("Mixtral", {"dp": 2}, {}, marks=SLOW),
        pytest.param("Mixtral", {"dp": 2, "tp": 2}, {"data_parallel": "fsdp"}, marks=SLOW),
        pytest.param("Mixtral", {"cp": 2}, {}, marks=SLOW),
        pytest.param("Qwen3-MoE", {"dp": 2, "tp": 2}, {}, marks=SLOW),
        pytest.param("DeepSeek-V3", {"dp": 2}, {}, marks=SLOW),
        pytest.param("DeepSeek-V3", {"cp": 2}, {}, marks=SLOW),
        pytest.param("GPT-OSS", {"dp": 2, "tp": 2}, {}, marks=SLOW),
        pytest.param("GPT-OSS", {"cp": 2}, {}, marks=SLOW),
        pytest.param("OLMoE", {"cp": 2}, {}, marks=SLOW),
        ("OLMoE", {"dp": 2, "tp": 2}, {"expert_model_parallel_size": 2}),
        pytest.param("Mixtral", {"dp": 4}, {"expert_model_parallel_size": 4, "data_parallel": "fsdp"}, marks=SLOW),
        pytest.param("Qwen3-MoE", {"dp": 3, "tp": 2}, {"expert_model_parallel_size": 3}, marks=SLOW),
        pytest.param("DeepSeek-V3", {"dp": 4}, {"expert_model_parallel_size": 2}, marks=SLOW),
        pytest.param("GPT-OSS", {"dp": 2, "tp": 2}, {"expert_model_parallel_size": 2}, marks=SLOW),
        pytest.param("GPT-OSS", {"dp": 2, "cp": 2}, {"expert_model_parallel_size": 2}, marks=SLOW),
    ],
)
def test_ranks_that_share_out_batch_or_sequence(
    name: str, mesh: dict[str, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Router losses, of which each token is part, too. Each rank groups its own rows by expert."""
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *operands: False)  # it has no fp64 kernel
    if name == "OLMoE":
        model, call = olmoe(), {"input_ids": torch.randint(61, (4, 13), generator=torch.Generator().manual_seed(0))}
        call["labels"] = call["input_ids"]
    else:
        row = catalogue.rows()[name]
        model = row.build(attention=row.attention[-1])
        rows = 2 * mesh.get("dp", 2)  # at least two for each rank
        call = {k: torch.cat([v, v, v])[:rows] for k, v in row.inputs(model).items()}
    with default_dtype(torch.float64):
        verdict = megafx.verify(
            InDoubles(model), megafx.Config(**options), example_inputs=call, mesh=mesh, tolerance=RTOL
        )
    assert verdict, str(verdict)


def olmoe() -> nn.Module:
    config = transformers.OlmoeConfig(
        vocab_size=61, hidden_size=24, intermediate_size=14, num_hidden_layers=1, num_attention_heads=4, num_experts=5,
        num_key_value_heads=2, num_experts_per_tok=2, output_router_logits=True, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.OlmoeForCausalLM(config).double()
