"""The tensors of a model's state, each once, with all its names and this rank's slices of the original tensor.

    for stored in stored_tensors(model):        # parameters, then persistent buffers; tied ones once
        for box in stored.slices:
            stored.local[box.local].copy_(original_tensor[box.original])

`local` is the memory itself: parameters of merged linears are views of one tensor, and stay views.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megafx.distributed.failures import meet, stopping_with_others
from megafx.distributed.parameters import Slot, as_parameter, parameter_slots, runtime_of
from megafx.distributed.saved_shards import is_saved, taken
from megafx.distributed.tensor import TPTensor, local_of, slices_of, wrap
from megafx.errors import UsageError
from megafx.placements.slices import ShardSlice
from megafx.progress import stage


@dataclass(frozen=True)
class Stored:
    """names: all FQNs, the one of the first use first. tensor: the parameter or buffer, with its global shape."""

    names: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def local(self) -> torch.Tensor:
        """This rank's memory: the physical shard, padding included; the tensor itself where it is whole."""
        return local_of(self.tensor)

    @property
    def slices(self) -> list[ShardSlice]:
        return slices_of(self.tensor)


def stored_tensors(model: nn.Module) -> list[Stored]:
    """Every parameter, then every persistent buffer, each once, in the order of their first uses."""
    kept = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    kept |= {name for name, module, key, _ in _buffers(model) if key not in module._non_persistent_buffers_set}
    return [s for s in all_tensors(model) if kept.intersection(s.names)]


def all_tensors(model: nn.Module) -> list[Stored]:
    """Every parameter, then every buffer, non-persistent ones included."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in itertools.chain(*named):
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return [Stored(tuple(names), tensor) for tensor, names in found.values()]


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """(FQN, module, key, buffer), aliases included."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in list(module._buffers.items()):
            if buffer is not None:
                yield (f"{prefix}.{key}" if prefix else key), module, key, buffer


def give_memory(
    model: nn.Module, wanted: Callable[[str], bool] = lambda name: True, device: torch.device | None = None
) -> list[str]:
    """Allocate zeros for each meta parameter and buffer of which any name is wanted; returns the names of these.

    Parameters stay the same objects, so that optimizers made of them stay valid (except parameters with weak references:
    recurrent layers' weights). device: of the new memory; default: the mesh's, else that of the model's other parameters,
    else the CPU.
    """
    slots = [(name, slot, p) for name, slot in parameter_slots(model) if (p := slot.get()) is not None]
    if device is None:
        sharded = next((p for _, _, p in slots if isinstance(p, TPTensor)), None)
        real = (p.device for _, _, p in slots if not p.is_meta)
        device = next(real, torch.device("cpu")) if sharded is None else _mesh_device(sharded)
    given: list[str] = []
    done: dict[int, torch.Tensor] = {}
    for name, slot, parameter in slots:
        if id(parameter) not in done and parameter.is_meta and wanted(name):
            done[id(parameter)] = _with_memory(parameter, device)
        if id(parameter) in done:
            given.append(name)
            if done[id(parameter)] is not parameter:
                setattr(slot.module, slot.key, done[id(parameter)])
    for name, module, key, buffer in _buffers(model):
        if buffer.is_meta and (wanted(name) or id(buffer) in done):
            module._buffers[key] = done.setdefault(id(buffer), torch.zeros_like(buffer, device=device))
            given.append(name)
    return given


@torch.no_grad()
def _with_memory(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A meta parameter, plain or sharded, with zeros in it: the same object where torch can swap its contents."""
    made: torch.Tensor
    if isinstance(parameter, TPTensor):
        made = wrap(torch.zeros_like(parameter._local_tensor, device=_mesh_device(parameter)), parameter._spec)
    else:
        made = torch.zeros_like(parameter, device=device)
    new = as_parameter(made, like=parameter)
    if weakref.getweakrefs(parameter):  # recurrent layers hold some to their weights: torch cannot swap these
        return new
    torch.utils.swap_tensors(parameter, new)
    return parameter


def _mesh_device(param: TPTensor) -> torch.device:
    kind = param._spec.mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _whole_copy(value: torch.Tensor) -> torch.Tensor:
    """The whole tensor of a parameter, buffer or gradient, in memory of its own. Collective."""
    return (value.full_tensor() if hasattr(value, "full_tensor") else value.clone()).detach()


@torch.no_grad()
@stage("full_state_dict")
def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """`state_dict()` with whole tensors in the original layout, on every rank. Collective.

    They are copies: later steps do not change them, whether a rank held a tensor whole or not. Tied parameters are gathered or
    copied once and stay one tensor.
    """
    _meet("megafx.full_state_dict", model)
    done: dict[Any, torch.Tensor] = {}

    def full(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        local: Any = local_of(value)
        if type(local) is torch.Tensor:  # each call of state_dict() makes tensors anew over the same memory
            local = local.untyped_storage()._cdata, local.storage_offset(), local.shape, local.stride(), local.dtype
        if local not in done:
            done[local] = _whole_copy(value)
        return done[local]

    with stopping_with_others("megafx.full_state_dict"):
        return {name: full(value) for name, value in model.state_dict().items()}


@torch.no_grad()
def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """FQN -> a copy of the whole gradient in the original layout, on every rank, of each parameter that has one. Collective."""
    _meet("megafx.full_gradients", model)
    with stopping_with_others("megafx.full_gradients"):
        return {n: _whole_copy(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def _meet(what: str, model: nn.Module) -> None:
    """Ranks that gather alone would wait for others forever: they raise LostRankError."""
    runtime = runtime_of(model)
    meet(what, None if runtime is None else runtime.group)


def prepare_assignment(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Before the values of `load_state_dict(state, assign=True)` are loaded: tied parameters part, as in one process, where
    they share memory if the values do. Raises UsageError where shards cannot be what one process's model would be."""
    runtime = runtime_of(model)
    for stored in all_tensors(model):
        given = {n: v for n in stored.names if isinstance(v := state.get(n), torch.Tensor)}
        other = next((n for n, v in given.items() if v.dtype != stored.tensor.dtype), None)
        places = {(id(model.get_submodule(n.rpartition(".")[0])), n.rpartition(".")[2]) for n in stored.names}
        parts = len(given) > 0 and len(places) > 1
        uncut = runtime is not None and runtime.params is None and len({*map(_memory, given.values())}) < len(given)
        if parts and (uncut or not isinstance(stored.tensor, nn.Parameter)):
            found = f"would part {' and '.join(map(repr, stored.names))}, which are one tensor"
            fix = (
                "the values alone are loaded by load_state_dict(state): what is tied stays tied. Call the model before, or "
                "untie it before parallelize"
            )
        elif other is not None:
            found = f"would make '{other}' a tensor of {given[other].dtype}; it has {stored.tensor.dtype}"
            fix = (
                "load_state_dict(state) rounds the values; for the other dtype call model.to(dtype) before parallelize"
            )
        else:
            continue
        raise UsageError(f"load_state_dict(assign=True) {found}, and shards stay where they are", fix=fix)
    tied: dict[int, dict[tuple[int, str], tuple[Slot, str]]] = {}
    for fqn, slot in parameter_slots(model):
        tied.setdefault(id(slot.get()), {})[id(slot.module), slot.key] = slot, fqn
    for slots in tied.values():
        taken_by = [(slot, v) for slot, fqn in slots.values() if isinstance(v := state.get(fqn), torch.Tensor)]
        locals_of = dict[Any, torch.Tensor]()
        for i, (slot, value) in enumerate(taken_by if len(slots) > 1 else []):
            param, memory = slot.get(), _memory(value)
            assert isinstance(param, TPTensor)
            if i == 0 and len(taken_by) == len(slots):  # the others leave it
                locals_of[memory] = param._local_tensor
                continue
            local = locals_of.setdefault(memory, param._local_tensor.clone())
            slot.module._parameters[slot.key] = as_parameter(wrap(local, param._spec), param)


def _memory(value: torch.Tensor) -> Any:
    local = local_of(value)
    return local.untyped_storage()._cdata, local.storage_offset(), local.stride()


def prepare_loading(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Before `nn.Module.load_state_dict` of the result, whose copies then shard whole tensors: meta parameters and buffers
    that `state` has values for get memory (parameters keep their identity), and shards from files of torch.save are shards
    again. Raises UsageError for shards that are not this rank's."""
    mine = {name: tensor for stored in all_tensors(model) for name in stored.names for tensor in (stored.tensor,)}
    found = {n: taken(v, mine[n], f"'{n}'") if n in mine and is_saved(v) else v for n, v in state.items()}
    give_memory(model, lambda name: isinstance(value := state.get(name), torch.Tensor) and not value.is_meta)
    if all(found[n] is v for n, v in state.items()):
        return state
    made = OrderedDict(found)
    if hasattr(state, "_metadata"):
        made._metadata = state._metadata  # type: ignore[attr-defined]  # torch's versions of modules
    return made
