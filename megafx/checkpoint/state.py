"""The tensors of a training run by name (model, optimizers, generators): collected to save, put back on loading.

    model.<FQN>                          parameters and persistent buffers; tied ones once, under the name of their first use
    optimizer.state.<FQN>.<key>          the optimizer's state of a parameter (optimizer.<i>.state... with several)
    optimizer.groups.<i>.<option>        options that are tensors (a capturable learning rate)
    rng.cpu, rng.cuda                    torch's default generators, from which megafx's seeds are drawn too; rank 0's
    rng.replicas.<i>.cpu, ....cuda       those of data-parallel rank i + 1, where they are not rank 0's
    extra.<path>                         the user's

Everything else is plain data in `metadata.json` (`encode`).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from megafx.distributed.parameters import device_of, runtime_of
from megafx.distributed.tensor import local_of, wrap
from megafx.errors import CheckpointError, UsageError
from megafx.weights.state import stored_tensors

State = dict[str, torch.Tensor]  # this rank's: TPTensors know their slices' original coordinates, others are whole
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def collect(
    model: nn.Module,
    optimizers: Optimizers,
    extra: Mapping[str, Any],
    rank: int = 0,
    replicas: Sequence[dict[str, torch.Tensor]] = (),
) -> tuple[State, dict[str, Any]]:
    """(tensors by name, plain data) of everything to save. No communication, no copies. Generators, the user's plain tensors
    and plain data may differ between ranks: rank 0's are saved. replicas: `generators` of each data-parallel rank."""
    tensors: State = {}
    aliases: dict[str, str] = {}
    borrowed: frozenset[str] = getattr(runtime_of(model), "borrowed", frozenset())
    for stored in stored_tensors(model):
        if stored.tensor.is_meta:
            found = f"'{stored.name}' is on the meta device: it has no values to save"
            raise UsageError(found, fix="load or initialise it")
        if stored.name in borrowed:
            continue
        tensors[f"model.{stored.name}"] = stored.tensor
        aliases |= dict.fromkeys(stored.names[1:], stored.name)
    objects = {k: v for k, v in model.state_dict().items() if not isinstance(v, torch.Tensor)}
    held = {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in extra.items()}
    several, device = several_of(optimizers), device_of(model)
    roots = [f"optimizer.{i}" for i in range(len(several))] if len(several) > 1 else ["optimizer"]
    rng: dict[str, Any] = dict(replicas[0] if replicas else generators(device))
    if any(not torch.equal(x, rng[kind]) for other in replicas for kind, x in other.items()):
        rng["replicas"] = list(replicas[1:])
    data = {
        "aliases": aliases,
        "model": encode(objects, "model", tensors),
        "optimizers": [encode(_by_name(o, model), at, tensors) for o, at in zip(several, roots, strict=False)],
        "rng": encode(rng, "rng", tensors),
        "extra": encode(held, "extra", tensors),
    }
    for name, tensor in list(tensors.items()):
        if isinstance(tensor, DTensor):
            if any(p.is_partial() for p in tensor.placements):
                found = f"'{name}', whose ranks hold summands, is to be saved"
                raise CheckpointError(found, fix="redistribute it first")
            tensors[name] = wrap(tensor._local_tensor.detach(), tensor._spec)
        elif rank != 0 and name.startswith(("rng.", "extra.")):
            del tensors[name]
    return tensors, data


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The plain data of all ranks of a pipeline as those of the whole model: rank 0's, with the names of all stages."""
    optimizers = []
    for of_stages in zip(*(part["optimizers"] for part in parts), strict=True):
        if len({len(each["groups"]) for each in of_stages}) > 1:
            what = "optimizers of a pipeline's stages have different numbers of parameter groups"
            raise CheckpointError(what, fix="make the same groups on every stage, also those without parameters")
        groups = []
        for same in zip(*(each["groups"] for each in of_stages), strict=True):
            groups.append({**same[0], "names": [*dict.fromkeys(name for group in same for name in group["names"])]})
        optimizers.append({"groups": groups, "state": {k: v for each in of_stages for k, v in each["state"].items()}})
    union = {key: {k: v for part in parts for k, v in part[key].items()} for key in ("aliases", "model")}
    return {**parts[0], **union, "optimizers": optimizers}


def copied(state: State) -> State:
    """The same values in CPU memory of their own."""
    return {n: _like(x, local_of(x).to("cpu", copy=True)) for n, x in state.items()}


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros in CPU memory for this rank's part."""
    local = local_of(tensor)
    return _like(tensor, torch.zeros(local.shape, dtype=local.dtype))


def _like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    return wrap(local, tensor._spec) if isinstance(tensor, DTensor) else local


def generators(device: torch.device) -> dict[str, torch.Tensor]:
    """States of torch's default generators: of the CPU and, on a GPU, of `device`."""
    found = {"cpu": torch.get_rng_state()}
    return found | {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else found


def set_generators(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    if "cpu" in states:  # not in a checkpoint that was made of weights alone (`megafx convert`)
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def generators_of(
    saved: Mapping[str, Any], replica: int, replicas: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Generator states for one of `replicas` data-parallel ranks. If states of another number of ranks were saved, they are
    derived from rank 0's and the replica's number. Raises torch's errors for invalid states."""
    several = [saved, *saved.get("replicas", ())]
    found = {}
    for kind, where in (("cpu", torch.device("cpu")), ("cuda", device)):
        if kind not in saved or where.type != kind:
            continue
        generator = torch.Generator(where)
        generator.set_state(several[replica if len(several) == replicas else 0][kind])
        if 1 < len(several) != replicas and replica > 0:
            seed = torch.randint(2**62, (), generator=generator, device=where)
            generator.manual_seed(int(seed) + replica)
        found[kind] = generator.get_state()
    return found


def finish_model(model: nn.Module, objects: dict[str, Any]) -> None:
    """After tensors are filled: `set_extra_state` of modules, and new tensor versions, for autograd's saved-tensor checks."""
    if objects:
        nn.Module.load_state_dict(model, objects, strict=False)
    for stored in stored_tensors(model):
        torch.autograd.graph.increment_version(stored.tensor)


def several_of(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """None, one or several -> a list."""
    if optimizers is None:
        return []
    return list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]


def names_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """FQNs of each group's parameters."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = []
    for group in optimizer.param_groups:
        if unknown := [tuple(p.shape) for p in group["params"] if id(p) not in names]:
            raise UsageError(
                f"the optimizer holds {len(unknown)} parameters that the model does not have (the first of shape {unknown[0]})",
                fix="give the model that the optimizer was made of",
            )
        found.append([names[id(p)] for p in group["params"]])
    return found


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names", "names")}


def _by_name(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """The state dict by FQN: {"groups": [{"names": FQNs, option: value}], "state": {FQN: {key: value}}}."""
    state, groups = optimizer.state_dict(), []
    named: dict[int, str] = {}
    for names, group in zip(names_of(optimizer, model), state["param_groups"], strict=True):
        groups.append({"names": names, **options_of(group)})
        named |= dict(zip(group["params"], names, strict=True))
    return {"groups": groups, "state": {named[index]: value for index, value in state["state"].items()}}


def optimizer_misfit(optimizer: torch.optim.Optimizer, model: nn.Module, data: Any) -> str | None:
    """How a saved optimizer's parameter groups differ from this one's; None if they do not."""
    mine = [*filter(None, names_of(optimizer, model))]  # a stage of a pipeline may have none of a group
    theirs = [*filter(None, (group["names"] for group in data["groups"]))]
    if sorted(map(sorted, mine)) == sorted(map(sorted, theirs)):
        if any("lr" not in group for group in data["groups"]):
            return "its optimizer has a group without learning rate"
        return None
    a, b = {n for names in theirs for n in names}, {n for names in mine for n in names}
    if a != b:
        return f"its optimizer has parameters {sorted(a - b)[:3]} that this one has not, and lacks {sorted(b - a)[:3]}"
    return f"its optimizer has {len(theirs)} groups of parameters, this one {len(mine)}, or they are otherwise grouped"


def state_misfits(model: nn.Module, data: Any, shapes: Mapping[str, Any]) -> list[str]:
    """Tensors of a saved optimizer whose shape does not fit their parameter (sizes of 1 are reduced dims)."""
    parameters, wrong = dict(model.named_parameters()), []
    for fqn, kept in data["state"].items():
        if fqn not in parameters:
            wrong.append(f"its optimizer keeps a state of '{fqn}', which is no parameter of the model")
            continue
        mine = tuple(parameters[fqn].shape)
        for name in tensor_names(kept):
            shape = tuple(shapes[name][0])
            if len(shape) == len(mine) and any(n not in (1, m) for n, m in zip(shape, mine, strict=True)):
                wrong.append(f"'{name}' is {shape} there, '{fqn}' is {mine} in the model")
    return wrong


def optimizer_targets(model: nn.Module, data: Any, shapes: Mapping[str, Any]) -> State:
    """Memory for the tensors of one saved optimizer: name -> tensor, sharded like the parameter if it has its shape.
    shapes: name in the checkpoint -> (shape, dtype)."""
    made: State = {name: zeros_of(shapes[name]) for name in tensor_names(data["groups"])}
    parameters = dict(model.named_parameters())
    for fqn, kept in data["state"].items():
        like = parameters[fqn] if parameters[fqn].ndim else None  # else the count of steps would go to its device
        made |= {name: zeros_of(shapes[name], like) for name in tensor_names(kept)}
    return made


def zeros_of(saved: tuple[tuple[int, ...], torch.dtype], like: torch.Tensor | None = None) -> torch.Tensor:
    """Memory for a saved tensor (shape, dtype), on the device and in the shards of `like` if that has the same shape."""
    shape, dtype = saved
    if like is None or tuple(like.shape) != shape:
        return torch.zeros(shape, dtype=dtype)
    return torch.zeros_like(like.detach(), dtype=dtype, memory_format=torch.contiguous_format)


def finish_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, data: Any, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Give the optimizer its saved state, through its own `load_state_dict`."""
    whole = decode(data, tensors.__getitem__)
    saved = {frozenset(group["names"]): options_of(group) for group in whole["groups"]}
    now, groups, state = optimizer.state_dict(), [], {}
    for group, names in zip(now["param_groups"], names_of(optimizer, model), strict=True):
        kept = {key: value for key, value in group.items() if key in ("params", "param_names")}
        # a newer torch has options that were not saved
        groups.append(options_of(group) | (saved[frozenset(names)] if names else {}) | kept)
        found = zip(group["params"], names, strict=True)
        state.update({index: whole["state"][name] for index, name in found if name in whole["state"]})
    optimizer.load_state_dict({**now, "state": state, "param_groups": groups})


_DICTS: dict[str, type] = {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}
DEEPEST = 100  # most levels of nested lists and dicts
_KINDS = {kind: tag for tag, kind in _DICTS.items()}


def encode(value: Any, path: str, tensors: State, depth: int = 0) -> Any:
    """`value` as JSON data. Its tensors go into `tensors` under their path. Raises CheckpointError with the path.

        {"lr": 0.1, "betas": (0.9, 0.95), "ema": tensor}, of path "extra"
        {"lr": 0.1, "betas": {"$tuple": [0.9, 0.95]}, "ema": {"$tensor": "extra.ema"}}

    What JSON cannot say is an object with one key that begins with '$'. Reading it back never runs code from the file.
    """
    if depth > DEEPEST:
        fix = "flatten it, or leave out what holds itself"
        raise CheckpointError(f"{path[:100]}... is more than {DEEPEST} lists and dicts deep", fix=fix)
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor):
        name = path if path not in tensors else f"{path}#{len(tensors)}"  # {"a.b": x, "a": {"b": y}}
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if type(value) in (list, tuple, torch.Size):
        items = [encode(v, f"{path}.{i}", tensors, depth + 1) for i, v in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) in _KINDS:
        if type(value) is dict and all(type(k) is str and not k.startswith("$") for k in value):
            return {k: encode(v, f"{path}.{k}", tensors, depth + 1) for k, v in value.items()}
        pairs = [
            [encode(k, f"{path} (a key)", {}, depth + 1), encode(v, f"{path}.{k}", tensors, depth + 1)]
            for k, v in value.items()
        ]
        return {_KINDS[type(value)]: pairs}
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold",
        fix="give numbers, strings, None, tensors, and lists, tuples and dicts of them; or an object with state_dict() and "
        "load_state_dict() whose state consists of these",
    )


def decode(data: Any, tensor: Callable[[str], Any], depth: int = 0) -> Any:
    """Inverse of `encode`; tensor: name -> the tensor, or what replaces it."""
    if depth > DEEPEST + 2:  # 'extra' and the list of optimizers hold what was encoded
        raise CheckpointError(f"a checkpoint holds data that are more than {DEEPEST} lists and dicts deep")
    inner = lambda v: decode(v, tensor, depth + 1)
    if isinstance(data, list):
        return [*map(inner, data)]
    if not isinstance(data, dict):
        return data
    if len(data) != 1 or not next(iter(data)).startswith("$"):
        return {k: inner(v) for k, v in data.items()}
    (tag, held), *_ = data.items()
    if tag == "$tensor":
        return tensor(held)
    if tag == "$float":
        return float(held)
    if tag == "$dtype":
        found = getattr(torch, held, None)
        if not isinstance(found, torch.dtype):
            raise CheckpointError(f"a checkpoint names '{held}', which is no dtype of torch {torch.__version__}")
        return found
    if tag == "$tuple":
        return tuple(map(inner, held))
    if tag in _DICTS:
        return _DICTS[tag]({inner(k): inner(v) for k, v in held})
    raise CheckpointError(f"a checkpoint holds '{tag}', which this version of megafx does not know")


def tensor_names(data: Any) -> Iterator[str]:
    """Names of the tensors that encoded data refer to."""
    if isinstance(data, list):
        for value in data:
            yield from tensor_names(value)
    elif isinstance(data, Mapping):
        if set(data) == {"$tensor"}:
            yield data["$tensor"]
        else:
            yield from tensor_names(list(data.values()))
