"""Covers: checkpoint/torch_format.py: what FSDP ranks saved by torch.distributed.checkpoint goes on
on tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zoo
from ranks import check
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import megafx


@check(2)
def what_fsdp_saved_goes_on_tensor_parallel(folder: Path) -> None:
    torch.manual_seed(0)
    built, inputs = zoo.ZOO["nanogpt"](dropout=0.0)
    saved: Any = fully_shard(built.double())
    optimizer = torch.optim.AdamW(saved.parameters(), lr=0.01)

    def steps(model: Any, optimizer: Any) -> list[float]:
        losses = []
        for seed in range(3):
            optimizer.zero_grad()
            torch.manual_seed(seed)
            loss = model(**inputs(2, 11))[1]
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    steps(saved, optimizer)
    state = {"model": get_model_state_dict(saved), "optim": get_optimizer_state_dict(saved, optimizer)}
    dcp.save(state, checkpoint_id=folder / "stock")
    wanted = {n: {k: whole(v) for k, v in s.items()} for n, s in state["optim"]["state"].items()}  # type: ignore[union-attr]

    torch.manual_seed(1)
    model: Any = zoo.ZOO["nanogpt"](dropout=0.0)[0].double()
    model = megafx.parallelize(
        model, megafx.Config(tensor_model_parallel_size=2, hardware="cpu-gloo"), example_inputs=inputs(2, 16)
    )
    mine = torch.optim.AdamW(model.parameters(), lr=0.5)
    megafx.load_checkpoint(folder / "stock", model, mine)
    found = get_optimizer_state_dict(model, mine)["state"]
    assert found.keys() == wanted.keys() and mine.param_groups[0]["lr"] == 0.01
    sharded = [n for n, kept in found.items() if type(kept["exp_avg"]).__name__ != "Tensor"]  # type: ignore[index]
    assert len(sharded) > 4, sharded
    for name, kept in megafx_whole(model, mine).items():
        torch.testing.assert_close(kept, wanted[name], rtol=0, atol=0)
    assert steps(model, mine) == pytest.approx(steps(saved, optimizer), rel=1e-10)


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def megafx_whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """FQN -> {key: the tensor in original coordinates}."""
    names = {id(p): n for n, p in model.named_parameters()}
    return {
        names[id(p)]: {k: getattr(v, "full_tensor", v.clone)() for k, v in kept.items()}
        for p, kept in optimizer.state.items()
    }
