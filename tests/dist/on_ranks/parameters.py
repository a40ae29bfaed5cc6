"""Sharded parameters on real gloo ranks: optimizers, norms and clipping as in one process, and no way to take the physical
order for the logical one."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import check
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megafx.distributed.parameters import replicate_parameters, shard_like, shard_parameters
from megafx.distributed.tensor_layout import pads
from megafx.errors import UsageError
from megafx.placements.types import I, Layout, S, owned
from megafx.weights.state import full_gradients, full_state_dict, prepare_loading

T = 3


@cache
def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (T,), mesh_dim_names=("tp",))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.uneven = nn.Linear(5, 7)  # rows 3 + 3 + 1
        self.blocked = nn.Linear(4, 12)  # three blocks of four rows, each cut into 2 + 1 + 1 (padded to 2) rows
        self.even = nn.Linear(6, 9)
        self.empty = nn.Linear(4, 4)  # rows 2 + 2 + 0
        self.owned = nn.Linear(4, 5)  # all rows on rank 1
        self.norm = nn.LayerNorm(6)


def placements() -> dict:
    def both(name, layout):
        return {f"{name}.weight": S(0, layout), f"{name}.bias": S(0, layout)}

    return {
        **both("uneven", Layout.contiguous(7, T)),
        **both("blocked", Layout.of([(4, 1)], T, rep=3)),
        "even.weight": S(1, Layout.contiguous(6, T)),
        "even.bias": I,
        **both("empty", Layout.contiguous(4, T)),
        "owned.weight": owned(5, 1),
        "owned.bias": owned(5, 1),
    }


def sharded_like(reference: nn.Module, optimizers=()):
    """(a copy of the reference with parameters sharded, optimizers made of it while they were still whole)."""
    model = Model().to(next(reference.parameters()).dtype)
    model.load_state_dict(reference.state_dict())
    replicate_parameters(model, mesh_of_all())
    made = [kind(model.parameters(), **options) for kind, options in optimizers]
    shard_parameters(model, placements())
    return model, made


def set_gradients(model: nn.Module, reference: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        q.grad = torch.randn(q.shape, generator=generator, dtype=q.dtype)
        p.grad = shard_like(q.grad.clone(), p)


def assert_equal_state(model: nn.Module, reference: nn.Module) -> None:
    whole = full_state_dict(model)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(whole[name], value, rtol=1e-12, atol=1e-14)
    for name, value in full_gradients(model).items():
        torch.testing.assert_close(value, reference.get_parameter(name).grad, rtol=1e-12, atol=1e-14)
    assert model.owned.weight._local_tensor.numel() == (20 if dist.get_rank() == 1 else 0)
    for name, p in model.named_parameters():
        if name.split(".")[0] in ("uneven", "blocked", "empty"):
            where = p._spec.placements[0]
            for start, length in pads(p._spec.mesh, where):
                assert (p._local_tensor.narrow(where.dim, start, length) == 0).all(), f"padding of {name}"


@check(T, seed=0)
def optimizers_step_as_in_one_process() -> None:
    decay = {"lr": 0.1, "weight_decay": 0.1}
    kinds = [
        (torch.optim.AdamW, {"foreach": True, **decay}),
        (torch.optim.AdamW, {"foreach": False, **decay}),
        (torch.optim.AdamW, {"fused": True, **decay}),
        (torch.optim.AdamW, {"amsgrad": True, **decay}),
        (torch.optim.SGD, {"momentum": 0.9, "foreach": True, **decay}),
        (torch.optim.SGD, {"momentum": 0.9, **decay}),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True, **decay}),
    ]
    for kind, options in kinds:
        reference = Model().double()
        model, (optimizer,) = sharded_like(reference, [(kind, options)])
        plain = kind(reference.parameters(), **options)
        for step in range(3):
            set_gradients(model, reference, step)
            foreach = options.get("foreach")
            ours = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
            theirs = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, foreach=foreach)
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
            assert_equal_state(model, reference)
            optimizer.step()
            plain.step()
            assert_equal_state(model, reference)
        for key, state in plain.state_dict()["state"].items():
            for name, value in state.items():
                mine = optimizer.state_dict()["state"][key][name]
                mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
                torch.testing.assert_close(mine, value, rtol=1e-12, atol=1e-14)


@check(T, seed=0)
def scalers_averages_and_saved_states_work() -> None:
    reference = Model().double()
    model, (optimizer,) = sharded_like(reference, [(torch.optim.AdamW, {"lr": 0.1})])
    plain = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for infinite in (False, True):
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
        set_gradients(model, reference, 0)
        if infinite:
            reference.blocked.weight.grad[11, 0] = float("inf")
            model.blocked.weight.grad = shard_like(reference.blocked.weight.grad.clone(), model.blocked.weight)
        for scaler, stepped in zip(scalers, (optimizer, plain), strict=True):
            scaler.scale(torch.ones(()))
            scaler.step(stepped)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (4.0 if infinite else 8.0)
        assert_equal_state(model, reference) if not infinite else None
    again = torch.optim.AdamW(model.parameters(), lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    averaging = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    averages = [torch.optim.swa_utils.AveragedModel(m, multi_avg_fn=averaging) for m in (model, reference)]
    for step in range(2):
        set_gradients(model, reference, step)
        again.step()
        plain.step()
        averages[0].update_parameters(model)
        averages[1].update_parameters(reference)
        optimizer.zero_grad(set_to_none=False)
        assert model.blocked.weight.grad.norm() == 0
    for mine, theirs in ((averages[0].module, averages[1].module), (model, reference)):
        whole = get_model_state_dict(mine, options=StateDictOptions(full_state_dict=True))
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(whole[name], value, rtol=1e-12, atol=1e-14)


@check(T, seed=0)
def an_infinity_on_one_rank_has_every_rank_skip_the_step() -> None:
    """Whatever is the first gradient: a sharded one, a replicated one, one of a plain tensor beside the model's."""

    def whole(p: torch.Tensor) -> torch.Tensor:
        return p.full_tensor() if hasattr(p, "full_tensor") else p

    for first in ("uneven", "norm", "plain"):  # optimizers take both kinds of tensors one by one
        for options in ({"foreach": True}, {"fused": True}) if first != "plain" else ({"foreach": False},):
            reference, head = Model(), nn.Linear(2, 2)
            model, _ = sharded_like(reference)
            names = sorted(dict(reference.named_parameters()), key=lambda n, first=first: not n.startswith(first))
            own = [model.get_parameter(n) for n in names]
            own = [*head.parameters(), *own] if first == "plain" else own
            optimizer = torch.optim.SGD(own, lr=0.1, **options)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(torch.ones(()))
            for infinite in (False, True):
                set_gradients(model, reference, 0)
                if infinite:
                    reference.blocked.weight.grad[11, 0] = float("inf")
                    model.blocked.weight.grad = shard_like(reference.blocked.weight.grad, model.blocked.weight)
                    ranks = (~model.blocked.weight.grad._local_tensor.isfinite()).any().int()
                    dist.all_reduce(ranks)
                    assert ranks == 1, "one rank is to have the infinity"
                for p in head.parameters():
                    p.grad = torch.ones_like(p)
                before = [whole(p).detach().clone() for p in own]
                scaler.step(optimizer)
                scaler.update()
                changed = [not torch.equal(whole(p), old) for p, old in zip(own, before, strict=True)]
                assert changed == [not infinite] * len(own), f"{first} first, {options}: rank {dist.get_rank()}"
            assert scaler.get_scale() == 4.0


@check(T, seed=0)
def physical_order_never_shows() -> None:
    reference = Model()
    model, _ = sharded_like(reference)
    p, q = model.blocked.weight, reference.blocked.weight
    assert isinstance(p, nn.Parameter) and isinstance(p, DTensor) and p.shape == q.shape
    assert torch.equal(p.full_tensor(), q)
    assert torch.equal(p.redistribute(placements=[Replicate()]).to_local(), q)
    assert torch.equal((p * 2 + q).full_tensor(), 3 * q)
    assert torch.equal(p.half().full_tensor(), q.half())
    readings = [
        lambda p: p.norm(),
        lambda p: p.sum(),
        lambda p: p.mean(),
        lambda p: (p + 1).norm(),
        lambda p: p.norm(1),
        lambda p: torch.linalg.vector_norm(p, float("inf")),
        lambda p: torch.linalg.vector_norm(p, -float("inf")),
        lambda p: torch.linalg.vector_norm(p, 2, dim=(0, 1), keepdim=True),
        lambda p: p.max(),
        lambda p: (p + 9).min(),
        lambda p: (p - 9).amax((0, 1)),
        lambda p: p.sum(0),
        lambda p: p.max(1),
        lambda p: p.std(),
        lambda p: p.median(),
        lambda p: (p > 0).any(),
        lambda p: (p + 9 > 0).all(),
        lambda p: p.count_nonzero(),
        lambda p: torch.equal(p, p + 1),
        lambda p: p.detach().tolist(),
        lambda p: p.detach().numpy(),
        lambda p: p[1, 2].item(),
        lambda p: p.view(-1),
        lambda p: p.t(),
        lambda p: p[0],
        lambda p: p[:, 1:3] * 2,
        lambda p: p[torch.tensor([3, 1])],
        lambda p: p.split(5)[1].sum(),
        lambda p: [row.norm() for row in p],
        lambda p: torch.cat([p, p]),
        lambda p: torch.stack([p, p]).mean(0),
        lambda p: p @ torch.ones(4, 2),
        lambda p: p @ p.t() - torch.eye(12),
        lambda p: torch.einsum("ij,ik->jk", p, p),
        lambda p: nn.functional.linear(torch.ones(1, 4), p),
        lambda p: p * torch.ones(4),
        lambda p: torch.ones(2, 12, 4) * p,
        lambda p: torch.linalg.svdvals(p),
        lambda p: nn.functional.mse_loss(p, torch.ones(12, 4)),
        lambda p: torch.dist(p, torch.ones(12, 4)),
        lambda p: p.new_zeros(3) + p.new_ones(3),
        lambda p: f"{p.detach()[0]}",
    ]
    for i, read in enumerate(readings):
        found, wanted = read(p), read(q)
        whole = torch.utils._pytree.tree_map(lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x, found)
        if isinstance(wanted, str):
            assert found == wanted
        else:
            torch.testing.assert_close(whole, wanted, msg=lambda m, i=i: f"reading {i}: {m}")
    vectors = [nn.utils.parameters_to_vector(m.parameters()) for m in (model, reference)]
    assert type(vectors[0]) is torch.Tensor and torch.equal(*vectors)
    for placements in ([Shard(0)], [Shard(1)]):
        with pytest.raises(UsageError):
            p.redistribute(placements=placements)
    # a plain DTensor that carries the placement (as torch makes them of gradients) is refused or right, too
    leaked = DTensor.__new__(DTensor, p._local_tensor, p._spec, requires_grad=False)
    assert torch.equal(leaked.full_tensor(), q)
    with pytest.raises(UsageError):
        torch.distributed.tensor._utils.compute_local_shape_and_global_offset(p.shape, mesh_of_all(), p.placements)


@check(T, seed=0)
def autograd_goes_through_parameters() -> None:
    reference = Model()
    model, _ = sharded_like(reference)
    p, q = model.blocked.weight, reference.blocked.weight
    weights = torch.arange(48.0).view(12, 4)
    for loss, plain in (((p.full_tensor() * weights).sum(), (q * weights).sum()), ((p**2).sum(), (q**2).sum())):
        p.grad = q.grad = None
        loss.backward()
        plain.backward()
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    p.grad = None
    (p.to_local() ** 2).sum().backward()
    torch.testing.assert_close(p.grad.full_tensor(), 2 * q)


@check(T, seed=0)
def copies_and_files_keep_the_layout(folder: Path) -> None:
    reference = Model()
    model, _ = sharded_like(reference)
    other = copy.deepcopy(model)
    assert_equal_state(other.double(), reference.double())
    # torch.distributed.checkpoint writes chunks in logical coordinates: any placement reads them
    dcp.save(model.state_dict(), checkpoint_id=folder / "dcp")
    whole = {n: torch.zeros_like(v).float() for n, v in reference.state_dict().items()}
    dcp.load(whole, checkpoint_id=folder / "dcp", no_dist=True)
    for name, value in reference.state_dict().items():
        assert torch.equal(whole[name].double(), value), name
    fresh, _ = sharded_like(Model())
    state = fresh.state_dict()
    dcp.load(state, checkpoint_id=folder / "dcp")
    assert_equal_state(fresh.double(), reference)


@check(T, seed=0)
def states_are_saved_as_plain_tensors(folder: Path) -> None:
    """torch.save of a state: read by a process that has only torch; taken back by the same model, and by no other."""
    model, (optimizer,) = sharded_like(Model(), [(torch.optim.Adam, {})])
    set_gradients(model, Model(), 0)
    optimizer.step()
    files = [folder / f"{what}{dist.get_rank()}.pt" for what in ("model", "optimizer")]
    with pytest.warns(UserWarning, match="this rank's shards"):
        torch.save(model.state_dict(), files[0])
    torch.save(optimizer.state_dict(), files[1])
    code = (
        f"import sys, torch; state = torch.load({str(files[0])!r}); assert 'megafx' not in sys.modules; "
        "w = state['uneven.weight']; assert type(w) is torch.Tensor and w.ndim == 3 and w.megafx_shard['shape'] == [7, 5]; "
        "assert type(state['norm.weight']) is torch.Tensor and state['norm.weight'].shape == (6,)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    state = torch.load(files[0])
    with pytest.raises(RuntimeError, match="size mismatch for blocked.weight"):
        Model().load_state_dict(state)
    before = {n: v.clone() for n, v in full_state_dict(model).items()}
    fresh, (again,) = sharded_like(Model(), [(torch.optim.Adam, {})])
    fresh.load_state_dict(prepare_loading(fresh, state))
    again.load_state_dict(torch.load(files[1]))
    for name, value in full_state_dict(fresh).items():
        assert torch.equal(value, before[name]), name
    for each, stepped in ((model, optimizer), (fresh, again)):
        set_gradients(each, Model(), 1)
        stepped.step()
    after = full_state_dict(model)
    for name, value in full_state_dict(fresh).items():
        assert torch.equal(value, after[name]) and not torch.equal(value, before[name]), name
    other = torch.load(folder / f"model{(dist.get_rank() + 1) % T}.pt") if not dist.barrier() else None
    with pytest.raises(UsageError, match=r"is the shard of rank \d of 3 .* holds another part"):
        prepare_loading(fresh, other)


@check(T, seed=0)
def whole_values_can_be_copied_in() -> None:
    reference, other = Model(), Model()
    model, _ = sharded_like(reference)
    assert not model.load_state_dict(other.state_dict()).missing_keys
    assert_equal_state(model.double(), other.double())
    with torch.no_grad():
        nn.init.normal_(model.uneven.weight)
        nn.init.constant_(model.blocked.weight, 3.0)
    other.uneven.weight.data, other.blocked.weight.data = (
        model.uneven.weight.full_tensor(),
        torch.full((12, 4), 3.0).double(),
    )
    assert_equal_state(model, other)
