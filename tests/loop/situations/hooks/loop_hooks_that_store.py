"""Hooks that store what forward reads later in the same call, the order of hooks, and hooks after exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loop import Loop, situation
from torch import Tensor, nn

from megafx.errors import UsageError

UNET = "https://forums.fast.ai/t/unetblock-hooks-and-the-stored-activations/42612"
FEATURES = "https://discuss.pytorch.org/t/how-can-i-extract-intermediate-layer-output-from-loaded-cnn-model/77301"
ORDER = "https://github.com/pytorch/pytorch/issues/48654"
ALWAYS = "https://github.com/pytorch/pytorch/pull/104278"


class Skip:
    """fastai's Hook: what a module returned last."""

    def __init__(self, module: nn.Module, function: Callable[..., Tensor]) -> None:
        self.stored: Any = None
        self.function = function
        self.handle = module.register_forward_hook(self.hook)

    def hook(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.stored = self.function(module, args, output)


class Net(nn.Module):
    """Two encoders and a decoder, which takes what hooks on the encoders have stored. 7 is no multiple of the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.decoder = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(14, 4)


class UNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.skip = Skip(self.first, lambda module, args, output: output)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).relu()).tanh()
        return self.decoder(torch.cat([y, self.skip.stored], -1))


class Listed(Net):
    """A list that hooks append to, and that forward clears."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        for module in (self.first, self.second):
            module.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.features.append(output)

    def forward(self, x: Tensor) -> Tensor:
        self.features.clear()
        self.second(self.first(x).relu())
        return self.decoder(torch.cat(self.features, -1))


STORES: dict[str, Tensor] = {}


class Named(Net):
    """A global dict, and a variable of the function that makes the hooks."""

    def __init__(self) -> None:
        super().__init__()
        last: Any = None

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            nonlocal last
            last = output

        def named(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any) -> None:
                STORES[name] = args[0]

            return hook

        self.first.register_forward_hook(keep)
        self.second.register_forward_pre_hook(named("hidden"))
        self.last = lambda: last

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).relu())
        return self.decoder(torch.cat([y * self.last(), STORES["hidden"]], -1))


class Counted(Net):
    """A flag and a number that a hook sets, and forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.calls = False, 0
        self.first.register_forward_hook(self.count)

    def count(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.odd, self.calls = not self.odd, self.calls + 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = y * self.calls if self.odd else y.sin()
        return self.decoder(torch.cat([y, self.second(y)], -1))


def trained(loop: Loop, model: nn.Module, filled: bool = False) -> None:
    """Three calls with other sizes. filled: a call before the model is parallelized fills what hooks store."""
    STORES.clear()
    if filled:
        model(torch.randn(2, 6))
    model = loop.model(model)
    for size in (3, 4, 3):
        out = model(torch.randn(size, 6))
        out.square().mean().backward()
        loop.see(out=out)
    loop.see_gradients(model)


@situation(UNET)
def a_decoder_reads_what_a_hook_stored(loop: Loop) -> None:
    trained(loop, UNet())
    trained(loop, UNet(), filled=True)


@situation(FEATURES, like="a_decoder_reads_what_a_hook_stored")
def hooks_append_to_a_list_that_forward_reads(loop: Loop) -> None:
    trained(loop, Listed(), filled=True)


@situation(FEATURES, like="a_decoder_reads_what_a_hook_stored")
def hooks_store_in_a_dict_and_a_variable_that_forward_reads(loop: Loop) -> None:
    trained(loop, Named(), filled=True)


@situation(UNET, slow=(2,))
def a_hook_sets_a_flag_and_a_number_that_forward_reads(loop: Loop) -> None:
    trained(loop, Counted())


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Sequential(nn.Linear(6, 7), nn.Tanh()), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))


@situation(ORDER, slow=(2,))
def hooks_run_in_the_order_of_registration(loop: Loop) -> None:
    """Those that only compute are part of the graph, recorders are not. One is taken off, and set again."""
    model, seen = loop.model(Chain()), list[Tensor]()
    record = lambda module, args, output: seen.append(output.detach())
    model.inner.register_forward_hook(record)
    for _ in range(2):
        double = model.inner.register_forward_hook(lambda module, args, output: output * 2)
        last = model.inner.register_forward_hook(record)
        out = model(torch.randn(3, 6))
        out.sum().backward()
        double.remove()
        loop.see(out=out, without=model(torch.randn(3, 6)))
        last.remove()
    loop.see(seen=seen)
    loop.see_gradients(model)


@situation(ALWAYS, slow=(2,))
def hooks_that_are_always_called_after_an_exception(loop: Loop) -> None:
    model, log, broken = loop.model(Chain()), list[Any](), [False]
    shape = lambda x: None if x is None else tuple(x.shape)

    def fail(module: nn.Module, args: Any, output: Tensor) -> None:
        if broken[0]:
            raise ValueError("a sensor is down")

    def always(name: str) -> Callable[..., None]:
        return lambda module, args, output: log.append((name, shape(args[0]), shape(output)))

    model.inner.register_forward_hook(always("outer"), always_call=True)
    model.inner[1].register_forward_pre_hook(lambda module, args: log.append("before"))
    model.inner[1].register_forward_hook(always("inner"), always_call=True)
    model.inner[1].register_forward_hook(fail)
    model.inner[1].register_forward_hook(always("late"), always_call=True)
    for broken[0] in (False, True, False):
        loop.see_error(lambda: model(torch.randn(3, 6)))
        log.append("call")
    loop.see(log=log)


class Decides(nn.Module):
    """x [rows, 8] -> [rows, 8], by code that stays eager."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 9), nn.Sequential(nn.Linear(9, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.last = hidden.tanh() if x.sum() > -1e9 else hidden
        return self.second(self.last)


def _recorded_in_eager_code(loop: Loop, record: Callable[[nn.Module, list[Tensor]], None], calls: int = 1) -> None:
    recorded: list[Tensor] = []
    module = nn.Sequential(nn.Linear(8, 8), Decides(), nn.Linear(8, 4))
    record(module[1], recorded)
    model = loop.model(module)
    for _ in range(2):
        x = torch.randn(3, 8, requires_grad=True)
        outputs = [model(x * (i + 1)) for i in range(calls)]
        loss = sum(y.square().mean() for y in outputs)
        loss = loss + sum((i + 1) * r.square().mean() for i, r in enumerate(recorded))
        loss.backward()
        loop.see(loss=loss, x=x.grad, count=len(recorded))
        recorded.clear()
        loop.see_gradients(model)


@situation(
    "https://discuss.pytorch.org/t/extract-features-from-layer-of-submodule-of-a-model/20181",
    like="inputs_and_changed_outputs_of_code_that_decides_are_recorded",
)
def features_of_code_that_decides_are_recorded_for_the_loss(loop: Loop) -> None:
    """The runs that show the sizes of its results record nothing."""

    def outputs(module: nn.Module, recorded: list[Tensor]) -> None:
        for each in (module, module.first, module.second, module.second[0]):
            each.register_forward_hook(lambda module, args, output: recorded.append(output))

    _recorded_in_eager_code(loop, outputs)
    _recorded_in_eager_code(loop, outputs, calls=2)


@situation("https://discuss.pytorch.org/t/extract-features-from-layer-of-submodule-of-a-model/20181")
def inputs_and_changed_outputs_of_code_that_decides_are_recorded(loop: Loop) -> None:
    def inputs(module: nn.Module, recorded: list[Tensor]) -> None:
        for each in (module, module.second, module.second[1]):
            each.register_forward_pre_hook(lambda module, args: recorded.append(args[0]))

    def changed(module: nn.Module, recorded: list[Tensor]) -> None:
        def double(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
            recorded.append(output)
            return 2 * output

        module.first.register_forward_hook(double)
        module.second.register_forward_hook(double)

    _recorded_in_eager_code(loop, inputs)
    _recorded_in_eager_code(loop, changed)


@situation("https://discuss.pytorch.org/t/extract-features-from-layer-of-submodule-of-a-model/20181")
def what_code_that_decides_keeps_beside_its_result_is_in_the_loss(loop: Loop) -> None:
    """Refused; the advice is followed."""
    model = loop.model(nn.Sequential(nn.Linear(8, 8), Decides()))
    for retain in (False, True):
        x = torch.randn(3, 8)
        loss = model(x).square().mean() + model[1].last.square().mean()
        if not loop.eager and not retain:
            with pytest.raises(UsageError, match=r"(?s)has kept beside what it returned.*retain_graph=True"):
                loss.backward()
        else:
            loss.backward(retain_graph=True)
        model.zero_grad() if not retain else loop.see_gradients(model)
