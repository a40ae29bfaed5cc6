"""Every option of examples/models/transformer.py and moe.py, sharded over 2, 3 and 4 ranks, against one process at fp64.

Without the slow ones, every second option at one number of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import zoo
from harness import Case, assert_equal
from torch.nn import functional as F

import megafx
from megafx.capture.export import capture_call

sys.path.append(str(zoo.EXAMPLES))

SMALL: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "ffn_hidden_size": 50,
}
DENSE: dict[str, dict[str, Any]] = {
    "plain": {},
    "post-norm residual": {"apply_residual_connection_post_layernorm": True},
    "fp32 residual": {"fp32_residual_connection": True},
    "zero-centred gamma": {"layernorm_zero_centered_gamma": True},
    "RMSNorm": {"normalization": "RMSNorm", "layernorm_epsilon": 1e-6},
    "RMSNorm, zero-centred gamma": {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": True},
    "no biases": {"add_bias_linear": False},
    "biases of q, k, v alone": {"add_bias_linear": False, "add_qkv_bias": True},
    "SwiGLU": {"gated_linear_unit": True, "activation_func": F.silu},
    "GeGLU without bias": {"gated_linear_unit": True, "add_bias_linear": False},
    "ReLU": {"activation_func": F.relu},
    "squared ReLU": {"activation_func": lambda x: F.relu(x).square()},
    "kv_channels": {"kv_channels": 10},
    "grouped queries": {"num_query_groups": 2},
    "one query group": {"num_query_groups": 1, "num_attention_heads": 8},
    "rotary": {"position_embedding_type": "rope"},
    "rotary, interleaved, half": {
        "position_embedding_type": "rope",
        "rotary_interleaved": True,
        "rotary_percent": 0.5,
        "kv_channels": 8,
    },
    "no positions": {"position_embedding_type": "none"},
    "window": {"window_size": (3, 0)},
    "window without an end": {"window_size": (-1, 0)},
    "query-key layer scaling": {"apply_query_key_layer_scaling": True, "num_layers": 2},
    "softmax as it comes": {"attention_softmax_in_fp32": False},
    "cross attention": {"cross_attention_size": 20},
    "cross attention, grouped": {"cross_attention_size": 20, "num_query_groups": 2},
    "untied": {"share_embeddings_and_output_weights": False},
}
MOE: dict[str, dict[str, Any]] = {
    "top 2": {},
    "top 1, softmax first": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "balancing loss": {"moe_aux_loss_coeff": 0.1},
    "z-loss": {"moe_z_loss_coeff": 0.1},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "sinkhorn, top 1": {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
    "capacity": {"moe_expert_capacity_factor": 1.0},
    "capacity by position": {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"},
    "gated experts": {"gated_linear_unit": True, "activation_func": F.silu},
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def case(options: dict[str, Any], moe: bool = False) -> tuple[Case, dict[str, Any]]:
    import moe as experts
    import transformer

    torch.manual_seed(0)
    config = (experts.MoEConfig if moe else transformer.TransformerConfig)(**SMALL | options)
    model = transformer.Transformer(config).double().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, dtype=p.dtype) * 0.2)

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        call = {"idx": zoo._ids(67, batch, seq), "targets": zoo._labels(67, batch, seq)}
        if config.cross_attention_size is not None:
            generator = torch.Generator().manual_seed(2)
            call["memory"] = torch.randn(batch, 11, config.cross_attention_size, generator=generator).double()
        return call

    return Case(model, inputs, capture_call(model, (), inputs(2, 16))), inputs(3, 13)


def check(options: dict[str, Any], t: int, moe: bool = False) -> None:
    made, inputs = case(options, moe)
    wanted = made.reference(inputs)
    assert len(wanted.gradients) >= 8
    compiled = made.compile(t)
    assert any(str(p)[0] == "S" for p in compiled.plan.params.values()), "nothing is sharded"
    assert_equal(made.run(compiled, inputs), wanted)


def each(names: Iterable[str]) -> Iterator[Any]:
    """(name, ranks): all pairs; every second name at one number of ranks, the others marked slow."""
    for i, name in enumerate(names):
        for t in (2, 3, 4):
            yield pytest.param(name, t, marks=[] if not i % 2 and t == 2 + i // 2 % 3 else pytest.mark.slow)


@pytest.mark.parametrize(("name", "t"), list(each(DENSE)))
def test_option(name: str, t: int) -> None:
    check(DENSE[name], t)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "t"), list(each(MOE)))
def test_experts(name: str, t: int) -> None:
    check(MOE[name], t, moe=True)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "moe"), [({}, False), ({"moe_input_jitter_eps": 0.1}, True)])
def test_dropout_and_jitter_do_not_depend_on_the_number_of_ranks(options: dict[str, Any], moe: bool) -> None:
    made, inputs = case(DROPOUT | options, moe)
    wanted = made.run(made.compile(1), inputs)
    assert_equal(made.run(made.compile(3), inputs), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_init_methods(layers: int) -> None:
    """What writes into the residual stream is smaller by sqrt(2 layers); plans are made of weights that stay as they are."""
    import transformer

    torch.manual_seed(0)
    config = transformer.TransformerConfig(num_layers=layers, hidden_size=96, init_method_std=0.03)
    model = transformer.Transformer(config)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        if p.dim() > 1:
            residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            assert float(p.detach().std()) == pytest.approx(
                0.03 / (2 * layers) ** 0.5 if residual else 0.03, rel=0.05
            ), name
        elif "bias" in name:
            assert not p.any()
    megafx.parallelize(model)
    ids = torch.arange(20).view(2, 10)
    model(ids, ids).backward()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
