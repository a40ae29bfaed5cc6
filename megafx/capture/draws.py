"""Random numbers that forward draws, and other things that are not the same at each call.

**Layers that a model drops at random** in training (`layerdrop`), in one graph:

    for layer in self.layers:                               # what models write
        if self.training and torch.rand([]) < self.layerdrop:
            continue
        x = layer(x)

A graph cannot follow the draw. Here the comparison is traced and taken for False; the layer that is called next becomes
where(draw < p, x, layer(x)). So every call draws anew, from the seed of the step: the same on every rank. A dropped layer is
computed all the same, and its parameters get gradients of zero where eager leaves none.

**Other generators, iterators, the clock, files, a seed**: a graph would have what they gave at capture. While a model is traced
they are an error that names the line, but where code that is left eager calls them; variables of the environment are guarded
(reads.py).
"""

from __future__ import annotations

import builtins
import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megafx.capture.code_names import OF_ENVIRON, is_looked_at, names_layerdrop, names_of
from megafx.capture.messages import A_FILE, not_repeatable
from megafx.capture.reads import Reads
from megafx.errors import CaptureError, or_leave_eager
from megafx.ir.source_lines import current_user_line, frame_behind, is_user_file, line_of
from megafx.meanwhile import replacing
from megafx.ops.eager_call import in_eager_code

_NAME = "layerdrop"
_BELOW = (torch.Tensor.__lt__, torch.Tensor.lt, torch.lt, torch.Tensor.__le__, torch.Tensor.le, torch.le)


def draws_in_torch(module: nn.Module) -> bool:
    """True if a module's forward compares a draw of torch's with its layerdrop; other generators leave no trace in a graph."""
    names = names_of(module)
    return "rand" in names and any(name.endswith(_NAME) for name in names)


class LayerDraws(TorchFunctionMode):
    """Follows draws that are compared with a layerdrop. pending: the comparison whose layer has not been called yet."""

    def __init__(self, device: torch.device, note: Callable[[str], None]) -> None:
        super().__init__()
        self.device, self.note = device, note
        self.drawn: list[Tensor] = []
        self.compared: list[Tensor] = []
        self.pending: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.rand and _called_for_layerdrop():
            value: Tensor = func(*args, **(kwargs | {"device": self.device}))
            if value.dim() == 0:
                self.drawn.append(value)
            return value
        if func in _BELOW and any(args[0] is x for x in self.drawn):
            self.compared.append(func(*args, **kwargs))
            return self.compared[-1]
        if func is torch.Tensor.__bool__ and any(args[0] is x for x in self.compared):
            self.check()
            self.pending = args[0]
            return False
        return func(*args, **kwargs)

    def check(self) -> None:
        """Raise where a draw has decided about something else than a layer."""
        if self.pending is not None:
            raise CaptureError(
                "a draw was compared with layerdrop, and no layer of a ModuleList was called after it",
                source=current_user_line(),
                fix="set layerdrop to 0, or let the draw decide whether one layer of a ModuleList is called",
            )

    @replacing
    def forward_for(self, fqn: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The forward of a layer that may be dropped."""
        drop, self.pending = self.pending, None
        output = original(*args, **kwargs)
        if drop is None:
            return output
        several = isinstance(output, (tuple, list))
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        first = output[0] if several else output
        if given is None or not isinstance(first, Tensor) or given.shape != first.shape:
            found = "a layer that layerdrop may leave out does not return a tensor like its first argument"
            raise CaptureError(found, module=fqn, source=current_user_line(), fix="set layerdrop to 0")
        self.note(
            f"layerdrop: layers of '{fqn.rpartition('.')[0]}' are dropped at random in every call; a dropped one is "
            f"computed all the same, and its parameters get gradients of zero, where eager leaves none"
        )
        kept = torch.where(drop, given, first)
        return type(output)((kept, *output[1:])) if several else kept


def _called_for_layerdrop() -> bool:
    """True if the user's code that is running reads a layerdrop."""
    frame = frame_behind(sys._getframe(1), lambda file: not is_user_file(file))
    return frame is not None and any(name.endswith(_NAME) for name in frame.f_code.co_names)


def droppable_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(FQN, layer) of the lists of modules whose forward drops layers by a draw of torch's."""
    for path, owner in model.named_modules():
        if owner.training and draws_in_torch(owner):
            for name, layers in owner.named_children():
                if isinstance(layers, nn.ModuleList):
                    yield from ((f"{path}.{name}.{i}".lstrip("."), layer) for i, layer in layers.named_children())


@contextlib.contextmanager
def following(draws: LayerDraws | None) -> Iterator[None]:
    """Within, what is traced drops layers by the draws of the model's own code; None: it drops none."""
    with draws or contextlib.nullcontext():
        yield
        if draws is not None:
            draws.check()


# -- what gives something else at each call


_CLOCK = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")
_SEEDS = ("manual_seed", "seed", "set_rng_state")
_SEEDS_OF_CUDA = ("manual_seed", "manual_seed_all", "set_rng_state")


def unrepeatable(reads: Reads) -> list[tuple[Any, str, Callable[[Any], Any], str]]:
    """(owner, name, its replacement in a trace, why) of functions that give something else at each call."""
    table: list[tuple[Any, str, Callable[[Any], Any], str]] = [
        (type(os.environ), "__getitem__", reads.environment, "a graph is for what variables of the environment hold")
    ]
    why = "a graph would have the same number at every call"
    for module, shown in ((random, "Python's `random`"), (np.random, "numpy")):
        for name in dir(module):
            function = vars(module).get(name)
            if isinstance(getattr(function, "__self__", None), (random.Random, np.random.RandomState)) and not any(
                word in name for word in ("state", "seed")
            ):
                table.append((module, name, partial(_refusing, reads, f"a random number of {shown}"), why))
    why = "a graph draws from the seed of its step"
    for owner, names in ((torch, _SEEDS), (torch.random, _SEEDS), (torch.cuda, _SEEDS_OF_CUDA)):
        table += [(owner, name, partial(_refusing_seeds, reads, name), why) for name in names]
    table += [(time, name, partial(_refusing, reads, "the clock"), why) for name in _CLOCK]
    table.append((builtins, "next", partial(_noting, reads), "an iterator that is kept goes on at each call"))
    opens: list[tuple[Any, str]] = [(builtins, "open"), (torch, "save"), (torch, "load")]
    opens += [(Path, name) for name in ("open", "read_text", "read_bytes", "write_text", "write_bytes")]
    opens += [(np, name) for name in ("load", "save", "savez", "loadtxt", "savetxt")]
    for owner, name in opens:
        table.append(
            (owner, name, partial(_refusing, reads, A_FILE), "a graph would have what the file held at capture")
        )
    table.append(
        (type(os.environ), "__setitem__", partial(_refusing_variables, reads), "calls of a graph would not set it")
    )
    return table


@replacing
def _noting(reads: Reads, old: Any, *args: Any) -> Any:
    """Of `next`: which iterators go on."""
    if reads.on and args:
        reads.advanced.add(id(args[0]))
    return old(*args)


@replacing
def _refusing_variables(reads: Reads, old: Any, environ: Any, name: str, value: str) -> None:
    # past what makes it this thread's
    line = line_of(frame_behind(sys._getframe(2), OF_ENVIRON.__contains__), walk=False)
    looked_at = line is not None and is_looked_at(line.file)
    if reads.on and not in_eager_code() and looked_at and os.environ.get(name) != value:
        found = f"forward sets os.environ[{name!r}]: calls of a graph would not"
        raise CaptureError(found, source=line, fix="set it before the call, or keep the value in an attribute")
    old(environ, name, value)


@replacing
def _refusing_seeds(reads: Reads, name: str, old: Any, /, *args: Any, **kwargs: Any) -> Any:
    frame = sys._getframe(2)  # past what makes it this thread's (prepare.py)
    line = line_of(frame, walk=False)
    if not reads.on or in_eager_code() or line is None or not is_looked_at(line.file):
        return old(*args, **kwargs)
    module = reads.names.get(id(frame.f_locals.get("self")))
    fix = "draw the numbers before the call, and give them to forward or keep them in a buffer"
    raise CaptureError(
        f"forward sets the state of torch's generator ({name}): a graph draws from the seed of its step, and would "
        "have other numbers at each call",
        module=module,
        source=line,
        fix=or_leave_eager(fix, module),
    )


@replacing
def _refusing(reads: Reads, what: str, old: Any, /, *args: Any, **kwargs: Any) -> Any:
    frame = sys._getframe(2)  # past what makes it this thread's (prepare.py)
    line = line_of(frame, walk=False)
    owner = frame.f_locals.get("self")
    drops = isinstance(owner, nn.Module) and names_layerdrop(owner)
    if not reads.on or line is None or not is_looked_at(line.file) or drops:
        return old(*args, **kwargs)
    raise not_repeatable(what, line)
