"""Shards in files of torch.save: plain tensors, which `torch.load` reads anywhere with its defaults and without megafx.

A shard is saved as this rank's values with one more dim of size 1 in front, so that no model takes it for a whole tensor, and
with an attribute that says where the values belong:

    tensor.megafx_shard == {"shape": [64, 48], "rank": 0, "ranks": 2, "slices": [[offsets, offsets in the tensor, sizes], ...]}

`load_state_dict` of a model that is cut the same way, and steps of its optimizers, take them back. A tensor that every rank
holds whole is saved as it is.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megafx.distributed.tensor_layout import cuts_of, spec_of
from megafx.errors import UsageError
from megafx.placements.slices import shard_slices

MARK = "megafx_shard"


def saved(x: DTensor) -> torch.Tensor:
    """What is saved of a tensor: see the module docstring. Warns of shards."""
    local = x._local_tensor.detach()
    if not x._spec.placements[0].is_shard():
        return local
    warnings.warn(
        "the state of a parallelized model is saved with torch.save: the file holds this rank's shards, which only the same "
        "model on as many ranks takes back, each rank its own file. For a file that any program loads, save "
        "megafx.full_state_dict(model) (called on every rank) or call megafx.save_pretrained; megafx.save_checkpoint saves "
        "for any number of ranks.",
        stacklevel=2,
    )
    shard = local[None]
    setattr(shard, MARK, _description(x))
    return shard


def _description(x: DTensor) -> dict[str, Any]:
    mesh = x._spec.mesh
    rank, ranks = mesh.get_local_rank(), mesh.size()
    boxes = shard_slices(x.shape, cuts_of(x), rank)
    slices = [[[*box.offsets], [*box.local_offsets], [*box.sizes]] for box in boxes]
    return {"shape": [*x.shape], "rank": rank, "ranks": ranks, "slices": slices}


def is_saved(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and hasattr(x, MARK)


def taken(x: torch.Tensor, like: Any, what: str) -> torch.Tensor:
    """A saved shard -> a tensor that is cut as `like` is, over the same memory. Raises UsageError where it is another's."""
    there = getattr(x, MARK)
    if isinstance(like, DTensor) and like._spec.placements[0].is_shard():
        here = _description(like)
        if there == here and x.shape[1:] == like._local_tensor.shape:
            return DTensor.__new__(type(like), x.detach()[0], spec_of(like._spec, x.dtype), requires_grad=False)
        cut = f"rank {here['rank']} of {here['ranks']} holds another part of {tuple(like.shape)} here"
    else:
        cut = "the tensor is whole here"
    raise UsageError(
        f"{what} is the shard of rank {there['rank']} of {there['ranks']} of a tensor {tuple(there['shape'])}, and {cut}",
        fix="load each rank's own file into the same model on as many ranks; for other models and numbers of ranks save "
        "megafx.full_state_dict(model), or use megafx.save_checkpoint and megafx.load_checkpoint",
    )


_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()


def _take_states(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before a step: saved shards in a state that was loaded become shards again."""
    if _seen.get(optimizer) is optimizer.state:
        return
    for parameter, state in optimizer.state.items():
        for key, value in state.items() if isinstance(state, dict) else ():
            if is_saved(value):
                state[key] = taken(value, parameter, f"the optimizer's '{key}'")
    _seen[optimizer] = optimizer.state


register_optimizer_step_pre_hook(_take_states)
