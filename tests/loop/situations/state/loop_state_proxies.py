"""Objects that give out what others hold: proxies, dicts whose items are attributes, registries."""

from __future__ import annotations

from typing import Any

import torch
from loop import Loop, situation
from torch import Tensor, nn

PROXY = "https://github.com/pytorch/pytorch/pull/126875"
ATTRIBUTES = "https://github.com/pytorch/pytorch/issues/141138"
REGISTRY = "https://github.com/todofixthis/class-registry"


class Options:
    def __init__(self) -> None:
        self.gain, self.double = 1.0, False


class Proxy:
    """Has the attributes of another object."""

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "_inner", inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_inner"), name)


class Through(nn.Module):
    """Has the attributes of its options, which it finds in three ways."""

    def __init__(self, options: Any, proxy: Any) -> None:
        super().__init__()
        self.linear, self.proxy = nn.Linear(6, 4), proxy
        object.__setattr__(self, "options", options)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["options"], name)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.gain * self.proxy.gain
        return y + y.tanh() if self.double else y


@situation(PROXY)
def attributes_come_from_an_object_behind(loop: Loop) -> None:
    options, behind = Options(), Options()
    model, x = loop.model(Through(options, Proxy(behind))), torch.randn(3, 6)
    for owner, name, value in [(options, "gain", 0.5), (options, "double", True), (behind, "gain", 3.0)]:
        loop.see(loss=model(x).square().mean())
        setattr(owner, name, value)
    object.__setattr__(model.proxy, "_inner", Options())
    loss = model(x).square().mean()
    loss.backward()
    loop.see(loss=loss)
    loop.see_gradients(model)


class ByKey(dict[str, Any]):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class OrNone(dict[str, Any]):
    __getattr__ = dict.get


class Scaled(nn.Module):
    def __init__(self, sizes: ByKey, more: OrNone) -> None:
        super().__init__()
        self.sizes, self.more, self.linear = sizes, more, nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.sizes.gain * self.sizes.inner.gain + (self.more.bias or 0.0)


@situation(ATTRIBUTES, like="a_container_of_another_kind_takes_the_place")
def items_of_dicts_are_attributes(loop: Loop) -> None:
    sizes, more = ByKey(gain=1.0, inner=ByKey(gain=1.0)), OrNone()
    model, x = loop.model(Scaled(sizes, more)), torch.randn(3, 6)
    loop.see(loss=model(x).square().mean())
    sizes.inner.gain = 2.0
    loop.see(loss=model(x).square().mean())
    more["bias"] = 0.5
    loop.see(loss=model(x).square().mean())


class Registry:
    kinds: dict[str, Any] = {}

    def __class_getitem__(cls, name: str) -> Any:
        return cls.kinds[name]


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        activated: Tensor = Registry["activation"](self.linear(x))  # type: ignore[misc]
        return activated


@situation(REGISTRY)
def a_class_is_a_registry(loop: Loop) -> None:
    Registry.kinds["activation"] = torch.tanh
    model, x = loop.model(Chosen()), torch.randn(3, 6)
    for kind in (torch.tanh, torch.sigmoid):
        Registry.kinds["activation"] = kind
        loop.see(loss=model(x).square().mean())
