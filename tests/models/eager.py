"""One process running the plain model at fp64: what every cell of the matrix is compared with."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from harness import loss_name
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megafx.checks.simulate import Logical
from megafx.ir.program import Program


class Promoted(TorchDispatchMode):
    """Casts to fp32 (`x.float()`, `softmax(dtype=torch.float32)`, ..) are casts to fp64 within."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        promoted = lambda a: torch.float64 if a is torch.float32 else a
        return func(*tree_map(promoted, args), **tree_map(promoted, kwargs or {}))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within: numbers that a model makes tensors of are of this dtype, as its parameters are."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def eager(model: nn.Module, program: Program, call: Mapping[str, Any]) -> Logical:
    """Outputs and gradients of one call of a copy of the model, by the names that its graph gives them."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):  # a graph returns no key-value cache
            config.use_cache = False
        if getattr(config, "_experts_implementation", None) == "grouped_mm":  # has no fp64 kernel
            config._experts_implementation = "eager"
    with Promoted(), default_dtype(torch.float64):
        leaves = tree_leaves(plain(**call))
        assert program.call is not None
        order = [leaf.index for leaf in program.call.out_leaves]
        user = [o for o in program.outputs if o.kind == "user"]
        named = {user[i].name: leaf for i, leaf in zip(order, leaves, strict=True) if i >= 0}
        named[loss_name(program)].backward()
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    return Logical({name: value.detach() for name, value in named.items()}, gradients)
