"""What forward asks of autograd, while it is captured: hooks on values; gradients, which are refused.

A hook on a value inside of the model (`h.register_hook(f)`) changes its gradient, or looks at it: to scale it, reverse it, clip
it, or print it. While a model is traced, a hooked value goes through a node that passes it on as it is, and whose backward is
the user's function: it runs in each backward on the whole gradient, on every rank.

    Before:  %h = relu(%x); %y = mm(%h, %w); hooked(%h, %k); %z = sum(%h)         # %k = pass on %h, which nobody reads
    After:   %h = relu(%x); %k = pass on %h; %y = mm(%k, %w); %z = sum(%k)
    Legal because: the hook of eager mode sees the gradient of all uses, those before it was set too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree

from megafx.capture.errors import DIFFERENTIATES, Differentiates
from megafx.errors import CaptureError, SourceLine
from megafx.ir.program import located
from megafx.ir.source_lines import current_user_line
from megafx.meanwhile import replacing
from megafx.ops.eager_probes import FindsRows, eager_call_of

_library = torch.library.Library("megafx", "FRAGMENT")
_library.define("hooked(Tensor value, Tensor passed_on) -> ()")
_library.impl("hooked", lambda value, passed_on: None, "CompositeExplicitAutograd")
torch.library.register_fake("megafx::hooked", lambda value, passed_on: None, lib=_library)
HOOKED = torch.ops.megafx.hooked.default
has_side_effect(HOOKED)  # export keeps it, and what it reads


class _PassedOn(torch.autograd.Function):
    """The value itself; its gradient goes through `hook`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, hook: Callable[[Tensor], Any]) -> Tensor:
        ctx.hook = hook
        ctx.set_materialize_grads(False)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        found = None if gradient is None else ctx.hook(gradient)
        return gradient if found is None else found, None


class _Hook(nn.Module):
    """The function as a module, which an eager node calls."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function: Callable[[Tensor], Any] | None = function

    def forward(self, value: Tensor) -> Tensor:
        return value if self.function is None else _PassedOn.apply(value, self.function)

    def remove(self) -> None:
        self.function = None


_hooks: list[_Hook] = []  # graphs hold weak references


@replacing
def register_hook(
    note: Callable[[str], None],
    of_rows: Callable[[Any], FindsRows | None],
    old: Callable[..., Any],
    value: Tensor,
    function: Callable[[Tensor], Any],
) -> Any:
    """What replaces `Tensor.register_hook` while a model is traced. of_rows: as `functions.of_rows`, of the function."""
    if not isinstance(value, FakeTensor) or not value.requires_grad:
        return old(value, function)
    source = current_user_line()
    if any(isinstance(x, FakeTensor) for x in _held(function)):
        raise CaptureError(
            "a hook on a value computes with a tensor that forward has made: it would keep that of the trace",
            source=source,
            fix="let the hook use numbers, or tensors that it reads from the module; or write a torch.autograd.Function "
            "that takes the tensor",
        )
    _hooks.append(_Hook(function))
    torch.ops.megafx.hooked(value, eager_call_of(_hooks[-1], "a hook on a value", (value,), of_rows(function)))
    note(f"{source}: the hook runs in each backward, on the whole gradient on every rank")
    return _hooks[-1]


@replacing
def retain_grad(old: Callable[..., Any], value: Tensor) -> None:
    """What replaces `Tensor.retain_grad` while a model is traced."""
    if isinstance(value, FakeTensor) and value.requires_grad and not value.is_leaf:
        raise CaptureError(
            "retain_grad() on a value inside of forward: a graph keeps no gradient of it",
            source=current_user_line(),
            fix="take the gradient by a hook: value.register_hook(self.keep), where keep(self, grad) stores it",
        )
    old(value)


@replacing
def no_gradients(old: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What replaces `torch.autograd.grad`, `torch.autograd.backward` and `Tensor.backward` while a model is traced."""
    if any(isinstance(x, FakeTensor) for x in pytree.tree_leaves((args, kwargs))):
        raise Differentiates if old.__name__ == "grad" else gradient_in_forward(current_user_line())
    return old(*args, **kwargs)


def gradient_in_forward(source: SourceLine | None, or_else: str = "") -> CaptureError:
    """or_else: what the code may do that has the same effect."""
    found, fix = DIFFERENTIATES
    return CaptureError(found.replace(":", f"{or_else}:", 1), source=source, fix=fix)


def _held(function: Callable[..., Any]) -> list[Any]:
    """What a function, a bound method or a partial holds other than globals: tensors in tuples, lists and dicts too."""
    found: list[Any] = []
    todo: list[Any] = [function]
    while todo:
        one = todo.pop()
        if inspect.ismethod(one):
            one = one.__func__
        if inspect.isfunction(one):
            cells = [*inspect.getclosurevars(one).nonlocals.values()]
            todo += [
                x for x in (*cells, *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()) if x is not one
            ]
            continue
        if hasattr(one, "func") and hasattr(one, "keywords"):
            todo += [one.func, *one.args, *one.keywords.values()]
            continue
        found += pytree.tree_leaves(one)
    return found


def place_hooks(gm: fx.GraphModule) -> None:
    """Send all uses of hooked values through the nodes of their hooks, the hook that was set last nearest to the value."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            marks = module.graph.find_nodes(op="call_function", target=HOOKED)
            if marks:
                for value in dict.fromkeys(mark.args[0] for mark in marks):
                    _place(module, value, [mark for mark in marks if mark.args[0] is value], module is gm)
                module.graph.lint()
                module.recompile()


def _place(module: fx.GraphModule, value: Any, marks: list[fx.Node], outermost: bool) -> None:
    if value.op == "placeholder" and not outermost:
        raise CaptureError(
            "a hook is set under autocast or no_grad on a value from outside of that context",
            fix="set the hook outside of the context",
            **located(marks[0]),
        )
    results: list[Any] = [mark.args[1] for mark in marks]
    calls = [result.args[0] for result in results]
    own = {*calls, *marks}
    for user in [u for u in value.users if u not in own]:
        user.replace_input_with(value, results[0])
    after = value
    while after.next.op == "placeholder":
        after = after.next
    for call, result, inner in reversed([*zip(calls, results, [*results[1:], value], strict=True)]):
        call.replace_input_with(value, inner)
        after.append(call)
        call.append(result)
        after = result
    for mark in marks:
        module.graph.erase_node(mark)
