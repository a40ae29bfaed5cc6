"""Adapters of peft around a model of transformers, put in before it is parallelized: two steps of their parameters."""

from __future__ import annotations

from typing import Any

import torch
from loop import Loop, situation
from loop_models import tokens
from torch import nn


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 19, "hidden_size": 12, "intermediate_size": 22, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def train(loop: Loop, config: Any) -> None:
    from peft import get_peft_model

    model = loop.model(get_peft_model(llama(), config))
    torch.manual_seed(1)
    ids = tokens()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(3):
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        loop.see(loss=out.loss)
        loop.see_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


LINEARS = ["q_proj", "v_proj", "down_proj"]
FP32 = 2e-6  # transformers computes the loss in fp32


@situation("https://github.com/huggingface/peft/issues/1474", slow=(1,), rtol=FP32)
def dora(loop: Loop) -> None:
    from peft import LoraConfig

    train(loop, LoraConfig(r=3, target_modules=LINEARS, use_dora=True, init_lora_weights=False))


@situation("https://github.com/huggingface/peft/issues/1245", slow=(1,), rtol=FP32)
def rank_stabilized_lora_with_saved_modules_and_biases(loop: Loop) -> None:
    from peft import LoraConfig

    config = LoraConfig(
        r=5, target_modules=["q_proj", "up_proj"], use_rslora=True, modules_to_save=["lm_head"], lora_bias=True
    )
    train(loop, config)


@situation("https://github.com/huggingface/peft/issues/593", slow=(1, 2), rtol=FP32)
def ia3(loop: Loop) -> None:
    from peft import IA3Config

    train(loop, IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]))


@situation("https://github.com/huggingface/peft/issues/1659", slow=(1, 2), rtol=FP32)
def vera(loop: Loop) -> None:
    from peft import VeraConfig

    train(loop, VeraConfig(r=5, target_modules=["q_proj", "v_proj"], vocab_size=19))


@situation("https://github.com/huggingface/peft/issues/2298", slow=(1, 2), rtol=FP32)
def some_tokens_are_trained(loop: Loop) -> None:
    from peft import LoraConfig

    train(loop, LoraConfig(r=3, target_modules=["v_proj"], trainable_token_indices=[3, 7]))
