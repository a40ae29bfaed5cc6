"""The ranks of a run as a mesh: data-parallel ranks times context-parallel ranks times tensor-parallel ranks.

A user's mesh may have a dim 'tp', before it a dim 'cp', and before these a dim 'dp' or dims 'dp_replicate' and 'dp_shard', of
which a last one, 'ep', has the ranks that share out experts.
Without one, a mesh of the world is made, in which the tensor-parallel ranks of a group are neighbours.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megafx.config import Config
from megafx.distributed import exchange
from megafx.distributed.agreement import check_setting
from megafx.distributed.failures import wait_at_exit
from megafx.distributed.tensor_layout import set_everyone
from megafx.errors import AgreementError
from megafx.ops.axes import AxisContext
from megafx.placements.data_axis import (
    BATCH_AXIS,
    CONTEXT_AXIS,
    COPY_AXIS,
    DDP,
    EXPERT_AXIS,
    EXPERT_COPY_AXIS,
    EXPERT_GRADIENT_AXIS,
    EXPERT_REPLICA_AXIS,
    GRADIENT_AXIS,
    REPLICA_AXIS,
    SAME_EXPERTS_AXIS,
    SHARD_AXIS,
    TENSOR_AXIS,
    DataAxis,
)


@dataclass(frozen=True)
class Meshes:
    """Where this rank is."""

    tensor: DeviceMesh | None  # 1-d, of the tensor-parallel axis; None for one rank without a process group
    data: DataAxis | None = None  # None for one data-parallel and one context-parallel rank
    axes: dict[str, AxisContext] = field(default_factory=dict)  # this rank on each of their axes
    batch: dist.ProcessGroup | None = None  # batch, everyone: groups of these ranks and of all
    rows: dist.ProcessGroup | None = None  # of data-parallel ranks alone
    everyone: dist.ProcessGroup | None = None
    # the ranks that are given the same calls, where these are more than the tensor-parallel ones
    calls: dist.ProcessGroup | None = None
    # 1-d, of the ranks that hold one copy of sharded parameters, tensor-parallel ranks next to each other
    shards: DeviceMesh | None = None
    # 1-d, of the ranks that hold one copy of experts, those that share them out next to each other
    experts: DeviceMesh | None = None
    experts_tensor: DeviceMesh | None = None  # the same with their tensor-parallel ranks, next to each other


def make_meshes(config: Config, mesh: DeviceMesh | None, device: torch.device) -> Meshes:
    """The meshes of a run; all its ranks must pass the same Config. Collective over `mesh`, or over the world without one.

    Raises AgreementError.
    """
    if mesh is None:
        mesh = _world(config, device)
        made = Meshes(None) if mesh is None else _meshes(config, mesh)
    else:
        made = _meshes(config, mesh)
        if made.tensor is not None:
            check_setting(config, made.everyone or made.tensor.get_group())
    for each in (made.tensor, made.shards, made.experts, made.experts_tensor):
        if each is not None and made.everyone is not None:
            set_everyone(each, made.everyone)
    if made.tensor is not None and made.tensor.size() > 1:
        exchange.prepare(made.tensor.get_group(), torch.device(made.tensor.device_type), config.tp_comm_overlap)
    return made


def _meshes(config: Config, mesh: DeviceMesh) -> Meshes:
    wait_at_exit()
    tensor = tensor_mesh(mesh, config.tensor_model_parallel_size)
    names = [n for n in DATA_DIMS if n in (mesh.mesh_dim_names or ())]
    ranks = math.prod(mesh[name].size() for name in names)
    context = mesh[CONTEXT_AXIS].size() if CONTEXT_AXIS in (mesh.mesh_dim_names or ()) else 1
    if config.context_parallel_size != context:
        raise AgreementError(
            f"context_parallel_size={config.context_parallel_size}, but the mesh has {context} context-parallel ranks",
            fix=f"make them equal; such a dim of a mesh is named '{CONTEXT_AXIS}'",
        )
    experts = mesh[EXPERT_AXIS].size() if EXPERT_AXIS in names else 1
    if config.expert_model_parallel_size != experts:
        raise AgreementError(
            f"expert_model_parallel_size={config.expert_model_parallel_size}, but the mesh has {experts} ranks that share out "
            "experts",
            fix=f"make them equal; such a dim of a mesh is named '{EXPERT_AXIS}', and is the last of the data-parallel ones",
        )
    one = config.data_parallel_size == 1 or (ranks == 1 and config.data_parallel_size is None)
    if one and context == 1:
        return Meshes(tensor if tensor is not None and tensor.size() > 1 else None)
    if not one and config.data_parallel_size is not None and config.data_parallel_size != ranks:
        raise AgreementError(
            f"data_parallel_size={config.data_parallel_size}, but the mesh has {ranks} data-parallel ranks",
            fix=f"make them equal; such dims of a mesh are named '{BATCH_AXIS}', or '{REPLICA_AXIS}' and '{SHARD_AXIS}'",
        )
    if tensor is None:
        raise AgreementError(f"mesh {mesh} has no dim '{TENSOR_AXIS}'", fix="add one, of one rank if need be")
    return _with_data(config, mesh, tensor, names, ranks)


def _world(config: Config, device: torch.device) -> DeviceMesh | None:
    """A mesh of all ranks; None for one rank."""
    t, d, c = config.tensor_model_parallel_size, config.data_parallel_size or 1, config.context_parallel_size
    d, dp = d * c, d  # groups of tensor-parallel ranks
    join_the_job(t, d, device)
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
    if world is None:
        if (t or 1) * d == 1:
            return None
        sizes = f"tensor_model_parallel_size={t}" + _outer(dp, c)
        raise AgreementError(
            f"{sizes}, but there is no process group",
            fix=f"start with `torchrun --standalone --nproc-per-node {(t or 1) * d}`",
        )
    if t == 1 and d == 1:
        return None
    check_setting(config, dist.group.WORLD)
    if t is None and world % d == 0:
        t = world // d
    if t is None or t * d != world:
        asked = (f", tensor_model_parallel_size={t}" if t is not None else "") + _outer(dp, c)
        raise AgreementError(
            f"{asked[2:]}, but the world has {world} ranks",
            fix=f"start {(t or 1) * d} ranks, or set data_parallel_size so that their product is {world}",
        )
    if world == 1:
        return None
    return world_mesh(device, dims_of(config, t))


def dims_of(config: Config, t: int) -> dict[str, int]:
    """The dims of a mesh of the world, outermost first, with their sizes. t: tensor-parallel ranks. Raises AgreementError."""
    dp, c = config.data_parallel_size or 1, config.context_parallel_size
    inner = ({} if c == 1 else {CONTEXT_AXIS: c}) | {TENSOR_AXIS: t}
    if dp * c == 1:
        return inner
    shard = dp if config.data_parallel == DDP else config.data_parallel_shard_size or dp
    experts = config.expert_model_parallel_size
    if shard % experts:
        raise AgreementError(
            f"{shard} data-parallel ranks cannot share out experts in groups of expert_model_parallel_size={experts}",
            fix=f"set data_parallel_size, and data_parallel_shard_size where it is set, to multiples of {experts}",
        )
    if experts > 1:
        groups = {REPLICA_AXIS: dp // shard, SAME_EXPERTS_AXIS: shard // experts}
        return {name: size for name, size in groups.items() if size > 1} | {EXPERT_AXIS: experts} | inner
    return ({BATCH_AXIS: dp} if shard == dp else {REPLICA_AXIS: dp // shard, SHARD_AXIS: shard}) | inner


def _outer(dp: int, cp: int) -> str:
    """The sizes of the outer axes that are more than one, as settings."""
    sizes = {"data_parallel_size": dp, "context_parallel_size": cp}
    return "".join(f", {name}={size}" for name, size in sizes.items() if size > 1)


def join_the_job(t: int | None, d: int, device: torch.device) -> None:
    """Make the process group where a launcher (torchrun) has started this process as one of several, and nobody has made it.

    A warning where the config asks for one rank: each process would train a model of its own.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    started = all(name in os.environ for name in names) and int(os.environ["WORLD_SIZE"]) > 1
    if not started or not dist.is_available() or (dist.is_initialized() and (t, d) != (1, 1)):
        return
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if (t, d) == (1, 1):
        warnings.warn(
            f"{ranks} processes were started, and tensor_model_parallel_size=1 without data parallelism makes each train a "
            "model of its own: leave tensor_model_parallel_size out for tensor parallelism over all of them, or set "
            f"data_parallel_size={ranks}",
            stacklevel=4,
        )
        return
    on_gpu = device.type == "cuda" or (device.type == "meta" and torch.cuda.is_available())
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group("nccl" if on_gpu else "gloo")
    if rank == 0:
        print(f"megafx: made the process group of {ranks} ranks ({dist.get_backend()})", file=sys.stderr, flush=True)


# dims of a mesh that are data-parallel, outermost first
DATA_DIMS = (REPLICA_AXIS, SHARD_AXIS, SAME_EXPERTS_AXIS, BATCH_AXIS, EXPERT_AXIS)
_made: dict[tuple[str, tuple[tuple[str, int], ...]], tuple[dist.ProcessGroup | None, DeviceMesh]] = {}


def world_mesh(device: torch.device, dims: Mapping[str, int]) -> DeviceMesh:
    """One mesh per shape, for all models: process groups are never freed, and each holds files and threads."""
    kind = device.type if device.type != "meta" else "cuda" if torch.cuda.is_available() else "cpu"
    world, key = dist.group.WORLD, (kind, tuple(dims.items()))
    if key not in _made or _made[key][0] is not world:
        _made[key] = world, init_device_mesh(kind, tuple(dims.values()), mesh_dim_names=tuple(dims))
    return _made[key][1]


def tensor_mesh(mesh: DeviceMesh, size: int | None = None) -> DeviceMesh:
    """The tensor-parallel dim of a mesh, 1-d. Raises AgreementError unless it has `size` ranks."""
    names = mesh.mesh_dim_names or ()
    if TENSOR_AXIS in names and mesh.ndim > 1:
        mesh = mesh[TENSOR_AXIS]
    if mesh.ndim != 1:
        found = f"mesh {mesh} has {mesh.ndim} dims, none of them named '{TENSOR_AXIS}'"
        raise AgreementError(found, fix=f"name one dim '{TENSOR_AXIS}'")
    if size is not None and size != mesh.size():
        found = f"tensor_model_parallel_size={size}, but dim '{TENSOR_AXIS}' of the mesh has {mesh.size()} ranks"
        raise AgreementError(found, fix="make them equal")
    return mesh


def ranks_alike(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks of a mesh that are given the same batches, 1-d: tensor-parallel ranks, those of one sequence together.

    Raises AgreementError where no dim is tensor-parallel.
    """
    tensor = tensor_mesh(mesh)
    if CONTEXT_AXIS not in (mesh.mesh_dim_names or ()):
        return tensor
    return mesh[(CONTEXT_AXIS, TENSOR_AXIS)]._flatten("cp_tp")


def _with_data(config: Config, mesh: DeviceMesh, tensor: DeviceMesh, names: list[str], ranks: int) -> Meshes:
    experts = [name for name in names if name == EXPERT_AXIS]
    apart = {SHARD_AXIS, SAME_EXPERTS_AXIS, *experts} & {*names}  # where these are, ranks of 'dp_replicate' hold copies
    sharing_one = [name for name in names if not apart or name != REPLICA_AXIS]
    shard = math.prod(mesh[name].size() for name in sharing_one)
    if config.data_parallel == DDP:
        shard = 1
    elif config.data_parallel_shard_size not in (None, shard):
        found = f"data_parallel_shard_size={config.data_parallel_shard_size}, but the mesh has {shard} ranks to a copy"
        raise AgreementError(found, fix=f"name the dims '{REPLICA_AXIS}' and '{SHARD_AXIS}'")
    context, bucket = config.context_parallel_size, config.data_parallel_bucket_mib * 2**20
    sequence = [CONTEXT_AXIS] if context > 1 else []
    every = [*names, *sequence]
    data = DataAxis(ranks, config.data_parallel, shard, bucket, context, config.expert_model_parallel_size)
    batch = _joined(mesh, names, BATCH_AXIS) if names else None
    everyone = _joined(mesh, [*every, TENSOR_AXIS], "_".join((*every, TENSOR_AXIS)))
    axes = {BATCH_AXIS: AxisContext(0, 1) if batch is None else _context(batch)}
    sharing, calls = batch, None
    if sequence:
        sharing = _joined(mesh, every, GRADIENT_AXIS)
        axes |= {CONTEXT_AXIS: _context(mesh[CONTEXT_AXIS]), GRADIENT_AXIS: _context(sharing)}
        calls = ranks_alike(mesh).get_group()
    assert sharing is not None
    shards = own = own_tensor = None
    if data.sharded:
        holders = [*sharing_one, *sequence]
        axes[data.shard_axis] = _context(_joined(mesh, holders, data.shard_axis))
        shards = _joined(mesh, [*holders, TENSOR_AXIS], data.copy_axis)
        axes[data.copy_axis] = _context(shards)
        if REPLICA_AXIS in names:
            axes[REPLICA_AXIS] = _context(mesh[REPLICA_AXIS])
    if experts:
        own, own_tensor = mesh[EXPERT_AXIS], _joined(mesh, [EXPERT_AXIS, TENSOR_AXIS], EXPERT_COPY_AXIS)
        axes[EXPERT_AXIS] = _context(own)
        if data.same_experts > 1:  # these hold shards of each rank's experts
            same = [name for name in sharing_one if name != EXPERT_AXIS]
            axes[SAME_EXPERTS_AXIS] = _context(_joined(mesh, same, SAME_EXPERTS_AXIS))
            own = _joined(mesh, sharing_one, SHARD_AXIS)
            own_tensor = _joined(mesh, [*sharing_one, TENSOR_AXIS], COPY_AXIS)
            if sequence:
                copies = [name for name in every if name not in sharing_one]
                axes[EXPERT_REPLICA_AXIS] = _context(_joined(mesh, copies, EXPERT_REPLICA_AXIS))
        if data.alike > 1:
            alike = [name for name in every if name != EXPERT_AXIS]
            axes[EXPERT_GRADIENT_AXIS] = _context(_joined(mesh, alike, EXPERT_GRADIENT_AXIS))
    rows = None if batch is None else batch.get_group()
    return Meshes(tensor, data, axes, sharing.get_group(), rows, everyone.get_group(), calls, shards, own, own_tensor)


def _joined(mesh: DeviceMesh, names: list[str], joined: str) -> DeviceMesh:
    """These dims of a mesh as one."""
    if len(names) == 1:
        return mesh[names[0]]
    taken = joined in (mesh.mesh_dim_names or ())  # a mesh of dims 'dp' and 'ep'
    return mesh[tuple(names)]._flatten("_".join(names) if taken else joined)


def _context(mesh: DeviceMesh) -> AxisContext:
    return AxisContext(mesh.get_local_rank(), mesh.size(), mesh.get_group().group_name)
