"""Sharded training state of all ranks of a job in one process: real TPTensors and optimizers on a group that does nothing.

`Job` trains the logical model with gradients of the simulator (all ranks in lockstep), and gives or takes every rank's state.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Case, loss_name
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from megafx.checkpoint.checkpoint import load_checkpoint
from megafx.checkpoint.state import collect, finish_optimizer
from megafx.checkpoint.storage import FLAT, FolderWriter
from megafx.compiler.compiled import Compiled
from megafx.distributed.agreement import draw_seed
from megafx.distributed.parameters import replicate_parameters, shard_like, shard_parameters
from megafx.distributed.tensor import TPTensor
from megafx.planner.plan import Plan

CPU = torch.device("cpu")


@contextlib.contextmanager
def rank_of(rank: int, t: int) -> Iterator[DeviceMesh | None]:
    """This process as one of t ranks, whose collectives do nothing; yields the mesh, None at t = 1."""
    if t == 1:
        yield None
        return
    dist.init_process_group("fake", rank=rank, world_size=t, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (t,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def sharded(model: nn.Module, mesh: DeviceMesh | None, params: Any) -> nn.Module:
    """A copy of a plain model with its parameters cut for this rank."""
    model = copy.deepcopy(model)
    if mesh is not None:
        replicate_parameters(model, mesh)
        shard_parameters(model, params)
    return model


def shard_optimizer(plain: torch.optim.Optimizer, mine: torch.optim.Optimizer) -> None:
    """Give `mine`, of sharded parameters, the state of `plain`."""
    whole = plain.state_dict()
    params = [p for group in mine.param_groups for p in group["params"]]
    state = {
        i: {k: _cut(v, params[i]) if isinstance(v, torch.Tensor) else v for k, v in kept.items()}
        for i, kept in whole["state"].items()
    }
    mine.load_state_dict({"state": state, "param_groups": copy.deepcopy(whole["param_groups"])})


def _cut(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    if isinstance(param, TPTensor) and value.shape == param.shape:
        return shard_like(value, param)
    return value.clone()


class Held(DefaultSavePlanner):
    """What a rank holds of each tensor, and its plan of what to write, after its process group is gone."""

    def __init__(self, state: dict[str, torch.Tensor], rank: int) -> None:
        super().__init__(**FLAT)
        self.set_up_planner(state, is_coordinator=rank == 0)
        items = self.create_local_plan().items
        self.values = {(i.index.fqn, i.index.offset): super(Held, self).resolve_data(i).detach().clone() for i in items}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self.values[write_item.index.fqn, write_item.index.offset]


def write_together(ranks: list[Held], writer: FolderWriter) -> None:
    """What `torch.distributed.checkpoint.save` does on all ranks, in one process."""
    plans, metadata = ranks[0].create_global_plan([held.plan for held in ranks])
    plans = writer.prepare_global_plan(plans)
    results = [writer.write_data(held.finish_plan(plan), held).wait() for held, plan in zip(ranks, plans, strict=True)]
    writer.finish(metadata, results)


def assemble(ranks: list[Held]) -> dict[str, torch.Tensor]:
    """Whole tensors of the slices of all ranks, each element of which has to be there; equal where ranks hold the same."""
    whole: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for held in ranks:
        for item in held.plan.items:
            name, about = item.index.fqn, item.tensor_data
            local = held.values[name, item.index.offset]
            full = whole.setdefault(name, torch.zeros(about.size, dtype=local.dtype))
            covered = seen.setdefault(name, torch.zeros(about.size, dtype=torch.bool))
            box = tuple(slice(o, o + n) for o, n in zip(about.chunk.offsets, about.chunk.sizes, strict=True))
            assert torch.equal(full[box][covered[box]], local[covered[box]]), f"ranks differ in {name}"
            full[box] = local
            covered[box] = True
    for name, covered in seen.items():
        assert covered.all(), f"no rank holds all of {name}"
    return whole


class Job:
    """A model of the zoo trained on t simulated ranks. `model` and `optimizer` hold the logical values."""

    def __init__(
        self, name: str, *, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.case = Case.of(name, **options)
        self.model = self.case.model
        self.plans: dict[int, Plan] = {}
        self.made: dict[int, Compiled] = {}
        self.first = copy.deepcopy(self.model.state_dict())
        self.kind = optimizer
        self.restart()

    def restart(self) -> None:
        """Weights as they were first, a new optimizer, the generator seeded."""
        self.model.load_state_dict(self.first)
        self.optimizer = self.new_optimizer(self.model)
        torch.manual_seed(7)

    def new_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        options = {"weight_decay": 0.1} if self.kind is torch.optim.AdamW else {"momentum": 0.9}
        return self.kind(model.parameters(), lr=1e-2, foreach=False, **options)

    def plan(self, t: int) -> Plan:
        if t not in self.plans:
            self.plans[t] = self.case.plan(t)
        return self.plans[t]

    def compiled(self, t: int) -> Compiled:
        if t not in self.made:
            self.made[t] = self.case.compile(t, given=self.plan(t))
        return self.made[t]

    def random_steps(self, steps: int) -> None:
        """Optimizer steps with gradients that are drawn."""
        for _ in range(steps):
            for p in self.model.parameters():
                p.grad = torch.randn_like(p)
            self.optimizer.step()

    def train(self, t: int, steps: int) -> list[float]:
        """Losses of `steps` steps on t ranks, of other batches each, dropout drawn as in a real run."""
        compiled = self.compiled(t)
        losses = []
        for _ in range(steps):
            inputs = self.case.inputs(2, int(torch.randint(5, 17, ())))
            values = self.case.values(compiled.program, inputs)
            seed = draw_seed(CPU, None)
            values |= {s.name: seed for s in compiled.program.inputs if s.kind == "seed"}
            found = self.case.run_values(compiled, values)
            for name, p in self.model.named_parameters():
                p.grad = found.gradients.get(name)
            self.optimizer.step()
            losses.append(float(found.outputs[loss_name(compiled.program)]))
        return losses

    @contextlib.contextmanager
    def rank(self, rank: int, t: int) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
        """This rank's model and optimizer, with the logical values of now."""
        params = self.plan(t).params
        with rank_of(rank, t) as mesh:
            model = sharded(self.model, mesh, params)
            optimizer = self.new_optimizer(model)
            shard_optimizer(self.optimizer, optimizer)
            yield model, optimizer

    def save(self, folder: Path, t: int, step: int, extra: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Write a checkpoint as t ranks do; the whole tensors that were saved."""
        ranks, data = [], {}
        for rank in range(t):
            with self.rank(rank, t) as (model, optimizer):
                state, described = collect(model, optimizer, extra if rank == 0 else {}, rank)
                data = data or described
                ranks.append(Held(state, rank))
        whole = assemble(ranks)
        write_together(ranks, FolderWriter(folder, step, data))
        return whole

    def load(self, folder: Path, t: int, extra: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Load on t ranks, one after another, into models of other values; the whole tensors that are in them then.

        The logical model and optimizer take these values, and the generator those of the checkpoint.
        """
        with torch.no_grad():
            for p in self.model.parameters():
                p.fill_(float("nan"))
        self.optimizer = self.new_optimizer(self.model)
        ranks = []
        for rank in range(t):
            with self.rank(rank, t) as (model, optimizer):
                assert load_checkpoint(folder, model, optimizer, extra=extra) is not None
                state, data = collect(model, optimizer, {}, rank)
                ranks.append(Held(state, rank))
        whole = assemble(ranks)
        self.take(whole, data)
        return whole

    def take(self, whole: dict[str, torch.Tensor], data: dict[str, Any]) -> None:
        named = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in whole.items():
                if name.startswith("model.") and name.removeprefix("model.") in named:
                    named[name.removeprefix("model.")].copy_(value)
        finish_optimizer(self.optimizer, self.model, data["optimizers"][0], whole)
