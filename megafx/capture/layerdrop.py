"""Layers that a model drops at random in training (`layerdrop`), in one graph.

    for layer in self.layers:                               # what models write
        if self.training and torch.rand([]) < self.layerdrop:
            continue
        x = layer(x)

A graph cannot follow the draw. Here the comparison is traced and taken for False; the layer that is called next becomes
where(draw < p, x, layer(x)). So every call draws anew, from the seed of the step: the same on every rank. A dropped layer is
computed all the same, and its parameters get gradients of zero where eager leaves none.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megafx.errors import CaptureError
from megafx.ir.source_lines import current_user_line, is_user_file

_NAME = "layerdrop"
_BELOW = (torch.Tensor.__lt__, torch.Tensor.lt, torch.lt, torch.Tensor.__le__, torch.Tensor.le, torch.le)


def names_of(module: nn.Module) -> set[str]:
    """Names that a module's forward reads, through its decorators."""
    found: set[str] = set()
    function: Any = type(module).forward
    while function is not None:
        found.update(getattr(getattr(function, "__code__", None), "co_names", ()))
        function = getattr(function, "__wrapped__", None)
    return found


def draws_in_torch(module: nn.Module) -> bool:
    """Whether a module's forward compares a draw of torch's with its layerdrop; other generators leave no trace in a graph."""
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

    def forward_for(self, fqn: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a layer that may be dropped."""

        def forward(*args: Any, **kwargs: Any) -> Any:
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

        return forward


def _called_for_layerdrop() -> bool:
    """Whether the user's code that is running reads a layerdrop."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
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
