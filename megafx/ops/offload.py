"""Values that wait for backward in host memory, copied there and back while the device computes.

    megafx::offload       value -> the same in pinned host memory; the copy has only been started
    megafx::offloaded     (result of offload, value) -> that result, once the copy is done; the value stays alive until then
    megafx::reload        host tensor -> the value on the device; the copy has only been started
    megafx::reloaded      result of reload -> the same, once the copy is done

Copies have two streams of their own, one for each direction. The graph's stream waits for them at `offloaded` and `reloaded`.
So memory is never reused while a copy reads or writes it: it is freed once no later op reads the value, as everywhere else.
What a backward never asks for is freed with the call that kept it. If a run ends between two of these ops (an error in another
op), the copy that is under way keeps its memory until the next one begins.

Copies have the value's memory layout. Without a GPU they go to another CPU tensor, at once.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from megafx.ir.facts import FREE, declare


class _Copy(NamedTuple):
    event: Any  # of CUDA, recorded after the copy
    memory: Tensor  # what the copy writes


_under_way: dict[int, _Copy] = {}  # address of what a copy writes -> the copy


@cache
def _stream(device: torch.device, direction: str) -> Any:
    return torch.cuda.Stream(device)


def _start(source: Tensor, target: Tensor, device: torch.device, direction: str) -> Tensor:
    """Copy on the direction's stream, behind what the current stream has to do so far."""
    for address in [a for a, copy in _under_way.items() if copy.event.query()]:
        del _under_way[address]  # of a run that ended early
    stream = _stream(device, direction)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
    _under_way[target.data_ptr()] = _Copy(event, target)
    return target


def _finish(target: Tensor, device: torch.device) -> None:
    copy = _under_way.pop(target.data_ptr(), None)
    if copy is not None:
        torch.cuda.current_stream(device).wait_event(copy.event)


def _offload(value: Tensor) -> Tensor:
    if value.device.type != "cuda":
        return value.clone()
    return _start(value, torch.empty_like(value, device="cpu", pin_memory=True), value.device, "out")


def _offloaded(host: Tensor, value: Tensor) -> Tensor:
    if value.device.type == "cuda":
        _finish(host, value.device)
    return host


def _reload(host: Tensor, cuda: bool) -> Tensor:
    if not cuda:
        return host.clone()
    device = torch.device("cuda", torch.cuda.current_device())
    return _start(host, torch.empty_like(host, device=device), device, "back")


def _reloaded(value: Tensor) -> Tensor:
    if value.device.type == "cuda":
        _finish(value, value.device)
    return value.view(value.shape)


def _on_host(value: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(value, device="cpu")


def _on_device(host: Tensor, cuda: bool) -> Tensor:
    return torch.empty_like(host, device="cuda" if cuda else "cpu")


_library = torch.library.Library("megafx", "FRAGMENT")
for _schema, _run, _fake in (
    ("offload(Tensor value) -> Tensor", _offload, _on_host),
    ("offloaded(Tensor host, Tensor value) -> Tensor", _offloaded, _on_host),
    ("reload(Tensor host, bool cuda) -> Tensor", _reload, _on_device),
    ("reloaded(Tensor(a) value) -> Tensor(a)", _reloaded, lambda x: x.view(x.shape)),
):
    _name = _schema.partition("(")[0]
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megafx::{_name}", _fake, lib=_library)
    declare(f"megafx.{_name}.default", cost=FREE)

OFFLOAD, OFFLOADED = torch.ops.megafx.offload.default, torch.ops.megafx.offloaded.default
RELOAD, RELOADED = torch.ops.megafx.reload.default, torch.ops.megafx.reloaded.default


def is_on_host(node: fx.Node) -> bool:
    """True if the value takes no device memory."""
    return node.target in (OFFLOAD, OFFLOADED)
