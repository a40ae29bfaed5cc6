"""Values for a model on the meta device, from its own constructor: bit-equal to eager, at any degree of parallelism.

    with torch.device("meta"):
        model = Net(config)
    megafx.parallelize(model, example_inputs=batch)
    torch.manual_seed(0)
    megafx.initialize(model, lambda: Net(config))    # what torch.manual_seed(0); Net(config) gives

The constructor runs once more, on fake tensors, and its operations are recorded (constructor_log.py). These then run in order,
drawing from torch's generators; this rank's slices of each final tensor are copied, and the tensor is freed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from megafx.distributed import agreement
from megafx.distributed.parameters import everyone_of, runtime_of
from megafx.errors import MegafxError, UsageError
from megafx.progress import stage
from megafx.weights.constructor_log import Log, Ref, Storage, draw_in_order, execute, record, replay, schedule, view
from megafx.weights.index_random import IndexRandom
from megafx.weights.names import own_config
from megafx.weights.state import Stored, all_tensors, give_memory, stored_tensors

aten = torch.ops.aten
_LEAVE_UNINITIALISED = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty)
Factory = Callable[[], Any]


@stage("initialize")
def initialize(
    model: nn.Module,
    factory: Factory | None = None,
    *,
    seed: int | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Give every parameter and buffer of `model` the value that factory() gives it in eager mode; returns `model`.

    factory: builds the model (or one with the same names and shapes), as eager code would, on the device on which eager
    code would draw; for Hugging Face models it defaults to `type(model)(model.config)`. Values are converted to the dtypes of
    `model`. Ranks draw from rank 0's generators, and hold no more than their shards and the few tensors that are being made.

    seed: draw by element index instead (Philox, keyed by the seed, the operation and the index): each rank draws its slices
    only, and nothing that is overwritten. Values are the same at any degree of parallelism; they have eager mode's
    distributions, but not its numbers. Applies to `normal_` and `uniform_`; other draws use a generator seeded per operation.

    A constructor may not make shapes depend on values (`x[x > 0]`), nor read values by memory address; tensors from NumPy and
    the like are taken as they are. device: where to allocate if the model has no mesh; default: that of its other parameters,
    else the CPU.

    Collective over all ranks of the model. Raises UsageError, on every rank and before anything is changed.
    """
    runtime = runtime_of(model)
    if runtime is not None:
        runtime.same_generators(everywhere=True)
    with agreement.raising_together(everyone_of(model)):
        check_planned(model)
        log = recorded(model, factory, seed)
    if (group := everyone_of(model)) is not None:  # ranks must have recorded the same steps and seeds
        seeds = b"".join(s.seeded.cpu().numpy().tobytes() for s in log.steps if s.seeded is not None)
        text = f"{[str(s.func) for s in log.steps]} {hashlib.blake2b(seeds).hexdigest()}"
        fix = "build the same model on every rank, and seed generators of your own alike"
        agreement.check_same("what the constructor draws", text, group, fix)
    give_memory(model, device=None if device is None else torch.device(device))
    fill(log, all_tensors(model), seed)
    if runtime is not None:
        runtime.memory_given()
    return model


def check_planned(model: nn.Module) -> None:
    """Raise UsageError if meta parameters are not sharded yet: they would get the memory of the whole model."""
    runtime = runtime_of(model)
    if runtime is None or runtime.mesh is None or runtime.params is not None:
        return
    if any(p.is_meta for p in model.parameters()):
        found = "the model is not planned yet, so it is not known which slices this rank holds"
        raise UsageError(found, fix="pass example_inputs= to megafx.parallelize")


def recorded(model: nn.Module, factory: Factory | None, seed: int | None = None) -> Log:
    """The constructor's steps, checked against the model's names, shapes and ties. Raises UsageError with all that is wrong."""
    log = record(factory or _hugging_face_factory(model), None if seed is None else IndexRandom(seed).run)
    wrong = []
    for tensor in all_tensors(model):
        made = {name: log.refs.get(name) for name in tensor.names}
        wrong += [f"'{name}' is not in the factory's model" for name, ref in made.items() if ref is None]
        places = {ref if isinstance(ref, Ref) else id(ref) for ref in made.values() if ref is not None}
        if len(places) > 1:
            wrong.append(f"{', '.join(made)} are tied in the model, and not in the factory's")
        for name, ref in made.items():
            shape = None if ref is None else (ref.size if isinstance(ref, Ref) else tuple(ref.shape))
            if shape is not None and shape != tuple(tensor.tensor.shape):
                wrong.append(f"'{name}' is {shape} in the factory's model, {tuple(tensor.tensor.shape)} in this one")
            if not isinstance(ref, Ref):
                continue
            last = next((step for step in reversed(log.steps) if ref.storage in step.writes), None)
            if last is None or last.func.overloadpacket in _LEAVE_UNINITIALISED:
                wrong.append(f"'{name}' is written by no initialiser: in eager mode too it is whatever was in memory")
    if wrong:
        found = "\n  ".join(["the factory's model is not this one, or has no values:", *wrong])
        raise UsageError(found, fix="let it build the same model, and give values to all of it")
    return log


def fill(log: Log, tensors: Collection[Stored], seed: int | None = None, only_needed: bool = False) -> None:
    """Run the steps that `tensors` need, and copy this rank's slices of each. seed: as given to `recorded`.

    only_needed: skip the draws of other tensors; drawn values then differ from eager mode's.
    """
    by_memory: dict[Storage, list[tuple[Stored, Ref]]] = {}
    for tensor in tensors:
        ref = log.refs[tensor.name]
        if isinstance(ref, Ref):
            by_memory.setdefault(ref.storage, []).append((tensor, ref))
        else:
            _copy(tensor, ref)

    def deliver(number: Storage, memory: torch.UntypedStorage) -> None:
        for tensor, ref in by_memory[number]:
            _copy(tensor, view(memory, ref))

    if seed is None and not only_needed:
        replay(log, by_memory, deliver)
        return
    random = None if seed is None else IndexRandom(seed)
    direct = set() if random is None else random.fill_slices(log, by_memory)
    plan = schedule(log.steps, by_memory.keys() - direct, keep=lambda step: False)
    execute(log, plan, deliver, draw_in_order if random is None else random.run)


class Rest:
    """Meta tensors that files have no values for (non-persistent buffers): they get the constructor's. Made before anything is
    changed: raises UsageError where the constructor cannot be run. also: names of further such tensors."""

    def __init__(self, model: nn.Module, factory: Factory | None, also: Collection[str] = ()) -> None:
        saved = {t.name for t in stored_tensors(model)} - {*also}
        self.model = model
        self.names = [t.name for t in all_tensors(model) if t.tensor.is_meta and t.name not in saved]
        self.log: Log | None = None
        if self.names:
            try:
                self.log = recorded(model, factory)
            except MegafxError as error:
                found = f"no file has {', '.join(self.names)}: they get what the constructor gives, but {error.found}"
                raise type(error)(found, fix=error.fix) from error

    def fill(self) -> None:
        """Compute their values, once they have memory."""
        if self.log is not None:
            fill(self.log, [t for t in all_tensors(self.model) if t.name in self.names], only_needed=True)


@torch.no_grad()
def _copy(tensor: Stored, whole: torch.Tensor) -> None:
    for box in tensor.slices:
        tensor.local[box.local].copy_(whole[box.original])


def _hugging_face_factory(model: nn.Module) -> Factory:
    runtime = runtime_of(model)
    kind = type(model) if runtime is None else runtime.original
    if not (hasattr(kind, "from_pretrained") and hasattr(model, "config")):
        found = f"how a {kind.__name__} is built is not known"
        raise UsageError(found, fix="pass a factory: megafx.initialize(model, lambda: Net(config))")
    config = own_config(model)
    return lambda: kind(config)
