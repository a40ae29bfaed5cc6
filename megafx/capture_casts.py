"""Modules that forward converts (`self.classifier = self.classifier.to(torch.float32)`), while they are captured.

Where parameters and buffers are already as they are to be, nothing happens. Where they are not, eager code changes the dtype
or device of the model's parameters in its first call, for good: a graph computes with parameters, it does not change what they
are, so that this is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from megafx.errors import CaptureError
from megafx.source_lines import current_user_line


@contextlib.contextmanager
def conversions_refused(model: nn.Module) -> Iterator[None]:
    """Within: `.to()`, `.float()`, `.cuda()` of a module that changes it raise CaptureError."""
    names = {module: name for name, module in model.named_modules()}
    apply = nn.Module._apply

    def refusing(self: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        for module in self.modules() if recurse else [self]:
            for key, before in (*module._parameters.items(), *module._buffers.items()):
                if before is None:
                    continue
                after = _converted(before, function)
                if (after.dtype, after.device) != (before.dtype, before.device):
                    raise _refused(names.get(self, ""), f"{names.get(module, '')}.{key}".lstrip("."), before, after)
        return self

    nn.Module._apply = refusing  # type: ignore[method-assign]  # for the time of a trace
    try:
        yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]  # as it was


def _converted(before: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """What becomes of a tensor like this one. (The trace sees nothing of it: it would take the result for the parameter.)"""
    with _disable_current_modes(), FakeTensorMode():
        return function(torch.empty([1] * before.dim(), dtype=before.dtype, device=before.device))


def _refused(module: str, name: str, before: Tensor, after: Tensor) -> CaptureError:
    was, made = str(before.dtype), str(after.dtype)
    if was == made:
        was, made = repr(str(before.device)), repr(str(after.device))
    return CaptureError(
        f"forward converts a module: {name} is {was}, and would be {made} from the first call on",
        module=module,
        source=current_user_line(),
        fix=f'convert it before: model.get_submodule("{module}").to({made})',
    )
