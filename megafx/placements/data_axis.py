"""How many ranks share the work of a batch, and how they hold parameters. No torch import.

    ddp     every rank holds all parameters; gradients are all-reduced
    zero1   ranks hold shards of parameters (so that their optimizer has the state of a shard), gathered at the first forward
            after a step and kept until the next; gradients are reduce-scattered. Source: Rajbhandari et al. 2020 (ZeRO)
    fsdp    the same, but gathered a region at a time, freed after use and gathered again in backward. Source: Zhao et al. 2023

With `shard_ranks` less than `ranks`, shards are of that many ranks, and groups of them hold copies (HSDP): gradients are
reduce-scattered within a group and all-reduced between groups.

Ranks that cut the sequence of one part of the batch share parameters too: a copy is held by `shard_ranks` groups of `cp`
ranks. (So does torchtitan, whose axis `dp_shard_cp` this is.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megafx.config import Config
from megafx.errors import ConfigError
from megafx.placements.types import Layout

# The axes of data parallelism: all its ranks; those that share one copy of a sharded parameter; those that hold the same shard;
# and those that share a copy together with their tensor-parallel ranks. JOINED: what some are made of.
TENSOR_AXIS, CONTEXT_AXIS = "tp", "cp"
PIPELINE_AXIS = "pp"
MICRO_AXIS = "micro"  # micro-batches of a pipeline, which are computed one after the other
BATCH_AXIS, SHARD_AXIS, REPLICA_AXIS, COPY_AXIS = "dp", "dp_shard", "dp_replicate", "dp_shard_tp"
# The same with ranks that cut a sequence: all that have summands of a gradient; those that share a copy.
GRADIENT_AXIS, CONTEXT_SHARD_AXIS, CONTEXT_COPY_AXIS = "dp_cp", "dp_shard_cp", "dp_shard_cp_tp"
# Data-parallel ranks that share out experts, the innermost of these ranks; those of a shard group that have the same experts;
# all that have the same experts, and so summands of their gradients; those that hold one copy of all experts. (The names of
# the first two are torchtitan's.)
EXPERT_AXIS, SAME_EXPERTS_AXIS, EXPERT_GRADIENT_AXIS, EXPERT_COPY_AXIS = "ep", "dp_shard_mod_ep", "edp", "ep_tp"
EXPERT_REPLICA_AXIS = "edp_replicate"  # those that hold the same rows of the same experts, where ranks cut a sequence
_SHARD = (SHARD_AXIS, SAME_EXPERTS_AXIS, EXPERT_AXIS)
JOINED = {
    BATCH_AXIS: (REPLICA_AXIS, *_SHARD),
    SHARD_AXIS: (SAME_EXPERTS_AXIS, EXPERT_AXIS),
    COPY_AXIS: (*_SHARD, TENSOR_AXIS),
    GRADIENT_AXIS: (REPLICA_AXIS, *_SHARD, BATCH_AXIS, CONTEXT_AXIS),
    CONTEXT_SHARD_AXIS: (*_SHARD, CONTEXT_AXIS),
    CONTEXT_COPY_AXIS: (*_SHARD, CONTEXT_AXIS, TENSOR_AXIS),
    EXPERT_COPY_AXIS: (EXPERT_AXIS, TENSOR_AXIS),
    EXPERT_GRADIENT_AXIS: (REPLICA_AXIS, SAME_EXPERTS_AXIS, CONTEXT_AXIS),
    EXPERT_REPLICA_AXIS: (REPLICA_AXIS, CONTEXT_AXIS),
}
DATA_AXES = (SHARD_AXIS, REPLICA_AXIS, SAME_EXPERTS_AXIS, *JOINED)
OUTER_AXES = (*DATA_AXES, CONTEXT_AXIS, EXPERT_AXIS)  # all but the tensor-parallel one


def ranks_of(axis: str, sizes: Mapping[str, int]) -> int:
    """Ranks of an axis, or of those that it joins. sizes: of the axes of a mesh."""
    return math.prod(sizes.get(part, 1) for part in ((axis,) if axis in sizes else JOINED.get(axis, ())))


def inner_ranks(axis: str, sizes: Mapping[str, int]) -> int:
    """Ranks of the axes inside of this one: its neighbours are so many apart. (Those that hold the same shard are farther
    apart, by the ranks of a copy.) sizes: of the axes of a mesh."""
    if axis in (TENSOR_AXIS, COPY_AXIS, CONTEXT_COPY_AXIS):
        return 1
    t, context = sizes.get(TENSOR_AXIS, 1), sizes.get(CONTEXT_AXIS, 1)
    if axis in (CONTEXT_AXIS, GRADIENT_AXIS, CONTEXT_SHARD_AXIS):
        return t
    if axis == SAME_EXPERTS_AXIS or (axis == EXPERT_GRADIENT_AXIS and context == 1):
        return t * context * sizes.get(EXPERT_AXIS, 1)
    return t if axis in (EXPERT_GRADIENT_AXIS, EXPERT_REPLICA_AXIS) else t * context


DDP, ZERO1, FSDP = "ddp", "zero1", "fsdp"


@dataclass(frozen=True)
class DataAxis:
    """The ranks that share out a batch, and how they hold parameters."""

    ranks: int
    form: str = DDP  # DDP, ZERO1 or FSDP
    shard_ranks: int = 1  # of `ranks`, those that hold one copy of the parameters; 1 with DDP
    bucket_bytes: int = 25 * 2**20  # gradients are reduced together until they are this many
    # ranks that cut the sequence of each part of the batch; their gradients are summed with those of the others, and they
    # hold shards of a copy with them, but for experts
    cp: int = 1
    # of `ranks`, those that share out the experts of mixtures, whole ones; with a form that shards, of `shard_ranks`, and
    # those of these that have the same experts hold shards of them
    experts: int = 1

    @classmethod
    def of(cls, config: Config) -> DataAxis | None:
        """What a config says without ranks to ask; None for one rank."""
        ranks, form, experts = config.data_parallel_size or 1, config.data_parallel, config.expert_model_parallel_size
        if ranks % experts:
            found = (
                f"expert_model_parallel_size={experts} without data-parallel ranks, among which experts are shared out"
            )
            raise ConfigError(found, fix=f"set data_parallel_size to a multiple of {experts}")
        shard = 1 if form == DDP else config.data_parallel_shard_size or ranks
        cp = config.context_parallel_size
        made = cls(ranks, form, shard, config.data_parallel_bucket_mib * 2**20, cp, experts)
        return made if ranks > 1 or cp > 1 else None

    @classmethod
    def of_context(cls, config: Config) -> DataAxis | None:
        """The ranks that cut the sequence of one part of the batch, all data-parallel ones where these share out experts; None
        for one."""
        if config.expert_model_parallel_size > 1:
            return cls.of(config)
        return cls(1, cp=config.context_parallel_size) if config.context_parallel_size > 1 else None

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the axes."""
        sizes = {BATCH_AXIS: self.ranks}
        if self.experts > 1:
            sizes = {
                REPLICA_AXIS: self.ranks // self.same_experts // self.experts,
                SAME_EXPERTS_AXIS: self.same_experts,
                EXPERT_AXIS: self.experts,
            }
        elif self.sharded:
            sizes = {REPLICA_AXIS: self.replicas, SHARD_AXIS: self.shard_ranks}
        return sizes | ({CONTEXT_AXIS: self.cp} if self.cp > 1 else {})

    @property
    def alike(self) -> int:
        """Ranks that have the same experts, those of a sequence too: their gradients of experts are summed."""
        return self.ranks * self.cp // self.experts

    @property
    def same_experts(self) -> int:
        """Ranks that cut the rows of the experts that each of them has: those of a copy, one in each group that shares out."""
        return self.shard_ranks // self.experts if self.form != DDP else 1

    @property
    def sharing(self) -> int:
        """Ranks that hold one copy of the parameters, tensor-parallel ones not counted."""
        return 1 if self.form == DDP else self.shard_ranks * self.cp

    @property
    def sharded(self) -> bool:
        """True if a rank holds less than whole parameters."""
        return self.sharing > 1

    @property
    def shard_axis(self) -> str:
        """The axis of the ranks that hold one copy."""
        return SHARD_AXIS if self.cp == 1 else CONTEXT_SHARD_AXIS

    @property
    def copy_axis(self) -> str:
        """The axis of these with their tensor-parallel ranks."""
        return COPY_AXIS if self.cp == 1 else CONTEXT_COPY_AXIS

    @property
    def replicas(self) -> int:
        """Ranks that hold the same shard."""
        return self.ranks // self.shard_ranks


def rows_of(length: int, data: DataAxis, t: int, cut: bool, experts: bool = False) -> tuple[bool, int, Layout]:
    """How ranks share the rows of a parameter, `length` on a tensor-parallel rank: (whether data-parallel ranks alone share
    them, number of ranks, layout).

    cut: tensor-parallel ranks hold shards; else they hold the same rows, and share them too. experts: the rows are this rank's
    experts, which those that have the same ones share.
    """
    if experts:
        return True, data.same_experts, Layout.contiguous(length, data.same_experts)
    alone = cut or t == 1
    ranks = data.sharing * (1 if alone else t)
    return alone, ranks, Layout.contiguous(length, ranks)
