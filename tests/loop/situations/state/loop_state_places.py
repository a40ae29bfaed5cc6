"""Where users keep what forward reads and writes: closures, classes, functions, namespaces, the environment, shared lists."""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from loop import Loop, situation
from torch import nn
from torch.nn import functional as F

READS = "https://github.com/pytorch/pytorch/issues/115774"
WRITES = "https://github.com/NVIDIA/Megatron-LM/issues/1652"
GAIN: ContextVar[float] = ContextVar("gain", default=1.0)
LOCAL = threading.local()
ARGS = argparse.Namespace(scale=1.0, mode="plain")
NORMS: list[torch.Tensor] = []


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def _step(loop: Loop, model: nn.Module, length: int = 3) -> None:
    torch.manual_seed(length)
    loss = model(torch.randn(2, length, 8)).square().mean()
    loss.backward()
    loop.see(loss=loss)


@situation(READS, ranks=(1,))
def state_of_the_process_is_changed(loop: Loop) -> None:
    class Model(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = super().forward(x) * GAIN.get() * LOCAL.gain * ARGS.scale * float(os.environ.get("LOOP_GAIN", "1"))
            return -h if ARGS.mode == "negated" else h + torch.full((8,), 0.1)

    LOCAL.gain, ARGS.scale, ARGS.mode = 1.0, 1.0, "plain"
    os.environ.pop("LOOP_GAIN", None)
    model = loop.model(Model())
    _step(loop, model)
    token = GAIN.set(2.0)
    _step(loop, model)
    GAIN.reset(token)
    LOCAL.gain = 3.0
    _step(loop, model)
    ARGS.scale = 0.5
    _step(loop, model)
    ARGS.mode = "negated"
    _step(loop, model)
    os.environ["LOOP_GAIN"] = "4"
    _step(loop, model)
    del os.environ["LOOP_GAIN"]
    torch.set_default_dtype(torch.float32)
    ARGS.mode = "plain"
    loop.see(out=model(torch.ones(2, 3, 8, dtype=torch.float64)))
    loop.see_gradients(model)


class Settings:
    """As configuration libraries have them: attributes by `__getattr__`."""

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "values", values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.values[name] = value


@situation(READS, ranks=(1,), like="attributes_come_from_an_object_behind")
def settings_partials_and_dicts_of_attributes_are_changed(loop: Loop) -> None:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.settings = Settings(scale=1.0, residual=False)
            self.activation: Callable[..., torch.Tensor] = functools.partial(F.leaky_relu, negative_slope=0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.down(self.activation(self.up(x))) * self.settings.scale
            if "late" in self.__dict__:
                h = h * self.__dict__["late"]
            return x + h if self.settings.residual else h

    model = loop.model(Model())
    _step(loop, model)
    model.settings.scale = 2.0
    _step(loop, model)
    model.settings.residual = True
    _step(loop, model)
    model.activation = functools.partial(F.leaky_relu, negative_slope=0.5)
    _step(loop, model)
    model.late = 0.5
    _step(loop, model)
    loop.see_gradients(model)


@situation(READS, ranks=(1,), like="functions_closures_and_globals_count")
def the_slope_of_an_activation_is_changed(loop: Loop) -> None:
    model = loop.model(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.1), nn.Linear(16, 8)))
    for slope in (0.1, 0.5, 0.7):
        model[1].negative_slope = slope
        _step(loop, model)
    loop.see_gradients(model)


class Counted(Mlp):
    calls = 0
    tables: dict[int, torch.Tensor] = {}
    seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        length = x.shape[1]
        if length not in self.tables:
            self.tables[length] = torch.arange(length, dtype=x.dtype)[None, :, None]
        self.seen.append(x.detach().mean())
        return super().forward(x + self.tables[length]) / type(self).calls


@situation(WRITES, like="tables_are_kept_by_sizes_in_tuples")
def classes_count_keep_tables_and_lists(loop: Loop) -> None:
    Counted.calls = 0
    Counted.tables.clear()
    Counted.seen.clear()
    model = loop.model(Counted())
    for length in (3, 4, 3):
        _step(loop, model, length)
    loop.see(calls=Counted.calls, lengths=sorted(Counted.tables), seen=torch.stack(Counted.seen))
    loop.see_gradients(model)


def _helper(x: torch.Tensor, memory: dict[str, int] = {}) -> torch.Tensor:  # noqa: B006  as users write it
    memory["calls"] = memory.get("calls", 0) + 1
    _helper.calls += 1  # type: ignore[attr-defined]  # of a function
    NORMS.append(x.detach().norm())
    return x * memory["calls"]


@situation(WRITES, ranks=(1,))
def functions_closures_and_globals_count(loop: Loop) -> None:
    def counter() -> Callable[[torch.Tensor], torch.Tensor]:
        calls = 0

        def scaled(x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return x * calls

        return scaled

    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = counter()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            return _helper(self.scaled(super().forward(x))) / self.calls

    _helper.calls = 0  # type: ignore[attr-defined]  # of a function
    (_helper.__defaults__ or ())[0].clear()
    NORMS.clear()
    model = loop.model(Model())
    for _ in range(3):
        _step(loop, model)
    loop.see(calls=(model.calls, _helper.calls), norms=torch.stack(NORMS))  # type: ignore[attr-defined]  # of a function
    loop.see_gradients(model)


@situation(WRITES)
def blocks_share_a_list_of_losses(loop: Loop) -> None:
    class Block(Mlp):
        def __init__(self, losses: list[torch.Tensor]) -> None:
            super().__init__()
            self.losses = losses

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = super().forward(x)
            self.losses.append(h.square().mean())
            return x + h

    class Model(nn.Module):
        def __init__(self, clears: bool) -> None:
            super().__init__()
            self.losses: list[torch.Tensor] = []
            self.blocks, self.clears = nn.ModuleList([Block(self.losses) for _ in range(2)]), clears

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.clears:
                self.losses.clear()
            for block in [*self.blocks, *self.blocks]:
                x = block(x)
            return x.square().mean() + sum(self.losses) if self.clears else x.square().mean()

    for clears in (False, True):
        model = loop.model(Model(clears))
        for _ in range(3):
            if not clears:
                model.losses.clear()
            loss = model(torch.ones(2, 3, 8))
            loss = loss if clears else loss + sum(model.losses)
            loss.backward()
            loop.see(loss=loss, losses=torch.stack(model.losses).detach())
        loop.see_gradients(model)


@situation(WRITES, ranks=(1,), like="functions_closures_and_globals_count")
def buffers_and_histories_are_made_in_forward(loop: Loop) -> None:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.recent: collections.deque[torch.Tensor] = collections.deque(maxlen=2)
            self.history = collections.defaultdict(list)
            self.last = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "positions") or self.positions.shape[0] < x.shape[1]:
                self.register_buffer("positions", torch.arange(x.shape[1], dtype=x.dtype)[:, None])
            h = super().forward(x + self.positions[: x.shape[1]])
            self.recent.append(h.mean())
            self.history["max"].append(h.max().item())
            self.last = h.std().item()
            return h

    model = loop.model(Model())
    for length in (3, 3, 5, 4):
        _step(loop, model, length)
        loop.see(recent=[*model.recent], last=model.last, history=model.history["max"])
    loop.see_gradients(model)
    loop.see_state(model)


@situation(READS, ranks=(1,))
def cached_functions_are_used_inside_and_outside(loop: Loop) -> None:
    @functools.cache
    def mask(length: int) -> torch.Tensor:
        return torch.ones(length, length).tril()

    class Model(Mlp):
        @functools.cache  # noqa: B019  as users write it
        def positions(self, length: int) -> torch.Tensor:
            return torch.arange(length)[:, None] * 1.0

        @functools.cached_property
        def scale(self) -> torch.Tensor:
            return torch.tensor(2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mask(x.shape[1]) @ super().forward(x) + self.positions(x.shape[1]) * self.scale

    model = loop.model(Model())
    for length in (3, 4, 3):
        _step(loop, model, length)
        loop.see(mask=mask(length), positions=model.positions(length), scale=model.scale)


ACTIVATION: Any = None
DROPOUT = nn.Dropout(0.0)


@situation(READS, ranks=(1,))
def names_that_code_only_tests_stand_for_something_else(loop: Loop) -> None:
    """Modules, classes and functions of torch; a pre-hook of the model puts them there, or the loop."""
    late: Any = None

    class Model(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = super().forward(x)
            if ACTIVATION is not None:
                h = h * 2
            if late is not None:
                h = h * 3
            if not self.training:
                h = table(h)  # not defined yet
            if globals().get("GIVEN"):
                h = h * 5
            return h * 7 if DROPOUT.training else h

    model = Model()
    values = iter([None, nn.ReLU(), nn.ReLU, torch.relu, functools, *[None] * 6])
    model.register_forward_pre_hook(lambda module, args: globals().update(ACTIVATION=next(values)))
    model = loop.model(model)
    for number in range(10):
        late = nn.Identity if number == 6 else None
        globals().update({"GIVEN": True} if number == 7 else {})
        DROPOUT.train(number != 8)
        _step(loop, model)
        globals().pop("GIVEN", None)
    table = nn.functional.relu
    model.eval()
    _step(loop, model)


@situation(READS, ranks=(1,), like="state_of_the_process_is_changed")
def blocks_have_closures_of_their_own(loop: Loop) -> None:
    """Each block's function has a variable of the same name, which a schedule changes, and so has a context."""

    def scaled(rate: float) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], None]]:
        def change(to: float) -> None:
            nonlocal rate
            rate = to

        return lambda x: x * rate, change

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.functions = nn.ModuleList(Mlp() for _ in range(3)), [scaled(0.1 * i) for i in range(1, 4)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block, (scale, _) in zip(self.blocks, self.functions, strict=True):
                x = x + scale(block(x)) * GAIN.get()
            return x

    module = Blocks()
    model = loop.model(module)
    for step in range(4):
        _step(loop, model)
        for i, (_, change) in enumerate(module.functions):
            change(0.3 * step + 0.1 * i)


class Registry(collections.OrderedDict[str, Any]):
    """Gives out a new module of the class that it holds, as transformers' ACT2FN does."""

    def __getitem__(self, name: str) -> nn.Module:
        made: nn.Module = super().__getitem__(name)()
        return made


REGISTRY = Registry(relu=nn.ReLU, gelu=nn.GELU, tanh=nn.Tanh)


@situation(
    "https://github.com/huggingface/transformers/blob/main/src/transformers/models/mamba/modeling_mamba.py",
    like="state_of_the_process_is_changed",
)
def a_registry_makes_what_it_gives_out(loop: Loop) -> None:
    class Model(Mlp):
        name = "gelu"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(REGISTRY[self.name](self.up(x)))

    def held() -> list[str]:
        return [f"{name} {kind.__name__}" for name, kind in collections.OrderedDict.items(REGISTRY)]

    REGISTRY.update(gelu=nn.GELU)
    REGISTRY.move_to_end("relu")
    before, model = held(), loop.model(Model())
    _step(loop, model)
    assert held() == before
    REGISTRY["gelu"] = nn.SiLU
    _step(loop, model)
    model.name = "tanh"
    _step(loop, model)
    assert held() == ["gelu SiLU", "tanh Tanh", "relu ReLU"]


# -- methods and functions in whose place a user puts others


@contextlib.contextmanager
def _patched(owner: Any, name: str, new: Any) -> Iterator[None]:
    before = vars(owner).get(name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


class Methods(nn.Module):
    """Calls methods and operators of tensors, nn.GELU and a function of this module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.act = nn.LayerNorm(7), nn.Linear(7, 8), nn.Linear(8, 7), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.up(self.norm(x))).sin().softmax(-1)
        return _reloaded(self.down(h)) + h.mean(-1, keepdim=True)


def _reloaded(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


def _sees(loop: Loop, model: nn.Module) -> None:
    torch.manual_seed(3)
    loss = model(torch.randn(4, 7)).square().mean()
    loss.backward()
    loop.see(loss=loss)


@situation("https://github.com/xl0/lovely-tensors")
def methods_of_tensors_are_replaced(loop: Loop) -> None:
    sin, softmax, mean, add = torch.Tensor.sin, torch.Tensor.softmax, torch.Tensor.mean, torch.Tensor.__add__
    with _patched(torch.Tensor, "softmax", lambda x, dim: softmax(2 * x, dim)):
        model = loop.model(Methods())
        _sees(loop, model)
    _sees(loop, model)
    with _patched(torch.Tensor, "sin", lambda x: sin(x) * 2):
        _sees(loop, model)
    with _patched(torch.Tensor, "mean", lambda x, *args, **options: mean(x, *args, **options) * 3):
        _sees(loop, model)
    with _patched(torch.Tensor, "__add__", lambda x, y: add(x, y * 2)):
        _sees(loop, model)
    _sees(loop, model)
    loop.see_gradients(model)


@situation("https://github.com/xl0/lovely-tensors", like="methods_of_tensors_are_replaced")
def methods_are_added_to_tensors(loop: Loop) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).twice().halves  # type: ignore[attr-defined]

    factor = 2.0
    with (
        _patched(torch.Tensor, "twice", lambda x: x * factor),
        _patched(torch.Tensor, "halves", property(lambda x: x[..., :4] - x[..., 4:])),
    ):
        model = loop.model(Own())
        _sees(loop, model)
        factor = 3.0
        _sees(loop, model)
        with _patched(torch.Tensor, "twice", lambda x: x.exp()):
            _sees(loop, model)
    loop.see_gradients(model)


@situation("https://ipython.readthedocs.io/en/stable/config/extensions/autoreload.html")
def code_is_reloaded_and_calls_of_modules_are_replaced(loop: Loop) -> None:
    model, code, call = loop.model(Methods()), _reloaded.__code__, nn.Module.__call__
    _sees(loop, model)
    _reloaded.__code__ = (lambda x: x.sigmoid()).__code__
    try:
        _sees(loop, model)
    finally:
        _reloaded.__code__ = code

    def doubled(module: nn.Module, *args: Any, **options: Any) -> Any:
        return call(module, *args, **options) * (2 if isinstance(module, nn.GELU) else 1)

    with _patched(nn.Module, "__call__", doubled):
        _sees(loop, model)
    _sees(loop, model)
    loop.see_gradients(model)


class Bounded(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


@situation(READS, like="layers_are_replaced")
def the_class_of_a_submodule_is_changed(loop: Loop) -> None:
    model = loop.model(nn.Sequential(nn.Linear(8, 8), Mlp()))
    for cls in (Mlp, Bounded, Mlp):
        model[1].__class__ = cls
        _step(loop, model)
    loop.see_gradients(model)


PROMPT = """
scale, settings, seen = 2.0, {"shift": 1.0, "on": True}, []

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x, counts={"calls": 0}):
        counts["calls"] += 1
        h = self.up(x) * scale
        if settings["on"]:
            h = h + settings["shift"] * counts["calls"]
        seen.append(h.detach().mean())
        return self.down(h.tanh()).square().mean()
"""


@situation("https://github.com/pytorch/pytorch/issues/115774", like="functions_closures_and_globals_count")
def code_of_a_prompt_reads_globals(loop: Loop) -> None:
    """What is typed at Python's prompt, in IPython or in a notebook, or given to `exec`, is in no file."""
    for file in ("<stdin>", "<string>", "<ipython-input-3-0123456789ab>"):
        names: dict[str, Any] = {"nn": nn}
        exec(compile(PROMPT, file, "exec"), names)
        model = loop.model(names["Net"]())
        changes = (2.0, 1.0, True), (3.0, 1.0, True), (3.0, -0.5, True), (3.0, -0.5, False)
        for scale, shift, on in changes if file == "<stdin>" else changes[:2]:
            names["scale"] = scale
            names["settings"].update(shift=shift, on=on)
            loss = model(torch.randn(4, 8))
            loss.backward()
            loop.see(loss=loss, seen=list(names["seen"]))
        loop.see_gradients(model)
