"""Functions of a model's code that stay eager inside of a captured graph: those that cannot be traced and only keep books.

Where code that decides by data is in a function that a module's forward calls (positions by the grids of images, windows,
lists of lengths), the function alone is one node of the graph, not the module. That is sound for a function that gets tensors
without a gradient, reads no parameter and no buffer, and changes none of its arguments; else the next function that called it,
and at last the module, is left eager (compiler/captured.py).

While a model is traced, the code of such a function is another: it makes the node. So all ways to the function lead there,
whatever names it has been imported under.
"""

from __future__ import annotations

import dis
import gc
import inspect
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from megafx.capture.conversions import original
from megafx.errors import CaptureError, SourceLine
from megafx.ir.source_lines import is_user_file
from megafx.ops.eager_call import EagerCall, Held, as_node, in_eager_code
from megafx.ops.eager_probes import Probes, kept_leaf, noting_sets, probed
from megafx.progress import also_among_frozen

_CALL = nn.Module._call_impl.__code__.co_name
_MARK = "what is called"
_NOT_PLAIN = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def functions_of(error: BaseException) -> tuple[types.CodeType, ...]:
    """Code of the functions on the error's stack that the deepest module's forward has called, the deepest first."""
    seen: BaseException | None = error
    frames: list[types.FrameType] = []
    while seen is not None and not frames:
        frames = [frame for frame, _ in traceback.walk_tb(seen.__traceback__)]
        seen = seen.__cause__ or seen.__context__
    calls = [
        i for i, f in enumerate(frames) if f.f_code.co_filename == torch_module.__file__ and f.f_code.co_name == _CALL
    ]
    found = []
    for frame in frames[calls[-1] + 1 :] if calls else []:
        code = original(frame.f_code)
        forward = code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module)
        named = "<" not in code.co_qualname and not code.co_flags & _NOT_PLAIN
        if is_user_file(code.co_filename) and named and not forward:
            found.append(code)
    return tuple(dict.fromkeys(reversed(found)))


def functions_on_line(module: nn.Module, source: SourceLine | None) -> tuple[types.CodeType, ...]:
    """Code of the functions that forward calls by name on a line: of a graph's node no more is known."""
    forward = inspect.unwrap(type(module).forward)
    if source is None or not isinstance(forward, types.FunctionType) or forward.__code__.co_filename != source.file:
        return ()
    found = []
    for step in dis.get_instructions(forward.__code__):
        if step.positions is None or step.positions.lineno != source.line or not isinstance(step.argval, str):
            continue
        named = (forward.__globals__ if step.opname == "LOAD_GLOBAL" else {}).get(step.argval)
        if step.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            named = inspect.getattr_static(module, step.argval, None)
        if isinstance(named, types.FunctionType):
            code = inspect.unwrap(named).__code__
            if is_user_file(code.co_filename) and not code.co_flags & _NOT_PLAIN and "<" not in code.co_qualname:
                found.append(code)
    return tuple(dict.fromkeys(found))


class NotAlone(CaptureError):
    """A function cannot be left eager by itself. code: of the function."""

    code: types.CodeType


class LeftFunction:
    """A function whose calls are nodes of what is traced."""

    def __init__(self, code: types.CodeType, probes: Probes | None) -> None:
        self.code, self.probes, self.busy = code, probes, False

    def functions(self) -> list[types.FunctionType]:
        """Those that have this code now."""
        is_own = lambda f: isinstance(f, types.FunctionType) and f.__code__ is self.code  # noqa: E731
        return also_among_frozen(lambda: [*filter(is_own, gc.get_referrers(self.code))])

    def code_for(self, function: types.FunctionType) -> types.CodeType:
        """What a call of the function runs in this thread while a model is traced."""
        own = types.FunctionType(
            self.code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        own.__kwdefaults__ = function.__kwdefaults__
        thread = threading.get_ident()

        def called(*args: Any, **kwargs: Any) -> Any:
            if self.busy or in_eager_code() or threading.get_ident() != thread:
                return own(*args, **kwargs)
            self.busy = True
            try:
                return self._node(own, args, kwargs)
            finally:
                self.busy = False

        return _calling(called, self.code)

    def refuse(self, found: str) -> NotAlone:
        error = NotAlone(f"the function {self.code.co_qualname} {found}", fix="leave its module eager")
        error.code = self.code
        return error

    def _refuse_set(self, module: nn.Module, name: str, function: str) -> None:
        raise self.refuse(f"sets the attribute '{name}', which other code may read before it runs")

    def _node(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if not tensors:
            raise self.refuse("gets no tensor")
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise self.refuse("gets tensors that require a gradient")
        name = self.code.co_qualname
        modules = [x for x in leaves if isinstance(x, nn.Module)]
        try:
            held = tuple(
                Held(weakref.ref(x)) if isinstance(x, nn.Module) else kept_leaf(x, tensors, name) for x in leaves
            )
            keeper: Any = modules[0] if modules else own
            call = EagerCall(weakref.ref(keeper), name, spec, held, (), (), (False,) * len(tensors), function=own)
            with noting_sets(modules, self._refuse_set, name):
                call = probed(call, tensors, {}, self.probes)
        except NotAlone:
            raise
        except Exception as error:  # whatever the function raises: then its module may be left eager
            raise self.refuse(f"fails outside of the graph: {type(error).__name__}: {error}") from error
        return as_node(call, tensors)


def _calling(target: Callable[..., Any], code: types.CodeType) -> types.CodeType:
    """Code that calls `target` with its arguments, for functions with the same closure as those of `code`."""
    cells = code.co_freevars
    lines = [
        "def outer():",
        *(f"  {name} = None" for name in cells),
        "  def stub(*args, **kwargs):",
        *(["    if 0:", f"      {', '.join(cells)}"] if cells else []),
        f"    called = {_MARK!r}",
        "    return called(*args, **kwargs)",
        "  return stub",
    ]
    space: dict[str, Any] = {}
    exec(compile("\n".join(lines), "<megafx: a function that stays eager>", "exec"), space)
    made: types.CodeType = space["outer"]().__code__
    assert made.co_freevars == cells, f"{code.co_qualname}: {made.co_freevars} in place of {cells}"
    return made.replace(co_consts=tuple(target if x == _MARK else x for x in made.co_consts))


def left_functions(codes: Sequence[types.CodeType], probes: Probes | None) -> list[LeftFunction]:
    return [LeftFunction(code, probes) for code in codes]
