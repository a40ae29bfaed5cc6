"""Stages of torch.distributed.pipelining that are parallelized: 2 stages of 2 tensor-parallel ranks, exact in fp64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import RTOL, check
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

import megafx
from megafx.errors import AgreementError

VOCAB, WIDTH, LENGTH, MICROBATCHES = 67, 12, 7, 3


class Block(nn.Module):
    """19 features, which 2 does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 19), nn.Linear(19, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCAB, WIDTH), Block()

    def forward(self, ids: Tensor) -> Tensor:
        return self.block(self.embed(ids))


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm, self.head = Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.block(x)))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@check(4, slow=True, seed=0)
def two_stages_of_two_ranks() -> None:
    stages: list[nn.Module] = [First().double(), Last().double()]
    eager = copy.deepcopy(stages)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    index = mesh["pp"].get_local_rank()
    module = megafx.parallelize(stages[index], mesh=mesh["tp"])
    draw = torch.Generator().manual_seed(1)
    ids, target = (torch.randint(0, VOCAB, (2 * MICROBATCHES, LENGTH), generator=draw) for _ in range(2))
    hidden, logits = (torch.zeros(2, LENGTH, n, dtype=torch.float64, requires_grad=True) for n in (WIDTH, VOCAB))
    shapes = {"input_args": (ids[:2], hidden)[index], "output_args": (hidden, logits)[index]}
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh.get_group("pp"), **shapes)
    for schedule in (ScheduleGPipe, Schedule1F1B):
        module.zero_grad(), [m.zero_grad() for m in eager]
        losses: list[Tensor] = []
        run = schedule(stage, n_microbatches=MICROBATCHES, loss_fn=loss_of)
        run.step(ids) if index == 0 else run.step(target=target, losses=losses)
        wanted = []
        for i, y in zip(ids.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            wanted.append(loss_of(eager[1](eager[0](i)), y))
            (wanted[-1] / MICROBATCHES).backward()
        for found, loss in zip(losses, wanted, strict=index == 1):
            torch.testing.assert_close(found, loss.detach(), rtol=RTOL, atol=0)
        gradients = megafx.full_gradients(module)
        theirs = {n: p.grad for n, p in eager[index].named_parameters()}
        assert gradients.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(gradients[name], value, rtol=RTOL, atol=1e-14)
    if index == 1:  # what PipelineStage probes shapes with when it is given none: memory as it comes
        with pytest.raises(AgreementError, match="input_args= and output_args="):
            fresh = megafx.parallelize(copy.deepcopy(eager[1]), mesh=mesh["tp"])
            fresh(torch.full((2, LENGTH, WIDTH), float(dist.get_rank()), dtype=torch.float64))
