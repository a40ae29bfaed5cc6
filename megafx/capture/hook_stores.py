"""What a hook may store, read off its code: forward, where it reads that later in the same call, has to see it.

    class Skip:                                     # a U-Net's (fastai)
        def hook(self, module, args, output):
            self.stored = output                    # stores attribute `stored` of this object
    ...
    x = torch.cat([x, self.skip.stored], 1)         # the decoder reads it

The bytecode is followed in its order, with a stack of values: those objects that the hook can name (what it is bound to, its
module, variables of enclosing functions, globals, attributes of these) are known, all others are not. Functions of the user
that it calls are followed too. A store into something unknown is missed here; where forward reads such a thing, the call itself
finds out (runtime/bound_graph.py).
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import types
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all

from megafx.capture.reads import LIBRARIES, Reads
from megafx.errors import SourceLine
from megafx.ir.python_state import ABSENT, Place
from megafx.ir.source_lines import is_user_file

# fmt: off
_CHANGE = frozenset([  # methods of containers
    "append", "appendleft", "extend", "insert", "update", "setdefault", "add", "pop", "popleft", "popitem", "clear", "remove",
    "discard", "__setitem__", "__delitem__",
])
# fmt: on
_CONTAINERS = (list, dict, set, deque)
_ENDS = "JUMP_FORWARD JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT RETURN_VALUE RETURN_CONST RAISE_VARARGS"
_LEAVES = _ENDS.split()
_DEPTH = 6
ANY_NAME = "*"  # of an attribute that is set by a computed name


@dataclass(frozen=True, eq=False)
class _Known:
    """A value that the code names. place: (holder, key, name) of where it was found."""

    value: Any
    place: tuple[Any, Any, str] | None = None


@dataclass(frozen=True, eq=False)
class _Method:
    """An attribute of a known value that is no data: `self.features.append`, a method of the user's."""

    owner: _Known
    name: str


@dataclass
class Stores:
    """places: (holder, key, name) of attributes, globals and variables that are assigned to. containers: that are changed.
    parameters: that are read, those of modules that are called included."""

    places: list[tuple[Any, Any, str]] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for _, _, name in self.places)

    def read_by(self, reads: Reads) -> bool:
        """True if a trace of forward has read one of these."""
        owners = [(reads.classes.get(h, h) if isinstance(h, type) else h, h, key) for h, key, _ in self.places]
        return any(reads.has_read(own, key) or reads.has_read(holder, key) for own, holder, key in owners) or any(
            id(container) in reads.reached for container in self.containers
        )


def stores_of(hook: Any, module: nn.Module) -> Stores:
    """What a hook on a module may store."""
    found = Stores()
    _Follow(found, set()).call(_Known(hook), [_Known(module)], 0)
    return found


def places_written_by(code: Iterable[Any]) -> list[Place]:
    """Where functions, and modules with the hooks in them, may store something outside of the modules' own attributes."""
    found = Stores()
    follow = _Follow(found, set())
    for each in code:
        for module in each.modules() if isinstance(each, nn.Module) else ():
            own = [getattr(module, name) for name in ("_forward_pre_hooks", "_forward_hooks")]
            hooks = [
                h for t in (*own, of_all._global_forward_pre_hooks, of_all._global_forward_hooks) for h in t.values()
            ]
            for hook in hooks:
                follow.call(_Known(hook), [_Known(module)], 0)
        follow.call(_Known(each), [], 0)
    places = [Place(h, k, name) if k != ANY_NAME else Place([h], 0, name) for h, k, name in found.places]
    return places + [Place([container], 0, "") for container in found.containers]


def code_run_by(function: Any) -> tuple[Stores, set[types.CodeType]]:
    """What a call of a function may store, and the code of the user that it runs, also in functions that it calls."""
    follow = _Follow(Stores(), set())
    follow.call(_Known(function), [], 0)
    return follow.found, {code for code, _ in follow.seen}


def function_of(hook: Any) -> types.FunctionType | None:
    """The Python function that runs when a hook is called."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    if not isinstance(hook, types.FunctionType):
        hook = inspect.getattr_static(type(hook), "__call__", None)
    return hook if isinstance(hook, types.FunctionType) else None


def names_of_hook(hook: Any) -> frozenset[str]:
    """Names in the code of a hook."""
    function = function_of(hook)
    if function is None:
        return frozenset()
    code = function.__code__
    return frozenset([*code.co_names, *code.co_freevars, *(c for c in code.co_consts if isinstance(c, str))])


def line_of_hook(hook: Any) -> SourceLine | None:
    """Where a hook is written."""
    function = function_of(hook)
    return None if function is None else SourceLine(function.__code__.co_filename, function.__code__.co_firstlineno)


@dataclass
class _Follow:
    """Follows the code of functions. seen: (code, what it is bound to) of those it has followed."""

    found: Stores
    seen: set[tuple[Any, int]]

    def call(self, callee: Any, args: list[Any], depth: int) -> None:
        """A call of a known value."""
        if isinstance(callee, _Method):
            self._method(callee, args, depth)
            return
        if not isinstance(callee, _Known) or depth > _DEPTH:
            return
        value = callee.value
        if isinstance(value, functools.partial):
            self.call(_Known(value.func), [*map(_Known, value.args), *args], depth)
        elif isinstance(value, types.MethodType):
            self.call(_Known(value.__func__), [_Known(value.__self__), *args], depth)
        elif isinstance(value, types.FunctionType):
            self._run(value, args, depth)
        elif isinstance(value, types.BuiltinMethodType):
            if value.__name__ in _CHANGE and isinstance(value.__self__, _CONTAINERS):
                self.found.containers.append(value.__self__)
            elif value is setattr and len(args) == 3 and isinstance(args[0], _Known):
                name = args[1].value if isinstance(args[1], _Known) else None
                self._assign(args[0], name)
        elif not isinstance(value, type):
            if isinstance(value, nn.Module):
                self.found.parameters.extend(value.parameters())
            of = "forward" if isinstance(value, nn.Module) else "__call__"
            method = inspect.getattr_static(type(value), of, None)
            if isinstance(method, types.FunctionType):
                self._run(method, [callee, *args], depth)

    def _method(self, callee: _Method, args: list[Any], depth: int) -> None:
        owner = callee.owner
        if isinstance(owner.value, (*_CONTAINERS, type(None))) and callee.name in _CHANGE:
            self._change(owner)
            return
        method = inspect.getattr_static(type(owner.value), callee.name, None)
        if isinstance(method, (classmethod, staticmethod)):
            own = [_Known(type(owner.value))] if isinstance(method, classmethod) else []
            self.call(_Known(method.__func__), [*own, *args], depth)
        elif isinstance(method, types.FunctionType):
            self._run(method, [owner, *args], depth)

    def _change(self, owner: Any) -> None:
        """A container is changed."""
        if isinstance(owner, _Known):
            if isinstance(owner.value, _CONTAINERS):
                self.found.containers.append(owner.value)
            if owner.place is not None:
                self.found.places.append(owner.place)

    def _assign(self, owner: Any, name: Any) -> None:
        """An attribute is assigned to."""
        if not isinstance(owner, _Known):
            return
        name = name if isinstance(name, str) else ANY_NAME
        holder = owner.value if isinstance(owner.value, type) else getattr(owner.value, "__dict__", None)
        if holder is not None:
            self.found.places.append((holder, name, name))

    def _attribute(self, owner: Any, name: str) -> Any:
        if not isinstance(owner, _Known):
            return None
        held = getattr(owner.value, "__dict__", None) if not isinstance(owner.value, type) else vars(owner.value)
        if held is not None and name in held:
            holder = owner.value if isinstance(owner.value, type) else held
            return _Known(held[name], (holder, name, name))
        if isinstance(owner.value, nn.Module):
            for table in ("_modules", "_buffers", "_parameters"):
                if name in (held or {}).get(table, ()):
                    return _Known(held[table][name])  # type: ignore[index]  # it was found there
        for base in type(owner.value).__mro__:
            if name in vars(base) and not hasattr(type(vars(base)[name]), "__get__"):
                return _Known(vars(base)[name], (base, name, name))
        if (
            name not in _CHANGE
            and held is not None
            and inspect.getattr_static(type(owner.value), name, ABSENT) is ABSENT
        ):
            return _Known(None, (held, name, name))  # nothing yet
        return _Method(owner, name)

    def _run(self, function: types.FunctionType, args: list[Any], depth: int) -> None:
        code = function.__code__
        bound = args[0].value if args and isinstance(args[0], _Known) else None
        if not is_user_file(code.co_filename) or (function.__module__ or "").partition(".")[0] in LIBRARIES:
            return
        if (code, id(bound)) in self.seen:
            return
        self.seen.add((code, id(bound)))
        local: dict[str, Any] = dict(zip(code.co_varnames[: code.co_argcount], args, strict=False))
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        stack: list[Any] = []
        joins: dict[int, list[Any]] = {}
        left = False

        def pop(count: int = 1) -> list[Any]:
            taken = [stack.pop() if stack else None for _ in range(count)]
            return taken[::-1]

        for each in dis.get_instructions(code):
            name, arg = each.opname, each.argval
            if left:
                stack = joins.get(each.offset, [])
            left = name in _LEAVES
            if isinstance(arg, int) and each.opcode in dis.hasjrel:
                joins.setdefault(arg, [*stack[:-1]] if name.startswith("POP_JUMP") else [*stack])
            if name in ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_FAST_AND_CLEAR"):
                stack.append(local.get(arg))
            elif name in ("LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"):
                stack += [local.get(each_name) for each_name in arg]
            elif name == "STORE_FAST":
                local[arg] = pop()[0]
            elif name == "STORE_FAST_LOAD_FAST":
                local[arg[0]] = pop()[0]
                stack.append(local.get(arg[1]))
            elif name == "STORE_FAST_STORE_FAST":
                local[arg[0]], local[arg[1]] = pop()[0], pop()[0]
            elif name in ("LOAD_CONST", "LOAD_SMALL_INT"):
                stack.append(_Known(arg))
            elif name in ("LOAD_GLOBAL", "LOAD_NAME"):
                if each.arg is not None and each.arg & 1 and name == "LOAD_GLOBAL":
                    stack.append(None)  # the empty slot of a call
                names = function.__globals__
                known = names.get(arg, vars(builtins).get(arg, ABSENT))
                place = (names, arg, arg) if arg in names else None
                stack.append(None if known is ABSENT else _Known(known, place))
            elif name in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
                stack.append(_in_cell(cells[arg], arg) if arg in cells else local.get(arg))
            elif name == "STORE_DEREF":
                value = pop()[0]
                if arg in cells:
                    self.found.places.append((cells[arg], "cell_contents", arg))
                else:
                    local[arg] = value
            elif name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                pop(int(name == "STORE_GLOBAL"))
                self.found.places.append((function.__globals__, arg, arg))
            elif name in ("LOAD_ATTR", "LOAD_METHOD"):
                stack.append(self._attribute(pop()[0], arg))
                if dis.stack_effect(each.opcode, each.arg) == 1:
                    stack.append(None)
            elif name == "STORE_ATTR":
                self._assign(pop(2)[1], arg)
            elif name == "DELETE_ATTR":
                self._assign(pop()[0], arg)
            elif name == "STORE_SUBSCR":
                self._change(pop(3)[1])
            elif name == "DELETE_SUBSCR":
                self._change(pop(2)[0])
            elif name == "STORE_SLICE":
                self._change(pop(4)[1])
            elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and each.argrepr == "[]"):
                stack.append(_item(*pop(2)))
            elif name == "BINARY_OP":
                left_operand, _ = pop(2)
                inplace = each.argrepr.endswith("=")
                if inplace and isinstance(getattr(left_operand, "value", None), _CONTAINERS):
                    self._change(left_operand)
                stack.append(left_operand if inplace else None)
            elif name == "COPY" and each.arg is not None:
                stack.append(stack[-each.arg] if len(stack) >= each.arg else None)
            elif name == "SWAP" and each.arg is not None and len(stack) >= each.arg:
                stack[-1], stack[-each.arg] = stack[-each.arg], stack[-1]
            elif name in ("PRECALL", "KW_NAMES", "RESUME", "CACHE"):
                continue
            elif name in ("CALL", "CALL_KW") and each.arg is not None:
                if name == "CALL_KW":
                    pop()
                given = pop(each.arg)
                slots = pop(2)
                callee = next((slot for slot in slots if isinstance(slot, (_Known, _Method))), None)
                self.call(callee, given, depth + 1)
                stack.append(None)
            else:
                effect = (
                    dis.stack_effect(each.opcode, each.arg)
                    if each.opcode >= dis.HAVE_ARGUMENT
                    else dis.stack_effect(each.opcode)
                )
                if effect < 0:
                    pop(-effect)
                    if name.startswith(
                        ("BUILD_", "CALL", "FORMAT", "COMPARE", "CONTAINS", "IS_OP", "BINARY", "LIST_", "DICT_", "SET_")
                    ):
                        stack[-1:] = [None]
                else:
                    if name.startswith(("BUILD_", "UNARY", "FORMAT", "GET_", "UNPACK")) and effect >= 0 and stack:
                        stack[-1:] = [None]
                    stack += [None] * effect
            if stack and isinstance(stack[-1], _Known) and isinstance(stack[-1].value, nn.Parameter):
                self.found.parameters.append(stack[-1].value)


def _in_cell(cell: Any, name: str) -> _Known:
    """What a variable of an enclosing function holds, None where nothing yet."""
    try:
        return _Known(cell.cell_contents, (cell, "cell_contents", name))
    except ValueError:
        return _Known(None, (cell, "cell_contents", name))


def _item(container: Any, key: Any) -> Any:
    """A part of a known container: `self.stores['skip']`; where the key is unknown, the container itself."""
    if not isinstance(container, _Known):
        return None
    if isinstance(key, _Known) and isinstance(container.value, (list, dict, tuple)):
        try:
            return _Known(container.value[key.value], container.place)
        except (KeyError, IndexError, TypeError):
            return container
    return container
