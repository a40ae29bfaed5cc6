"""Python data with tensors in it <-> JSON that names the tensors.

    encode({"lr": 0.1, "betas": (0.9, 0.95), "ema": tensor}, "extra", tensors)
        -> {"lr": 0.1, "betas": {"$tuple": [0.9, 0.95]}, "ema": {"$tensor": "extra.ema"}}, tensors["extra.ema"] = tensor

What JSON has no word for is an object with one key that begins with '$': tuples, dicts with other keys than strings, floats
that are no numbers, dtypes. Anything else is refused: reading a checkpoint never runs code of its writer.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from megafx.errors import CheckpointError

_DICTS: dict[str, type] = {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}
_KINDS = {kind: tag for tag, kind in _DICTS.items()}


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON data. Its tensors go into `tensors` under their path. Raises CheckpointError with the path."""
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
        items = [encode(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) in _KINDS:
        keys = list(value)
        if type(value) is dict and all(type(k) is str and not k.startswith("$") for k in keys):
            return {k: encode(v, f"{path}.{k}", tensors) for k, v in value.items()}
        pairs = [[encode(k, f"{path} (a key)", {}), encode(v, f"{path}.{k}", tensors)] for k, v in value.items()]
        return {_KINDS[type(value)]: pairs}
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold",
        fix="give numbers, strings, None, tensors, and lists, tuples and dicts of them; or an object with state_dict() and "
        "load_state_dict() that are such",
    )


def decode(data: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Inverse of `encode`; tensor: what a name stands for."""
    if isinstance(data, list):
        return [decode(v, tensor) for v in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1 or not next(iter(data)).startswith("$"):
        return {k: decode(v, tensor) for k, v in data.items()}
    (tag, held), *_ = data.items()
    if tag == "$tensor":
        return tensor(held)
    if tag == "$float":
        return float(held)
    if tag == "$dtype":
        return _dtype(held)
    if tag == "$tuple":
        return tuple(decode(v, tensor) for v in held)
    if tag in _DICTS:
        return _DICTS[tag]({decode(k, tensor): decode(v, tensor) for k, v in held})
    raise CheckpointError(f"a checkpoint holds '{tag}', which this version of megafx does not know")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"a checkpoint names '{name}', which is no dtype of torch {torch.__version__}")
    return found


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
