"""Losses and gradients that are not finite, found on every rank at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

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
