"""Losses and gradients that are not finite, found on every rank at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megafx.errors import NumericError


def check_finite(what: str, named: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup | None) -> None:
    """Raise NumericError, on every rank of the group, where a tensor of any rank holds an infinity or a NaN.

    named: (name, this rank's part) of the same tensors on every rank. Waits for the device.
    """
    if not named:
        return
    bad = torch.stack([x.detach().isfinite().all().logical_not() for _, x in named]).to(torch.int32)
    if group is not None:
        dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=group)
    names = [name for (name, _), found in zip(named, bad.tolist(), strict=True) if found]
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise NumericError(
            f"{what} not finite: {', '.join(names[:5])}{more}",
            fix="go on from an earlier checkpoint, with a smaller learning rate or without this batch; where a GradScaler "
            "scales the loss, leave the check off: it skips such steps",
        )


def unscale_gradients(
    func: Callable[..., None], gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """Multiply gradients by 1 / scale, in place; found_inf becomes 1 on all ranks where any rank met an infinity or NaN.

    func: `_amp_foreach_non_finite_check_and_unscale_`, which `torch.amp.GradScaler` calls for the gradients of each dtype;
    the same ones on all ranks. found_inf, inv_scale: [] or [1], plain tensors. A gradient that is no DTensor is the same on
    all ranks. DTensor's own handler of this operation (torch 2.11 to 2.13, `found_inf_reduce_handler`) looks at the first
    gradient alone: where that one is replicated (a layer norm's) the others' infinities stay with the rank that has them.
    """
    sharded = [g for g in gradients if isinstance(g, DTensor)]
    func([g._local_tensor if isinstance(g, DTensor) else g for g in gradients], found_inf, inv_scale)
    for mesh in dict.fromkeys(g.device_mesh for g in sharded):  # an order that all ranks have in common
        for axis in range(mesh.ndim):
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
