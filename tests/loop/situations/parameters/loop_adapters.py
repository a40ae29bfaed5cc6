"""Adapters of peft: put in before a model is parallelized, switched, scaled and turned off between calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loop import Loop, situation
from loop_models import tokens
from torch import Tensor, nn


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


@situation("https://github.com/huggingface/peft/issues/1245", rtol=FP32, like="dora")
def rank_stabilized_lora_with_saved_modules_and_biases(loop: Loop) -> None:
    from peft import LoraConfig

    config = LoraConfig(
        r=5, target_modules=["q_proj", "up_proj"], use_rslora=True, modules_to_save=["lm_head"], lora_bias=True
    )
    train(loop, config)


@situation("https://github.com/huggingface/peft/issues/593", rtol=FP32, like="dora")
def ia3(loop: Loop) -> None:
    from peft import IA3Config

    train(loop, IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]))


@situation("https://github.com/huggingface/peft/issues/1659", rtol=FP32, like="dora")
def vera(loop: Loop) -> None:
    from peft import VeraConfig

    train(loop, VeraConfig(r=5, target_modules=["q_proj", "v_proj"]))


@situation("https://github.com/huggingface/peft/issues/2298", slow=(1, 2), rtol=FP32)
def some_tokens_are_trained(loop: Loop) -> None:
    from peft import LoraConfig

    train(loop, LoraConfig(r=3, target_modules=["v_proj"], trainable_token_indices=[3, 7]))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def _adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["up", "down"], init_lora_weights=False)
    model = peft.get_peft_model(Base(), options, "first")
    model.add_adapter("second", options)
    model.set_adapter("first")
    return model


@situation("https://github.com/huggingface/trl/issues/2698", like="adapters_are_switched_and_scaled")
def an_adapter_is_turned_off_for_the_reference(loop: Loop) -> None:
    model, x = loop.model(_adapted()), torch.randn(4, 8)
    for _ in range(2):
        model.zero_grad()
        loss = model(x)
        with torch.no_grad(), model.disable_adapter():
            reference = model(x)
        (loss - reference).square().backward()
        loop.see(loss=loss, reference=reference)
        loop.see_gradients(model)


@situation("https://github.com/huggingface/peft/issues/2860", slow=(2,))
def adapters_are_switched_and_scaled(loop: Loop) -> None:
    model, x = loop.model(_adapted()), torch.randn(4, 8)
    for name in ("first", "second", "first"):
        model.set_adapter(name)
        for scale in (2.0, 1.0, 0.5):
            for module in model.modules():
                if hasattr(module, "scaling"):
                    module.scaling[name] = scale
            model.zero_grad()
            loss = model(x)
            loss.backward()
            loop.see(loss=loss)
            loop.see_gradients(model)
    if not loop.eager:
        assert model.megafx.captures <= 6


class Merging(nn.Linear):
    """loralib's: eval() adds the product to the weight, train() takes it away."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(2, inputs))
        self.lora_b = nn.Parameter(torch.randn(outputs, 2))
        self.merged = False

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (self.lora_b @ self.lora_a) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight, self.bias)
        return y if self.merged else y + x @ self.lora_a.T @ self.lora_b.T


class WithLoss(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


@situation("https://github.com/microsoft/LoRA/issues/9", like="adapters_are_switched_and_scaled")
def adapters_are_merged_by_eval_and_taken_out_by_train(loop: Loop) -> None:
    """Also where evaluation is not under `no_grad`: its loss comes of frozen weights, and needs no gradient."""
    model = loop.model(WithLoss(Merging(6, 8), nn.Tanh(), Merging(8, 6)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        x = torch.randn(3, 6)
        loss = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        evaluated = model(x)
        loop.see(loss=loss, evaluated=evaluated, needs=evaluated.requires_grad)
        model.train()
    loop.see_gradients(model)
    loop.see_state(model)
