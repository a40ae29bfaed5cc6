"""What forward asks of how its arguments lie in memory: a trace has them contiguous, and calls may not.

if not x.is_contiguous():       # answered by the call's own tensor, and a graph serves calls with the same answer alone
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from megafx.capture.code_names import is_looked_at
from megafx.errors import CaptureError
from megafx.ir.source_lines import current_user_line

_WHY = "how an argument lies in memory is a matter of the call's own tensor"


class Layouts:
    """real: the tensors of a call, by name. asked: whether those are contiguous of which code of the model has asked that."""

    def __init__(self, real: Mapping[str, Tensor] | None = None) -> None:
        self.real = real or {}
        self.names: dict[int, str] = {}
        self.asked: dict[str, bool] = {}

    def begin(self, traced: Mapping[str, Tensor]) -> None:
        """Of a trace. traced: its inputs."""
        self.names = {id(x): name for name, x in traced.items() if name in self.real}
        self.asked.clear()

    def replacements(self) -> Iterator[tuple[Any, str, Callable[[Any], Any], str]]:
        """(object, name, old -> new, why)."""
        yield Tensor, "is_contiguous", self._is_contiguous, _WHY
        yield Tensor, "stride", self._stride, _WHY

    def _name(self, x: Tensor) -> str | None:
        """Of an argument of which code of the model asks."""
        name = self.names.get(id(x))
        # behind _here_alone
        return name if name is not None and is_looked_at(sys._getframe(3).f_code.co_filename) else None

    def _is_contiguous(self, old: Callable[..., bool]) -> Callable[..., bool]:
        def is_contiguous(x: Tensor, *args: Any, **kwargs: Any) -> bool:
            if args or kwargs or (name := self._name(x)) is None:
                return old(x, *args, **kwargs)
            return self.asked.setdefault(name, self.real[name].is_contiguous())

        return is_contiguous

    def _stride(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def stride(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            name = self._name(x)
            if name is not None and not self.asked.setdefault(name, self.real[name].is_contiguous()):
                own = re.sub(r"^kwargs\[(\w+)\]", r"\1", name)
                raise CaptureError(
                    f"forward asks for strides of its argument '{own}', which is not contiguous: the graph would have those of "
                    "a contiguous one",
                    source=current_user_line(),
                    fix=f"pass {own}.contiguous(), or index by sizes (unfold, narrow, reshape)",
                )
            return old(x, *args, **kwargs)

        return stride
