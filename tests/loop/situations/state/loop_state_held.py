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


@situation(THREAD, ranks=(1,), like="arrays_that_forward_changes_are_named")
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


# -- functions with functools.lru_cache: eager mode computes with what is in the cache, stale or not

BASE = 10.0


@functools.lru_cache
def _by_base(scale: float) -> torch.Tensor:
    return torch.full((7,), scale) * BASE


@functools.lru_cache
def _halved(mask: torch.Tensor) -> torch.Tensor:
    return mask * 0.5


@functools.lru_cache
def _positions(count: int, width: int) -> torch.Tensor:
    return torch.arange(count)[:, None] / torch.arange(1, width + 1)


@functools.lru_cache
def _sums() -> torch.Tensor:
    return torch.zeros(7)


@functools.lru_cache
def _settings() -> Gain:
    return Gain(1.0)


class Cached(nn.Module):
    """Tables by cached functions: of sizes, of a buffer, of the module, of nothing; two that are too many for one cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(7, 7), 1.0
        self.register_buffer("mask", torch.tril(torch.ones(7, 7)))
        self.table = functools.lru_cache(maxsize=2)(self._make)
        for memo in (_by_base, _halved, _positions, _sums, _settings, Cached.full, Cached.pair):
            memo.cache_clear()

    def _make(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(count)[:, None] / 7
        return angles.cos() * self.scale, angles.sin()

    @functools.lru_cache  # noqa: B019 - users do
    def full(self, width: int) -> torch.Tensor:
        return torch.full((width,), self.scale)

    @staticmethod
    @functools.lru_cache(maxsize=1)
    def pair(number: int) -> torch.Tensor:
        return torch.arange(7) * BASE + number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.table(x.shape[0])
        x = F.linear(x, self.linear.weight * _halved(self.mask)) * self.full(7) + _by_base(2.0)
        return (x + _positions(x.shape[0], 7)) * cos + sin * self.pair(1) - self.pair(2)


@situation(THREAD, like="cached_weights_stay_until_the_cache_is_cleared")
def cached_functions_give_what_is_in_their_caches(loop: Loop) -> None:
    global BASE
    BASE, model = 10.0, loop.model(Cached())
    for rows, scale in ((4, 1.0), (4, 2.0), (6, 3.0), (4, 4.0), (8, 5.0), (6, 6.0)):
        BASE, model.scale = 10.0 * scale, scale
        loss = model(torch.randn(rows, 7)).square().mean()
        loss.backward()
        loop.see(loss=loss)
    _by_base.cache_clear()
    Cached.full.cache_clear()
    model.mask.mul_(3.0)
    loop.see(of_old_mask=model(torch.ones(4, 7)).mean())
    model.mask = torch.ones(7, 7)
    loop.see(of_new_mask=model(torch.ones(4, 7)).mean(), of_positions=_positions(4, 7))
    loop.see_gradients(model)


class OfWeights(nn.Module):
    """Weights that are merged once, without a gradient, and others that are merged with one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 8)
        self.a, self.b = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 7))
        OfWeights.merged.cache_clear()

    @functools.lru_cache  # noqa: B019 - users do
    def merged(self) -> torch.Tensor:
        with torch.no_grad():
            return self.linear.weight + self.a @ self.b

    @functools.lru_cache  # noqa: B019 - users do
    def product(self) -> torch.Tensor:
        return self.a @ self.b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.merged(), self.linear.bias) + F.linear(x, self.product())


@situation(THREAD)
def cached_weights_stay_until_the_cache_is_cleared(loop: Loop) -> None:
    model, x = loop.model(OfWeights()), torch.randn(4, 7)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        OfWeights.product.cache_clear()
        if step == 2:
            OfWeights.merged.cache_clear()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        loop.see(loss=loss)
        loop.see_gradients(model)
        optimizer.step()

    def backward_of_one_graph_twice() -> None:
        for _ in range(2):
            model(x).square().mean().backward()

    loop.see_error(backward_of_one_graph_twice)


class OfLayer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(7, 7), number

    @functools.lru_cache  # noqa: B019 - users do
    def share(self) -> float:
        return 1.0 / (1 + self.number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.share()


class OfLayers(nn.Module):
    """Layers that are alike but for a cached number; a sum and settings that cached functions hold for all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(OfLayer, range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * _settings().value
        with torch.no_grad():
            _sums().add_(x.mean(0))
        return x + _sums()


@situation(THREAD)
def cached_functions_hold_the_one_instance_and_numbers_of_layers(loop: Loop) -> None:
    _sums.cache_clear()
    _settings.cache_clear()
    model = loop.model(OfLayers())
    for step in range(3):
        _settings().value = 1.0 + step
        loss = model(torch.randn(4, 7)).square().mean()
        loss.backward()
        loop.see(loss=loss, sums=_sums())
        for layer in model.layers:
            layer.number += 1
    loop.see_gradients(model)


def _by_gain(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return BASE * function(*args)

    return inner


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    @_by_gain
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@situation(THREAD)
def a_decorator_reads_a_global(loop: Loop) -> None:
    global BASE
    model, x = loop.model(Decorated()), torch.randn(4, 7)
    for base in (1.0, 2.0, 0.5):
        BASE = base
        loss = model(x).square().mean()
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


@functools.lru_cache
def is_doubled() -> bool:
    return True


CHECKS = {"first": {"check": is_doubled, "least": [1]}, "second": {"check": is_doubled}}


class Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        for found in CHECKS.values():
            if found["check"]():
                x = x * 2
        return x


@situation("https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_flash_attention_utils.py")
def a_table_holds_functions_with_a_cache(loop: Loop) -> None:
    """As transformers' table of versions of flash attention does: what a trace puts there is gone afterwards."""
    model, x = loop.model(Checked()), torch.randn(4, 7)
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        loop.see(loss=loss, same=all(found["check"] is is_doubled for found in CHECKS.values()))
    loop.see_gradients(model)
