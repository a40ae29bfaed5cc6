"""Covers: the cache on disk on several ranks: one reads, all take what it has read, or none does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zoo
from ranks import check
from torch import Tensor, nn
from torch.nn import functional as F

import megafx


@contextlib.contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    before = os.environ["MEGAFX_CACHE"]  # 'off' (conftest.py)
    os.environ["MEGAFX_CACHE"] = str(folder)
    try:
        yield
    finally:
        os.environ["MEGAFX_CACHE"] = before


class Small(nn.Module):
    """Compiled in a fifth of the time of a transformer: entries of the cache are compared, not graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).square().mean()


def start(model: nn.Module, inputs: dict[str, Tensor], **config: Any) -> tuple[str, list[Tensor]]:
    """(what the cache did, loss and gradients of this rank) of a new start."""
    parallel = megafx.parallelize(model.double(), megafx.Config(**config))
    output = parallel(**inputs)
    loss = output if isinstance(output, Tensor) else output["loss"]
    loss.backward()
    values = [loss.detach(), *(p.grad.to_local() for p in parallel.parameters() if p.grad is not None)]
    return parallel.megafx.cached, values


def llama() -> tuple[str, list[Tensor]]:
    torch.manual_seed(0)
    model, inputs = zoo.build("llama")
    return start(model, inputs(2, 16), tensor_model_parallel_size=2)


def small(**config: Any) -> tuple[str, list[Tensor]]:
    torch.manual_seed(0)
    return start(Small(), {"x": torch.randn(4, 6, dtype=torch.float64)}, **config)


@check(2)
def a_second_start_has_the_same_bits(folder: Path) -> str:
    rank = dist.get_rank()
    with cache_in(folder):
        did, first = llama()
        assert did == ("written" if rank == 0 else "not used"), did
        again, second = llama()
        assert again == "read"
        assert all(map(torch.equal, first, second))
    return f"{len(first)} tensors"


@check(2)
def an_entry_that_one_rank_cannot_use_is_used_by_none(folder: Path) -> str:
    from megafx.runtime.program_cache import program_cache

    with cache_in(folder):
        _, first = small(tensor_model_parallel_size=2)
        plain = program_cache.state_of
        if dist.get_rank() == 1:
            program_cache.state_of = lambda *args: "'something'"
        try:
            did, second = small(tensor_model_parallel_size=2)
        finally:
            program_cache.state_of = plain
        assert did != "read"
        assert all(map(torch.equal, first, second))
        if dist.get_rank() == 0:
            for path in folder.glob("*-*"):
                path.write_bytes(path.read_bytes()[:-9] + b"corrupted")
        dist.barrier()
        assert small(tensor_model_parallel_size=2)[0] != "read"
        did, third = small(tensor_model_parallel_size=2)
        assert did == "read"
        assert all(map(torch.equal, first, third))
    return f"{len(first)} tensors"


@check(2)
def replicas_read_it_too(folder: Path) -> str:
    with cache_in(folder):
        _, first = small(data_parallel_size=2, data_parallel="fsdp")
        did, second = small(data_parallel_size=2, data_parallel="fsdp")
        assert did == "read"
        assert all(map(torch.equal, first, second))
    return f"{len(first)} tensors"
