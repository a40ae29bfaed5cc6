"""Copies that forward makes with Python's `copy`: of tensors, of modules, and of objects that hold state.

A copied tensor is a clone that autograd starts from, as in eager mode. What `copy` takes out of an object no
`__getattribute__` sees: it is noted here.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megafx.capture.like_layers import AroundForward
from megafx.capture.reads import Reads
from megafx.meanwhile import replacing
from megafx.ops.eager_call import in_eager_code


def copying(reads: Reads) -> list[tuple[Any, str, Callable[[Any], Any], str]]:
    """(owner, name, its replacement in a trace, why)."""
    runs = lambda: reads.on and not in_eager_code()

    @replacing
    def deep(old: Callable[..., Tensor], x: Tensor, memo: dict[int, Any]) -> Tensor:
        if not runs() or (x.requires_grad and not x.is_leaf):  # which torch refuses
            return old(x, memo)
        if id(x) not in memo:
            memo[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
        found: Tensor = memo[id(x)]
        return found

    @replacing
    def shallow(old: Callable[..., Any], x: Tensor, protocol: Any) -> Any:
        of_copy = sys._getframe(2).f_code.co_filename == copy.__file__  # past what makes it this thread's
        return (_detached, (x, x.requires_grad)) if of_copy and runs() else old(x, protocol)

    @replacing
    def noting(old: Callable[..., Any], /, x: Any, *args: Any, **kwargs: Any) -> Any:
        for name in [*vars(x)] if runs() and hasattr(x, "__dict__") else ():
            getattr(x, name)  # which is noted
        made = old(x, *args, **kwargs)
        if runs() and isinstance(made, nn.Module) and isinstance(vars(x).get("forward"), AroundForward):
            own = vars(made).pop("forward").replaced  # the copy has no shards, and is called in this trace alone
            vars(made).update({} if own is None else {"forward": own})
        return made

    why = "a copy of a tensor of a trace has no memory of its own"
    table = [(kind, "__deepcopy__", deep, why) for kind in (Tensor, nn.Parameter)]
    return [*table, (Tensor, "__reduce_ex__", shallow, why), (copy, "_reconstruct", noting, "what is copied is read")]


def _detached(x: Tensor, requires_grad: bool) -> Tensor:
    with torch.no_grad():
        return x.detach().requires_grad_(requires_grad)
