"""What backward makes again, on gloo ranks: loss and gradients have the bits of a run that keeps everything.

Covers: passes/recompute/ with sequence parallelism, with parameters sharded over data-parallel ranks, and under autocast.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import zoo
from ranks import check
from torch import Tensor
from torch.distributed.tensor import DTensor

import megafx

SHARDED: dict[str, Any] = {"data_parallel_size": 2, "data_parallel": "fsdp"}


def step(
    layers: int = 2, autocast: bool = False, checkpoint: bool = False, **config: Any
) -> tuple[Tensor, dict[str, Tensor], int]:
    """(loss, this rank's gradients, bytes kept) of one step of a GPT-2 with dropout."""
    torch.manual_seed(0)
    model, inputs = zoo.build("gpt2", layers=layers, dropout=0.1)
    model.double() if not autocast else model.float()
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    megafx.parallelize(model, megafx.Config(**config), example_inputs=None if autocast else inputs(2, 16))
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        loss = model(**inputs(2, 16)).loss
    loss.backward()
    gradients = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        gradients[name] = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
    parts = model.megafx.settled.last.executable().parts
    kept = sum(model.megafx.settled.last.program.sizes.workload(s.numel) * s.itemsize for s in parts.saved if s.numel)
    return loss.detach(), gradients, kept


def same(plain: dict[str, Any], *others: dict[str, Any]) -> None:
    loss, gradients, kept = step(**plain)
    for options in others:
        found, theirs, less = step(**plain, **options)
        assert torch.equal(loss, found), (options, loss, found)
        off = [n for n, g in gradients.items() if not torch.equal(g, theirs[n])]
        assert not off and less < kept, (options, off, less, kept)


TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


@check(2, slow=True)
def what_is_made_again_on_tensor_parallel_ranks() -> None:
    same({**TENSOR, "layers": 1}, {"activation_memory_budget": 0.0})


@check(2, slow=True)
def what_is_offloaded_spread_or_checkpointed() -> None:
    same(TENSOR, {"cpu_offloading": True})
    spread = {"recompute_granularity": "full", "distribute_saved_activations": True}
    same({"tensor_model_parallel_size": 2, "sequence_parallel": False}, spread)
    same({**TENSOR, "autocast": True}, {"checkpoint": True})


@check(2, slow=True)
def what_is_made_again_with_sharded_parameters() -> None:
    same(SHARDED, {"activation_memory_budget": 0.2, "checkpoint": True})
