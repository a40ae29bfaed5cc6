"""State in what Python's library offers to hold it: weak references, views of dicts, user dicts and lists, buffers, the one
instance of a class; and modes that forward switches by itself."""

from __future__ import annotations

import array
import collections
import ctypes
import functools
import multiprocessing
import types
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loop import Loop, situation
from torch import nn

from megafx.errors import CaptureError

THREAD = "https://github.com/pytorch/pytorch/issues/115774"


class Gain:
    def __init__(self, value: float) -> None:
        self.value = value


class Only:
    """A class with one instance."""

    instance: Any = None

    def __new__(cls) -> Only:
        if cls.instance is None:
            cls.instance = super().__new__(cls)
            cls.instance.value = 1.0
        return cls.instance


class Chosen:
    current: Any = None

    @classmethod
    def get(cls) -> Any:
        return cls.current


def _step(loop: Loop, model: nn.Module) -> None:
    torch.manual_seed(3)
    loss = model(torch.randn(2, 3, 8)).square().mean()
    loss.backward()
    loop.see(loss=loss)


@situation(THREAD, ranks=(1,))
def weak_references_and_the_one_instance_of_a_class_are_read(loop: Loop) -> None:
    owner, other = Gain(1.0), Gain(2.0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.owner, self.stand_in = nn.Linear(8, 8), weakref.ref(owner), weakref.proxy(other)
            self.of, self.by_name = weakref.WeakKeyDictionary({owner: 3.0}), weakref.WeakValueDictionary(a=owner)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.owner()
            assert found is not None
            h = self.linear(x) * found.value * self.stand_in.value + self.of[found]
            return h * self.by_name["a"].value * Only().value * Chosen.get().value

    Only().value, Chosen.current = 1.0, Gain(1.0)
    model = loop.model(Model())
    _step(loop, model)
    owner.value = 0.5
    _step(loop, model)
    other.value = 3.0
    model.of[owner] = 1.0
    _step(loop, model)
    model.by_name["a"] = other
    _step(loop, model)
    Only().value = 2.0
    _step(loop, model)
    Chosen.current.value = 2.5
    _step(loop, model)
    Chosen.current = Gain(0.25)
    _step(loop, model)
    loop.see_gradients(model)


@situation(THREAD, ranks=(1,))
def views_of_dicts_user_dicts_and_buffers_are_changed(loop: Loop) -> None:
    options = {"gain": 1.0}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.view = nn.Linear(8, 8), types.MappingProxyType(options)
            self.chain, self.own = collections.ChainMap({}, options), collections.UserDict(options)
            self.items, self.codes, self.numbers = (
                collections.UserList([1.0]),
                bytearray(b"\x02"),
                array.array("d", [1]),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x) * self.view["gain"] + self.chain["gain"] * x + self.own["gain"]
            return h * self.items[0] * self.codes[0] * self.numbers[0]

    model = loop.model(Model())
    _step(loop, model)
    options["gain"] = 2.0
    _step(loop, model)
    model.own["gain"] = model.chain["gain"] = 3.0
    model.items[0] = 0.5
    _step(loop, model)
    model.codes[0], model.numbers[0] = 1, 4.0
    _step(loop, model)
    loop.see_gradients(model)


@situation(THREAD, ranks=(1,))
def options_come_in_another_order(loop: Loop) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            for name, value in options.items():
                h = h * value + len(name)
            return h

    model, x = loop.model(Model()), torch.randn(2, 3, 8)
    for _ in range(2):
        loop.see(first=model(x, scale=torch.full((8,), 2.0), by=torch.full((8,), 3.0)))
        loop.see(second=model(x, by=torch.full((8,), 3.0), scale=torch.full((8,), 2.0)))


@situation("https://github.com/pytorch/pytorch/issues/168058", ranks=(1,))
def forward_enters_inference_mode_and_leaves_gradients_off(loop: Loop) -> None:
    @torch.inference_mode()
    def largest(h: torch.Tensor) -> torch.Tensor:
        return h.amax()

    class Counted(nn.Linear):
        calls = 0

        def __call__(self, *args: Any) -> Any:
            Counted.calls += 1
            return super().__call__(*args)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.leave = Counted(8, 8), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                norm = self.linear(x).square().mean()
            h = self.linear(x) / (1 + norm.clone()) * largest(self.linear(x)).clone()
            if self.leave:
                torch.set_grad_enabled(False)
            return h

    model = loop.model(Model())
    _step(loop, model)
    with torch.inference_mode():
        loop.see(value=model(torch.ones(2, 3, 8)).clone())
    model.leave = True
    loss = model(torch.ones(2, 3, 8)).sum()
    loop.see(on=torch.is_grad_enabled(), loss=loss, calls=Counted.calls)
    torch.set_grad_enabled(True)
    loop.see_gradients(model)


class Settled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if torch.are_deterministic_algorithms_enabled():
            h = h * 2
        if torch.get_float32_matmul_precision() == "high":
            h = h + 1
        if torch.is_grad_enabled():
            h = h * 5
        if torch.is_inference_mode_enabled():
            h = h * 7
        if torch.backends.cudnn.enabled and torch.is_autocast_cache_enabled() and not torch.is_anomaly_enabled():
            h = h * 11
        return h * 3 if torch.backends.cudnn.benchmark or torch.compiler.is_compiling() else h


@situation(THREAD, ranks=(1,))
def settings_of_torch_are_changed(loop: Loop) -> None:
    """And whether gradients are on, where no parameter wants one. A capture is no compiler that the user has asked for."""
    model = loop.model(Settled())
    _step(loop, model)
    torch.use_deterministic_algorithms(True)
    _step(loop, model)
    torch.use_deterministic_algorithms(False)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    _step(loop, model)
    torch.set_float32_matmul_precision(before)
    with torch.backends.cudnn.flags(benchmark=True):
        _step(loop, model)
    with torch.backends.cudnn.flags(enabled=False):
        _step(loop, model)
    with torch.autograd.set_detect_anomaly(True):
        _step(loop, model)
    with torch.inference_mode():
        loop.see(value=model(torch.ones(2, 3, 8)).clone())
    frozen, x = loop.model(Settled().requires_grad_(False)), torch.randn(2, 3, 8)
    loop.see(on=frozen(x))
    with torch.no_grad():
        loop.see(off=frozen(x))


@functools.singledispatch
def activation(h: torch.Tensor) -> torch.Tensor:
    return h


class Patched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gains = nn.Linear(8, 8), collections.OrderedDict(a=1.0, b=2.0, c=3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = activation(F.silu(self.linear(x)))
        for i, gain in enumerate(self.gains.values()):
            h = h * (gain + i)
        self.gains.move_to_end("a")
        self.gains["b"] = self.gains.pop("b")
        return h


@situation("https://github.com/linkedin/Liger-Kernel/issues/159")
def functions_of_torch_are_replaced(loop: Loop) -> None:
    """Between calls, as patches of model libraries do; and forward moves items of an ordered dict."""
    model, silu, forward = loop.model(Patched()), F.silu, nn.Linear.forward
    try:
        _step(loop, model)
        F.silu = lambda h: 3 * silu(h)
        _step(loop, model)
        nn.Linear.forward = lambda self, x: 2 * forward(self, x)  # type: ignore[method-assign]  # as users do
        _step(loop, model)
    finally:
        F.silu, nn.Linear.forward = silu, forward  # type: ignore[method-assign]
    loop.see(order=[*model.gains])
    activation.register(torch.Tensor, lambda h: h.sin())
    _step(loop, model)
    activation.register(torch.Tensor, lambda h: h)
    loop.see_gradients(model)


@situation(THREAD, ranks=(1,))
def whether_tensors_are_of_inference_mode(loop: Loop) -> None:
    """Refused; the advice is followed."""

    class Asks(nn.Linear):
        tensors = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = super().forward(x)
            return h if (h.is_inference() if self.tensors else torch.is_inference_mode_enabled()) else 2 * h

    model = loop.model(Asks(8, 8))
    if not loop.eager:
        with pytest.raises(CaptureError, match="is_inference"):
            model(torch.ones(2, 8))
    model.tensors = loop.eager
    loop.see(plain=model(torch.ones(2, 8)))
    with torch.inference_mode():
        loop.see(inference=model(torch.ones(2, 8)).clone())


@situation("https://discuss.pytorch.org/t/how-to-share-a-step-counter-with-dataloader-workers/61500")
def memory_shared_with_workers_and_what_is_given_up(loop: Loop) -> None:
    """Numbers of ctypes and of other processes; an object that a weak reference refers to, and that is gone."""
    owner = Gain(3.0)

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = super().forward(x) * self.step.value * self.rates[1] + self.number.value
            return h if self.owner() is None else 2 * h

    model = Model(8, 8)
    model.step, model.number = multiprocessing.Value("d", 1.0), ctypes.c_double(2.0)
    model.rates, model.owner = (ctypes.c_double * 2)(1.0, 2.0), weakref.ref(owner)
    model = loop.model(model)
    _step(loop, model)
    model.step.value = 5.0
    _step(loop, model)
    model.number.value, model.rates[1] = 7.0, 3.0
    _step(loop, model)
    del owner
    _step(loop, model)
