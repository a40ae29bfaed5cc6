"""Batches of data loaders: from one rank to its tensor-parallel group, and checks of who got what.

batch = megafx.broadcast_data(batch, mesh)    # rank 0 of each group reads; what the other ranks pass is ignored
megafx.check_data(batch, mesh)                # the same within a group, another in every data-parallel replica

A group of a mesh that has a dim 'cp' is of all context- and tensor-parallel ranks of one part of the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megafx.distributed.agreement import broadcast_object, check_inputs, of_all_ranks, raising_together, tensor_hash
from megafx.distributed.mesh import ranks_alike
from megafx.errors import AgreementError
from megafx.placements.data_axis import CONTEXT_AXIS, TENSOR_AXIS

_FIX = "give the ranks of a tensor- or context-parallel group one batch (broadcast_data), shard data by data-parallel rank only"


@dataclass(frozen=True)
class _Tensor:
    """Replaces a tensor of the batch, whose bytes are sent apart."""

    shape: torch.Size
    dtype: torch.dtype
    on_gpu: bool


def broadcast_data(batch: Any, mesh: DeviceMesh | None = None) -> Any:
    """The batch of the first rank of each tensor-parallel group, on all of its ranks. Collective over the group.

    batch: tensors and any picklable values in dicts, lists and tuples (other mappings come back as dicts); on other ranks
    anything, such as None. Values are bit-equal, tensors on the same kind of device as on the first rank. mesh: as for
    `parallelize`; None: all ranks are one group.

    The structure is sent as a pickled object (its size, then itself), the bytes of all tensors after it in one broadcast.
    """
    group = _group_of(mesh)
    if group is None:
        return batch
    device = torch.device("cuda" if dist.is_initialized() and "nccl" in dist.get_backend() else "cpu")
    first, tensors, about = dist.get_rank(group) == 0, list[torch.Tensor](), list[_Tensor]()

    structure, about = broadcast_object((_described(batch, tensors, about), about) if first else None, group)
    sizes = [t.shape.numel() * t.dtype.itemsize for t in about]
    sent = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    if sum(sizes):
        if first:
            torch.cat([x.view(torch.uint8).to(device) for x in tensors if x.numel()], out=sent)
        dist.broadcast(sent, group_src=0, group=group)
    return batch if first else _restored(structure, iter(sent.split(sizes)))


def _described(value: Any, tensors: list[torch.Tensor], about: list[_Tensor]) -> Any:
    """The value with a description in place of each tensor. Fills both lists."""
    if not isinstance(value, torch.Tensor):
        return _map(value, lambda part: _described(part, tensors, about))
    tensors.append(value.detach().contiguous().reshape(-1))
    about.append(_Tensor(value.shape, value.dtype, value.device.type != "cpu"))
    return about[-1]


def _restored(value: Any, parts: Iterator[torch.Tensor]) -> Any:
    """The value that was described; parts: the bytes of its tensors."""
    if not isinstance(value, _Tensor):
        return _map(value, lambda part: _restored(part, parts))
    whole = next(parts).clone().view(value.dtype).view(value.shape)  # a clone begins where its dtype may
    return whole if value.on_gpu else whole.cpu()


def check_data(batch: Any, mesh: DeviceMesh | None = None, step: int = 0) -> None:
    """Raise AgreementError where data went wrong: ranks of one tensor-parallel group with different batches, or two
    data-parallel replicas (along any other dim of `mesh`) with the same one. Collective; every rank of the mesh raises.

    Parallelized models check the first half of this on their first calls, then every `Config.check_inputs_every`.
    """
    leaves = _named(batch, "batch")
    named = [(name, x) for name, x in leaves if isinstance(x, torch.Tensor)]
    group, problem = _group_of(mesh), None
    if group is not None:
        values = [(name, x) for name, x in leaves if not isinstance(x, torch.Tensor)]
        try:
            check_inputs(named, f"batch with {values}", step, group)
        except AgreementError as error:
            problem = error  # the other groups get it before it is raised
    about = [(tuple(x.shape), str(x.dtype), int(tensor_hash(x))) for _, x in named]
    own = int.from_bytes(hashlib.blake2b(repr(about).encode(), digest_size=7).digest(), "big") if about else -1
    for name in (mesh.mesh_dim_names or ()) if mesh is not None else ():
        if name in (CONTEXT_AXIS, TENSOR_AXIS) or mesh is None:
            continue
        axis = mesh[name].get_group()
        try:
            with raising_together(axis):
                if problem is not None:
                    raise problem
        except AgreementError as error:
            problem = error
        hashes = of_all_ranks(torch.tensor([own]), axis)[:, 0].tolist()
        a = next((a for a, one in enumerate(hashes) if one >= 0 and one in hashes[:a]), None)
        if problem is None and a is not None:
            same = hashes.index(hashes[a])
            found = f"step {step}: replicas {same} and {a} of dim '{name}' of the mesh got the same batch"
            problem = AgreementError(found, fix=_FIX)
    if problem is not None:
        raise problem


def _group_of(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The ranks that are given the same batch; None: this rank alone."""
    if mesh is None:
        return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
    alike = ranks_alike(mesh)
    return alike.get_group() if alike.size() > 1 else None


def _named(value: Any, name: str) -> list[tuple[str, Any]]:
    """(path, leaf) of nested mappings, lists and tuples."""
    if isinstance(value, Mapping):
        return [found for k, v in value.items() for found in _named(v, f"{name}.{k}")]
    if isinstance(value, (list, tuple)):
        return [found for i, v in enumerate(value) for found in _named(v, f"{name}[{i}]")]
    return [(name, value)]


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same containers of `function(x)`; leaves as they are."""
    if isinstance(value, Mapping):
        return {k: function(v) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(function, value))
    return type(value)(map(function, value)) if type(value) in (list, tuple) else value
