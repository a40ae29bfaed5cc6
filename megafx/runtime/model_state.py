"""What the graphs of one model share (`ModelState`), and where ranks compare what they are about to run (`Boards`)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from megafx.config import Config
from megafx.distributed import agreement
from megafx.distributed.board import BACKWARD, FORWARD, Board, Entry, calls_differ, replicas_differ
from megafx.distributed.mesh import Meshes
from megafx.distributed.optimizers import Steps
from megafx.distributed.parameters import Slot, device_of
from megafx.distributed.tensor import TPTensor
from megafx.errors import UsageError
from megafx.planner.hardware import Hardware
from megafx.runtime.held_gradients import HeldGradients
from megafx.runtime.keys import Call

logger = logging.getLogger("megafx")


class Compared(Protocol):
    """A graph (BoundGraph)."""

    state: ModelState
    about: str  # what tensor-parallel ranks agree on
    schedule: str  # collectives of data-parallel ranks
    equal_batches: bool  # it relies on batches of equal shapes


@dataclass
class ModelState:
    """What the graphs of one model share. slots: FQN -> where the parameter is; step: calls so far."""

    model: nn.Module
    config: Config
    meshes: Meshes
    slots: dict[str, Slot] = field(default_factory=dict)
    held: HeldGradients = field(default_factory=HeldGradients)
    step: int = 0
    boards: Boards | None = None  # once a call was made
    steps: Steps = field(default_factory=Steps)
    rounded: set[str] = field(default_factory=set)  # FQNs of modules left eager, whose results ranks round differently
    drawn: torch.Tensor | None = None  # the seed of all calls of a step, while one is made of several (pipelining.py)

    def round_as_first(self, fqn: str) -> None:
        """From now on ranks take rank 0's results of a module that is left eager, and say so."""
        if fqn not in self.rounded and self.boards is not None:
            logger.warning(
                "what '%s' returns, a module that is left eager, differs in its last bits between ranks: rank 0 sends its "
                "results and gradients to the others in each call", fqn,
            )  # fmt: skip
        self.rounded.add(fqn)

    def aliases(self, slots: Iterable[Slot]) -> list[list[Slot]]:
        """Of each slot those that hold the same parameter."""
        found: dict[int, list[Slot]] = {}
        for slot in self.slots.values():
            found.setdefault(id(slot.get()), []).append(slot)
        return [found[id(slot.get())] for slot in slots]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that are given the same calls."""
        return self.meshes.calls or (None if self.meshes.tensor is None else self.meshes.tensor.get_group())

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """The tensor-parallel and data-parallel ranks together."""
        return self.meshes.everyone or self.group

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def device_bytes(self, hardware: Hardware) -> int | None:
        """What this process may have of its device: torch.cuda.set_per_process_memory_fraction counts."""
        device = self.device
        if device.type == "cuda":
            part = torch.cuda.get_per_process_memory_fraction(device)
            return int(part * torch.cuda.get_device_properties(device).total_memory)
        return hardware.memory_bytes

    def local_parameters(self, names: Sequence[str], parameters: Sequence[Any]) -> list[torch.Tensor]:
        """What graphs take of parameters. Without tensor parallelism they may be plain."""
        kinds = {*map(type, parameters)}
        if kinds == {TPTensor}:
            return [p._local_tensor for p in parameters]
        if self.meshes.tensor is None and type(None) not in kinds:
            return [p._local_tensor if isinstance(p, TPTensor) else p.detach() for p in parameters]
        name, p = next((n, p) for n, p in zip(names, parameters, strict=True) if not isinstance(p, TPTensor))
        raise UsageError(
            f"parameter '{name}' was replaced after megafx.parallelize by a {type(p).__name__}",
            fix="change the model first, then parallelize it; or assign with load_state_dict or param.copy_",
        )

    def replicated(self) -> list[tuple[str, torch.Tensor]]:
        """(FQN, value) of parameters that all tensor-parallel ranks hold whole."""
        stored: list[tuple[str, Any]] = [(n, slot.get()) for n, slot in self.slots.items()]
        named = [(n, p) for n, p in stored if isinstance(p, TPTensor) and not p.is_meta]
        return [(n, p._local_tensor.detach()) for n, p in named if p._spec.placements[0].is_replicate()]

    def stepped(self) -> str:
        """The parameter that the last step of an optimizer had first, in words."""
        name = next((n for n, slot in self.slots.items() if id(slot.get()) == self.steps.last), None)
        return "" if name is None else f"; the last one here began with '{name}'"

    def seed(self, *, one_mask: bool) -> torch.Tensor:
        """The seed of this step. one_mask: the ranks of data parallelism draw parts of one mask."""
        if self.drawn is not None:
            return self.drawn
        return agreement.draw_seed(self.device, self.meshes.everyone if one_mask else self.group)

    def check_finite(self, what: str, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Raise on every rank where `Config.check_for_nan_in_loss_and_grad` is set and something is not finite."""
        if self.config.check_for_nan_in_loss_and_grad:
            agreement.check_finite(f"call {self.step - 1}: {what}", named, self.everyone)


@dataclass
class Boards:
    """Where ranks compare what they are about to run."""

    calls: Board | None  # of tensor-parallel ranks
    replicas: Board | None  # of data-parallel ranks
    # how many forwards had collectives of data-parallel ranks. (Others, such as evaluation of a copy, are a rank's own.)
    shared: int = 0

    def forward(self, graph: Compared, call: Call, held: bool) -> None:
        """Compare the graph with that of other replicas."""
        if graph.schedule:
            self.shared += 1
            sizes = [n for _, x in call.tensors() for n in x.shape] if graph.equal_batches else []
            self._replicas(FORWARD, self.shared, graph, held, [graph.state.steps.count, *sizes])

    def backward(self, graph: Compared, step: int, shared: int, held: bool, about: str) -> None:
        """Of the step-th call and shared-th forward of replicas. about: what tensor-parallel ranks agree on."""
        if self.calls is not None:
            found = self.calls.exchange(Entry(BACKWARD, step, about, ()))
            if found is not None:
                raise calls_differ(found, ())
        self._replicas(BACKWARD, shared, graph, held, (), "" if about == graph.about else about.partition("\n")[0])

    def _replicas(
        self, phase: int, number: int, graph: Compared, held: bool, sizes: Sequence[int], more: str = ""
    ) -> None:
        if self.replicas is not None and graph.schedule:
            marks = [*(["no_sync holds gradients back"] if held else []), *([more] if more else [])]
            text = "\n".join([*marks, graph.schedule])
            if (found := self.replicas.exchange(Entry(phase, number, text, sizes))) is not None:
                raise replicas_differ(found, graph.state.stepped())

    def explain(self) -> None:
        """Raise the difference that made a collective fail, where there is one."""
        for board, says in ((self.calls, lambda found: calls_differ(found, ())), (self.replicas, replicas_differ)):
            if board is not None and (found := board.look()) is not None:
                raise says(found)
