"""Context parallelism on real gloo ranks: steps of a stock optimizer with clipping are those of one process on the whole
sequences, in fp64 and with dropout, also with sharded parameters; no_sync, evaluation, generation with a cache, checkpoints
that go on at other degrees; batches that differ.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import check, near, same_tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import megafx
from megafx.errors import AgreementError

VOCAB, CP = 19, {"context_parallel_size": 2, "tensor_model_parallel_size": 1}


class Model(nn.Module):
    """3 heads, learned positions; without labels it returns logits."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.embed, self.positions, self.drop = nn.Embedding(VOCAB, 6), nn.Embedding(16, 6), nn.Dropout(p)
        self.norm, self.qkv, self.out = nn.LayerNorm(6), nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.drop(self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        q, k, v = (y.unflatten(-1, (3, 2)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        p = self.drop.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        logits = (x + self.drop(self.out(y.transpose(1, 2).flatten(2)))) @ self.embed.weight.t()
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def start(p: float = 0.0) -> Model:
    torch.manual_seed(0)
    return Model(p).double()


def batch(step: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCAB, (rows, 7 + step), generator=torch.Generator().manual_seed(step))
    labels = ids.roll(-1, 1)
    labels[:, -1], labels[0, :3] = -100, -100
    return ids, labels


def stepped(model: nn.Module, calls: list[tuple[Tensor, Tensor]], p: float) -> list[Any]:
    """Three steps: losses and norms of gradients. calls: of each step, this rank's."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4), []
    for step, (ids, labels) in enumerate(calls):
        torch.manual_seed(7 + step)
        loss = model(ids, labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found += [loss.detach(), norm.full_tensor() if hasattr(norm, "full_tensor") else norm]
        optimizer.step(), optimizer.zero_grad()
    return found


def trains_like_one_process(options: dict[str, Any], p: float, mesh: DeviceMesh | None = None) -> nn.Module:
    dp, group = options.get("data_parallel_size", 1), dist.get_world_size() // options.get("data_parallel_size", 1)
    model = megafx.parallelize(start(p), megafx.Config(**options), mesh=mesh)
    calls = [batch(step) for step in range(3)]
    mine = [
        (ids.chunk(dp)[dist.get_rank() // group], labels.chunk(dp)[dist.get_rank() // group]) for ids, labels in calls
    ]
    found, state = stepped(model, mine, p), megafx.full_state_dict(model)
    if dist.get_rank() == 0:
        theirs, trained = one_process(p)
        for ours, wanted in zip(found, theirs, strict=True):
            near(ours, wanted, "a loss or a norm")
        same_tensors(state, trained, "after three steps:")
    return model


@cache
def one_process(p: float) -> tuple[list[Any], dict[str, Tensor]]:
    """What three steps give in eager mode; with dropout: by megafx on one rank, whose masks are those of any number."""
    one = start(p)
    if p > 0.0:
        one = megafx.parallelize(one, megafx.Config(tensor_model_parallel_size=1, cache=False))
    return stepped(one, [batch(step) for step in range(3)], p), dict(one.state_dict())


@check(2)
def steps_are_those_of_one_process() -> None:
    trains_like_one_process(CP, 0.3)
    trains_like_one_process(CP | {"cp_comm_type": "a2a"}, 0.0)  # three heads on two ranks


@check(2, slow=True)
def steps_with_and_without_dropout() -> None:
    trains_like_one_process(CP, 0.0)
    trains_like_one_process(CP | {"cp_comm_type": "a2a"}, 0.3)
    trains_like_one_process(CP | {"data_parallel": "zero1"}, 0.3)


@check(4, slow=True)
def beside_other_axes() -> None:
    both = {"context_parallel_size": 2, "tensor_model_parallel_size": 2}
    trains_like_one_process(both, 0.0)
    trains_like_one_process(both | {"cp_comm_type": "a2a"}, 0.0)
    sizes = CP | {"data_parallel_size": 2}
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp_shard", "cp", "tp"))
    trains_like_one_process(sizes | {"data_parallel": "fsdp"}, 0.3, mesh)
    trains_like_one_process(sizes | {"data_parallel": "zero1", "data_parallel_shard_size": 1}, 0.0)


@check(2, slow=True)
def ranks_of_a_sequence_share_parameters() -> None:
    model = trains_like_one_process(CP | {"data_parallel": "fsdp"}, 0.3)
    held = [p.to_local().numel() for p in model.parameters()]
    assert sum(held) <= sum(p.numel() for p in model.parameters()) / 2 + 6 * len(held)


@check(2)
def micro_batches_evaluation_and_a_checkpoint(folder: Path) -> None:
    plain = start()
    model = megafx.parallelize(copy.deepcopy(plain), megafx.Config(**CP))
    with model.megafx.no_sync():
        model(*batch(0)).backward()
    model(*batch(1)).backward()
    for step in (0, 1):
        plain(*batch(step)).backward()
    same_tensors(megafx.full_gradients(model), {n: p.grad for n, p in plain.named_parameters()}, "gradient")
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    megafx.save_checkpoint(folder, model, optimizer, step=1)
    torch.manual_seed(1)
    again = megafx.parallelize(Model(0.0).double(), megafx.Config(tensor_model_parallel_size=2))
    steps = torch.optim.AdamW(again.parameters())
    assert megafx.load_checkpoint(folder, again, steps).step == 1
    for each, stepping in ((model, optimizer), (again, steps)):
        stepping.zero_grad()
        each(*batch(2)).backward()
        stepping.step()
    same_tensors(megafx.full_state_dict(again), megafx.full_state_dict(model), "on tensor-parallel ranks:")
    megafx.save_checkpoint(folder, again, steps, step=2)
    assert megafx.load_checkpoint(folder, model, optimizer).step == 2
    with torch.no_grad():
        logits = model.eval()(batch(2)[0])
        plain.load_state_dict(megafx.full_state_dict(again))
        near(logits, plain.eval()(batch(2)[0]), "logits")


@check(2)
def batches_that_differ_between_the_ranks_are_refused() -> None:
    model = megafx.parallelize(start(), megafx.Config(**CP))
    ids, labels = batch(0)
    with pytest.raises(AgreementError, match="got different batches"):
        model((ids + dist.get_rank()) % VOCAB, labels)
