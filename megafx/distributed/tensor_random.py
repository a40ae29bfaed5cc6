"""Random numbers for shards are those of one process: every rank draws for the whole tensor, and keeps its part.

All ranks draw from rank 0's generator state. Where a rank's own state is another one (each rank seeded apart, data-parallel
ranks that drop out apart), it is advanced by as much, and stays the rank's own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from megafx.distributed.tensor_layout import everyone_on, shard_of, spec_of
from megafx.distributed.tensor_whole import LazyView, on_whole, op_name, written_by

# They overwrite all of their first operand, whatever it held.
_OVERWRITES = frozenset(
    ["bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"]
)


def is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def draw(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a random operation of which some operand is sharded, or a view of a shard. Collective.

    Results of the shape of the first such operand are sharded as it is, others are plain.
    """
    first = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, (DTensor, LazyView)))
    base = first.base if isinstance(first, LazyView) else first

    def call(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return _draw_as_rank_0(func, args, kwargs, base._spec.mesh, base._local_tensor.device)

    unread = first is args[0] and not isinstance(first, LazyView)
    if unread and op_name(func) in _OVERWRITES and base._spec.placements[0].is_shard():
        whole = torch.empty(base.shape, dtype=base.dtype, device=base._local_tensor.device)
        rest = pytree.tree_map(lambda x: x, (list(args[1:]), kwargs))
        if not any(isinstance(x, (DTensor, LazyView)) for x in pytree.tree_leaves(rest)):
            call(func, [whole, *args[1:]], kwargs)
            base._local_tensor.copy_(shard_of(whole, base._spec))
            return first
    if unread and op_name(func).endswith("_like"):
        args = [torch.empty(base.shape, dtype=base.dtype, device=base._local_tensor.device), *args[1:]]
    out = on_whole(func, args, kwargs, call)
    if written_by(func) or isinstance(first, LazyView):
        return out

    def part(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.shape != base.shape or x.dim() == 0:
            return x
        return DTensor.__new__(type(base), shard_of(x, base._spec), spec_of(base._spec, x.dtype), requires_grad=False)

    return pytree.tree_map(part, out)


def _draw_as_rank_0(func: Any, args: Any, kwargs: Any, mesh: DeviceMesh, device: torch.device) -> Any:
    """Run `func`, whose operands are plain, from the generator state of rank 0. Collective."""
    group = everyone_on(mesh)
    if device.type == "meta" or dist.get_world_size(group) == 1:
        return func(*args, **kwargs)
    generator = kwargs.get("generator")
    mine = _state(generator, device)
    first = mine.to(mesh.device_type, copy=True)
    dist.broadcast(first, group_src=0, group=group)
    first = first.cpu()
    if torch.equal(first, mine):
        return func(*args, **kwargs)
    copies = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))
    func(*copies[0], **copies[1])
    advanced = _state(generator, device)
    _set_state(generator, device, first)
    out = func(*args, **kwargs)
    _set_state(generator, device, advanced)
    return out


def _state(generator: torch.Generator | None, device: torch.device) -> torch.Tensor:
    if generator is not None:
        return generator.get_state()
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(generator: torch.Generator | None, device: torch.device, state: torch.Tensor) -> None:
    if generator is not None:
        generator.set_state(state)
    elif device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
