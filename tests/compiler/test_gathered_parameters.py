"""Covers: megafx/compiler/kept_values.py, and what counts as a change of a local tensor
(megafx/distributed/tensor_dispatch.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megafx.compiler.kept_values import Gathered, KeptValues
from megafx.distributed.parameters import replicate_parameters
from megafx.distributed.tensor import wrap


@pytest.fixture
def model(tmp_path, monkeypatch) -> Iterator[nn.Module]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    made = nn.Linear(4, 4)
    replicate_parameters(made, dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)))
    yield made
    dist.destroy_process_group()


@pytest.fixture
def keeper(monkeypatch) -> KeptValues:
    kept = KeptValues(whole=True)
    monkeypatch.setattr(kept, "gather", lambda shards, ranks, axis: torch.cat([s.flatten() for s in shards]))
    return kept


def gathered(model: nn.Module, keeper: KeptValues, *names: str) -> torch.Tensor:
    """These parameters, as a call gets them."""
    parameters = {name: getattr(model, name) for name in names}
    keeper.look(parameters)
    get = Gathered(tuple(range(len(names))), names, 2, "dp_shard", keeper)
    return get([p._local_tensor for p in parameters.values()])


def step(weight: torch.Tensor, **options: bool) -> None:
    weight.grad = wrap(torch.ones_like(weight._local_tensor), weight._spec)
    torch.optim.AdamW([weight], **options).step()


def load(weight: torch.Tensor) -> None:
    holder = nn.Module()
    holder.weight = weight
    holder.load_state_dict({"weight": torch.zeros(4, 4)})


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda w: w.mul_(2.0),
    "data": lambda w: w.data.copy_(torch.zeros(4, 4)),
    "a row": lambda w: w[0].zero_(),
    "a view": lambda w: w.view(4, 4).fill_(3.0),
    "out": lambda w: torch.add(w, w, out=w),
    "the local tensor": lambda w: w._local_tensor.zero_(),
    "a row of the local tensor": lambda w: w.to_local()[1].zero_(),
    "foreach step": lambda w: step(w, foreach=True),
    "fused step": lambda w: step(w, fused=True),
    "plain step": lambda w: step(w, foreach=False),
    "load_state_dict": load,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_gathered_is_kept_until_a_shard_changes(model, keeper, change):
    weight = model.weight

    def now() -> torch.Tensor:
        return gathered(model, keeper, "weight", "bias")

    first = now()
    weight.sum(), weight * 2.0, weight.detach()
    assert now() is first and keeper.made == 1
    with torch.no_grad():
        CHANGES[change](weight)
    second = now()
    assert keeper.made == 2 and torch.equal(second[:16], weight._local_tensor.flatten())
    assert not torch.equal(second, first) and now() is second


def test_another_tensor_in_its_place_and_other_regions_are_gathered_anew(model, keeper):
    first = gathered(model, keeper, "weight", "bias")
    model.weight._local_tensor = model.weight._local_tensor.clone()
    assert gathered(model, keeper, "weight", "bias") is not first
    assert len(keeper.kept) == 1  # never two copies of one parameter
    gathered(model, keeper, "bias")
    assert len(keeper.kept) == 1


def test_a_step_gives_up_what_was_gathered_of_its_parameters(model, keeper):
    gathered(model, keeper, "weight"), gathered(model, keeper, "bias")
    optimizer = torch.optim.SGD([model.weight], lr=0.0)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(len(keeper.kept)))
    optimizer.step()
    assert len(keeper.kept) == 1 and seen in ([1], [2])
    gathered(model, keeper, "bias")
    assert keeper.made == 2
