"""Data parallelism times tensor parallelism on real gloo ranks: losses, gradients and three steps of a stock optimizer with
clipping are those of one process on the whole batch, in fp64 and with dropout; what a rank holds of gathered parameters.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import check, near, same_gradients, same_tensors
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import megafx
from megafx.errors import AgreementError, UsageError
from megafx.runtime.held_gradients import HeldGradient

DDP = {"tensor_model_parallel_size": 2, "data_parallel_size": 2}

ROWS, LENGTH, VOCAB = 3, 7, 67


class Block(nn.Module):
    """3 heads and 19 features: neither divides by 2."""

    def __init__(self, h: int, heads: int, p: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj, self.up, self.down = (nn.Linear(*s) for s in ((h, 3 * h), (h, h), (h, 19), (19, h)))
        self.drop, self.heads, self.p = nn.Dropout(p), heads, p

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = [y.view(b, s, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1)]
        p = self.p if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.drop(self.proj(a.transpose(1, 2).reshape(b, s, h)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Model(nn.Module):
    """Without labels it returns logits: the loss is then the user's, of each rank's own rows."""

    def __init__(self, p: float = 0.0, layers: int = 1) -> None:
        super().__init__()
        self.embed, self.positions, self.drop = nn.Embedding(VOCAB, 12), nn.Embedding(32, 12), nn.Dropout(p)
        self.blocks = nn.ModuleList([Block(12, 3, p) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.drop(self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(step: int, parts: int) -> tuple[Tensor, Tensor]:
    """ids and labels of all ranks; the parts have unequal numbers of labels."""
    draw = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(0, VOCAB, (parts * ROWS, LENGTH), generator=draw) for _ in range(2))
    labels[0, : LENGTH - 2] = -100
    return ids, labels


def mine(x: Tensor, parts: int, tensor_ranks: int) -> Tensor:
    return x.chunk(parts)[dist.get_rank() // tensor_ranks]


def base(p: float = 0.0) -> Model:
    torch.manual_seed(0)
    return Model(p).double()


def parallel(model: nn.Module, **options: Any) -> nn.Module:
    return megafx.parallelize(model, megafx.Config(**options))


class Alone:
    """One process on the whole batch, beside the ranks, on rank 0; the others wait for what it says. In eager mode, unless the
    model draws: megafx draws the same at all numbers of ranks."""

    def __init__(self, model: nn.Module, draws: bool = True) -> None:
        self.model = model
        if draws and dist.get_rank() == 0:
            config = megafx.Config(tensor_model_parallel_size=1, data_parallel_size=1)
            self.model = megafx.parallelize(model, config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, eps=1e-4)

    def check(self, loss: Any, found: dict[str, Tensor], calls: list[tuple[Tensor, Tensor]], seed: int) -> None:
        """Loss of the last call and gradients of all."""
        if dist.get_rank():
            return
        torch.manual_seed(seed)
        for ids, labels in calls:
            wanted = self.model(ids, labels)
            wanted.backward()
        near(loss, wanted.detach(), "loss")
        same_tensors(found, {n: p.grad for n, p in self.model.named_parameters()}, "gradient")

    def step(self, norm: Any, state: dict[str, Tensor], what: str) -> None:
        if dist.get_rank():
            return
        near(norm, torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5), "norm of the gradients")
        self.optimizer.step(), self.optimizer.zero_grad()
        same_tensors(state, dict(self.model.state_dict()), what)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def trains_like_one_process(options: dict[str, Any]) -> None:
    start = base(0.3)
    one = Alone(copy.deepcopy(start))
    model = parallel(start, **options)
    d, t = options["data_parallel_size"], options["tensor_model_parallel_size"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4)
    for step in range(3):
        ids, labels = batch(step, d)
        torch.manual_seed(7 + step)
        loss = model(mine(ids, d, t), mine(labels, d, t))
        loss.backward()
        one.check(loss.detach(), megafx.full_gradients(model), [(ids, labels)], 7 + step)
        norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step(), optimizer.zero_grad()
        one.step(norm, megafx.full_state_dict(model), f"after step {step}:")


@check(4, slow=True)
def ddp() -> None:
    trains_like_one_process(DDP)


@check(4)
def parameters_sharded_over_both_axes() -> None:
    trains_like_one_process({**DDP, "data_parallel": "fsdp"})


@check(4, slow=True)
def parameters_sharded_under_inductor() -> None:
    trains_like_one_process({**DDP, "data_parallel": "fsdp", "compile": True})


@check(4, slow=True)
def optimizer_sharded() -> None:
    trains_like_one_process({**DDP, "data_parallel": "zero1"})
    model = parallel(base(), tensor_model_parallel_size=1, data_parallel_size=4, data_parallel="zero1")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    ids, labels = batch(0, 4)
    model(mine(ids, 4, 1), mine(labels, 4, 1)).backward()
    optimizer.step()
    held = sum(s["exp_avg"].to_local().numel() for s in optimizer.state.values())
    every = sum(p.numel() for p in model.parameters())
    assert every / 4 <= held < every / 3, (held, every)
    assert len(megafx.full_gradients(model)) == len(list(model.parameters()))


@check(4, slow=True)
def optimizer_shards_are_gathered_once_a_step() -> None:
    """Also over micro-batches and evaluation; again after whatever changes a parameter."""
    model = parallel(base(), **DDP, data_parallel="zero1")
    gathered = model.megafx.settled.gathered
    ids, labels = (mine(x, 2, 2) for x in batch(0, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(ids, labels).backward()
    once = gathered.made
    assert 0 < once <= 6, once  # before, in and after the layer, at most two groups of ranks each
    with model.no_sync():
        model(ids, labels).backward()
    model(ids, labels).backward()
    assert gathered.made == once
    for change in (optimizer.step, lambda: model.load_state_dict(model.state_dict())):
        change()
        found = model(ids, labels)
        assert gathered.made == 2 * once
        fresh = copy.deepcopy(base())
        fresh.load_state_dict(megafx.full_state_dict(model))
        rows = [fresh(i, y) for i, y in zip(*(x.chunk(2) for x in batch(0, 2)), strict=True)]
        counts = [int((y != -100).sum()) for y in batch(0, 2)[1].chunk(2)]
        near(found.detach(), (rows[0] * counts[0] + rows[1] * counts[1]).detach() / sum(counts), "loss")
        gathered.made = once
    with torch.no_grad():
        model.norm.weight.mul_(1.5)
        found, count = model(ids, labels), gathered.made
        assert once < count < 2 * once  # of the region that changed
        assert float((found - model(ids, labels)).abs()) == 0.0 and gathered.made == count


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB, bias=False)
        self.blocks = nn.ModuleList([nn.Sequential() for _ in range(2)])
        for block in self.blocks:
            block.a = nn.ModuleList([nn.Linear(16, 32, bias=False) for _ in range(3)])
            block.b = nn.Linear(32, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            q, k, v = (linear(x) for linear in block.a)
            x = x + block.b(torch.tanh(q) * torch.sigmoid(k) + v)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@check(4, slow=True)
def linears_of_gathered_parameters_are_merged() -> None:
    for form in ("fsdp", "zero1"):
        torch.manual_seed(0)
        start = Mixer().double()
        one = Alone(copy.deepcopy(start))
        model = parallel(start, **DDP, data_parallel=form, fusion_profile="all")
        ids, labels = batch(0, 2)
        loss = model(mine(ids, 2, 2), mine(labels, 2, 2))
        loss.backward()
        fusions = model.megafx.settled.last.program.fusions
        assert [f.fqn for f in fusions if f.stage == "merge_linears"] == ["blocks.0.a", "blocks.1.a"]
        one.check(loss.detach(), megafx.full_gradients(model), [(ids, labels)], 0)


@check(4, slow=True)
def shards_and_copies() -> None:
    sizes = {"tensor_model_parallel_size": 1, "data_parallel_size": 4, "data_parallel_shard_size": 2}
    trains_like_one_process({**sizes, "data_parallel": "fsdp"})


def accumulates_without_reducing(options: dict[str, Any]) -> None:
    start, t = base(), options["tensor_model_parallel_size"]
    one, model = Alone(copy.deepcopy(start), draws=False), parallel(start, **options)
    for again in range(2):
        calls = [batch(10 * again + k, 2) for k in range(3)]
        for k, (ids, labels) in enumerate(calls):
            with model.no_sync() if k < 2 else contextlib.nullcontext():
                loss = model(mine(ids, 2, t), mine(labels, 2, t))
                loss.backward()
            assert k == 2 or all(isinstance(p.grad, HeldGradient) for p in model.parameters())
        one.check(loss.detach(), megafx.full_gradients(model), calls, 0)
        model.zero_grad(), one.model.zero_grad()
    call = mine(ids, 2, t), mine(labels, 2, t)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def hold() -> None:
        with model.no_sync():
            model(*call).backward()

    def a_step_ago() -> None:
        optimizer.zero_grad()
        model(*call).backward()
        hold()
        optimizer.zero_grad()

    drops = (
        model.zero_grad,
        optimizer.zero_grad,
        lambda: optimizer.zero_grad(set_to_none=False),
        lambda: model.zero_grad(set_to_none=False),
        lambda: torch.optim.SGD(model.parameters(), foreach=False).zero_grad(set_to_none=False),
        a_step_ago,
    )
    for drop in drops if options.get("data_parallel") != "zero1" else drops[1:2]:
        hold()
        drop()  # with it, what is held
        model(*call).backward()
        one.check(loss.detach(), megafx.full_gradients(model), calls[-1:], 0)
        model.zero_grad(), one.model.zero_grad()
    hold()
    before = megafx.full_state_dict(model)
    reads = (optimizer.step, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    for read in (*reads, lambda: megafx.full_gradients(model)):
        with pytest.raises(UsageError, match="reads a gradient that `no_sync` holds"):
            read()
    assert all(torch.equal(v, before[n]) for n, v in megafx.full_state_dict(model).items())
    assert all(p.grad is None for p in copy.deepcopy(model).parameters())
    model.zero_grad()
    model(*call).backward()
    hold()
    model.embed.weight.grad.mul_(2.0)
    with pytest.raises(UsageError, match="changed in place while no_sync holds"):
        model(*call).backward()
    model.zero_grad(), one.model.zero_grad()


@check(2)
def accumulates_into_shards() -> None:
    accumulates_without_reducing({"tensor_model_parallel_size": 1, "data_parallel_size": 2, "data_parallel": "fsdp"})


@check(4, slow=True)
def accumulates() -> None:
    accumulates_without_reducing(DDP)
    accumulates_without_reducing({**DDP, "data_parallel": "fsdp"})
    accumulates_without_reducing({**DDP, "data_parallel": "zero1"})


@check(4, slow=True)
def a_checkpoint_of_shards_goes_on_elsewhere(folder: Path) -> None:
    """Saved with parameters sharded over both axes, loaded by ranks that hold copies: the same bits, and the same next step."""
    start, (ids, labels) = base(), batch(0, 2)
    call = (mine(ids, 2, 2), mine(labels, 2, 2))
    models = [parallel(copy.deepcopy(start), **DDP, data_parallel="fsdp"), parallel(start, **DDP)]
    for model in models:
        model(*call)  # settles how parameters are stored
    sharded, copies = [(model, torch.optim.AdamW(model.parameters(), lr=0.05)) for model in models]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        model(*call).backward()
        optimizer.step(), optimizer.zero_grad()
        return megafx.full_state_dict(model)

    step(*sharded)
    megafx.save_checkpoint(folder, *sharded, step=1)
    megafx.load_checkpoint(folder, *copies)
    found, wanted = (megafx.full_state_dict(model) for model in models)
    assert found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)
    same_tensors(step(*sharded), step(*copies), "after one step")


@check(4, slow=True)
def a_checkpoint_of_optimizer_shards_goes_elsewhere(folder: Path) -> None:
    """ZeRO-1 on 2 x 2 ranks, after two steps: loaded as copies, as shards and by one process, the same bits of everything."""
    start, (ids, labels) = base(), batch(0, 2)

    def made(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = parallel(copy.deepcopy(start), **options)
        if options["tensor_model_parallel_size"] > 1:
            model(mine(ids, 2, 2), mine(labels, 2, 2))  # settles how parameters are stored
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    model, optimizer = made(**DDP, data_parallel="zero1")
    for _ in range(2):
        model(mine(ids, 2, 2), mine(labels, 2, 2)).backward()
        optimizer.step(), optimizer.zero_grad()
    megafx.save_checkpoint(folder, model, optimizer, step=2)
    wanted = bits(model, optimizer)
    assert len(wanted) == 4 * len(list(model.parameters())) + 1  # values, two moments, steps; the tied name
    for options in (DDP, {**DDP, "data_parallel": "fsdp"}):
        other = made(**options)
        megafx.load_checkpoint(folder, *other)
        torch.testing.assert_close(bits(*other), wanted, rtol=0, atol=0)
        model(mine(ids, 2, 2), mine(labels, 2, 2)).backward()
        other[0](mine(ids, 2, 2), mine(labels, 2, 2)).backward()
        same_gradients(other[0], megafx.full_gradients(model))
        model.zero_grad()
    if dist.get_rank() == 0:
        alone = made(tensor_model_parallel_size=1, data_parallel_size=1)
        megafx.load_checkpoint(folder, *alone)
        torch.testing.assert_close(bits(*alone), wanted, rtol=0, atol=0)
    dist.barrier()


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.up(x), 0.3, self.training).square().mean()


@check(2)
def each_replica_goes_on_with_its_own_masks(folder: Path) -> None:
    """data_parallel_loss="average": ranks draw apart, and each does so as if the run had not stopped."""
    start, x = Dropped().double(), torch.ones(2, 8, dtype=torch.float64)
    options = {"tensor_model_parallel_size": 1, "data_parallel_size": 2, "data_parallel_loss": "average"}
    model, other = (parallel(copy.deepcopy(start), **options) for _ in range(2))
    model(x), other(x)
    megafx.save_checkpoint(folder, model, step=1)
    wanted = [model(x).item() for _ in range(2)]
    torch.manual_seed(7)  # the same on both ranks
    megafx.load_checkpoint(folder, other)
    found = [other(x).item() for _ in range(2)]
    states: list[Any] = [None, None]
    dist.all_gather_object(states, torch.get_rng_state())
    assert found == wanted and not torch.equal(*states)


@check(4)
def a_save_sends_no_rank_what_all_hold(folder: Path) -> None:
    """What a rank receives does not grow with the number of ranks, but for rank 0, which writes what there is of each."""
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(6, 13), nn.GELU(), nn.Linear(13, 6)).double()
    start = make()
    for form in ("ddp", "fsdp"):
        model = parallel(copy.deepcopy(start), **DDP, data_parallel=form)
        model(torch.ones(2, 6, dtype=torch.float64))
        with mock.patch.object(dist, "all_gather_object", side_effect=AssertionError("sent to all ranks")):
            megafx.save_checkpoint(folder / form, model, step=1)
            megafx.save_pretrained(model, folder / f"{form} files", max_shard_size="700B")  # several writers
        again = megafx.load_safetensors(make(), folder / f"{form} files")
        same_tensors(dict(again.state_dict()), dict(start.state_dict()), f"{form} saved:")


@check(2)
def a_model_of_one_rank_is_saved_by_rank_0_alone(folder: Path) -> None:
    """Several ranks would write the same files."""
    model = nn.Linear(2, 2)
    for save in (
        lambda: megafx.save_checkpoint(folder, model, step=1),
        lambda: megafx.save_pretrained(model, folder / "hf"),
    ):
        if dist.get_rank() == 0:
            save()
        else:
            with pytest.raises(UsageError, match="on rank 1 for a model that is not parallelized"):
                save()
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == [".owner.json", "hf", "step_00000001"]
    megafx.load_checkpoint(folder, model)


@check(2)
def models_share_their_groups() -> str:
    """A model that is dropped leaves no files and no threads."""

    def held() -> tuple[int, int]:
        gc.collect()  # a model and its class know each other
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    counts = []
    for _ in range(3):
        model = parallel(nn.Linear(4, 4), tensor_model_parallel_size=1, data_parallel_size=2)
        model(torch.ones(2, 4)).square().mean().backward()
        counts.append(held())
    assert counts[1] == counts[2], counts
    return f"{counts} files and threads"


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and optimizer state, whole, by name."""
    found = dict(megafx.full_state_dict(model))
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}: {key}"] = whole(value)
    return found


@check(4, slow=True)
def wrapping_is_the_error_that_names_the_options() -> None:
    model = parallel(base(), **DDP)
    loss = model(*(mine(x, 2, 2) for x in batch(0, 2)))
    with pytest.raises(UsageError, match=r"data_parallel_size=1\)"):  # loop_gradients_of_gradients.py follows this
        torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    for wrap in (nn.parallel.DistributedDataParallel, fully_shard):
        with pytest.raises(UsageError, match="data_parallel='ddp', 'zero1' or 'fsdp'"):
            wrap(model)


@check(4, slow=True)
def the_report_lists_bytes_by_axis() -> None:
    model = parallel(base(), **DDP)
    ids, labels = batch(0, 2)
    model(mine(ids, 2, 2), mine(labels, 2, 2)).backward()
    report = megafx.explain(model)
    local = sum(p.to_local().numel() for p in model.parameters())
    assert report.collectives()["backward all_reduce on dp"] == (2, local * 8 + 8)  # the loss's
    assert "2 (gradients summed" in str(report) and "backward all_reduce on dp" in str(report)


@check(4, slow=True)
def ddp_without_tensor_parallelism() -> None:
    trains_like_one_process({"tensor_model_parallel_size": 1, "data_parallel_size": 4})


@check(4, slow=True)
def a_loss_of_the_user_is_of_each_ranks_rows() -> None:
    """Gradients are averaged, as DistributedDataParallel does."""
    start = base()
    model, one = parallel(copy.deepcopy(start), **DDP), copy.deepcopy(start)
    ids, labels = batch(0, 2)
    F.cross_entropy(model(mine(ids, 2, 2)).flatten(0, 1), mine(labels, 2, 2).flatten()).backward()
    losses = [
        F.cross_entropy(one(i).flatten(0, 1), y.flatten()) for i, y in zip(ids.chunk(2), labels.chunk(2), strict=True)
    ]
    (sum(losses) / 2).backward()
    wanted = {n: p.grad for n, p in one.named_parameters() if p.grad is not None}
    same_gradients(model, wanted)


@check(4, slow=True)
def what_ranks_differ_in_is_said() -> None:
    model = parallel(base(0.3), **DDP)
    part = dist.get_rank() // 2
    ids, labels = batch(0, 2)
    model(mine(ids, 2, 2), mine(labels, 2, 2))
    with pytest.raises(AgreementError, match="shapes of their batches"):
        model(ids[: 2 + part], labels[: 2 + part])
    with pytest.raises(AgreementError, match="the mesh has 2 data-parallel ranks"):
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        megafx.parallelize(base(), megafx.Config(data_parallel_size=4), mesh=mesh)


@check(4, slow=True)
def weights_of_all_ranks_become_those_of_the_first() -> None:
    start = base()
    with torch.no_grad():
        start.norm.weight.fill_(dist.get_rank())
    model = parallel(start, **DDP)
    assert any("differed between ranks" in str(n) for n in model.megafx.notes)
    assert float(megafx.full_state_dict(model)["norm.weight"].sum()) == 0.0


# -- what a rank holds of gathered parameters


class Watch(TorchDispatchMode):
    """Bytes of gathered parameters that are there at once: sizes of the gathers in order, and the most.

    A thread of gloo lets go of a gathered buffer a moment after the wait for it returned. So a third buffer gets a
    second to go before it counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.most = 0
        self.gathered: list[tuple[StorageWeakRef, int]] = []

    def held(self, allowed: int) -> list[int]:
        """Sizes of the buffers that are there; more than `allowed` only where a second did not change that."""
        for _ in range(100):
            self.gathered = [(ref, size) for ref, size in self.gathered if not ref.expired()]
            if len(self.gathered) <= allowed:
                break
            time.sleep(0.01)
        return [size for _, size in self.gathered]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.megafx.gather_region.default:
            storage = found.untyped_storage()
            self.gathered.append((StorageWeakRef(storage), storage.nbytes()))
            self.sizes.append(storage.nbytes())
            self.most = max(self.most, sum(self.held(2)))
        return found


def a_region_and_the_next(watch: Watch, layers: int, what: str) -> str:
    """One gather a region, as there is one group of ranks and one dtype."""
    sizes, most = watch.sizes, watch.most
    assert len(sizes) >= layers and not watch.held(0), (what, sizes)
    assert max(sizes) < most <= max(a + b for a, b in itertools.pairwise(sizes)) < sum(sizes) / 2, (what, sizes, most)
    return f"{most} of {sum(sizes)} bytes in {what}"


@check(2, seed=0, slow=True)
def a_rank_holds_a_region_and_the_next_one() -> str:
    """In the form 'fsdp', beside its shard: in forward and in backward."""
    layers = 5
    config = megafx.Config(tensor_model_parallel_size=1, data_parallel_size=2, data_parallel="fsdp")
    model = megafx.parallelize(Model(layers=layers).double(), config)
    ids, labels = (mine(x, 2, 1) for x in batch(0, 2))
    model(ids, labels).backward()  # captured, and gloo has its buffers
    forward, backward = Watch(), Watch()
    with forward:
        loss = model(ids, labels)
    with backward:
        loss.backward()
    watched = ((forward, "forward"), (backward, "backward"))
    return ", ".join(a_region_and_the_next(watch, layers, what) for watch, what in watched)


class NormOfTheBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.up(x).transpose(1, 2))
        return F.gelu(h).transpose(1, 2).square().mean() + self.down(h.transpose(1, 2)).square().mean()


@check(2)
def batch_norm_has_the_statistics_of_the_whole_batch() -> None:
    """Two steps on 2 ranks are those of one process; and where each rank is for itself, all keep the statistics of rank 0."""
    torch.manual_seed(0)
    start = NormOfTheBatch().double()
    x = torch.randn(4, 5, 12, dtype=torch.float64)
    eager, own = copy.deepcopy(start), copy.deepcopy(start)
    sizes = {"tensor_model_parallel_size": 1, "data_parallel_size": 2}
    for average in (False, True):
        loss_of = {"data_parallel_loss": "average"} if average else {}
        model, plain = parallel(copy.deepcopy(start), **sizes, **loss_of), own if average else eager
        for step in (1.0, 2.0):
            rows = (x * step).chunk(2)
            model.zero_grad(), plain.zero_grad()
            loss = model(rows[dist.get_rank()])
            loss.backward()
            wanted = plain(rows[0] if average else x * step)  # DistributedDataParallel sends the buffers of rank 0
            wanted.backward()
            if not average:
                near(loss.detach(), wanted.detach(), "loss")
                same_tensors(megafx.full_gradients(model), {n: p.grad for n, p in plain.named_parameters()}, "gradient")
        found, wanted = ({n: b.double() for n, b in m.named_buffers()} for m in (model, plain))
        same_tensors(found, wanted, "buffer")


class LossAndPrediction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = self.down(self.up(x).tanh())
        return F.cross_entropy(out, y) + self.up.weight.norm(), out, out.mean(0)


@check(2, slow=True)
def terms_of_outputs_beside_the_loss_are_averaged() -> None:
    """A term that each rank computes of its own rows counts as in DistributedDataParallel, though gradients are added; a
    penalty counts once, and what is computed of statistics has the gradients of all rows."""
    torch.manual_seed(0)
    start, x, y = LossAndPrediction().double(), torch.randn(4, 8, dtype=torch.float64), torch.arange(4)
    for options in ({}, {"differentiable_outputs": True}):
        plain, model = copy.deepcopy(start), copy.deepcopy(start)
        model = parallel(model, tensor_model_parallel_size=1, data_parallel_size=2, **options)
        for _ in range(2):
            model.zero_grad(), plain.zero_grad()
            loss, out, mean = plain(x, y)
            (loss + out.sin().mean() + mean.square().sum()).backward()
            loss, out, mean = model(*(z.chunk(2)[dist.get_rank()] for z in (x, y)))
            (loss + out.sin().mean() + mean.square().sum()).backward()
            wanted = {n: p.grad for n, p in plain.named_parameters()}
            same_tensors(megafx.full_gradients(model), wanted, "gradient")


class Noisy(nn.Module):
    """Stochastic depth by rows, as timm has it, and a choice by Gumbel noise."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.router = nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.down(self.up(x).tanh())
        mask = branch.new_empty(x.shape[0], 1, 1).bernoulli_(0.7)
        kept = (0.8 + torch.rand((x.shape[0], 1, 1), dtype=x.dtype)).floor()
        chosen = F.gumbel_softmax(self.router(x), tau=0.7)
        y = (x + branch * mask * kept / 0.56)[..., None] * chosen[..., None, :]
        return (y + torch.randn_like(x)[..., None]).square().mean()


@check(2)
def noise_is_that_of_one_process() -> None:
    """Of each row and element, at any number of ranks."""
    torch.manual_seed(0)
    start, x = Noisy().double(), torch.randn(6, 3, 6, dtype=torch.float64)
    one = Alone(copy.deepcopy(start))
    for options in ({"data_parallel_size": 2}, {"data_parallel_size": 1}):
        t = 2 // options["data_parallel_size"]
        model = parallel(copy.deepcopy(start), tensor_model_parallel_size=t, **options)
        torch.manual_seed(3)
        loss = model(x.chunk(2)[dist.get_rank()] if t == 1 else x)
        loss.backward()
        found = megafx.full_gradients(model)
        if dist.get_rank() == 0:
            torch.manual_seed(3)
            one.model.zero_grad()
            wanted = one.model(x)
            wanted.backward()
            near(loss.detach(), wanted.detach(), "loss")
            same_tensors(found, {n: p.grad for n, p in one.model.named_parameters()}, "gradient")
