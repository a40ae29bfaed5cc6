"""What Python state forward reads while it is traced, so that a graph serves a call only where that state is the same.

Attributes: `__getattribute__` of modules, and of the classes of objects that modules hold, notes what is read. Globals, and
variables of enclosing functions: nothing sees them being read, so the code that forward can reach is looked through for names.
Containers are taken whole. What cannot be looked at again (a generator of `random` or numpy, the clock, a file) is an error.

Dynamo's guards were the other choice. They come from its own interpreter of bytecode, which a trace by non-strict export does
not run: a model would be traced twice, and would have to be traceable by both.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn

from megafx.capture.asked import Asked
from megafx.capture.code_names import (
    OF_ENVIRON,
    chains,
    codes,
    compares,
    computes,
    dict_of,
    from_getattr,
    functions_of_class,
    is_looked_at,
    names_at_classes,
    names_layerdrop,
    run_by_python,
)
from megafx.capture.memos import MEMO, Memos, memo_of
from megafx.capture.messages import Warned, not_repeatable, sets_a_slot
from megafx.errors import CaptureError, SourceLine
from megafx.ir.holders import (
    BACKENDS,
    ENVIRONMENT,
    FUNCTIONAL,
    OF_TORCH,
    SETTINGS,
    Current,
    Default,
    NamesOf,
    OwnAttributes,
    Setting,
    SizesOf,
    is_backend,
    replaced_in,
)
from megafx.ir.python_state import (
    ABSENT,
    PLAIN,
    Place,
    Referent,
    generator_state,
    generator_states,
    part_name,
    parts_of,
    snapshot,
    states_differ,
)
from megafx.ir.source_lines import frame_behind, is_installed, line_of
from megafx.meanwhile import replacing
from megafx.ops.eager_call import in_eager_code

# Tables of nn.Module, and what other parts of a key say already (runtime/keys.py).
TABLES = ("_parameters", "_buffers", "_modules")
IGNORED = frozenset(
    # torch's recurrent layers keep their parameters in two lists; the last one is transformers' note that hooks are installed,
    # which a capture takes away again.
    [
        *(*vars(nn.Module()), *TABLES, "training", "_compiled_call_impl", "_flat_weights", "_flat_weight_refs"),
        "_output_capturing_hooks_installed",
        "_call_impl",  # which a capture replaces
    ]
) - {"_non_persistent_buffers_set"}  # which register_buffer changes
LIBRARIES = frozenset([*sys.stdlib_module_names, "torch", "numpy", "megafx", "sympy", "triton"])
# Methods that code calls without naming them.
_OF_CLASSES = ("__new__", "__init__", "__call__", "__class_getitem__", "forward", "backward", "setup_context")


class Reads:
    """Notes the places that are read while `recording`. skipped: modules whose code runs at each call, not in the graph."""

    def __init__(self, model: nn.Module, skipped: frozenset[nn.Module] = frozenset()) -> None:
        self.model, self.on, self.compared = model, False, False  # compared: code asks which objects are the same
        self.skipped = {id(m) for m in skipped}
        self.own = {*map(id, model.modules())}
        self.names: dict[int, str] = {}  # of what can be reached from the model or from globals
        self.alive: list[Any] = []  # whose ids are keys above
        self.places: dict[tuple[int, Any], Place] = {}
        self.functions: list[types.FunctionType] = []  # the user's that forward may call
        self.written: dict[tuple[int, Any], SourceLine | None] = {}
        self.absent: set[tuple[int, Any]] = set()  # globals and variables that code names, and that are not there yet
        self.reached: set[int] = set()  # ids of containers
        self.clock: Callable[[], int] = lambda: 0  # how many hooks have run
        self.latest: dict[str, int] = {}  # name of an attribute's place -> the clock when it was last read
        self.patched: dict[type, dict[str, Any]] = {}
        self.generators: list[tuple[Place, Any]] = []
        self.iterators: list[tuple[Place, Any]] = []
        self.advanced: set[int] = set()  # identities of what code has given to `next`
        # name of a variable, global or attribute of a class -> key of its place
        self.owners: dict[str, tuple[int, Any]] = {}
        self.lists: list[dict[tuple[int, str], tuple[Any, str, Any]]] = []  # see `listing`
        # Called with each object before it is read from, with each place whose value may be changed in place, and with each
        # global, variable or attribute of a class that code in reach may assign to.
        self.met: Callable[[Any, str], None] = lambda owner, name: None
        self.taken: Callable[[Place], None] = lambda place: None
        self.assigned: Callable[[Place], None] = lambda place: None
        self.classes: dict[type, OwnAttributes] = {}
        self.left: Callable[[], dict[str, Any]] = dict  # what forward has written so far (followed.py)
        self.set_later: dict[tuple[int, str], tuple[str, str]] = {}  # attributes that code which is left eager sets
        self.warned: list[Warned] = []
        self.asked = Asked(model)
        self.unhooked: Collection[nn.Module] = ()  # modules whose own hooks the caller runs
        self.memos: Memos | None = None  # calls of functions with functools.lru_cache
        self.hidden: list[Any] = []  # those that code finds at a place where nothing can be put
        for fqn, module in model.named_modules():
            if id(module) not in self.skipped:
                self._know(module, fqn)

    # -- while a model is traced

    @contextlib.contextmanager
    def recording(self, start: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Within, reads are noted. start: called once globals are known."""
        self._find_globals()
        start()
        before = generator_states()
        self.on = True
        try:
            yield
        finally:
            self.on = False
            for memo in self.hidden:
                memo.cache_clear()
        if any(names_layerdrop(m) for m in self.model.modules()):
            return  # numbers that are compared with it decide nothing: it is 0 while a model is traced (prepare.py)
        for place, state in self.generators:
            if generator_state(place.get()) != state:
                raise not_repeatable(f"the generator of '{place.name}'", place.line)
        for place, iterator in self.iterators:
            if id(iterator) in self.advanced:
                raise CaptureError(
                    f"forward reads the next value of the iterator '{place.name}': a graph would have the same at every call",
                    source=place.line,
                    fix="count in an attribute (self.n += 1), or give forward what the iterator gives",
                )
        if (found := states_differ(before, generator_states())) is not None:
            raise not_repeatable(found, None)

    @contextlib.contextmanager
    def listing(self) -> Iterator[dict[tuple[int, str], tuple[Any, str, Any]]]:
        """Within, all attributes that are read are listed: (owner, name, value), '__dict__' where code looks at all."""
        self.lists.append({})
        try:
            yield self.lists[-1]
        finally:
            self.lists.pop()

    def repeat(self, owner: Any, other: Any, name: str, value: Any) -> None:
        """Note that `other` has been read from, as `owner` was."""
        attributes = dict_of(other)
        line = self.places[key].line if (key := (id(dict_of(owner)), name)) in self.places else None
        if isinstance(value, types.MethodType) and value.__self__ is owner:
            value = types.MethodType(value.__func__, other)
        self._note(other, name, attributes.get(name, value), line)

    def sets(self, module: nn.Module, name: str, fqn: str) -> None:
        """Code of the module `fqn`, which is left eager, sets this attribute, of itself or of a module in it."""
        inside = next((n for n, m in self.model.get_submodule(fqn).named_modules() if m is module), "")
        self.set_later[id(module), name] = fqn, ".".join(part for part in (fqn, inside, name) if part)

    def undo(self) -> None:
        """Give classes their own methods back."""
        for cls, methods in self.patched.items():
            for name, old in methods.items():
                if old is ABSENT:
                    delattr(cls, name)
                else:
                    setattr(cls, name, old)
        self.patched.clear()
        if self.memos is not None:
            self.memos.undo()

    def getattribute(self, plain: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        """A class's `__getattribute__` that notes what is read."""

        def read(owner: Any, name: str) -> Any:
            if self.set_later and self.on and (id(owner), name) in self.set_later and not in_eager_code():
                fqn, path = self.set_later[id(owner), name]
                raise CaptureError(
                    f"forward reads '{path}', which a module that is left eager sets when it runs",
                    module=fqn,
                    source=line_of(sys._getframe(1)),
                    fix="let the module return it",
                )
            outside = name == "training" and id(owner) not in self.own  # a module that the key of a graph does not know
            if not self.on or (name in IGNORED and not outside) or name.startswith("__"):
                if self.on and name == "__dict__" and is_looked_at((code := _reader().f_code).co_filename):
                    self._note_all(owner, code.co_consts)
                return plain(owner, name)
            try:
                value = plain(owner, name)
            except AttributeError:
                self._note(owner, name, ABSENT)
                self._note_behind(owner)
                raise
            self._note(owner, name, value)
            return value if self.memos is None else self.memos.of_attribute(value)

        return read

    def setattribute(self, plain: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
        """A class's `__setattr__` that notes what is written."""

        def write(owner: Any, name: str, value: Any) -> None:
            if self.on and id(owner) in self.skipped and name not in IGNORED and not in_eager_code():
                raise CaptureError(
                    f"forward sets '{name}' of a module that is left eager, which runs later",
                    source=line_of(sys._getframe(1)),
                    fix="pass it to the module as an argument",
                )
            if self.on and id(owner) in self.names:
                attributes = dict_of(owner)
                if isinstance(getattr(type(owner), name, None), types.MemberDescriptorType) and not in_eager_code():
                    raise sets_a_slot(owner, self.names[id(owner)], name, line_of(sys._getframe(1)))
                self.written.setdefault(
                    (id(owner if attributes is None else attributes), name), line_of(sys._getframe(1))
                )
            plain(owner, name, value)

        return write

    def _note(self, owner: Any, name: str, value: Any, line: SourceLine | None = None) -> None:
        """line: where it is read, if it is not the frame behind the caller's that reads it."""
        for each in self.lists:
            each[id(owner), name] = owner, name, value
        known = self.names.get(id(owner))
        if known is None:
            return
        attributes = dict_of(owner)
        key = id(owner if attributes is None else attributes), name
        if key in self.places:
            self.latest[self.places[key].name] = self.clock()
            return
        if key in self.written:
            return
        where = f"{known}.{name}" if known else name
        self.latest[where] = self.clock()
        if attributes is not None and name in attributes:
            place = Place(attributes, name, where, line or line_of(sys._getframe(2)))
        elif value is ABSENT:
            if attributes is None or any(name in attributes.get(table, ()) for table in TABLES):
                return self._note_table(owner, attributes, name, where)
            for table in TABLES:  # it may come as a parameter, buffer or submodule
                if table in attributes:
                    self.places[id(attributes[table]), name] = Place(attributes[table], name, where)
            place = Place(attributes, name, where, line or line_of(sys._getframe(2)))
        elif (cls := computes(type(owner), name)) is not None:
            # a method or property: it reads by itself; somebody may replace it, in the class or for this object
            if cls.__module__.partition(".")[0] not in LIBRARIES:
                self.places.setdefault((id(cls), name), Place(cls, name, f"{cls.__name__}.{name}"))
                self._note_of_class(type(owner), name, line or line_of(sys._getframe(2)))
            elif name != "forward":
                return
            place = Place(attributes, name, where)
        elif from_getattr(type(owner), name):
            if isinstance(owner, nn.Module) or not isinstance(value, PLAIN):
                return
            place = Place(owner, name, where, line or line_of(sys._getframe(2)))
        else:
            place = Place(owner, name, where, line or line_of(sys._getframe(2)))
        self._take(key, place, value)

    def _note_table(self, owner: Any, attributes: Any, name: str, where: str) -> None:
        """A parameter or buffer: whether it is there, and the sizes of a buffer, which forward may replace. (What it holds is
        an input.) Of a module outside of the model, it is a tensor like others."""
        buffers = attributes.get("_buffers", {}) if attributes is not None else {}
        if buffers.get(name) is not None and id(owner) in self.own:
            sizes = SizesOf(buffers, name)
            self.alive.append(sizes)
            self.places[id(buffers), f"sizes of {name}"] = Place(sizes, "sizes", f"{where}.shape")
        for table in TABLES[:2]:
            if id(owner) not in self.own and (value := (attributes or {}).get(table, {}).get(name)) is not None:
                self._take((id(attributes[table]), name), Place(attributes[table], name, where), value)
            if attributes is not None and attributes.get(table, {}).get(name, ABSENT) is None:
                key = id(attributes[table]), name
                self.places.setdefault(key, Place(attributes[table], name, where))

    def _note_all(self, owner: Any, named: Collection[Any]) -> None:
        """The code looks at `__dict__`: which attributes there are, and those that hold plain values or that are named."""
        for each in self.lists:
            each[id(owner), "__dict__"] = owner, "__dict__", None
        if (known := self.names.get(id(owner))) is None:
            return
        attributes = dict_of(owner)
        holder = NamesOf(attributes)
        self._take((id(attributes), "__dict__"), Place(holder, "names", f"{known}.__dict__".lstrip(".")), holder.names)
        for name, value in attributes.items():
            if name not in IGNORED and (isinstance(value, PLAIN) or name in named):
                self._note(owner, name, value)

    def _note_behind(self, owner: Any) -> None:
        """The class's `__getattr__` computes an attribute: what it may read by `object.__getattribute__(self, "_inner")`."""
        code = getattr(getattr(type(owner), "__getattr__", None), "__code__", None)
        attributes, named = dict_of(owner) or {}, set() if code is None else {*code.co_consts}
        for name in sorted(attributes.keys() & named - IGNORED):
            self._note(owner, name, attributes[name])

    def _take(self, key: tuple[int, Any], place: Place, value: Any) -> None:
        if isinstance(value, types.ModuleType):
            return
        self.places[key] = place
        self.alive.append(place.holder)
        self.taken(place)
        self._reach(value, place)

    def take_call(self, place: Place) -> None:
        """Code reads what a function with functools.lru_cache gives."""
        if (id(place.holder), place.key) not in self.places:
            self._take((id(place.holder), place.key), place, place.get())

    def _reach(self, value: Any, place: Place) -> None:
        """What is read of this value is noted too."""
        if type(value) in weakref.ProxyTypes:
            with contextlib.suppress(ReferenceError):  # its object may be gone
                self._reach(value.__init__.__self__, place)
            return
        found = parts_of(value)
        if found is not None:
            self.reached.add(id(value))
            for key, part in found[1].items():
                self._reach(part, Place(found[0], key, part_name(place.name, value, key), place.line))
        elif (state := generator_state(value)) is not None:
            self.generators.append((place, state))
        elif isinstance(value, Iterator):
            self.iterators.append((place, value))
        elif isinstance(value, MEMO):
            self._find_memo(value, place)
        elif isinstance(value, types.FunctionType):
            self.look_through(value)
        elif isinstance(value, types.MethodType):
            self.look_through(value.__func__, type(value.__self__))
            self._reach(value.__self__, Place(value, "__self__", f"{place.name}.__self__", place.line))
        elif isinstance(value, partial):
            for name in ("func", "args", "keywords"):
                at = Place(value, name, f"{place.name}.{name}", place.line)
                self._take((id(value), name), at, at.get())
        elif isinstance(value, weakref.ReferenceType):
            referent = value()
            self._take((id(value), "alive"), Place(Referent(value), "alive", f"{place.name}()", place.line), None)
            if referent is not None:
                self._reach(referent, Place(None, place.key, f"{place.name}()", place.line))
        elif isinstance(value, ContextVar):
            self._take((id(value), "value"), Place(Current(value), "value", f"{place.name}.get()", place.line), None)
        elif type(value).__module__ == "multiprocessing.sharedctypes":
            at = Place(value, "_obj", f"{place.name}.value", place.line)
            self._take((id(value), "_obj"), at, at.get())
        elif isinstance(value, threading.local):
            for name, part in vars(value).items():
                self._take((id(value), name), Place(value, name, f"{place.name}.{name}", place.line), part)
        elif isinstance(value, type) and not _library_of(value):
            for function in functions_of_class(value):
                self.look_through(function, value)
        elif not isinstance(value, (torch.Tensor, type, types.ModuleType, *PLAIN)) and id(value) not in self.names:
            self._know(value, place.name)
            if isinstance(value, nn.Module):  # outside of the model: in a list, a closure
                for name, inside in value.named_modules():
                    if id(inside) not in self.names:
                        self._know(inside, f"{place.name}.{name}")
            else:
                self._follow(type(value))
                self.met(value, place.name)
                for held in run_by_python([base for base in type(value).__mro__ if not _of_library(base)]):
                    if isinstance(held, types.FunctionType):
                        self.look_through(held, type(value))
                    elif not _of_library(type(held)):
                        self._reach(held, place)

    def _know(self, value: Any, name: str) -> None:
        self.names[id(value)] = name
        self.alive.append(value)

    def _follow(self, cls: Any) -> None:
        """Note reads of the instances of a class of the user."""
        # rates of optimizers and schedules change
        known = _of_library(cls) and not cls.__module__.startswith("torch.optim")
        if cls in self.patched or known or issubclass(cls, nn.Module):
            return
        old = {name: vars(cls).get(name, ABSENT) for name in ("__getattribute__", "__setattr__")}
        try:
            cls.__getattribute__ = self.getattribute(cls.__getattribute__)
            cls.__setattr__ = self.setattribute(cls.__setattr__)
        except TypeError:  # of an extension: compared by identity alone
            return
        self.patched[cls] = old

    @replacing
    def environment(self, plain: Callable[[Any, str], str], environ: Any, name: str) -> str:
        """An `os.environ.__getitem__` that notes what code of the user or of a model library asks for."""
        # past what makes it this thread's (prepare.py)
        frame = frame_behind(sys._getframe(2), OF_ENVIRON.__contains__)
        if self.on and frame is not None and is_looked_at(frame.f_code.co_filename):
            place = Place(ENVIRONMENT, name, f"os.environ[{name!r}]", line_of(frame))
            self.places.setdefault((id(ENVIRONMENT), name), place)
        return plain(environ, name)

    def has_read(self, holder: Any, key: Any) -> bool:
        """True if code has read (or assigned to) what an object holds under a key, or might have."""
        where = id(holder), key
        return where in self.places or where in self.written or where in self.absent

    # -- names in code

    def _find_globals(self) -> None:
        """Look through the code of the model: that of the user, and of the packages that modules of the model are from."""
        self._code_seen: set[Any] = set()
        self.places.setdefault((id(OF_TORCH), "number"), Place(OF_TORCH, "number", "torch.Tensor's methods"))
        self._packages = {type(m).__module__.partition(".")[0] for m in self.model.modules()} - LIBRARIES
        for method in (f for owner in (torch.Tensor, nn.Module) for f in replaced_in(owner).values()):
            self.look_through(getattr(method, "fget", getattr(method, "__func__", method)))
        for module in self.model.modules():
            if id(module) in self.skipped:
                continue
            self._note_library(type(module))
            forward = vars(module).get("forward", ABSENT)
            own = getattr(forward, "own", forward)
            for function in (own, getattr(type(module), "forward", None), type(module).__call__):
                self.look_through(getattr(function, "__func__", function), type(module))
            for table in ("_forward_hooks", "_forward_pre_hooks") if module not in self.unhooked else ():
                for number, hook in vars(module).get(table, {}).items():  # those that are traced
                    self._reach(hook, Place(vars(module)[table], number, f"a hook of '{self.names[id(module)]}'"))

    def _note_library(self, cls: type) -> None:
        """The forwards of a class of modules, and the functions that a library's calls: somebody may put others there."""
        forward = getattr(cls, "forward", None)
        for base in cls.__mro__:
            if "forward" in vars(base) and base is not nn.Module and not type(base).__module__.startswith("megafx"):
                self.places.setdefault((id(base), "forward"), Place(base, "forward", f"{base.__name__}.forward"))
        if isinstance(forward, types.FunctionType) and is_of_torch(forward):
            for kind, (first, *rest) in chains(forward.__code__):
                if kind == "global" and isinstance(found := forward.__globals__.get(first), types.ModuleType):
                    self._note_function(found, rest)

    def _note_function(self, module: types.ModuleType, rest: list[str]) -> None:
        """The function of torch that code calls as `module.rest[0]`, or of a module in it."""
        for name in rest:
            found = vars(module).get(name) if module.__name__.startswith("torch") else None
            if not isinstance(found, types.ModuleType):
                if isinstance(found, (types.FunctionType, types.BuiltinFunctionType)) and is_of_torch(found):
                    self._note_inner(module, name, found)
                return
            module = found

    def _note_inner(self, module: types.ModuleType, name: str, function: Any) -> None:
        """The function of torch that is called `name` in a module, and those of torch that it calls."""
        key = id(vars(module)), name
        if key in self.places:
            return
        self._bound(Place(vars(module), name, f"{module.__name__}.{name}"))
        if not isinstance(function, types.FunctionType) or function.__globals__ is not vars(nn.functional):
            return
        for kind, (first, *rest) in chains(function.__code__):
            if kind == "global" and first in FUNCTIONAL and not first.startswith(("has_torch", "handle_torch")):
                self._note_inner(nn.functional, first, vars(nn.functional)[first])
            elif (
                kind == "global" and first == "torch" and len(rest) == 1 and callable(found := vars(torch).get(rest[0]))
            ):
                self._note_inner(torch, rest[0], found)

    def look_through(self, function: Any, cls: type | None = None) -> None:
        """Note the globals and enclosing variables that a function names, and those of functions that it can reach."""
        if self.memos is not None and self.memos.is_one(function):
            return
        if isinstance(function, MEMO):  # the trace computes, and what it computes is not found by other code
            self.hidden.append(function)
            function.cache_clear()
        if callable(inner := getattr(function, "__wrapped__", None)):  # what is around it is looked through, too
            self.look_through(inner, cls)
            if is_installed(getattr(getattr(function, "__code__", None), "co_filename", "")):
                return  # but not what packages put around their functions: nothing on disk could name its variables
        code = getattr(function, "__code__", None)
        if not isinstance(function, types.FunctionType) or code is None or not is_looked_at(code.co_filename):
            return
        known = str(function.__module__).partition(".")[0] in self._packages or "site-packages" not in code.co_filename
        # of the `__new__` of a named tuple the globals are its own
        if not known or (id(function), cls) in self._code_seen or not function.__globals__.get("__builtins__", True):
            return
        known = id(function) in self._code_seen  # in another class, whose attributes are others
        self._code_seen.update([id(function), (id(function), cls)])
        for of, name, line in names_at_classes(function, cls, (type(m) for m in self.model.modules())):
            self._note_of_class(of, name, line)
        if known:
            return
        self.alive.append(function)
        own = not is_installed(code.co_filename)
        self.functions += [function] * own
        for default in Default.all_of(function):
            if parts_of(default.value) is not None or (own and default.position is None):
                name = self._name_of((id(function), default.name), f"default '{default.name}' of {function.__name__}")
                at = Place(default, "value", name)
                self._take((id(default), "value"), at, default.value)
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        names = function.__globals__
        where = str(names.get("__name__", "")).rpartition(".")[2]
        self.compared |= own and compares(code)
        for part in codes(code):
            line = SourceLine(part.co_filename, part.co_firstlineno)
            for kind, chain in chains(part):
                first, *rest = chain
                if kind == "global" and first not in names and hasattr(builtins, first):
                    self.absent.add((id(names), first))
                    if first == "globals":  # `globals().get("SCALE")`
                        self._note_named(part, names, where, line)
                elif kind == "global":
                    self._note_name(self._variable(names, first, f"{where}.{first}", line), rest)
                    found, by_name = names.get(first), not _BY_NAME.isdisjoint(part.co_names)
                    if by_name and isinstance(found, types.ModuleType) and not _library_of(found):
                        self._note_named(part, vars(found), first, line)
                elif kind == "free" and first in cells:
                    self._note_name(self._variable(cells[first], "cell_contents", f"{where}.{first}", line), rest)
                elif kind == "stored" and first in names:
                    self.assigned(self._variable(names, first, f"{where}.{first}", line))
                elif kind == "freed" and first in cells:
                    self.assigned(self._variable(cells[first], "cell_contents", f"{where}.{first}", line))
                elif kind == "assigned" and cls is not None:
                    for base in [base for base in cls.__mro__ if not _of_library(base)]:
                        self.assigned(self._variable(self._own(base), first, f"{base.__name__}.{first}", line))

    def look_through_class(self, cls: type, *names: str) -> None:
        """As `look_through`, of the methods that code calls without naming them, and of those named."""
        for name in (*_OF_CLASSES, *names):
            method = vars(cls).get(name)
            if memo_of(method) is not None:
                self._find_memo(method, Place(cls, name, f"{cls.__name__}.{name}"))
                continue
            self.look_through(getattr(method, "__func__", method), cls)

    def _note_named(self, code: types.CodeType, names: dict[str, Any], where: str, line: SourceLine) -> None:
        """Code asks for names by strings, in the globals of a module: those of its strings that may be meant."""
        for name in code.co_consts:
            if isinstance(name, str) and name.isidentifier():
                self._note_name(self._variable(names, name, f"{where}.{name}", line), [])

    def _note_of_class(self, cls: Any, name: str, line: SourceLine | None) -> None:
        """name: of an attribute, in code of this class's methods. `type(self).calls` is seen by no `__getattribute__`."""
        bases = [base for base in cls.__mro__ if not _of_library(base)]
        owner = next((i for i, base in enumerate(bases) if name in vars(base)), None)
        if owner is None:
            return
        found = vars(bases[owner])[name]
        method = getattr(found, "fget", getattr(found, "__func__", found))
        if memo_of(found) is not None:
            self._find_memo(found, Place(bases[owner], name, f"{bases[owner].__name__}.{name}", line))
        elif callable(method):
            self.look_through(method, cls)
        elif hasattr(type(found), "__get__") and not _of_library(type(found)):
            self._reach(found, Place(bases[owner], name, f"{bases[owner].__name__}.{name}", line))
        elif isinstance(found, PLAIN) or parts_of(found) is not None or self._is_object(found):
            for base in bases[: owner + 1]:
                place = self._variable(own := self._own(base), name, f"{base.__name__}.{name}", line)
                self._take((id(own), name), place, place.get())

    def _variable(self, holder: Any, key: Any, name: str, line: SourceLine | None) -> Place:
        """The place of a variable, by a name that no other place has: variables of several functions are called alike."""
        return Place(holder, key, self._name_of((id(holder), key), name), line)

    def _name_of(self, key: tuple[int, Any], name: str) -> str:
        names = itertools.chain([name], (f"{name} ({number})" for number in itertools.count(2)))
        return next(each for each in names if self.owners.setdefault(each, key) == key)

    def _is_object(self, value: Any) -> bool:
        """True if it is an instance of a class of the user, as a class may hold: the one instance of it, a registry."""
        return not (_of_library(type(value)) or callable(value) or hasattr(type(value), "__get__"))

    def _own(self, cls: type) -> OwnAttributes:
        return self.classes.setdefault(cls, OwnAttributes(cls))

    def _find_memo(self, found: Any, place: Place) -> None:
        """A function with functools.lru_cache, which code finds at this place."""
        attribute = any(place.holder is vars(m) for m in self.model.modules())  # `getattribute` gives another
        if self.memos is None or not (attribute or self.memos.find(found, place)):
            self.look_through(memo_of(found))

    def _note_name(self, place: Place, rest: list[str]) -> None:
        """place: of a global or enclosing variable; rest: the attributes that code reads of it."""
        value = place.get()
        key = id(place.holder), place.key
        if value is ABSENT:
            self.absent.add(key)
            return self._bound(place)
        library = _library_of(value)
        if isinstance(value, types.ModuleType):
            self._bound(place)
            if library:
                self._note_setting(value, rest, place)
                self._note_function(value, rest)
            if rest and not library and rest[0] in vars(value):
                self._note_name(Place(vars(value), rest[0], f"{place.name}.{rest[0]}", place.line), rest[1:])
            return
        if isinstance(value, type):
            self._bound(place)
            held = getattr(value, rest[0], None) if rest and not library else None
            if held is not None and (isinstance(held, (*PLAIN, list, dict, tuple, set)) or self._is_object(held)):
                at = Place(value, rest[0], f"{place.name}.{rest[0]}", place.line)
                self._take((id(value), rest[0]), at, at.get())
            if not library:
                self.look_through_class(value, *rest[:1])
            return
        if isinstance(value, types.FunctionType):
            if isinstance(kinds := vars(value).get("registry"), types.MappingProxyType):  # functools.singledispatch
                at = Place(vars(value), "registry", f"{place.name}.registry", place.line)
                self._take((id(value), "registry"), at, kinds)
            if not is_looked_at(value.__code__.co_filename):
                return self._bound(place)
            if rest and not rest[0].startswith("__"):  # an attribute of a function
                self.met(value, place.name)
                at = Place(vars(value), rest[0], f"{place.name}.{rest[0]}", place.line)
                self._take((id(vars(value)), rest[0]), at, at.get())
        elif callable(value) and library and not isinstance(value, (MEMO, partial, types.MethodType, nn.Module)):
            self._note_setting(value, rest, place)
            return self._bound(place)
        if key not in self.places:
            self._take(key, place, value)

    def _note_setting(self, value: Any, rest: list[str], place: Place) -> None:
        """value: a library's module or function, of which code reads the attributes `rest`: settings of torch."""
        holder, name = None, str(getattr(value, "__name__", ""))
        for name in rest:
            if not isinstance(value, types.ModuleType) and not type(value).__module__.startswith(BACKENDS):
                return
            holder, value = value, getattr(value, name, ABSENT)
        setting = SETTINGS.get(name) if callable(value) else None
        if not callable(value) and isinstance(value, PLAIN) and is_backend(holder):
            setting = Setting(getattr, (holder, name))
        if setting is not None:
            self.places.setdefault(
                (hash(setting), "text"), Place(setting, "text", ".".join((place.name, *rest)), place.line)
            )

    def _bound(self, place: Place) -> None:
        """place: of a name that holds nothing, or a module, a class or a library's function: another may be put there."""
        # the cell in which `super()` looks: nothing writes there
        if place.name.partition(" (")[0].endswith(".__class__"):
            return
        self.places.setdefault((id(place.holder), place.key), place)
        self.alive.append(place.holder)

    # -- afterwards

    def forget(self) -> None:
        """Give up what was kept alive for its identity: objects of the user go when he gives them up."""
        for known in (self.names, self.alive, self.functions):
            known.clear()

    def guards(self, varies: frozenset[str]) -> list[tuple[Place, Any]]:
        """The places that were read, and what they hold, but for those named in `varies`."""
        found = []
        for place in self.places.values():
            if place.name not in varies:
                found.append((place, snapshot(place.get(), place.name, varies)))
        return found


def _of_library(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in LIBRARIES


def is_of_torch(function: Any) -> bool:
    """True if a function or class is torch's, and not one that a capture puts in its place."""
    return str(getattr(function, "__module__", None) or "torch").partition(".")[0] == "torch"


def _library_of(value: Any) -> bool:
    """True if a module, a class, or the class of another value is of a library that guards do not look into."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in LIBRARIES
    return _of_library(value if isinstance(value, type) else type(value))


def _reader() -> types.FrameType:
    """The frame whose code reads an attribute."""
    frame = sys._getframe(2)
    own = frame.f_code.co_name == "plain" and frame.f_back is not None  # what makes it this thread's (prepare.py)
    return frame.f_back if own and frame.f_back is not None else frame


_BY_NAME = frozenset(["getattr", "hasattr"])
