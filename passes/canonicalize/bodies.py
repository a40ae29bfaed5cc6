"""Inline the bodies of the higher-order ops that export makes of grad-mode and autocast contexts.

Before:  %y = wrap_with_set_grad_enabled(False, %body, %x)
After:   the body's nodes; detach where a value computed without gradient is used by one computed with gradient. (What an
         in-place op changes is no such value: it is the tensor that the body was given.)
Before:  %y = wrap_with_autocast('cpu', bfloat16, True, None, %body, %x)
After:   the body's nodes, with the casts that autocast does as aten.to nodes
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._python_dispatch import TorchDispatchMode

from megafx.errors import CaptureError
from megafx.ir.nodes import writes
from megafx.ir.program import FQN, MADE_BY, VAL, fake_args, fqn_of, is_floating, located
from megafx.passes.canonicalize.editor import BY, Editor

aten = torch.ops.aten
_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


@dataclass
class _Mode:
    """The state that a body's nodes run under. casts: (value, dtype) -> the cast of it that the body has already."""

    grad: bool = True
    autocast: dict[str, Any] | None = None
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = field(default_factory=dict)


def inline_bodies(editor: Editor) -> int:
    """Inline every body, nested ones too; return their number."""
    count = 0
    for node in list(editor.graph.nodes):
        if node.op == "call_function" and node.target in (_GRAD, _AUTOCAST):
            _inline(editor, node, _Mode())
            count += 1
    return count


def _inline(editor: Editor, call: fx.Node, outer: _Mode) -> Any:
    """Copy the body's nodes before `call` and give its users the results."""
    if call.target is _GRAD:
        enabled, inner, *operands = call.args
        mode = _Mode(bool(enabled), outer.autocast, outer.casts)
    else:
        device_type, dtype, enabled, cache_enabled, inner, *operands = call.args
        settings = {"device_type": device_type, "dtype": dtype, "enabled": enabled, "cache_enabled": cache_enabled}
        mode = _Mode(outer.grad, settings)
    body = getattr(editor.program.gm, str(inner.target))
    made: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    results = _copy_body(editor, call, body, made, mode)
    if outer.grad and not mode.grad:
        own = {n for n in made.values() if isinstance(n, fx.Node) and is_floating(n) and _itself(n) not in operands}
        results = fx.node.map_arg(results, lambda n: editor.at(call)(aten.detach.default, n) if n in own else n)
    _substitute(call, results)
    return results


def _itself(node: fx.Node) -> fx.Node:
    """The tensor that in-place ops gave back."""
    while node.op == "call_function" and writes(node) and node.target._schema.arguments[0].is_write:
        node = node.all_input_nodes[0]
    return node


def _copy_body(editor: Editor, call: fx.Node, body: fx.GraphModule, made: dict[fx.Node, Any], mode: _Mode) -> Any:
    for inner in body.graph.nodes:
        if inner.op == "output":
            return fx.node.map_arg(inner.args[0], lambda n: made[n])
        if inner.op == "placeholder":
            continue
        if inner.op == "get_attr":  # the module of a nested body: reachable from the root under a name of its own
            name = f"{call.name}_{inner.target}".replace(".", "_")
            setattr(editor.program.gm, name, getattr(body, str(inner.target)))
            with editor.graph.inserting_before(call):
                made[inner] = editor.graph.get_attr(name)
            continue
        with editor.graph.inserting_before(call):
            new = editor.graph.node_copy(inner, lambda n: made[n])
        new.meta[MADE_BY] = (*inner.meta.get(MADE_BY, ()), BY)
        if not mode.grad:
            editor.without_grad.add(new)
        if not new.meta.get(FQN):
            new.meta[FQN] = fqn_of(call)
        if new.target in (_GRAD, _AUTOCAST):
            made[inner] = _inline(editor, new, mode)
        else:
            made[inner] = new
            if mode.autocast is not None and mode.autocast["enabled"]:
                _cast_operands(editor, new, mode)
    raise AssertionError("a body without an output")


def _substitute(call: fx.Node, results: Any) -> None:
    """Give the users of a call, which are getitems of its tuple of results, these results."""
    for user in list(call.users):
        if user.target is operator.getitem and isinstance(results, (tuple, list)):
            value = results[user.args[1]]
            if isinstance(value, fx.Node):
                user.replace_all_uses_with(value)
                user.graph.erase_node(user)
    if call.users:
        single = results[0] if isinstance(results, (tuple, list)) and len(results) == 1 else results
        if not isinstance(single, fx.Node):
            raise CaptureError("a grad-mode or autocast context returns something that is no tensor")
        call.replace_all_uses_with(single)
    call.graph.erase_node(call)


# -- autocast


class _SeeCasts(TorchDispatchMode):
    """Sees which of the watched tensors are cast, and to what, while an op runs."""

    def __init__(self, watched: dict[int, fx.Node]) -> None:
        super().__init__()
        self.watched = watched
        self.found: dict[fx.Node, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = (kwargs or {}).get("dtype")
        if func is aten._to_copy.default and id(args[0]) in self.watched and dtype is not None:
            self.found[self.watched[id(args[0])]] = dtype
        return func(*args, **(kwargs or {}))


def _cast_operands(editor: Editor, node: fx.Node, mode: _Mode) -> None:
    """Make explicit what autocast does to this op's operands, and check that the op then computes the dtype it had."""
    operands = [n for n in node.all_input_nodes if is_floating(n)]
    wanted = _dtype(node.meta.get(VAL))
    if not isinstance(node.target, torch._ops.OpOverload) or not operands or wanted is None:
        return
    see = _SeeCasts({id(n.meta[VAL]): n for n in operands})
    settings = {**(mode.autocast or {}), "cache_enabled": False}
    with editor.program.fake_mode, torch.no_grad(), enable_python_dispatcher(), torch.autocast(**settings), see:
        node.target(*fake_args(node.args), **fake_args(node.kwargs))
    for attempt in (see.found, dict.fromkeys(operands, wanted), dict.fromkeys(operands, torch.float32)):
        if _dtype(_run(editor, node, attempt)) == wanted:
            break
    else:
        raise CaptureError(
            f"autocast makes {node.target} compute {wanted}, and no cast of its operands does the same",
            fix="cast the operands in the model, or leave the autocast context for this op",
            **located(node),
        )
    attempt = {n: d for n, d in attempt.items() if n.meta[VAL].dtype != d}
    for n in operands:
        if n in attempt and (n, attempt[n]) not in mode.casts:
            mode.casts[n, attempt[n]] = editor.at(node)(aten.to.dtype, n, attempt[n])
    cast = lambda n: mode.casts[n, attempt[n]] if n in attempt else n
    node.args, node.kwargs = fx.node.map_arg(node.args, cast), fx.node.map_arg(node.kwargs, cast)


def _run(editor: Editor, node: fx.Node, casts: dict[fx.Node, torch.dtype]) -> Any:
    def value(n: fx.Node) -> Any:
        return n.meta[VAL].to(casts[n]) if n in casts else n.meta[VAL]

    with editor.program.fake_mode, torch.no_grad(), enable_python_dispatcher():
        args, kwargs = fx.node.map_arg(node.args, value), fx.node.map_arg(node.kwargs, value)
        try:
            return node.target(*args, **kwargs)
        except RuntimeError:  # the operands' dtypes do not go together: this is no way to cast them
            return None


def _dtype(value: Any) -> torch.dtype | None:
    first = value[0] if isinstance(value, (tuple, list)) else value
    return first.dtype if isinstance(first, torch.Tensor) else None
