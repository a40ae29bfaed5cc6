"""Models at the widths of published ones, two layers deep, on the meta device: what the planner's tests plan.

`program(name)` captures one in bf16 training mode with labels, and canonicalizes it. No weights exist.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import zoo
from torch import nn

from megafx.capture.export import capture_call
from megafx.config import Config
from megafx.ir.program import Program
from megafx.passes.canonicalize.canonicalize import canonicalize_program
from megafx.passes.plan.plan_sharding import ask, make_problem, plan_sharding
from megafx.planner.context import CompileContext
from megafx.planner.problem import Problem
from megafx.testing import make_context

LAYERS = 2


def nanogpt(layers: int) -> nn.Module:
    gpt = zoo.example("gpt")
    return gpt.GPT(gpt.GPTConfig(vocab_size=51200, n_layer=layers, n_head=32, n_embd=4096, block_size=2048))


def gpt3(layers: int) -> nn.Module:
    """The widths of GPT-3 175B."""
    gpt = zoo.example("gpt")
    return gpt.GPT(gpt.GPTConfig(vocab_size=51200, n_layer=layers, n_head=96, n_embd=12288, block_size=2048))


def gpt2(layers: int) -> nn.Module:
    """GPT-2 medium; its vocabulary of 50257 padded to a multiple of 128 * 8, as Megatron pads it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=1024, n_head=16, vocab_size=51200, n_positions=1024))


def llama(layers: int) -> nn.Module:
    """Llama 3 8B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def bert(layers: int) -> nn.Module:
    """BERT large; its vocabulary of 30522 padded."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=layers, hidden_size=1024, num_attention_heads=16, intermediate_size=4096, vocab_size=30720
    )
    return BertForMaskedLM(config)


def t5(layers: int) -> nn.Module:
    """T5 large."""
    from transformers import T5Config, T5ForConditionalGeneration

    settings: dict[str, Any] = {
        "num_layers": layers,
        "d_model": 1024,
        "num_heads": 16,
        "d_kv": 64,
        "d_ff": 4096,
        "vocab_size": 32128,
        "use_cache": False,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }
    config = T5Config(**settings)
    return T5ForConditionalGeneration(config)


MODELS = {"nanogpt": nanogpt, "gpt3": gpt3, "gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5}
SEQUENCE = {"nanogpt": 2048, "gpt3": 2048, "gpt2": 1024, "llama": 8192, "bert": 512, "t5": 512}


def _inputs(name: str) -> dict[str, Any]:
    ids = torch.zeros(2, 64, dtype=torch.long, device="meta")
    if name in ("nanogpt", "gpt3"):
        return {"idx": ids, "targets": ids}
    return {"input_ids": ids, "labels": ids}


@cache
def captured(name: str, layers: int) -> Program:
    """One training call as captured; compile a copy of it."""
    with torch.device("meta"):
        model = MODELS[name](layers).to(torch.bfloat16).train()
    return capture_call(model, (), _inputs(name))


@cache
def _canonical(name: str, layers: int) -> Program:
    program = captured(name, layers).copy()
    canonicalize_program(program)
    return program


def program(name: str, layers: int = LAYERS) -> Program:
    """The canonical graph of one training call; plan a copy of it."""
    return _canonical(name, layers)


def context_of(name: str, t: int, hardware: str = "h100-nvlink", **config: Any) -> CompileContext:
    settings = Config(seq_length=SEQUENCE[name], micro_batch_size=1, **config)
    return make_context(t, settings, hardware=hardware)


def planned(name: str, t: int = 8, layers: int = LAYERS, **config: Any) -> tuple[Program, CompileContext]:
    """(program, its context after plan_sharding)."""
    question = context_of(name, t, **config)
    copy = program(name, layers).copy()
    plan_sharding(copy, question)
    return copy, question


def problem(name: str, t: int, layers: int = LAYERS, **config: Any) -> Problem:
    """The planning problem of a model, as `plan_sharding` makes it."""
    copy, question = program(name, layers).copy(), context_of(name, t, **config)
    active, order = ask(copy, question)
    return make_problem(copy, question, active, order)[0]
