"""What one rank alone does, or does otherwise, ends all ranks at once, with its text. On real gloo ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks import check, raises
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import megafx
from megafx.checkpoint.state import decode
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
        raises(CaptureError, "no such table", lambda: net(Fails)(x()))


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
        raises(LostRankError, r"asynchronous=(True|False)\), rank", save(asynchronous=rank == 1))
        raises(CheckpointError, "ZeroDivisionError: no load_state_dict", load(extra={"run": Refuses("load_state_dict")}))
        raises(CheckpointError, "ZeroDivisionError: no state_dict", load(extra={"run": Refuses("state_dict")}))
        raises(CheckpointError, "it has no extra 'other'", load(extra={"other": Refuses("")} if rank else None))
        raises(CheckpointError, "does not fit", load([optimizer, optimizer] if rank else optimizer))
        denied = PermissionError(f"permission denied: {folder}") if rank else None
        for where in ("exists", "iterdir" if rank == 0 else "exists"):
            with mock.patch.object(Path, where, side_effect=denied, autospec=True) if rank else contextlib.nullcontext():
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
        with mock.patch(f"megafx.weights.load.{what}", side_effect=OSError("worn out")) if rank else contextlib.nullcontext():
            with at_once():
                raises(CheckpointError, "OSError: worn out", lambda: megafx.load_safetensors(model, folder))
    for what in ("find_savings", "save_config", "_finish"):
        rank_0 = what == "_finish"  # it is rank 0's alone
        stops = mock.patch(f"megafx.weights.save.{what}", side_effect=ValueError("worn out"))
        with stops if rank == (0 if rank_0 else 1) else contextlib.nullcontext(), at_once():
            if what == "save_config":  # likewise: rank 1 never calls it
                megafx.save_pretrained(model, folder / what)
                continue
            raises(CheckpointError, "ValueError: worn out", lambda w=what: megafx.save_pretrained(model, folder / w))
    megafx.load_safetensors(model, folder)
    model(x()).backward()
