"""`torch.optim.Muon` of sharded parameters: one rank orthogonalizes each matrix, whole, so that all layouts give one update.

The momentum of a matrix lies in shards as the parameter does. In a step each rank gets whole the matrices that it owns, runs
torch's own Newton-Schulz iteration on them, and gives every rank its shard of the result: one all-to-all each way. Matrices are
shared out by their FLOPs, those that all ranks hold whole too (they need no first exchange). The matrix is the user's own
parameter: a fused q, k, v is one, as in one process. On equal momentum the update has the bits that one process computes.

Beside its shards a rank holds its part of the whole matrices, about as many bytes again, for the time of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import _muon as torch_muon
from torch.optim.optimizer import _to_scalar

from megafx.distributed.tensor import TPTensor
from megafx.distributed.tensor_layout import cuts_of
from megafx.errors import UsageError
from megafx.placements.tensors import cut_tensor, put_together
from megafx.placements.types import Cuts, local_shape


@cache
def prepare() -> None:
    """Let torch.optim.Muon, and what is derived of it, step parallelized parameters. Others are stepped by torch's function."""
    of_torch = torch_muon._single_tensor_muon

    def step(params: list[Tensor], grads: list[Tensor], muon_momentum_bufs: list[Tensor], **options: Any) -> None:
        rows = list(zip(params, grads, muon_momentum_bufs, strict=True))
        plain = [row for row in rows if not isinstance(row[0], TPTensor)]
        if plain or not rows:
            of_torch(*([list(column) for column in zip(*plain, strict=True)] or [[], [], []]), **options)
        alike: dict[tuple[DeviceMesh, torch.dtype], list[Any]] = {}
        for row in rows:
            if isinstance(row[0], TPTensor):
                alike.setdefault((row[0]._spec.mesh, row[2].dtype), []).append(row)
        for (mesh, _), own in alike.items():
            _step(mesh, own, **options)

    torch_muon._single_tensor_muon = step


def _step(
    mesh: DeviceMesh, rows: Sequence[tuple[TPTensor, TPTensor, TPTensor]], *, lr: Any, weight_decay: float, momentum: float,
    nesterov: bool, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float, adjust_lr_fn: str | None,
    has_complex: bool = False,
) -> None:  # fmt: skip
    """What torch's `_single_tensor_muon` does. rows: parameter, gradient and momentum, each placed alike; all of one dtype."""
    lr = _to_scalar(lr)
    updates = []
    for param, grad, buf in rows:
        if not isinstance(grad, TPTensor) or grad._spec.placements != param._spec.placements:
            raise UsageError(
                f"the gradient of a parameter of {tuple(param.shape)} is {type(grad).__name__}, and not placed as it is",
                fix="leave gradients as backward of the parallelized model makes them",
            )
        buf.lerp_(grad, 1 - momentum)
        updates.append((grad.lerp(buf, momentum) if nesterov else buf)._local_tensor)  # type: ignore[attr-defined]  # TPTensor
    shapes, cuts = [p.shape for p, _, _ in rows], [cuts_of(p) for p, _, _ in rows]

    def iterated(steps: int) -> list[Tensor]:
        function = partial(_iterate, coefficients=ns_coefficients, steps=steps, eps=eps)
        return by_owners(mesh.get_group(), updates, shapes, cuts, function, _dtype_of_results(updates[0].dtype))

    results = iterated(ns_steps)
    if not nesterov and updates[0].dtype == torch.bfloat16:  # torch divides such a momentum by its norm, in place
        for (_, _, buf), result in zip(rows, iterated(0), strict=True):
            buf._local_tensor.copy_(result)
    for (param, _, _), result in zip(rows, results, strict=True):
        rate = torch_muon._adjust_lr(lr, adjust_lr_fn, param.shape)
        param.mul_(1 - lr * weight_decay)
        param._local_tensor.add_(result, alpha=-rate)
        torch.autograd.graph.increment_version(param._local_tensor)


def _iterate(x: Tensor, *, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """torch's own, of a copy."""
    return torch_muon._zeropower_via_newtonschulz(x.clone(), coefficients, steps, eps)


@cache
def _dtype_of_results(dtype: torch.dtype) -> torch.dtype:
    a_step = torch_muon._zeropower_via_newtonschulz(torch.ones(1, 1, dtype=dtype), (1.0, 1.0, 1.0), 1, 1e-7)
    return a_step.dtype


def flops(shape: Sequence[int]) -> int:
    """Of one Newton-Schulz iteration, in proportion: a Gram matrix, its square, and their product with the matrix."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


@cache
def owners_of(shapes: tuple[tuple[int, ...], ...], ranks: int) -> list[int]:
    """The rank that computes each matrix: the dearest first, to the rank with the least to do."""
    loads, owners = [0] * ranks, [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: (-flops(shapes[i]), i)):
        owners[i] = min(range(ranks), key=lambda r: (loads[r], r))
        loads[owners[i]] += flops(shapes[i])
    return owners


def by_owners(
    group: dist.ProcessGroup, shards: Sequence[Tensor], shapes: Sequence[Sequence[int]], cuts: Sequence[Cuts],
    function: Callable[[Tensor], Tensor], dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """This rank's shards of function(whole matrix), each computed by one rank alone. Collective.

    shards: this rank's physical shards of matrices of these logical shapes. function: [m, n] -> [m, n] of `dtype`.
    """
    me, ranks, count = dist.get_rank(group), dist.get_world_size(group), len(shards)
    owners = owners_of(tuple(tuple(shape) for shape in shapes), ranks)
    sizes = [[local_shape(shapes[i], cuts[i], r) for r in range(ranks)] for i in range(count)]
    own = [i for i in range(count) if owners[i] == me]

    # to the owners: each rank's shard of what is cut
    sent = [[shards[i] for i in range(count) if owners[i] == r and cuts[i]] for r in range(ranks)]
    wanted = [[(sizes[i][r], shards[i].dtype) for i in own if cuts[i]] for r in range(ranks)]
    parts = _exchange(sent, wanted, shards[0].device, group)
    del sent
    found: dict[int, Tensor] = {}
    at = {i: k for k, i in enumerate(i for i in own if cuts[i])}
    for i in own:
        whole = put_together([parts[r][at[i]] for r in range(ranks)], cuts[i]) if cuts[i] else shards[i]
        found[i] = function(whole)
    del parts

    # back: its shard to each rank
    sent = [[cut_tensor(found[i], cuts[i], r) for i in own] for r in range(ranks)]
    wanted = [[(sizes[i][me], dtype) for i in range(count) if owners[i] == r] for r in range(ranks)]
    parts = _exchange(sent, wanted, shards[0].device, group)
    rows = [iter(part) for part in parts]
    return [next(rows[owners[i]]) for i in range(count)]


def _exchange(
    sent: Sequence[Sequence[Tensor]], wanted: Sequence[Sequence[tuple[list[int], torch.dtype]]], device: torch.device,
    group: dist.ProcessGroup,
) -> list[list[Tensor]]:  # fmt: skip
    """sent: tensors for each rank. wanted: (shape, dtype) of those from each rank. One all-to-all, of bytes."""
    give = [x.contiguous().view(-1).view(torch.uint8) for row in sent for x in row]
    splits = [sum(x.numel() * x.element_size() for x in row) for row in sent]
    lengths = [[torch.Size(shape).numel() * dtype.itemsize for shape, dtype in row] for row in wanted]
    taken = torch.empty(sum(map(sum, lengths)), dtype=torch.uint8, device=device)
    given = torch.cat(give) if give else taken.new_empty(0)
    dist.all_to_all_single(taken, given, [sum(row) for row in lengths], splits, group=group)
    found, at = list[list[Any]](), 0
    for row, sizes in zip(wanted, lengths, strict=True):
        found.append([])
        for (shape, dtype), length in zip(row, sizes, strict=True):
            # a copy where bytes do not begin at a multiple of the element's size
            part = taken[at : at + length]
            part = part if at % dtype.itemsize == 0 else part.clone()
            found[-1].append(part.view(dtype).view(shape))
            at += length
    return found
