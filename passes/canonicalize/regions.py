"""Inline the regions that export makes of grad-mode and autocast contexts.

Before:  %y = wrap_with_set_grad_enabled(False, %region, %x)
After:   the region's nodes; detach where a value computed without gradient is used by one computed with gradient
Before:  %y = wrap_with_autocast('cpu', bfloat16, True, None, %region, %x)
After:   the region's nodes, with the casts that autocast does as aten.to nodes
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
from megafx.ir.program import FQN, MADE_BY, VAL, fake_args, fqn_of, source_of
from megafx.passes.canonicalize.editor import BY, Editor

aten = torch.ops.aten
_GRAD_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST_REGION = torch.ops.higher_order.wrap_with_autocast


@dataclass
class _Mode:
    """The state that a region's nodes run under. casts: (value, dtype) -> the cast of it that the region has already."""

    grad: bool = True
    autocast: dict[str, Any] | None = None
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = field(default_factory=dict)


def inline_regions(editor: Editor) -> int:
    """Inline every region, nested ones too."""
    count = 0
    for node in list(editor.graph.nodes):
        if node.op == "call_function" and node.target in (_GRAD_REGION, _AUTOCAST_REGION):
            _inline(editor, node, _Mode())
            count += 1
    return count


def _inline(editor: Editor, call: fx.Node, outer: _Mode) -> Any:
    """Copy the region's nodes before `call` and give its users the results."""
    if call.target is _GRAD_REGION:
        enabled, region, *operands = call.args
        mode = _Mode(bool(enabled), outer.autocast, outer.casts)
    else:
        device_type, dtype, enabled, cache_enabled, region, *operands = call.args
        settings = {"device_type": device_type, "dtype": dtype, "enabled": enabled, "cache_enabled": cache_enabled}
        mode = _Mode(outer.grad, settings)
    body = getattr(editor.program.gm, str(region.target))  # type: ignore[union-attr]
    made: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    results = _copy_body(editor, call, body, made, mode)
    if outer.grad and not mode.grad:
        own = {n for n in made.values() if isinstance(n, fx.Node)} - {n for n in operands if isinstance(n, fx.Node)}
        results = fx.node.map_arg(results, lambda n: _detached(editor, call, n) if n in own else n)
    _substitute(call, results)
    return results


def _copy_body(editor: Editor, call: fx.Node, body: fx.GraphModule, made: dict[fx.Node, Any], mode: _Mode) -> Any:
    for inner in body.graph.nodes:
        if inner.op == "output":
            return fx.node.map_arg(inner.args[0], lambda n: made[n])
        if inner.op == "placeholder":
            continue
        if inner.op == "get_attr":
            made[inner] = _lift_attribute(editor, call, body, inner)
            continue
        with editor.graph.inserting_before(call):
            new = editor.graph.node_copy(inner, lambda n: made[n])
        new.meta[MADE_BY] = (*inner.meta.get(MADE_BY, ()), BY)
        if not mode.grad:
            editor.without_grad.add(new)
        if not new.meta.get(FQN):
            new.meta[FQN] = fqn_of(call)
        if new.target in (_GRAD_REGION, _AUTOCAST_REGION):
            made[inner] = _inline(editor, new, mode)
        else:
            made[inner] = new
            if mode.autocast is not None and mode.autocast["enabled"]:
                _cast_operands(editor, new, mode)
    raise AssertionError("a region without an output")


def _lift_attribute(editor: Editor, call: fx.Node, body: fx.GraphModule, inner: fx.Node) -> fx.Node:
    """A nested region's own module: make it reachable from the root under a name of its own."""
    name = f"{call.name}_{inner.target}".replace(".", "_")
    setattr(editor.program.gm, name, getattr(body, str(inner.target)))
    with editor.graph.inserting_before(call):
        return editor.graph.get_attr(name)


def _substitute(call: fx.Node, results: Any) -> None:
    """The users of a region are getitems of its tuple of results."""
    for user in list(call.users):
        if user.target is operator.getitem and isinstance(results, (tuple, list)):
            value = results[user.args[1]]  # type: ignore[index]
            if isinstance(value, fx.Node):
                user.replace_all_uses_with(value)
                user.graph.erase_node(user)
    if call.users:
        single = results[0] if isinstance(results, (tuple, list)) and len(results) == 1 else results
        if not isinstance(single, fx.Node):
            raise CaptureError("a grad-mode or autocast region returns something that is no tensor")
        call.replace_all_uses_with(single)
    call.graph.erase_node(call)


def _detached(editor: Editor, call: fx.Node, value: fx.Node) -> fx.Node:
    tensor = value.meta.get(VAL)
    if not isinstance(tensor, torch.Tensor) or not tensor.dtype.is_floating_point:
        return value
    return editor.at(call)(aten.detach.default, value)


# -- autocast


class _SeeCasts(TorchDispatchMode):
    """Which of the watched tensors are cast, and to what, while an op runs."""

    def __init__(self, watched: dict[int, fx.Node]) -> None:
        super().__init__()
        self.watched, self.found, self.others = watched, {}, 0  # type: ignore[var-annotated]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._to_copy.default:
            node = self.watched.get(id(args[0]))
            dtype = (kwargs or {}).get("dtype")
            if node is not None and dtype is not None:
                self.found[node] = dtype
            else:
                self.others += 1
        return func(*args, **(kwargs or {}))


def _cast_operands(editor: Editor, node: fx.Node, mode: _Mode) -> None:
    """Make explicit what autocast does to this op's operands, and check that the op then computes the dtype it had."""
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(
        node.meta.get(VAL), (torch.Tensor, tuple, list)
    ):
        return
    operands = [n for n in node.all_input_nodes if _is_float(n)]
    if not operands:
        return
    wanted = _dtype(node.meta[VAL])
    if wanted is None:
        return
    casts = _observed_casts(editor, node, operands, mode)
    for attempt in (casts, dict.fromkeys(operands, wanted), dict.fromkeys(operands, torch.float32)):
        if _dtype(_run(editor, node, attempt)) == wanted:
            break
    else:
        raise CaptureError(
            f"autocast makes {node.target} compute {wanted}, and no cast of its operands does the same",
            fix="cast the operands in the model, or leave the autocast context for this op",
            module=fqn_of(node),
            source=source_of(node),
        )
    attempt = {n: d for n, d in attempt.items() if n.meta[VAL].dtype != d}
    node.args = fx.node.map_arg(node.args, lambda n: _cast(editor, node, n, attempt.get(n), mode))
    node.kwargs = fx.node.map_arg(node.kwargs, lambda n: _cast(editor, node, n, attempt.get(n), mode))


def _observed_casts(editor: Editor, node: fx.Node, operands: list[fx.Node], mode: _Mode) -> dict[fx.Node, torch.dtype]:
    see = _SeeCasts({id(n.meta[VAL]): n for n in operands})
    settings = {**(mode.autocast or {}), "cache_enabled": False}
    with editor.program.fake_mode, torch.no_grad(), enable_python_dispatcher(), torch.autocast(**settings), see:
        node.target(*fake_args(node.args), **fake_args(node.kwargs))  # type: ignore[operator]
    return see.found


def _run(editor: Editor, node: fx.Node, casts: dict[fx.Node, torch.dtype]) -> Any:
    def value(n: fx.Node) -> Any:
        return n.meta[VAL].to(casts[n]) if n in casts else n.meta[VAL]

    with editor.program.fake_mode, torch.no_grad(), enable_python_dispatcher():
        args, kwargs = fx.node.map_arg(node.args, value), fx.node.map_arg(node.kwargs, value)
        try:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        except RuntimeError:  # the operands' dtypes do not go together: this is no way to cast them
            return None


def _cast(editor: Editor, node: fx.Node, operand: fx.Node, dtype: torch.dtype | None, mode: _Mode) -> fx.Node:
    if dtype is None:
        return operand
    if (operand, dtype) not in mode.casts:
        mode.casts[operand, dtype] = editor.at(node)(aten.to.dtype, operand, dtype)
    return mode.casts[operand, dtype]


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get(VAL)
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _dtype(value: Any) -> torch.dtype | None:
    first = value[0] if isinstance(value, (tuple, list)) else value
    return first.dtype if isinstance(first, torch.Tensor) else None
