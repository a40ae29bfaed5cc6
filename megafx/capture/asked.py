"""What forward asks of its arguments that a trace does not know: how they lie in memory, and how they were computed.

if not x.is_contiguous():       # answered by the call's own tensor, and a graph serves calls with the same answer alone
if x.is_leaf:                   # or x.grad_fn is None: the same
if id(x) not in self.seen:      # a graph serves calls with this very tensor
"""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensor

from megafx.capture.code_names import is_looked_at
from megafx.errors import CaptureError
from megafx.ir.call_spec import ANSWERS
from megafx.ir.python_state import FIRST_ADDRESS
from megafx.ir.source_lines import current_user_line

_WHY = "how an argument lies in memory, and how it was computed, is a matter of the call's own tensor"


class Asked:
    """real: the tensors of a call, by name. asked: of those, question (`ANSWERS`) -> the answer that the model's code got.
    model: whose parameters and buffers are in the trace under other addresses."""

    def __init__(self, model: nn.Module, real: Mapping[str, Tensor] | None = None) -> None:
        self.model, self.real = model, real or {}
        self.own, self.addresses = _tensors_of(model), dict[int, int]()
        self.addressed = 0  # how often code has asked for the address of a tensor or a module
        self.names: dict[int, str] = {}
        self.asked: dict[str, dict[str, Any]] = {}

    def begin(self, traced: Mapping[str, Tensor]) -> None:
        """Of a trace. traced: its inputs."""
        self.names = {id(x): name for name, x in traced.items() if name in self.real}
        of_fakes = zip(_tensors_of(self.model), self.own, strict=True)
        self.addresses = {id(fake): getattr(own, FIRST_ADDRESS, id(own)) for fake, own in of_fakes}
        self.asked.clear()

    def replacements(self) -> Iterator[tuple[Any, str, Callable[[Any], Any], str]]:
        """(object, name, old -> new, why)."""
        yield Tensor, "is_contiguous", self._is_contiguous, _WHY
        yield Tensor, "stride", self._stride, _WHY
        yield Tensor, "is_leaf", lambda old: property(self._answering("is_leaf")), _WHY
        yield Tensor, "grad_fn", lambda old: property(self._answering("grad_fn")), _WHY
        yield Tensor, "_version", lambda old: property(self._version), _WHY
        yield Tensor, "grad", lambda old: property(self._gradient, self._set_gradient), _WHY
        yield builtins, "id", self._id, "the address of a tensor of a trace is nothing that code could find again"

    def _name(self, x: Tensor, frames: int) -> str | None:
        """Of an argument of which code of the model asks, that many frames away."""
        name = self.names.get(id(x))
        return name if name is not None and is_looked_at(sys._getframe(frames + 1).f_code.co_filename) else None

    def _answer(self, name: str, question: str) -> Any:
        return self.asked.setdefault(name, {}).setdefault(question, ANSWERS[question](self.real[name]))

    def _answering(self, question: str) -> Callable[[Tensor], Any]:
        def get(x: Tensor) -> Any:
            if (name := self._name(x, 1)) is None:
                return getattr(super(Tensor, x), question)
            self._answer(name, question)
            return getattr(self.real[name], question)

        return get

    def _gradient(self, x: Tensor) -> Any:
        self._refuse(
            x, "reads `.grad`", "read it in the training loop, and pass what forward needs of it as an argument"
        )
        return super(Tensor, x).grad

    def _set_gradient(self, x: Tensor, value: Any) -> None:
        self._refuse(x, "sets `.grad`", "set it in the training loop")
        attribute: Any = super(Tensor, type(x)).grad
        attribute.__set__(x, value)

    def _version(self, x: Tensor) -> int:
        self._refuse(x, "reads `._version`", "count changes in an attribute of the model, which the training loop sets")
        return super(Tensor, x)._version

    def _refuse(self, x: Tensor, does: str, fix: str) -> None:
        if isinstance(x, FakeTensor) and (isinstance(x, nn.Parameter) or id(x) in self.names):
            code = sys._getframe(2).f_code
            if code.co_name == "zero_grad" and current_user_line() is not None:
                does, fix = "calls zero_grad, which sets `.grad`", "call it in the training loop"
            elif not is_looked_at(code.co_filename):
                return
            found = f"forward {does} of a parameter or an argument, which a graph does not have"
            raise CaptureError(found, source=current_user_line(), fix=fix)

    def _id(self, old: Callable[[Any], int]) -> Callable[[Any], int]:
        def address(x: Any) -> int:
            known = issubclass(type(x), (FakeTensor, nn.Module))
            if not known or not is_looked_at(sys._getframe(2).f_code.co_filename):
                return old(x)
            self.addressed += 1
            name = self.names.get(old(x))
            if name is None:
                return self.addresses.get(old(x), old(x))
            self._answer(name, "id")
            return old(self.real[name])

        return address

    def _is_contiguous(self, old: Callable[..., bool]) -> Callable[..., bool]:
        def is_contiguous(x: Tensor, *args: Any, **kwargs: Any) -> bool:
            if args or kwargs or (name := self._name(x, 2)) is None:  # behind _here_alone
                return old(x, *args, **kwargs)
            return bool(self._answer(name, "is_contiguous"))

        return is_contiguous

    def _stride(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def stride(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            name = self._name(x, 2)
            if name is not None and not self._answer(name, "is_contiguous"):
                own = re.sub(r"^kwargs\[(\w+)\]", r"\1", name)
                raise CaptureError(
                    f"forward asks for strides of its argument '{own}', which is not contiguous: the graph would have those of "
                    "a contiguous one",
                    source=current_user_line(),
                    fix=f"pass {own}.contiguous(), or index by sizes (unfold, narrow, reshape)",
                )
            return old(x, *args, **kwargs)

        return stride


def _tensors_of(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers, as often as they have names."""
    return [
        *dict(model.named_parameters(remove_duplicate=False)).values(),
        *dict(model.named_buffers(remove_duplicate=False)).values(),
    ]
