"""Checks that ranks agree and that values are finite; after a failed check every rank raises an error that says where.

Checks compare every rank with rank 0 and reduce the outcome, so that all ranks raise together instead of some hanging in a
collective, and what a rank sends does not grow with their number. Of differences that of the first rank is sent.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megafx.config import Config
from megafx.debugging import current
from megafx.distributed.failures import stopping_with_others
from megafx.distributed.tensor import TPTensor
from megafx.errors import AgreementError, LostRankError, MegafxError, NumericError
from megafx.meanwhile import meanwhile
from megafx.versions import version_of

OTHER_BATCHES = (
    "got different batches, as from a DistributedSampler over all ranks, another shuffle seed on each, a batch that one "
    "rank left out, or memory that nobody has written (torch.empty)"
)
SAME_BATCH = (
    "give every rank of a tensor- or context-parallel group the same batch: DistributedSampler(num_replicas=, rank=) by "
    "data-parallel rank, one seed for shuffling, or megafx.broadcast_data. (A PipelineStage needs input_args= and "
    "output_args=: else it probes with tensors of no value.)"
)
CHECKED_FIRST = 3  # steps at the beginning whose inputs are compared whatever `check_inputs_every` says


def broadcast_object(value: Any, group: dist.ProcessGroup | None, of: int = 0) -> Any:
    """The value (pickled) of rank `of` of the group, on every rank; without a group this rank's own."""
    box = [value]
    if group is not None:
        with stopping_with_others(f"a message of rank {of} to all"):
            dist.broadcast_object_list(box, group_src=of, group=group)
    return box[0]


def first_rank(holds: bool, group: dist.ProcessGroup | None) -> int | None:
    """The first rank of the group for which it holds, on every rank. Nothing that is sent grows with the number of ranks."""
    if group is None:
        return 0 if holds else None
    ranks = dist.get_world_size(group)
    device = dist.distributed_c10d._get_object_coll_device(group)
    first = torch.tensor(dist.get_rank(group) if holds else ranks, device=device)
    with stopping_with_others("a comparison of all ranks"):
        dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
    return None if int(first) == ranks else int(first)


_groups_of: Counter[tuple[int, ...]] = Counter()  # by their ranks: how many groups this process has made


def group_of(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """A new group of these ranks (of the world), which they alone call for. options: of `dist.new_group`.

    torch names such a group by how many groups a rank knows: ranks that are in different numbers of them would wait for one
    another in vain. Here it is named by how many groups these very ranks have made.
    """
    _groups_of[tuple(ranks)] += 1
    name = f"megafx {' '.join(map(str, ranks))}: {_groups_of[tuple(ranks)]}"
    with meanwhile(dist.distributed_c10d, _process_group_name=lambda ranks, use_hashed_name: name):
        return dist.new_group(list(ranks), use_local_synchronization=True, **options)


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's value (pickled), on every rank; without a group this rank's alone. For groups of a host, or few bytes."""
    found: list[Any] = [value]
    if group is not None:
        found = [None] * dist.get_world_size(group)
        with stopping_with_others("a comparison of all ranks"):
            dist.all_gather_object(found, value, group=group)
    return found


def gather_on_first(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's value (pickled) on rank 0 of the group; nothing on the others."""
    first = dist.get_rank(group) == 0
    found = [None] * dist.get_world_size(group) if first else None
    with stopping_with_others("a message of all ranks to rank 0"):
        dist.gather_object(value, found, group=group, group_dst=0)
    return found or []


def check_same(what: str, text: str, group: dist.ProcessGroup | None, fix: str = "") -> None:
    """Raise on every rank unless all ranks have the same text."""
    mine = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    other = first_rank(broadcast_object(mine, group) != mine, group)
    if other is not None:
        texts = [broadcast_object(text, group, of) for of in (0, other)]  # all ranks come here
        a, b = (t.splitlines() for t in texts)
        lines = (f"'{x[:200]}' on rank 0, '{y[:200]}' there" for x, y in zip(a, b, strict=False) if x != y)
        first = next(lines, f"{len(a)} lines on rank 0, {len(b)} there")
        raise AgreementError(f"rank {other} and rank 0 differ in {what}: {first}", fix=fix)


def check_setting(config: Config, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank unless all have the same Config, flags that change graphs, and versions. Collective."""
    flags = current()
    values = {f"Config.{name}": value for name, value in config.to_dict().items()}
    values |= {"megafx": version_of("megafx"), "torch": torch.__version__, "MEGAFX_SKIP": flags.skip}
    lines = [f"{name} = {value!r}" for name, value in values.items()]
    check_same(
        "the Config", "\n".join(lines), group, fix="give every rank the same Config, flags and installed versions"
    )


@contextlib.contextmanager
def raising_together(group: dist.ProcessGroup | None, become: type[MegafxError] | None = None) -> Iterator[None]:
    """If the body raises on any rank, every rank raises: its own error, or that of the first rank that has one. Collective.

    The body must hold no collective: a rank that raises would leave it. become: class for errors that are not megafx's; without
    it such an error stays as it is on its own rank and is an AgreementError on the others.
    """
    error: Exception | None = None
    sent: tuple[type[MegafxError], str, str] | None = None
    try:
        yield
    except LostRankError:
        raise
    except MegafxError as found:
        error, sent = found, (type(found), found.found, found.fix)
    except Exception as found:
        text = f"{type(found).__name__}: {found}"
        error, sent = found, (become or AgreementError, text, "")
        if become is not None:
            error = become(text)
            error.__cause__ = found
    first = first_rank(sent is not None, group)
    if first is None:
        return
    kind, text, fix = broadcast_object(sent, group, first)
    if error is not None:
        raise error
    raise kind(f"on rank {first}: {text}", fix=fix)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 24  # elements hashed at a time: bounds the int64 temporaries to a few hundred MB


def tensor_hash(x: torch.Tensor) -> torch.Tensor:
    """0-d int64 on x's device: position-dependent hash of its bits, equal for equal tensors (no host synchronisation)."""
    if x.is_complex():
        x = torch.view_as_real(x)
    x = x.detach()
    flat = (x if x.layout is torch.strided else x.to_dense()).reshape(-1)
    bits = flat.to(torch.uint8) if x.dtype == torch.bool else flat.view(_BITS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        positions = torch.arange(start + 1, start + part.numel() + 1, device=x.device)
        # multiplicative hashing of values and positions; wraps around in 64 bits (Knuth's golden ratio multipliers)
        mixed = (part + 0x632BE5AB) * (positions * 0x9E3779B1 + 1)
        total += (mixed ^ (mixed >> 29)).sum()
    return total


def _hashes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor_hash(x).to(tensors[0].device) for x in tensors])


def _gather_hashes(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Hashes of n tensors -> [ranks, n] on the host."""
    return of_all_ranks(_hashes(tensors), group)


def of_all_ranks(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Each rank's values [n] -> [ranks, n] on the host."""
    values = values.to(dist.distributed_c10d._get_object_coll_device(group))
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, values, group=group)
    return torch.stack(rows).cpu()


def differing(tensors: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup | None) -> list[str]:
    """Names of the plain tensors whose values are not those of rank 0 on every rank; meta tensors have none. Collective.

    Raises AgreementError on every rank unless names, shapes and dtypes are the same.
    """
    described = "\n".join(f"{n}: {tuple(x.shape)} {x.dtype} {'meta' if x.is_meta else ''}" for n, x in tensors)
    check_same("the model", described, group, fix="build the same model on every rank")
    real = [(n, x) for n, x in tensors if not x.is_meta]
    if not real:
        return []
    mine = _hashes([x for _, x in real])
    (first,) = of_first_rank([mine], group)
    differs = (mine != first).to(torch.uint8)
    dist.all_reduce(differs, dist.ReduceOp.MAX, group=group)
    return [n for (n, _), differ in zip(real, differs.tolist(), strict=True) if differ]


def agree_on_weights(
    model: nn.Module, group: dist.ProcessGroup | None, added: Collection[str] | None = None
) -> list[str]:
    """Compare (still whole) parameters and buffers of all ranks; take rank 0's where values differ. Returns their names.

    added: names of parameters, where only these are compared.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    named = [(n, x) for n, x in named if added is None or n in added]
    tensors = {n: x._local_tensor if isinstance(x, TPTensor) else x for n, x in named}
    different = differing([*tensors.items()], group)
    with torch.no_grad():
        for name in different:
            value = tensors[name].detach()
            whole = value.contiguous()
            dist.broadcast(whole, group_src=0, group=group)
            if whole is not value:
                value.copy_(whole)
    return different


def check_inputs(
    named: Sequence[tuple[str, torch.Tensor]], structure: str, step: int, group: dist.ProcessGroup | None
) -> None:
    """Raise AgreementError on every rank unless all were given the same inputs."""
    described = "\n".join([structure, *(f"{n}: {tuple(x.shape)} {x.dtype}" for n, x in named)])
    check_same(f"the call of step {step}", described, group, fix=SAME_BATCH)
    if not named:
        return
    hashes = _gather_hashes([x for _, x in named], group)
    differ = hashes != hashes[0]
    if wrong := [n for (n, _), column in zip(named, differ.T, strict=True) if column.any()]:
        ranks = differ.any(1).nonzero().flatten().tolist()
        raise AgreementError(
            f"step {step}: input {', '.join(wrong)} is not the same on all tensor-parallel ranks "
            f"(rank {', '.join(map(str, ranks))} against rank 0): they {OTHER_BATCHES}",
            fix=SAME_BATCH,
        )


def check_results(fqn: str, results: Sequence[torch.Tensor], step: int, group: dist.ProcessGroup | None) -> bool:
    """Raise AgreementError on every rank unless all have the same results of a module that is left eager; True if the last bits
    of floating numbers differ. Sums in no fixed order do that, and linear algebra where memory begins at another address."""
    if not results:
        return False
    hashes = _gather_hashes(results, group)
    other = [x for i, x in enumerate(results) if bool((hashes[:, i] != hashes[0, i]).any())]
    if not other:
        return False
    shapes = _gather_hashes([torch.tensor([*x.shape], device=x.device) for x in other], group)
    alike = bool((shapes == shapes[0]).all()) and all(x.is_floating_point() for x in other)
    if not alike or any(on_any_rank([_is_far(x, group) for x in other], other[0].device, group)):
        raise AgreementError(
            f"call {step}: what '{fqn}' returns, a module that is left eager, is not the same on all tensor-parallel ranks",
            fix="let its code depend on nothing but its inputs: no torch.Generator of its own, clock, file or rank",
        )
    return True


def of_first_rank(values: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Rank 0's values, in memory of their own. Collective."""
    found = [x.contiguous().clone() for x in values]
    for x in found:
        dist.broadcast(x, group_src=0, group=group)
    return found


def _is_far(x: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """True if this rank's values are others than rank 0's, by more than rounding. Collective."""
    (first,) = of_first_rank([x], group)
    tolerance = torch.finfo(x.dtype).eps ** 0.5
    largest = float(first.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if x.numel() else 0.0
    return not torch.allclose(x, first, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


SAMPLED = 64  # elements of a parameter that ranks compare


def sample(named: Sequence[tuple[str, torch.Tensor]]) -> tuple[list[tuple[str, int, float]], torch.Tensor]:
    """([(name, how many elements, eps of the dtype)], these elements of all, fp64): elements spread over each tensor."""
    about, parts = [], []
    for name, x in named:
        if x.is_floating_point() and x.numel():
            parts.append(x.reshape(-1)[:: -(-x.numel() // SAMPLED)])
            about.append((name, parts[-1].numel(), torch.finfo(x.dtype).eps))
    return about, torch.cat(parts).double() if parts else torch.empty(0)


def check_parameters(named: Sequence[tuple[str, torch.Tensor]], step: int, group: dist.ProcessGroup | None) -> None:
    """Raise AgreementError on every rank where ranks that hold a parameter whole hold different values.

    named: (FQN, value) in the same order on all ranks. Some elements of each are compared, to the square root of the dtype's
    eps: where kernels are not deterministic, what each rank computes for itself differs in its last bits.
    """
    if dist.get_world_size(group) == 1:
        return
    about, mine = sample(named)
    if not about:
        return
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    values = torch.stack(rows).cpu()
    if bool((values.view(torch.int64) == values.view(torch.int64)[0]).all()):
        return
    apart, at = [], 0
    for name, count, eps in about:
        part, at = values[:, at : at + count], at + count
        difference, scale = (part - part[0]).norm(dim=1), part.norm(dim=1).amax()
        if bool((difference > eps**0.5 * scale).any()):
            apart.append((name, int(difference.argmax())))
    if apart:
        name, rank = apart[0]
        more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
        raise AgreementError(
            f"call {step}: parameter '{name}'{more}, which tensor-parallel ranks hold whole, has other values on rank {rank} "
            "than on rank 0: these ranks have not made the same changes of parameters",
            fix="step, clip and load alike on every rank: one learning rate, no step or write under `if rank == 0:`; and go on "
            "from a checkpoint",
        )


def check_finite(what: str, named: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup | None) -> None:
    """Raise NumericError, on every rank of the group, where a tensor of any rank holds an infinity or a NaN.

    named: (name, this rank's part) of the same tensors on every rank. Waits for the device.
    """
    if not named:
        return
    bad = torch.stack([x.detach().isfinite().all().logical_not() for _, x in named]).to(torch.int32)
    if group is not None:
        dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=group)
    if names := [name for (name, _), found in zip(named, bad.tolist(), strict=True) if found]:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        which = f": {', '.join(names[:5])}{more}" if any(names) else ""  # a loss that is the only output has no name
        raise NumericError(
            f"{what} not finite{which}",
            fix="go on from an earlier checkpoint, with a smaller learning rate or without this batch; where a GradScaler "
            "scales the loss, leave the check off: it skips such steps",
        )


def on_any_rank(flags: Sequence[bool], device: torch.device, group: dist.ProcessGroup | None) -> list[bool]:
    """Which of these hold on at least one rank. Waits for the device."""
    if group is None:
        return [*flags]
    found = torch.tensor([*flags], dtype=torch.int32, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [bool(x) for x in found.tolist()]


def most(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The largest of all ranks, element by element, in place of a rank's own."""
    if group is not None:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


def draw_seed(device: torch.device, group: dist.ProcessGroup | None) -> torch.Tensor:
    """0-d int64 on `device` from torch's default generator there: rank 0's, on every rank; no host synchronisation. Every rank
    draws, so that generators advance alike."""
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
