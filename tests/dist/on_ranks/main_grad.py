"""Gradients in fp32 on gloo ranks: of shards, reduced over ranks in fp32, held and accumulated by products.

Covers: Config.gradient_accumulation_fusion and accumulate_allreduce_grads_in_fp32 with tensor and data parallelism.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from data_parallel import DDP, Alone, accumulates_without_reducing, base, batch, mine, parallel, whole
from ranks import check
from torch import Tensor

import megafx
from megafx.distributed.tensor import TPTensor

FUSED = {"gradient_accumulation_fusion": True}
CAST = {"accumulate_allreduce_grads_in_fp32": True}


def collective_dtypes(model: Any) -> set[torch.dtype]:
    program = model.megafx.settled.last.program
    starts = [n for n in program.graph.nodes if "reduce" in str(n.target) and "_c10d" in str(n.target)]
    last = [n for n in starts if n.meta.get("phase") == "backward"]
    return {n.meta["val"].dtype for n in last[-1:]}


def trains_in_bf16(parts: int, tensor_ranks: int, **options: Any) -> None:
    """Three micro-batches; the gradients of fp64 within the rounding of bf16 activations."""
    torch.manual_seed(0)
    exact, model = Alone(base(), draws=False), parallel(base().bfloat16(), **options)
    calls = [batch(k, parts) for k in range(3)]
    for k, (ids, labels) in enumerate(calls):
        held = k < 2 and parts > 1
        with model.no_sync() if held else contextlib.nullcontext():
            model(mine(ids, parts, tensor_ranks), mine(labels, parts, tensor_ranks)).backward()
        if not held and k == 0:
            places = [p.grad._local_tensor.data_ptr() for p in model.parameters()]
    found = megafx.full_gradients(model)
    assert {g.dtype for g in found.values()} == {torch.float32}
    if parts == 1:
        assert places == [p.grad._local_tensor.data_ptr() for p in model.parameters()]
    for p in model.parameters():
        assert isinstance(p, TPTensor) and p.main_grad is p.grad and p.dtype == torch.bfloat16
    other = copy.deepcopy(model)
    assert all(p.grad is None for p in other.parameters())  # as torch copies parameters
    assert parts == 1 or collective_dtypes(model) == {torch.float32}
    norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6))
    if dist.get_rank() == 0:
        for ids, labels in calls:
            exact.model(ids, labels).backward()
        squares: list[Tensor] = []
        for name, p in exact.model.named_parameters():
            off = (found[name].double() - p.grad).norm() / p.grad.norm()
            assert off < 0.05, (name, off)
            squares.append(found[name].double().square().sum())
        torch.testing.assert_close(norm.double(), torch.stack(squares).sum().sqrt(), rtol=1e-5, atol=0.0)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@check(2)
def gradients_of_shards_are_fp32() -> None:
    trains_in_bf16(1, 2, tensor_model_parallel_size=2, sequence_parallel=True, **FUSED)


@check(2, slow=True)
def gradients_are_fp32_in_the_other_forms() -> None:
    trains_in_bf16(1, 2, tensor_model_parallel_size=2, **CAST)
    trains_in_bf16(2, 1, tensor_model_parallel_size=1, data_parallel_size=2, data_parallel="fsdp", **FUSED)
    trains_in_bf16(2, 1, tensor_model_parallel_size=1, data_parallel_size=2, **FUSED)
    trains_in_bf16(2, 1, tensor_model_parallel_size=1, data_parallel_size=2, data_parallel="zero1", **CAST)


@check(4, slow=True)
def products_accumulate_what_is_held() -> None:
    """In fp64, against one process."""
    accumulates_without_reducing({**DDP, **FUSED})
    accumulates_without_reducing({**DDP, **FUSED, "data_parallel": "fsdp"})
    accumulates_without_reducing({**DDP, **CAST, "data_parallel": "zero1"})
