"""Batches of data loaders: from one rank to its tensor-parallel group, and checks of who got what.

batch = megafx.broadcast_data(batch, mesh)    # rank 0 of each group reads; what the others give is not looked at
megafx.check_data(batch, mesh)                # the same within a group, another in every data-parallel replica
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megafx.distributed.agreement import check_inputs, tensor_hash
from megafx.distributed.mesh import TENSOR_AXIS, tensor_mesh
from megafx.errors import AgreementError

_ALIGN = 16  # bytes: every tensor begins where its dtype may
_FIX = "give the ranks of a tensor-parallel group one batch (broadcast_data), and shard data by data-parallel rank only"
_FIRST = 1 << 16  # bytes that the first message of a group has room for

_room: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # bytes that a message has room for


@dataclass(frozen=True)
class _Tensor:
    """Where a tensor lies in the message."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def broadcast_data(batch: Any, mesh: DeviceMesh | None = None) -> Any:
    """The batch of the first rank of each tensor-parallel group, on all of its ranks. Collective over the group.

    batch: tensors and any picklable values in dicts, lists and tuples (other mappings come back as dicts); on other ranks
    anything, such as None. Values are bit-equal, tensors on the same kind of device as on the first rank. mesh: as for
    `parallelize`; None: all ranks are one group.

    Shapes and dtypes travel with the data, in one broadcast: of a buffer whose size all ranks know, which is the largest that
    was needed so far. A batch that does not fit is announced by it, and follows in a second one.
    """
    group = _group_of(mesh)
    if group is None:
        return batch
    device = torch.device("cuda" if _on_gpu() else "cpu")
    first = dist.get_rank(group) == 0
    room = _room.get(group, _FIRST)
    message = _pack(batch, device) if first else torch.empty(0, dtype=torch.uint8, device=device)
    buffer = torch.empty(room, dtype=torch.uint8, device=device)
    if first:
        fits = message if message.numel() <= room else message[:8]
        buffer[: fits.numel()] = fits
    dist.broadcast(buffer, group_src=0, group=group)
    size = int.from_bytes(buffer[:8].cpu().numpy().tobytes(), "little")
    if size > room:
        room = _room[group] = -(-size // _FIRST) * _FIRST
        buffer = message if first else torch.empty(size, dtype=torch.uint8, device=device)
        dist.broadcast(buffer, group_src=0, group=group)
    return batch if first else _unpack(buffer, device)


def check_data(batch: Any, mesh: DeviceMesh | None = None, step: int = 0) -> None:
    """Raise AgreementError where data went wrong: ranks of one tensor-parallel group with different batches, or two
    data-parallel replicas (along any other dim of `mesh`) with the same one. Collective; every rank of the mesh raises.

    Parallelized models check the first half of it on their first calls, then every `Config.check_inputs_every`.
    """
    leaves = _named(batch, "batch")
    named = [(name, x) for name, x in leaves if isinstance(x, torch.Tensor)]
    group, problem = _group_of(mesh), None
    if group is not None:
        values = [(name, x) for name, x in leaves if not isinstance(x, torch.Tensor)]
        try:
            check_inputs(named, f"batch with {values}", step, group)
        except AgreementError as error:
            problem = error  # the other groups are told before it is raised
    mine = [(tuple(x.shape), str(x.dtype), int(tensor_hash(x))) for _, x in named]
    for name in (n for n in (mesh.mesh_dim_names or ()) if n != TENSOR_AXIS) if mesh is not None else ():
        assert mesh is not None
        rows: list[Any] = [None] * mesh[name].size()
        dist.all_gather_object(rows, (mine, None if problem is None else problem.found), group=mesh[name].get_group())
        for a, (theirs, found) in enumerate(rows):
            if problem is None and found is not None:
                problem = AgreementError(found, fix=_FIX)
            same = [b for b in range(a) if theirs and rows[b][0] == theirs]
            if problem is None and same:
                found = f"step {step}: replicas {same[0]} and {a} of dim '{name}' of the mesh got the same batch"
                problem = AgreementError(found, fix=_FIX)
    if problem is not None:
        raise problem


def _group_of(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The tensor-parallel group; None: this rank alone."""
    if mesh is None:
        return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
    axis = tensor_mesh(mesh)
    return axis.get_group() if axis.size() > 1 else None


def _on_gpu() -> bool:
    return dist.is_initialized() and "nccl" in dist.get_backend()


def _named(value: Any, name: str) -> list[tuple[str, Any]]:
    """(path, leaf) of nested mappings, lists and tuples."""
    if isinstance(value, Mapping):
        return [found for k, v in value.items() for found in _named(v, f"{name}.{k}")]
    if isinstance(value, (list, tuple)):
        return [found for i, v in enumerate(value) for found in _named(v, f"{name}[{i}]")]
    return [(name, value)]


# -- one message: 8 bytes size of all, 8 bytes size of what describes it, that (pickled), tensors


def _pack(batch: Any, device: torch.device) -> torch.Tensor:
    tensors: list[torch.Tensor] = []
    at = 0

    def describe(value: Any) -> Any:
        nonlocal at
        if isinstance(value, torch.Tensor):
            flat = value.detach().contiguous().reshape(-1)
            tensors.append(flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8))
            start, at = at, -(-(at + tensors[-1].numel()) // _ALIGN) * _ALIGN
            return _Tensor(start, tuple(value.shape), value.dtype, value.device.type)
        return _map(value, describe)

    head = pickle.dumps(describe(batch))
    data = -(-(16 + len(head)) // _ALIGN) * _ALIGN
    message = torch.zeros(data + at, dtype=torch.uint8)
    start = (data + at).to_bytes(8, "little") + len(head).to_bytes(8, "little") + head
    message[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
    message = message.to(device)
    for part in tensors:
        message[data : data + part.numel()] = part
        data += -(-part.numel() // _ALIGN) * _ALIGN
    return message


def _unpack(message: torch.Tensor, device: torch.device) -> Any:
    length = int.from_bytes(message[8:16].cpu().numpy().tobytes(), "little")
    data = -(-(16 + length) // _ALIGN) * _ALIGN

    def restore(value: Any) -> Any:
        if isinstance(value, _Tensor):
            count = torch.Size(value.shape).numel() * value.dtype.itemsize
            part = message[data + value.start : data + value.start + count].clone()
            return part.view(value.dtype).view(value.shape).to(device if value.device != "cpu" else "cpu")
        return _map(value, restore)

    return restore(pickle.loads(message[16 : 16 + length].cpu().numpy().tobytes()))


def _map(value: Any, function: Any) -> Any:
    """The same containers of `function(x)`; leaves as they are."""
    if isinstance(value, Mapping):
        return {k: function(v) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(function, value))
    return type(value)(map(function, value)) if type(value) in (list, tuple) else value
