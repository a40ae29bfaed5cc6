"""Hooks that transformers, peft and trl set: gradient checkpointing, NEFTune, output_hidden_states."""

from __future__ import annotations

from typing import Any

import torch
from loop import Loop, situation
from torch import Tensor

CHECKPOINTING = "https://github.com/huggingface/transformers/issues/28023"
NEFTUNE = "https://github.com/huggingface/trl/pull/870"
FP32 = 1e-6  # transformers computes norms, rotations and losses in fp32


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    _generator.manual_seed(0)
    sizes = dict(vocab_size=13, hidden_size=12, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, tie_word_embeddings=False, **sizes, **options)).double()


def ids() -> Tensor:
    """Not of the default generator, from which a call with noise takes its seed."""
    return torch.randint(13, (2, 6), generator=_generator)


_generator = torch.Generator()


def train(loop: Loop, model: Any, steps: int = 2) -> None:
    model.train()
    for _ in range(steps):
        batch = ids()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


@situation(CHECKPOINTING, rtol=FP32, like="gradient_checkpointing_with_a_frozen_base")
def gradient_checkpointing_is_enabled_after(loop: Loop) -> None:
    model = loop.model(llama())
    model.gradient_checkpointing_enable()
    train(loop, model)
    model.gradient_checkpointing_disable()
    train(loop, model, 1)


@situation(CHECKPOINTING, rtol=FP32)
def gradient_checkpointing_with_a_frozen_base(loop: Loop) -> None:
    """trl's default with LoRA: embeddings are frozen, and a hook makes their output require a gradient."""
    from peft import LoraConfig, get_peft_model

    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    model = get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    ).double()
    model = loop.model(model)
    train(loop, model)


@situation(CHECKPOINTING, rtol=FP32, slow=(2,))
def input_gradients_are_required_after(loop: Loop) -> None:
    model = llama()
    model.model.embed_tokens.weight.requires_grad_(False)
    model = loop.model(model)
    train(loop, model, 1)
    model.enable_input_require_grads()
    train(loop, model, 1)
    model.disable_input_require_grads()
    train(loop, model, 1)


@situation(NEFTUNE, rtol=FP32)
def neftune_without_noise_in_evaluation(loop: Loop) -> None:
    """The noise is of the step's own seed: what can be compared is where it is zero, and the call after it is removed."""
    from transformers.integrations.neftune import activate_neftune, deactivate_neftune

    model = loop.model(llama())
    handle = activate_neftune(model, 0.0)
    train(loop, model, 1)
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    batch = ids()
    noisy = [float(model(input_ids=batch, labels=batch).loss.detach()) for _ in range(2)]
    if torch.distributed.is_initialized():
        everywhere: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everywhere, noisy)
        assert everywhere[0] == everywhere[-1], "each rank has noise of its own"
    loop.see(noisy=noisy[0] != noisy[1])
    model.eval()
    with torch.no_grad():
        loop.see(evaluated=model(input_ids=batch).logits)
    deactivate_neftune(model, handle)
    model.zero_grad()
    train(loop, model, 1)


@situation(NEFTUNE, rtol=FP32, like="neftune_without_noise_in_evaluation")
def neftune_is_active_before(loop: Loop) -> None:
    from transformers.integrations.neftune import activate_neftune

    model = llama()
    activate_neftune(model, 0.0)
    model = loop.model(model)
    train(loop, model)


@situation(
    "https://github.com/huggingface/transformers/issues/33698", rtol=FP32, like="input_gradients_are_required_after"
)
def hidden_states_are_asked_for_before_and_after(loop: Loop) -> None:
    """transformers collects them with hooks, which stay on the layers."""
    model, batch = llama(), ids()
    with torch.no_grad():
        loop.see(before=model(input_ids=batch, output_hidden_states=True).hidden_states)
    model = loop.model(model)
    out = model(input_ids=batch, output_hidden_states=True)
    loop.see(states=[h.detach() for h in out.hidden_states])
    train(loop, model, 1)
