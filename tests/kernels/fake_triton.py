"""Triton without a GPU: its dispatch is its own, but nothing is compiled, and launches are written down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


class Compiled:
    """In place of a compiled kernel. key: what Triton specialised it for; pointers: whether a parameter is an address."""

    def __init__(
        self, key: Any, pointers: list[bool], log: list[tuple[Compiled, tuple[int, ...], tuple[Any, ...]]]
    ) -> None:
        self.key, self.pointers, self.log = key, pointers, log
        self.function, self.packed_metadata = object(), object()

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, x: int, y: int, z: int, stream: int, function: Any, packed: Any, *rest: Any) -> None:
        assert (stream, function, packed) == (STREAM, self.function, self.packed_metadata)
        metadata, _, _, *values = rest
        assert metadata is None
        self.log.append((self, (x, y, z), tuple(values)))


STREAM = 1234


class Driver:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        assert device == 0
        return STREAM

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@contextmanager
def fake_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Fused ops take CPU tensors to their launchers. -> the list of (compiled, grid, values) of all launches."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    import megafx.kernels.attention.attention as attention
    import megafx.kernels.dropout.dropout as dropout
    import megafx.kernels.loss.cross_entropy as cross_entropy
    from megafx.kernels.common import op, replay

    log: list[Any] = []
    kernels: list[Any] = []

    def compile_nothing(self: Any, key: Any, signature: dict[str, str], device: int, *rest: Any) -> Compiled:
        kernels.append(self)
        compiled = Compiled((self.__name__, key), [kind.startswith("*") for kind in signature.values()], log)
        self.device_caches[device][0][key] = compiled
        return compiled

    monkeypatch.setattr(JITFunction, "_do_compile", compile_nothing)
    monkeypatch.setattr(replay, "supported", lambda: True)
    for module in (op, attention, cross_entropy, dropout):
        monkeypatch.setattr(module, "runs_triton", lambda x: x.dtype != torch.float64)
    before = driver._active
    driver.set_active(Driver())
    try:
        yield log
    finally:
        driver._active = before
        for kernel in kernels:
            kernel.device_caches.clear()
        for implementation in op._implementations.values():
            for cell in getattr(implementation, "__closure__", None) or ():
                if isinstance(cell.cell_contents, replay.Replay):
                    cell.cell_contents.forms.clear()


def seen(launch: Any, operands: list[Tensor], results: list[Tensor]) -> Any:
    """A launch with addresses as (which operand or result, bytes from its start)."""
    compiled, grid, values = launch

    def place(address: int) -> Any:
        if not address:  # of an empty tensor
            return int, 0
        for name, tensors in (("operand", operands), ("result", results)):
            for i, x in enumerate(tensors):
                if x.data_ptr() <= address < x.data_ptr() + max(1, x.untyped_storage().nbytes()):
                    return name, i, address - x.data_ptr()
        return "temporary"

    shown = []
    for value, is_pointer in zip(values, compiled.pointers, strict=True):
        if hasattr(value, "block_shape"):
            kept = {k: v for k, v in vars(value).items() if k != "base"}
            shown.append((place(value.base.data_ptr()), SimpleNamespace(**kept)))
        elif is_pointer:
            shown.append(place(value.data_ptr() if isinstance(value, Tensor) else value))
        else:
            shown.append((type(value), value))
    return compiled, grid, shown
