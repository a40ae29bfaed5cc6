"""What several examples share: the device of a rank, and a small Llama with something to learn."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM


def start() -> torch.device:
    """This rank's device: a GPU where this machine has one for each of its ranks. Under torchrun, also the process group."""
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def first() -> bool:
    """Whether this rank is the one that prints."""
    return not dist.is_initialized() or dist.get_rank() == 0


def end() -> None:
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def small_llama(**options: Any) -> LlamaForCausalLM:
    """The same weights on every rank; options: fields of LlamaConfig."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**(sizes | heads | options)))


def sequences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Arithmetic sequences modulo 61: the next token follows from the two before."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 61, (count, 2), generator=generator)
    ids = [(start + step * torch.arange(16)) % 61 for start, step in starts]
    return [{"input_ids": x, "labels": x} for x in ids]
