"""What one rank alone does, or does otherwise, ends all ranks at once, with its text. On real gloo ranks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import check, raises
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import megafx
from megafx.checkpoint.state import decode
from megafx.distributed.agreement import check_setting, differing, group_of, raising_together
from megafx.distributed.board import FORWARD, Entry, make_board
from megafx.errors import AgreementError, CaptureError, CheckpointError, LostRankError, UsageError


class Net(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.p = nn.Linear(6, 14), nn.Linear(14, 6), p

    def forward(self, x: Tensor) -> Tensor:
        return (x + F.dropout(self.down(self.up(x).relu()), self.p, self.training)).square().mean()


def net(model: type[nn.Module] = Net, *arguments: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = megafx.Config(**{"tensor_model_parallel_size": 2, **options})
    return megafx.parallelize(model(*arguments).double(), config)


def x(rows: int = 3, seed: int = 1) -> Tensor:
    return torch.randn(rows, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Well within the group's timeout, which is 120 s."""
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < 20


@check(2, seed=0)
def ranks_have_one_config() -> None:
    rank = dist.get_rank()
    for name, values in {
        "check_for_nan_in_loss_and_grad": (True, False),
        "check_inputs_every": (1, 0),
        "tensor_model_parallel_size": (2, 3),
        "norm_fusion": (True, False),
    }.items():
        with at_once():
            text = rf"rank 1 and rank 0 differ in the Config: 'Config.{name} = {values[0]}' on rank 0, .*{values[1]}' there"
            raises(AgreementError, text, lambda name=name, values=values: net(**{name: values[rank]}))
    copies = ({"data_parallel": "ddp"}, {"data_parallel": "zero1"})[rank]
    options = {"tensor_model_parallel_size": 1, "data_parallel_size": 2, **copies}
    raises(AgreementError, "'Config.data_parallel = 'ddp'' on rank 0", lambda: net(**options))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    config = megafx.Config(merge_linears=bool(rank))
    raises(AgreementError, "Config.merge_linears", lambda: megafx.parallelize(Net(), config, mesh=mesh))
    with mock.patch.object(torch, "__version__", f"2.{rank}"):
        raises(AgreementError, "differ in the Config: 'torch = '2.0'' on rank 0", net)


@check(2, seed=0)
def separate_models_are_a_warning() -> None:
    launched = {"RANK": str(dist.get_rank()), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with mock.patch.dict(os.environ, launched), pytest.warns(UserWarning, match="makes each train a model of its own"):
        config = megafx.Config(tensor_model_parallel_size=1)
        model = megafx.parallelize(nn.Linear(4, 4), config, example_inputs=(torch.ones(2, 4),))
    assert model.megafx.t == 1 and model.megafx.everyone is None


@check(2, seed=0)
def ranks_compute_the_same() -> None:
    """A dropout of another p, and a line that one rank alone cannot run: said where capture is, before ranks plan together."""
    rank = dist.get_rank()

    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            if rank == 1:
                raise OSError("no such table")
            return super().forward(x)

    with at_once():
        text = "differ in what the model computes: .*aten.dropout.default.* on rank 0"
        raises(AgreementError, text, lambda: net(Net, 0.1 + rank / 10)(x()))
        raises(OSError if rank == 1 else CaptureError, "no such table", lambda: net(Fails)(x()))


@check(4, seed=0)
def any_rank_of_a_mesh_that_differs_is_named() -> None:
    """Nothing that is sent grows with the number of ranks, and every rank has the same text, whichever it is."""
    rank, sizes = dist.get_rank(), {"tensor_model_parallel_size": 2, "data_parallel_size": 2}
    alone = mock.patch.object(dist, "all_gather_object", side_effect=AssertionError("values of all ranks go to all"))
    for other in range(4):
        named, here = other or 1, rank == other
        text = (
            rf"^rank {named} and rank 0 differ in the Config: 'Config.check_inputs_every = {1 if other == 0 else 0}' on"
        )
        with at_once(), alone:
            raises(
                AgreementError, text, lambda on=here: check_setting(megafx.Config(check_inputs_every=int(on)), group())
            )
        with at_once(), alone:
            shape = 7 if here else 6
            raises(
                AgreementError,
                rf"^rank {named} and rank 0 differ in the model: 'weight: \({7 if other == 0 else 6},",
                lambda n=shape: differing([("weight", torch.ones(n))], group()),
            )
            weights = [("same", torch.ones(3)), ("other", torch.full((3,), float(here)))]
            assert differing(weights, group()) == ["other"]
            kind, start = (
                (ValueError, "^no table") if here else (AgreementError, f"^on rank {other}: ValueError: no table")
            )
            raises(kind, start, lambda on=here: together(on))
    assert net(**sizes).megafx.meshes.everyone is not None


def group() -> Any:
    return dist.group.WORLD


def together(fails: bool) -> None:
    with raising_together(group()):
        if fails:
            raise ValueError("no table")


class Refuses:
    """State that cannot be saved, or not be loaded, on rank 1."""

    def __init__(self, on: str) -> None:
        self.on = on

    def state_dict(self) -> dict[str, int]:
        return self._do("state_dict")

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._do("load_state_dict")

    def _do(self, what: str) -> dict[str, int]:
        if what == self.on and dist.get_rank() == 1:
            raise ZeroDivisionError(f"no {what}")
        return {"a": 1}


@check(2, seed=0)
def an_error_of_one_rank_in_a_checkpoint(folder: Path) -> None:
    rank, model = dist.get_rank(), net()
    model(x()).backward()
    optimizer = torch.optim.AdamW(model.parameters())
    good = megafx.save_checkpoint(folder / "good", model, optimizer, step=1, extra={"run": Refuses(""), "x": 1.5})

    def save(step: int = 2, extra: Any = None, **options: Any) -> Callable[[], Any]:
        return lambda: megafx.save_checkpoint(folder / "bad", model, optimizer, step=step, extra=extra, **options)

    def load(what: Any = optimizer, extra: Any = None) -> Callable[[], Any]:
        return lambda: megafx.load_checkpoint(folder / "good", model, what, extra=extra)

    with at_once():
        raises(CheckpointError, "ZeroDivisionError: no state_dict", save(extra={"run": Refuses("state_dict")}))
        raises(CheckpointError, "extra.run", save(extra={"run": object() if rank else None}))
        raises(UsageError, "keep=0", save(keep=1 - rank))
        raises(AgreementError, "'step=2' on rank 0, 'step=3' there", save(step=2 + rank))
        raises(AgreementError, "'keep=1' on rank 0, 'keep=2' there", save(keep=1 + rank))
        optimizer.param_groups[0]["lr"] = 0.001 * (1 + rank)
        raises(AgreementError, "'lr': 0.001.* on rank 0, .*'lr': 0.002.* there", save())
        optimizer.param_groups[0]["lr"] = 0.001
        raises(LostRankError, r"asynchronous=(True|False)\), rank", save(asynchronous=rank == 1))
        raises(
            CheckpointError, "ZeroDivisionError: no load_state_dict", load(extra={"run": Refuses("load_state_dict")})
        )
        raises(CheckpointError, "ZeroDivisionError: no state_dict", load(extra={"run": Refuses("state_dict")}))
        raises(CheckpointError, "it has no extra 'other'", load(extra={"other": Refuses("")} if rank else None))
        raises(CheckpointError, "does not fit", load([optimizer, optimizer] if rank else optimizer))
        denied = PermissionError(f"permission denied: {folder}") if rank else None
        for where in ("exists", "iterdir"):
            with (
                mock.patch.object(Path, where, side_effect=denied, autospec=True) if rank else contextlib.nullcontext()
            ):
                raises(CheckpointError, "PermissionError: permission denied", load())
        broken = "megafx.checkpoint.checkpoint.read_content"
        with mock.patch(broken, side_effect=TypeError("a list")) if rank else contextlib.nullcontext():
            raises(CheckpointError, "no valid checkpoint.*TypeError", load())
        decoded = mock.patch("megafx.checkpoint.load.decode", side_effect=lambda *a: 1 // (1 - rank) and decode(*a))
        with decoded:
            raises(CheckpointError, "ZeroDivisionError", load())
    assert not (folder / "bad").exists()
    assert megafx.load_checkpoint(folder / "good", model, optimizer, extra={"run": Refuses("")}).path == good
    model(x()).backward()


@check(2, seed=0)
def an_error_of_one_rank_in_safetensors(folder: Path) -> None:
    rank, model = dist.get_rank(), net()
    model(x()).backward()
    if rank == 0:
        save_file({n: v.float() for n, v in Net().state_dict().items()}, folder / "model.safetensors")
    dist.barrier()
    for what in ("SafetensorsFiles", "_read", "give_memory"):
        with (
            mock.patch(f"megafx.weights.load.{what}", side_effect=OSError("worn out"))
            if rank
            else contextlib.nullcontext(),
            at_once(),
        ):
            raises(CheckpointError, "OSError: worn out", lambda: megafx.load_safetensors(model, folder))
    for what, alone in {"find_savings": 1, "save_config": 0, "_finish": 0}.items():  # the last two are rank 0's
        stops = mock.patch(f"megafx.weights.save.{what}", side_effect=ValueError("worn out"))
        with stops if rank == alone else contextlib.nullcontext(), at_once():
            raises(CheckpointError, "ValueError: worn out", lambda w=what: megafx.save_pretrained(model, folder / w))
    megafx.load_safetensors(model, folder)
    model(x()).backward()


class Tasks(Net):
    """Two heads of one shape; a call takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, task: str = "", mask: Tensor | None = None) -> Tensor:
        if task:
            x = x + torch.tanh((self.extra if task == "a" else self.other)(x))
        if mask is not None:
            x = x * mask[..., None]
        return super().forward(x)


@check(2, seed=0)
def calls_that_go_apart_late() -> None:
    """Beyond the calls whose inputs are hashed. Both ranks raise before anything is sent, so the next call is right again."""
    rank, model = dist.get_rank(), net(Tasks, check_inputs_every=0)
    for step in range(4):
        model(x(seed=step)).backward()

    def in_mode(training: bool, grad: bool) -> None:
        model.train(training)
        with torch.set_grad_enabled(grad):
            model(x())

    def wanted_of(name: str, wanted: bool) -> None:
        model.get_parameter(name).requires_grad_(wanted)
        try:
            model(x()).backward()
        finally:
            model.get_parameter(name).requires_grad_(True)

    def autocast(on: bool) -> None:
        with torch.autocast("cpu", enabled=on):
            model(x())

    for wanted in (False, True):  # every rank knows the graphs of these calls, so that none is captured below
        wanted_of("other.weight", wanted)
        autocast(wanted)
        model(x().requires_grad_(wanted))
    model.megafx.state.step = 4

    def alone(first: bool) -> None:
        loss = model(x())
        model(x()) if first else loss.backward()

    for text, call in {
        "call 4: .* DistributedSampler .* size 0 of 'x' is 3 on rank 0, 4 on rank 1": lambda: model(x(3 + rank)),
        "hash of the values of 'x'": lambda: model(x(seed=rank)),
        "different modes, as after model.eval": lambda: in_mode(rank == 1, True),
        "gradients on on rank 0, gradients off on rank 1": lambda: in_mode(True, rank == 0),
        "requires_grad of a parameter, 'other.weight': True on rank 0, False on": lambda: wanted_of(
            "other.weight", rank == 0
        ),
        "requires_grad of an input, 'kwargs.x.': False on rank 0, True on": lambda: model(
            x().requires_grad_(rank == 1)
        ),
        "autocast: autocast off on rank 0, autocast cpu as torch.bfloat16 on rank 1": lambda: autocast(rank == 1),
        "kwargs.task.*'a'.* on rank 0, .*'b'.* on rank 1": lambda: model(x(), task="ab"[rank]),
        "rank 0 is at the forward of call 5, rank 1 at the backward of call 4": lambda: alone(rank == 0),
    }.items():
        with at_once():
            raises(AgreementError, text, call)
        model.train()
        if "comes to" not in text:
            assert model(x()).isfinite()
            model.megafx.state.step = 4
    model = net(Tasks, check_inputs_every=0)
    with mock.patch("megafx.distributed.board._shared", side_effect=lambda group: None):  # as on several hosts
        for step in range(3):
            model(x(seed=step)).backward()
    raises(AgreementError, "call 3: .* size 0 of 'x' is 3 on rank 0, 4 on rank 1", lambda: model(x(3 + rank)))
    model(x()).backward()


@check(4)
def a_difference_of_one_rank_over_messages() -> None:
    """As between hosts: each rank learns of one that differs from it. Ranks may be in different numbers of groups before."""
    rank = dist.get_rank()
    if rank % 3 == 0:
        group_of([0, 3])
    if rank in (1, 3):
        group_of([1, 3])
    with mock.patch("megafx.distributed.board._shared", side_effect=lambda group: None):
        board = make_board(dist.group.WORLD, torch.device("cpu"))
    assert board is not None and board.exchange(Entry(FORWARD, 0, "alike", [1])) is None
    for odd, pairs in ((2, [(0, 2), (1, 2), (0, 2), (2, 3)]), (0, [(0, 1), (0, 1), (0, 2), (0, 3)])):
        found = board.exchange(Entry(FORWARD, 1, "alike", [5 if rank == odd else 1]))
        assert found is not None and found.ranks == pairs[rank], (rank, found)
        assert [entry.numbers for entry in found.entries] == [[5 if r == odd else 1] for r in pairs[rank]]


@check(2, seed=0)
def parameters_that_part() -> None:
    """A step that one rank leaves out, at the next call; other steps, at the next comparison of parameters."""
    rank = dist.get_rank()
    for options in (
        {},
        *({"tensor_model_parallel_size": 1, "data_parallel_size": 2, "data_parallel": f} for f in ("ddp", "fsdp")),
    ):
        model = net(check_inputs_every=0, **options)
        optimizers = [
            torch.optim.AdamW(model.parameters(), lr=1e-5),
            torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0),
        ]
        for step in range(4):
            model(x(seed=step)).backward()
            optimizers[0].step()
        if rank:
            optimizers[1].step()  # of parameters that are no model's
        model(x()).backward()
        if rank:
            optimizers[0].step()
        text = "ranks have not made the same optimizer steps.* 4 on rank 0, 5 on rank 1 .*; the last one here began with 'up"
        with at_once():
            raises(AgreementError, text, lambda m=model: m(x()))
    model = net(check_inputs_every=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
    for step in range(10):
        if step == 5:
            raises(AgreementError, "call 5: parameter 'down.bias'.* on rank 1 than on rank 0", lambda: model(x()))
            break
        model(x(seed=step)).backward()
        optimizer.step() if step == 3 else optimizer.zero_grad()


def graphs_differ(form: str) -> None:
    """Their gradients would be summed by place, which mixes them up. Other lengths, and a mask on one, are fine."""
    rank = dist.get_rank()
    options = {"tensor_model_parallel_size": 1, "data_parallel_size": 2, "data_parallel_loss": "average"}
    model = net(Tasks, data_parallel=form, **options)
    for step in range(2):
        model(x(3 + 2 * rank, step)).backward()
    model(x(), mask=torch.ones(3, 4).double() if rank else None).backward()
    model(x(), task="a").backward()
    with at_once():
        text = "(?s)'extra.bias' is used on data-parallel rank 0, and not on rank 1.*in module 'extra'.*torch.where"
        raises(AgreementError, text, lambda: model(x(), task="ab"[rank]))
        raises(AgreementError, "used on data-parallel rank 1, and not", lambda: model(x(), task="a" * rank))
        with model.no_sync() if rank else contextlib.nullcontext():
            raises(AgreementError, "no_sync on all or none", lambda: model(x()))
    model(x()).backward()
    with torch.no_grad():
        model(x())


@check(2, seed=0)
def replicas_whose_graphs_differ() -> None:
    graphs_differ("fsdp")


@check(2, seed=0, slow=True)
def replicas_with_copies_whose_graphs_differ() -> None:
    graphs_differ("ddp")


class Attends(nn.Module):
    """Fused queries, keys and values of 3 heads, a width of 19: parameters cut in blocks, unevenly, and on either dim."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(6, 27), nn.Linear(9, 19), nn.Linear(19, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = [y.unflatten(-1, (3, 3)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)]
        heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return self.down(self.up(heads).relu()).square().mean()


READINGS: dict[str, Callable[[Tensor], float]] = {
    "isfinite.all": lambda p: bool(torch.isfinite(p).all()),
    "isnan.any": lambda p: torch.isnan(p).any().item(),
    "not all": lambda p: bool(p.isfinite().all().logical_not()),
    "all are not 0": lambda p: bool((p != 0).all()),  # pads are
    "of several": lambda p: bool(torch.stack([torch.isfinite(p).all(), torch.isnan(p).any()]).any()),
    "count": lambda p: int(torch.isnan(p).sum()),
    "sum": lambda p: float(p.nan_to_num().sum()),
    "mean": lambda p: float(p.nan_to_num().mean()),
    "norm": lambda p: float(p.nan_to_num().norm()),
    "equal": lambda p: torch.equal(p, p),
    "equal sums": lambda p: torch.equal(p.nan_to_num(), p.nan_to_num() + 0),
    "allclose": lambda p: torch.allclose(p, p),
    "allclose with NaN": lambda p: torch.allclose(p, p, equal_nan=True),
}


@check(2, seed=0)
def numbers_read_off_shards_are_those_of_the_whole() -> None:
    """On all ranks, whichever of them has the NaN: a branch on one sends all ranks the same way."""
    model = net(Attends)
    model(x()).backward()
    whole = megafx.full_state_dict(model)
    kinds = {str(p.placements[0]) for p in model.parameters()}
    assert {"LayoutShard(S0/3*(3x3))", "LayoutShard(S0)", "LayoutShard(S1)"} <= kinds, kinds
    for place in ((), (0,), (-1,)):
        broken = {name: value.clone() for name, value in whole.items()}
        for value in broken.values() if place else ():
            value.view(-1)[place] = float("nan")
        model.load_state_dict(broken)
        with torch.no_grad():
            for name, p in model.named_parameters():
                for what, read in READINGS.items():
                    found, wanted = read(p), read(broken[name])
                    assert abs(found - wanted) <= 1e-12 * abs(wanted), f"{what} of {name}: {found}, not {wanted}"
    model.load_state_dict(whole)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    wanted = nn.utils.get_total_norm([*megafx.full_gradients(model).values()])
    assert abs(float(norm) - float(wanted)) <= 1e-12 * float(wanted) and bool(norm.isfinite())
