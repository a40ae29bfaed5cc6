"""Covers: megafx/capture/prepare.py. What is replaced while a model is traced is as before afterwards, object by object."""

from __future__ import annotations

import copy
import logging
import math
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import megafx
from megafx.capture import prepare
from megafx.capture.conversions import MATH, OF_NUMPY, imported_by_name
from megafx.capture.draws import LayerDraws, unrepeatable
from megafx.capture.errors import NESTING, SPARSE
from megafx.capture.export import capture_call
from megafx.capture.functions import classes_bound_early
from megafx.capture.libraries.flex import flex_replacements
from megafx.capture.prepare import Replacement, replaced, replacements
from megafx.capture.reads import LIBRARIES, Reads
from megafx.ir.holders import LEFT_BY_CAPTURES, OF_TORCH, replaced_in
from megafx.ops.eager_probes import LeftEager


class Dropping(nn.Module):
    """Something for each line of the table: layers that are dropped, a module left eager, a place that fails."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head, self.layerdrop, self.fails = nn.Linear(4, 4), 0.5, fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) < self.layerdrop:
                continue
            x = layer(x)
        if self.fails:
            raise KeyError("the user's own error")
        return self.head(x)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=13))


def table(model: nn.Module, eager: tuple[str, ...] = ()) -> list[Replacement]:
    left = [LeftEager(model.get_submodule(fqn), fqn) for fqn in eager]
    return replacements(model, lambda text: None, left, LayerDraws(torch.device("cpu"), lambda text: None))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], int]] = {
    "dropping": (lambda: Dropping().train(), ("head", "layers.0"), 34),  # a layer is left eager and dropped as well
    "hugging face": (gpt2, (), 36),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fails", [False, True])
def test_the_table_holds_within_and_is_gone_afterwards(name: str, fails: bool) -> None:
    make, eager, lines = MODELS[name]
    rows = table(make(), eager)
    lines += 2 + len(unrepeatable(Reads(make()))) + 4  # reads and writes of attributes; copies
    for library, names in ((math, MATH), (torch, LEFT_BY_CAPTURES)):
        lines += len(names) + len(imported_by_name(library, names, LIBRARIES))
    lines += len(replaced_in(nn.functional)) + 2  # flags of backends, and tensors of inference
    lines += len(NESTING) + len(SPARSE) + 1 + len(flex_replacements(lambda text: None))
    lines += 1 + 2  # calls without arguments; TorchScript's functions and methods
    lines += 6 + 8 + 2  # comparisons of sizes; what forward asks of its arguments; operands that ops return, torch.func
    lines += 2 * len(OF_NUMPY) + 4 + 4  # quotients of sizes; numbers that are made of them
    lines += 3 + 2  # batch norm and inference mode; whether a compiler is at work
    assert len(rows) == lines + len(classes_bound_early()) and all(row.why for row in rows)
    before = [row.now() for row in rows]
    try:
        with replaced(rows):
            assert all(row.now() is not old for row, old in zip(rows, before, strict=True))
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert all(row.now() is old for row, old in zip(rows, before, strict=True))


def test_a_line_that_cannot_be_put_in_place_undoes_those_before() -> None:
    class Owner:
        value = 1

    def refuse(old: Any) -> Any:
        raise ValueError

    with (
        pytest.raises(ValueError),
        replaced([Replacement(Owner, "value", lambda old: 2, ""), Replacement(Owner, "value", refuse, "")]),
    ):
        pass
    assert Owner.value == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_leaves_nothing_behind(fails: bool) -> None:
    model, x = Dropping(fails).train(), torch.randn(3, 5, 4)
    rows = table(model, ("head",))
    before = [row.now() for row in rows]
    inside = Mock(return_value=None)  # what a list holds after the runs that show sizes is what it held before
    hook = model.head.register_forward_pre_hook(lambda module, args: inside([row.now() for row in rows]))
    if fails:
        with pytest.raises(Exception, match="the user's own error"):
            capture_call(model, (x,), eager=["head"])
    else:
        capture_call(model, (x,), eager=["head"])
        within = inside.call_args_list[0].args[0]
        assert all(now is not old for now, old in zip(within[:5], before[:5], strict=True))
    hook.remove()
    assert all(row.now() is old for row, old in zip(rows, before, strict=True))


def test_one_thread_captures_at_a_time() -> None:
    """What is replaced is seen by all threads: a second capture waits for the first."""
    free = []
    with replaced([]):
        other = threading.Thread(target=lambda: free.append(prepare._LOCK.acquire(blocking=False)))
        other.start()
        other.join()
    assert free == [False] and prepare._LOCK.acquire(blocking=False)
    prepare._LOCK.release()


def in_a_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(call()))
    other.start()
    other.join()
    return found[0]


def test_other_threads_find_what_was_there_before(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Owner:
        @classmethod
        def named(cls) -> str:
            return f"{cls.__name__} as before"

        def plain(self) -> str:
            return "as before"

    class Derived(Owner):
        pass

    lines = [
        Replacement(Owner, "plain", lambda old: lambda self: "replaced", ""),
        Replacement(Derived, "named", lambda old: classmethod(lambda cls: f"{cls.__name__} replaced"), ""),
    ]
    with replaced(lines):
        assert (Derived().plain(), Derived.named()) == ("replaced", "Derived replaced")
        assert in_a_thread(lambda: (Derived().plain(), Derived.named())) == ("as before", "Derived as before")
    logger = logging.getLogger("a test's own")
    with replaced(table(nn.Linear(2, 2))):
        print("of this thread")
        logger.warning("of this thread")
        in_a_thread(lambda: (print("of another"), logger.warning("logged by another")))
    print("afterwards")
    assert capfd.readouterr().out == "of another\nafterwards\n" and caplog.messages == ["logged by another"]


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


class Squares(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + Squared.apply(self.linear(self.norm(x)).tanh())).square().mean()


def test_two_threads_parallelize_beside_a_third_that_trains() -> None:
    """Eager code with Functions and checkpointing goes on, and each thread gets its model's own gradients."""
    done, errors, steps = threading.Event(), list[BaseException](), [0]
    streams = sys.stdout, sys.stderr, logging.root.manager.disable, nn.Module._apply, torch.autograd.Function.apply

    def guarded(call: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            try:
                call(*args)
            except BaseException as error:
                errors.append(error)

        return run

    @guarded
    def train() -> None:
        linear = nn.Linear(6, 6)
        while not done.is_set() or not steps[0]:
            x = torch.randn(4, 6, requires_grad=True)
            run = lambda x: Squared.apply(linear(x)).relu()
            checkpoint(run, x, use_reentrant=bool(steps[0] % 2)).sum().backward()
            wanted = torch.autograd.grad((linear(x) ** 2).sum(), x)[0]
            torch.testing.assert_close(x.grad, wanted)
            linear.to(torch.float32)
            steps[0] += 1

    @guarded
    def parallelize(width: int) -> None:
        plain, model = (Squares(width).double() for _ in range(2))
        model.load_state_dict(plain.state_dict())
        megafx.parallelize(model)
        x = torch.randn(3, 5, width, dtype=torch.float64)
        model(x).backward(), plain(x).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)

    threads = [threading.Thread(target=train), *(threading.Thread(target=parallelize, args=(n,)) for n in (4, 6))]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    done.set()
    threads[0].join()
    assert not errors, errors
    assert streams == (
        sys.stdout,
        sys.stderr,
        logging.root.manager.disable,
        nn.Module._apply,
        torch.autograd.Function.apply,
    )


def test_copies_of_tensors_and_methods_that_are_put_back_replace_nothing() -> None:
    copy.deepcopy(torch.ones(2)), pickle.dumps(nn.Parameter(torch.ones(2)))
    own = torch.Tensor.softmax
    torch.Tensor.softmax = lambda self, *args: own(self, *args)  # type: ignore[method-assign]
    try:
        assert OF_TORCH.number > 0
    finally:
        torch.Tensor.softmax = own  # type: ignore[method-assign]
    assert OF_TORCH.number == 0 and not replaced_in(torch.Tensor)


class _Frozen(OrderedDict[str, Any]):
    """As diffusers' configs."""

    def update(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        raise TypeError("frozen")

    clear = pop = setdefault = update  # type: ignore[assignment]


def test_a_dict_that_refuses_to_be_changed() -> None:
    model: Any = nn.Linear(4, 4)
    model.settings = _Frozen(scale=2)
    model.forward = lambda value: nn.functional.linear(value, model.weight) * model.settings["scale"]
    x = torch.randn(2, 4)
    wanted = model(x)
    assert torch.equal(megafx.parallelize(model, example_inputs=(x,))(x), wanted)
    assert type(model.settings) is _Frozen and dict(model.settings) == {"scale": 2}


def test_what_torch_compile_puts_into_modules_replaces_nothing() -> None:
    code = (
        "import torch, megafx\nfrom torch import nn\nfrom megafx.ir.holders import OF_TORCH, replaced_in\n"
        "own = nn.Module.__init__\ntorch.compile(nn.Linear(2, 2), backend='eager')(torch.ones(1, 2))\n"
        "assert nn.Module.__init__ is not own\nassert OF_TORCH.number == 0, replaced_in(nn.Module)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_methods_that_packages_add_to_modules_replace_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers adds one when it initialises weights."""
    names: dict[str, Any] = {}
    exec(compile("def added(module): pass", "/usr/lib/site-packages/package/code.py", "exec"), names)
    monkeypatch.setattr(nn.Module, "smart_apply", names["added"], raising=False)
    assert OF_TORCH.number == 0
    monkeypatch.setattr(nn.Module, "own_apply", lambda module: None, raising=False)
    assert OF_TORCH.number > 0
