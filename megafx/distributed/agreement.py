"""Ranks of the tensor-parallel axis made to agree, or stopped with a text that says on what they differ.

Checks compare digests gathered on every rank, so that all ranks raise together instead of some hanging in a collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megafx.distributed.tensor import TPTensor
from megafx.errors import AgreementError, MegafxError

CHECKED_FIRST = 3  # steps at the beginning whose inputs are compared whatever `check_inputs_every` says


def broadcast_object(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Rank 0's value (pickled), on every rank; without a group this rank's own."""
    box = [value]
    if group is not None:
        dist.broadcast_object_list(box, group_src=0, group=group)
    return box[0]


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's value (pickled), on every rank; without a group this rank's alone."""
    found: list[Any] = [value]
    if group is not None:
        found = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, value, group=group)
    return found


def check_same(what: str, text: str, group: dist.ProcessGroup | None, fix: str = "") -> None:
    """Raise on every rank unless all ranks have the same text."""
    mine = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    digests = gather_objects((mine, text[:2000]), group)
    others = [r for r, (digest, _) in enumerate(digests) if digest != digests[0][0]]
    if others:
        raise AgreementError(
            f"rank {others[0]} and rank 0 differ in {what}: {_difference(digests[0][1], digests[others[0]][1])}",
            fix=fix,
        )


def raise_together(error: MegafxError | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if any rank has an error: its own, or that of the first rank that has one."""
    errors = gather_objects(None if error is None else (type(error), error.found, error.fix), group)
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if other is not None:
            kind, found, fix = other
            raise kind(f"on rank {rank}: {found}", fix=fix)


def _difference(a: str, b: str) -> str:
    """The first differing line of two texts."""
    for x, y in zip(a.splitlines(), b.splitlines(), strict=False):
        if x != y:
            return f"'{x[:200]}' on rank 0, '{y[:200]}' there"
    return f"{len(a.splitlines())} lines on rank 0, {len(b.splitlines())} there"


# -- hashes of tensors

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_CHUNK = 1 << 24  # elements hashed at a time: bounds the int64 temporaries to a few hundred MB


def tensor_hash(x: torch.Tensor) -> torch.Tensor:
    """0-d int64 on x's device: position-dependent hash of its bits, equal for equal tensors (no host synchronisation)."""
    if x.is_complex():
        x = torch.view_as_real(x)
    flat = x.detach().reshape(-1)
    bits = flat.to(torch.uint8) if x.dtype == torch.bool else flat.view(_BITS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        positions = torch.arange(start + 1, start + part.numel() + 1, device=x.device)
        # multiplicative hashing of values and positions; wraps around in 64 bits (Knuth's golden ratio multipliers)
        mixed = (part + 0x632BE5AB) * (positions * 0x9E3779B1 + 1)
        total += (mixed ^ (mixed >> 29)).sum()
    return total


def _gather_vector(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[n] -> [ranks, n] on the host."""
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, values, group=group)
    return torch.stack(rows).cpu()


def agree_on_weights(model: nn.Module, group: dist.ProcessGroup | None) -> list[str]:
    """Compare (still whole) parameters and buffers of all ranks; take rank 0's where they differ. Returns their names.

    Names, shapes and dtypes have to be the same.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    described = "\n".join(f"{n}: {tuple(x.shape)} {x.dtype} {'meta' if x.is_meta else ''}" for n, x in tensors)
    check_same("the model", described, group, fix="build the same model on every rank")
    real = [(n, x._local_tensor if isinstance(x, TPTensor) else x) for n, x in tensors if not x.is_meta]
    if not real:
        return []
    hashes = _gather_vector(torch.stack([tensor_hash(x).to(real[0][1].device) for _, x in real]), group)
    different = [i for i in range(len(real)) if bool((hashes[:, i] != hashes[0, i]).any())]
    with torch.no_grad():
        for i in different:
            value = real[i][1].detach()
            whole = value.contiguous()
            dist.broadcast(whole, group_src=0, group=group)
            if whole is not value:
                value.copy_(whole)
    return [real[i][0] for i in different]


def check_inputs(
    named: Sequence[tuple[str, torch.Tensor]], structure: str, step: int, group: dist.ProcessGroup | None
) -> None:
    """Raise on every rank unless all ranks were given the same inputs."""
    fix = (
        "give every rank of a tensor-parallel group the same batch: shard data by data-parallel rank only "
        "(PipelineStage probes shapes with tensors of no value unless it is given input_args= and output_args=)"
    )
    described = "\n".join([structure, *(f"{n}: {tuple(x.shape)} {x.dtype}" for n, x in named)])
    check_same(f"the call of step {step}", described, group, fix=fix)
    if not named:
        return
    device = named[0][1].device
    hashes = _gather_vector(torch.stack([tensor_hash(x).to(device) for _, x in named]), group)
    wrong = [n for i, (n, _) in enumerate(named) if bool((hashes[:, i] != hashes[0, i]).any())]
    if wrong:
        ranks = sorted({r for i in range(len(named)) for r in range(len(hashes)) if hashes[r, i] != hashes[0, i]})
        raise AgreementError(
            f"step {step}: input {', '.join(wrong)} is not the same on all tensor-parallel ranks "
            f"(rank {', '.join(map(str, ranks))} against rank 0)",
            fix=fix,
        )


def check_shapes(named: Sequence[tuple[str, torch.Tensor]], step: int, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank unless the batches of all data-parallel ranks have the same shapes."""
    described = "\n".join(f"{n}: {tuple(x.shape)}" for n, x in named)
    fix = (
        "give each the same number of rows and pad them to the same length: this model averages over its batch, or drops out "
        "by place in it; or use Config(data_parallel_loss='average')"
    )
    check_same(f"the shapes of their batches at step {step}", described, group, fix=fix)


def draw_seed(device: torch.device, group: dist.ProcessGroup | None) -> torch.Tensor:
    """0-d int64 on `device` from torch's default generator there: rank 0's, on every rank; no host synchronisation.

    Every rank draws, so that generators advance alike; the sequence is the one of a single process.
    """
    seed = torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=device)
    if group is not None:
        dist.broadcast(seed, group_src=0, group=group)
    return seed


def same_generators(device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Set torch's default generators, of the CPU and of `device`, to rank 0's state on every rank."""
    on_cuda = device.type == "cuda"
    mine = (torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_cuda else None)
    cpu, cuda = broadcast_object(mine, group)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)
