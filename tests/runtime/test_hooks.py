"""Covers: ops/hook_call.py, capture/hooks.py, capture/hook_stores.py, runtime/guards.py: hooks that no graph can serve, and
what their errors advise.

What hooks do is in tests/loop/situations/hooks/loop_hooks.py and loop_hooks_that_store.py.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from typing import Any

import pytest
import torch
from advice import refused
from torch import Tensor, nn

import megafx
from megafx.capture.hook_stores import stores_of
from megafx.capture.hooks import hooks_of
from megafx.errors import CaptureError, UsageError

X = torch.randn(3, 4)
ONE = megafx.Config(tensor_model_parallel_size=1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Double(nn.Module):
    """A change of values and dtype, as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], -1) if x.sum() is None else x.double()


def widened(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    kept.append(output)
    return output.double()


kept: list[Any] = []


def test_a_hook_that_changes_the_dtype() -> None:
    """It runs when the graph runs, so the graph cannot know; as a module of its own it is captured."""
    net = Net()
    net.down.register_forward_hook(widened)
    model = megafx.parallelize(net, ONE)
    with pytest.raises(UsageError, match="a hook returned torch.float64") as error:
        model(X)
    assert error.value.module == "down" and "nn.Sequential(model.x, Change())" in str(error.value)
    net = Net()
    net.down = nn.Sequential(net.down, Double())
    wanted = net(X)
    torch.testing.assert_close(megafx.parallelize(net, ONE)(X), wanted)


def test_a_traced_hook_may_change_sizes_and_dtypes() -> None:
    net = Net()
    net.down.register_forward_hook(lambda module, args, output: torch.cat([output, output], -1).double())
    wanted = net(X)
    model = megafx.parallelize(net, ONE)
    torch.testing.assert_close(model(X), wanted)


def test_backward_hooks_of_the_old_kind() -> None:
    net, seen = Net(), []
    model = megafx.parallelize(net, ONE)
    handle = model.up.register_backward_hook(lambda *_: seen.append(1))
    with pytest.raises(CaptureError, match="of the old kind") as error:
        model(X)
    assert error.value.module == "up" and "register_full_backward_hook" in error.value.fix
    handle.remove()
    model.up._is_full_backward_hook = None  # as torch asks, too
    model.up.register_full_backward_hook(lambda *_: seen.append(1))
    with pytest.warns(UserWarning, match="no inputs require gradients"):
        model(X).sum().backward()
    assert seen == [1]


def test_weights_that_accelerate_moves() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    net = Net()
    hooks.add_hook_to_module(net.up, hooks.AlignDevicesHook("cpu"))
    wanted = net(X)
    model = megafx.parallelize(net, ONE)
    with pytest.raises(CaptureError, match="AlignDevicesHook moves") as error:
        model(X)
    assert error.value.module == "up" and "remove_hook_from_submodules(model)" in error.value.fix
    hooks.remove_hook_from_submodules(model)
    torch.testing.assert_close(model(X), wanted)


class Sized(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, size=x.shape[0], other=object())


class Inner(nn.Module):
    def forward(self, x: Tensor, size: int, other: Any) -> Tensor:
        return x * size


def test_arguments_that_are_no_values_of_a_graph() -> None:
    net, seen = Sized(Inner()), []
    handle = net.inner.register_forward_hook(lambda m, a, k, o: seen.append(k), with_kwargs=True)
    model = megafx.parallelize(net, ONE)
    with pytest.raises(CaptureError, match=r"a hook would get a builtins\.object") as error:
        model(X)
    assert error.value.module == "inner" and "with_kwargs=False" in error.value.fix
    handle.remove()
    model.inner.register_forward_hook(lambda m, a, o: seen.append(o))
    torch.testing.assert_close(model(X), X * 3)
    assert len(seen) == 1


class Dead(nn.Module):
    """Computes what no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.probe = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.probe(x)
        return self.used(x)


def test_a_loss_of_what_no_output_depends_on() -> None:
    """The hook runs; the gradient of what it records would be lost, so it is an error."""
    seen: list[Tensor] = []
    model = megafx.parallelize(Dead(), ONE)
    model.probe.register_forward_hook(lambda m, a, o: seen.append(o))
    out = model(X)
    torch.testing.assert_close(seen[0], nn.functional.linear(X, model.probe.weight, model.probe.bias))
    with pytest.raises(UsageError, match="no output of the call depends on"):
        (out.sum() + seen[0].sum()).backward()
    seen.clear()
    model.zero_grad()
    (model(X).sum() + seen[0].detach().sum()).backward()


def test_calls_without_backward_free_what_they_keep() -> None:
    from megafx.ops import tapes

    gc.collect(), gc.collect(), gc.freeze()  # what is there takes seconds to look at
    others = set(tapes._tapes)  # of tests before this one, whose outputs something still holds
    model = megafx.parallelize(Net(), ONE)
    kept: list[Tensor] = []
    model.up.register_forward_hook(lambda m, a, o: kept.append(o))
    for _ in range(3):
        model(X)
    gc.collect(), gc.collect()  # a cycle that autograd's functions are part of is found in two steps
    assert len(tapes._tapes.keys() - others) == 1
    with pytest.raises(UsageError, match="whose output is gone") as error:
        kept[0].sum().backward()
    assert "keep the output of the call" in error.value.fix
    outputs = [model(X) for _ in range(2)]
    (kept[-1].sum() + kept[-2].sum()).backward()
    assert model.up.weight.grad is not None
    del outputs
    gc.collect(), gc.collect()
    assert not tapes._tapes.keys() - others


def traced(hook: Any) -> bool:
    module = nn.Linear(2, 2)
    module.register_forward_hook(hook)
    found = hooks_of(module, "")
    assert found is not None
    return not found.behind.runs


def test_which_hooks_are_traced() -> None:
    seen: list[Any] = []
    assert traced(lambda m, a, o: o * 2)
    assert traced(lambda m, a, o: torch.relu(o).float())
    assert not traced(lambda m, a, o: seen.append(o))
    assert not traced(lambda m, a, o: print(o))
    assert not traced(lambda m, a, o: o.detach().cpu().numpy() and None)
    assert not traced(lambda m, a, o: o.register_hook(print) and None)
    assert not traced(lambda m, a, o: o + torch.rand_like(o))
    assert not traced(lambda m, a, o: o if m.training else o * 2)


def test_another_table_in_the_place_of_one_is_seen() -> None:
    """Also where something still holds the old one, and where both are empty."""
    model, seen = megafx.parallelize(Net(), ONE), []
    model.up.register_forward_hook(lambda m, a, o: seen.append(o))
    model(X)
    held = [m._forward_hooks for m in model.modules()]
    for module in model.modules():
        module._forward_hooks = OrderedDict()
    model.act.register_forward_hook(lambda m, a, o: seen.append(o))
    model(X)
    assert [x.shape[-1] for x in seen] == [8, 8] and (seen[1] >= 0).all() and len(held) == 4


class Hidden(nn.Module):
    """Reads what a hook stores."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()) + self.last


def test_a_hook_stores_in_a_way_that_its_code_does_not_show() -> None:
    """The call finds out; assigned by name, the hook is a part of the graph."""
    net = Hidden()

    def hidden(module: nn.Module, args: Any, output: Tensor) -> None:
        exec("net.last = output", {"net": net, "output": output})

    def shown(module: nn.Module, args: Any, output: Tensor) -> None:
        net.last = output

    handle = net.first.register_forward_hook(hidden)
    model = megafx.parallelize(net, ONE)
    with refused("a hook changed '<name>', and forward reads that later in the same call") as errors:
        model(X)
    assert errors[0].module == "first" and "'last'" in errors[0].found
    handle.remove()
    net.first.register_forward_hook(shown)
    h = nn.functional.linear(X, net.first.weight, net.first.bias)
    torch.testing.assert_close(model(X), nn.functional.linear(h.tanh(), net.second.weight, net.second.bias) + h)


def test_what_the_code_of_a_hook_stores() -> None:
    class Holder:
        def __init__(self) -> None:
            self.items: dict[str, Any] = {}
            self.seen: list[Any] = []

        def put(self, key: str, value: Any) -> None:
            self.items[key] = value

        def plain(self, module: nn.Module, args: Any, output: Tensor) -> None:
            store = self.seen if output.dim() > 1 else None
            store += [output]  # type: ignore[operator]  # as users write it
            module.out = output

        def indirect(self, module: nn.Module, args: Any, output: Tensor) -> None:
            for name in ("a", "b"):
                self.put(name, output)
            setattr(self, "late", output)  # noqa: B010

        def reads(self, module: nn.Module, args: Any, output: Tensor) -> None:
            print(len(self.seen), self.items.get("a"), output)

    holder, module = Holder(), nn.Linear(2, 2)
    found = {name: stores_of(getattr(holder, name), module) for name in ("plain", "indirect", "reads")}
    assert "out" in found["plain"].names
    assert found["indirect"].names == {"items", "late"} and found["indirect"].containers[0] is holder.items
    assert not found["reads"].places and not found["reads"].containers
