"""What stays eager inside of a captured graph: functions that cannot be traced and only keep books; the values it is tried on.

Where code that decides by data is in a function that a module's forward calls (positions by the grids of images, windows,
lists of lengths), the function alone is one node of the graph, not the module. That is sound for a function that gets tensors
without a gradient, reads no parameter and no buffer, and changes none of its arguments; else the next function that called it,
and at last the module, is left eager (compiler/captured.py). While a model is traced, the code of such a function is another:
it makes the node. So all ways to the function lead there, whatever names it has been imported under.

To learn the sizes of its results, code that stays eager is run. It may need certain numbers (the grids of images, lengths that
add up to the whole). Where these follow from the inputs of the call alone, without parameters, they are computed from the trace
so far, and floating tensors are made up around them. So the code is run on the call itself, and on variants of it: the batch
twice, and with other lengths of the sequence. A variant on which the code fails is left out.

The same computes values of tensors that follow from constants and sizes alone (`by_values`), which depend on no data:
`torch.tensor([x.shape[-1] for x in crops]).cumsum(0)`. Where code asks for a number of such a tensor, or what torch makes of it
has sizes that its values decide, that is computed while the model is traced. If it follows from sizes of the call, the graph is
for these sizes alone; a number that the graph can read itself (`.item()`, `.tolist()`) is then left to it.
"""

from __future__ import annotations

import dis
import gc
import inspect
import operator
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import SymTypes
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from megafx.capture.conversions import original
from megafx.capture.host_numbers import HostNumber
from megafx.errors import CaptureError, SourceLine
from megafx.ir.nodes import storage_of, writes
from megafx.ir.program import VAL
from megafx.ir.source_lines import frames_of, is_user_file
from megafx.meanwhile import meanwhile
from megafx.ops.eager_call import EagerCall, Held, as_node, find_call, in_eager_code
from megafx.ops.eager_probes import Probes, kept_leaf, noting_sets, probed
from megafx.progress import also_among_frozen

_CALL = nn.Module._call_impl.__code__.co_name
_MARK = "what is called"
_NOT_PLAIN = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def functions_of(error: BaseException) -> tuple[types.CodeType, ...]:
    """Code of the functions on the error's stack that the deepest module's forward has called, the deepest first."""
    frames = [frame for frame, _ in frames_of(error)]
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
        is_own = lambda f: isinstance(f, types.FunctionType) and f.__code__ is self.code
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
            with meanwhile(self, busy=True):
                return self._node(own, args, kwargs)

        return calling(called, self.code)

    def refuse(self, found: str) -> NotAlone:
        error = NotAlone(f"the function {self.code.co_qualname} {found}", fix="leave its module eager")
        error.code = self.code
        return error

    def _refuse_set(self, module: nn.Module, name: str, function: str) -> None:
        raise self.refuse(f"sets the attribute '{name}', which other code may read before it runs")

    def _node(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        leaves = [x.entering() if isinstance(x, HostNumber) else x for x in leaves]
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


def calling(target: Callable[..., Any], code: types.CodeType) -> types.CodeType:
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


# -- real values of integers, on which code that stays eager is tried


class _Unknown(Exception):
    """A value that follows from parameters, or from no input of the call."""


class Values:
    """What a trace's values are for certain inputs. leaves: these, in the order of `traced`, the fakes of the trace."""

    def __init__(self, leaves: Sequence[Tensor], traced: Sequence[Tensor]) -> None:
        self.leaves, self.traced = leaves, traced
        self.tracer: Any = None
        self.known: dict[fx.Node, Any] = {}
        self.sizes: dict[sympy.Symbol, int] = {}
        fixed = []
        for real, fake in zip(leaves, traced, strict=True):
            for size, of_fake in zip(real.shape, fake.shape, strict=True):
                if not isinstance(of_fake, torch.SymInt):
                    fixed.append(int(size))
                elif of_fake.node.expr.is_Symbol:
                    self.sizes.setdefault(of_fake.node.expr, int(size))
        self.fixed = tuple(fixed)

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Real tensors for those of the trace: integers as they are, floating ones made up; None where that is not known."""
        mode = get_proxy_mode()
        if mode is None:
            return None
        self.tracer = mode.tracer
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            return self._like(tensors)

    def _like(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        made = []
        generator = torch.Generator().manual_seed(0)
        try:
            for tensor in tensors:
                if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                    shape = [self.size(n) for n in tensor.shape]
                    made.append(torch.randn(shape, generator=generator).to(tensor.dtype).to(tensor.device))
                else:
                    made.append(self._value(self._node_of(tensor)).clone())
        except (_Unknown, RuntimeError, ValueError, IndexError):  # an op that does not take the variant
            return None
        return made

    def size(self, size: Any) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expr = size.node.expr
        for symbol in expr.free_symbols - self.sizes.keys():
            self.sizes[symbol] = self._size_of(symbol)
        return int(expr.xreplace({s: sympy.Integer(self.sizes[s]) for s in expr.free_symbols}))

    def _size_of(self, symbol: sympy.Symbol) -> int:
        """Of a size that data decides: that of the first value that has it."""
        for node in self.tracer.graph.nodes:
            value = node.meta.get(VAL)
            if isinstance(value, torch.SymInt) and value.node.expr == symbol:
                return int(self._value(node))
            if isinstance(value, Tensor):
                for d, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                        return int(self._value(node).shape[d])
        raise _Unknown

    def _value(self, node: fx.Node) -> Any:
        todo = [node]
        while todo:  # operands first, without recursion: a graph is deep
            each = todo[-1]
            missing = [x for x in each.all_input_nodes if x not in self.known]
            if each not in self.known and not missing:
                self.known[each] = self._computed(each)
            todo = todo[:-1] if not missing else [*todo, *missing]
        if isinstance(self.known[node], _Unknown):
            raise self.known[node]
        return self.known[node]

    def _computed(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            found = [r for r, t in zip(self.leaves, self.traced, strict=True) if self._node_of(t) is node]
            return found[0] if found else _Unknown()
        if node.op == "get_attr":
            value = getattr(self.tracer.root, str(node.target), None)
            return value if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else _Unknown()
        if node.op != "call_function" or any(isinstance(self.known[x], _Unknown) for x in node.all_input_nodes):
            return _Unknown()
        known: Any = fx.map_arg((node.args, node.kwargs), lambda n: self.known[n])
        args, kwargs = known
        target = node.target
        if target is torch.ops.megafx.eager_call.default:
            call = find_call(args[4])
            if call.names or call.random:
                return _Unknown()
            found = [x for x in pytree.tree_leaves(call.run(args[0])) if isinstance(x, Tensor)]
            return [None, None, *found]
        return target(*args, **kwargs)

    def _node_of(self, tensor: Tensor) -> fx.Node:
        slot = get_proxy_slot(tensor, self.tracer, None)
        node = getattr(getattr(slot, "proxy", None), "node", None)
        if not isinstance(node, fx.Node):
            raise _Unknown
        return node


class CallValues:
    """The real inputs of a call, and variants of them (`Probes` of ops/eager_probes.py). dims: of each, the names of its dims
    (capture/dims.py)."""

    def __init__(self, leaves: Sequence[Tensor], dims: Sequence[Mapping[int, str]], scaled: bool = False) -> None:
        self.scaled = scaled
        self.variants = [list(leaves), *_variants(leaves, dims)] if _are_real(leaves) else []
        self.values: list[Values] = []

    def begin(self, traced: Sequence[Tensor]) -> None:
        """Of a trace. traced: its inputs."""
        self.values = [Values(leaves, traced) for leaves in self.variants]

    def runs(self, tensors: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], tuple[int, ...]]]:
        """Of each variant what a call gets; nothing where its integers are not known, or where it has none."""
        if all(x.dtype.is_floating_point or x.dtype.is_complex for x in tensors):
            return
        for number, each in enumerate(self.values):
            made = each.like(tensors)
            if made is not None:
                yield made, each.fixed
            elif number == 0:
                return


def _are_real(leaves: Sequence[Tensor]) -> bool:
    return bool(leaves) and not any(x.device.type == "meta" or isinstance(x, FakeTensor) for x in leaves)


def _longer(x: Tensor, dim: int) -> Tensor:
    """The last row of a dim twice."""
    return torch.cat([x, x.narrow(dim, x.shape[dim] - 1, 1)], dim)


def _shorter(x: Tensor, dim: int) -> Tensor:
    return x.narrow(dim, 0, x.shape[dim] - 1)


def _variants(leaves: Sequence[Tensor], dims: Sequence[Mapping[int, str]]) -> Iterator[list[Tensor]]:
    yield [torch.cat([x, x]) if x.dim() else x for x in leaves]
    names = {name for each in dims for d, name in each.items() if name != "batch"}
    for name in sorted(names):
        for change in (_longer, _shorter):
            made = []
            for leaf, each in zip(leaves, dims, strict=True):
                for d, theirs in each.items():
                    if theirs == name and leaf.shape[d] > 1:
                        leaf = change(leaf, d)
                made.append(leaf)
            yield made


# -- values that follow from constants and sizes

_NUMBERS = ("__index__", "__int__", "__float__", "__bool__", "item", "tolist")
_SIZED_BY_VALUES = ("unique", "unique_consecutive", "nonzero")
_READ_BY_A_GRAPH = ("item", "tolist", "__int__", "__float__", "nonzero")
_MOST = 1 << 16  # elements of a tensor that a trace computes
_ANY_MEMORY = ("empty", "empty_like", "empty_strided", "new_empty")
_DETACH = torch.ops.aten.detach_.default  # torch.tensor's
_MADE_HERE = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class _Constants(Values):
    """Values of nodes that depend on no input. by_size: the sizes of the call that they depend on."""

    def __init__(self, tracer: Any) -> None:
        super().__init__((), ())
        self.tracer, self.by_size = tracer, list[Any]()

    def of(self, tensor: Tensor) -> Any:
        node = self._node_of(tensor)
        behind, todo = {node: None}, [node]
        while todo:
            if not follows(each := todo.pop()):
                raise _Unknown
            new = [] if isinstance(each.meta.get(VAL), SymTypes) else each.all_input_nodes
            todo += [x for x in new if x not in behind]
            behind |= dict.fromkeys(new)
        held = {storage_of(x) for x in behind}
        written = (x for x in self.tracer.graph.nodes if writes(x) and x.target is not _DETACH)
        if any(not held.isdisjoint(map(storage_of, x.all_input_nodes)) for x in written):
            raise _Unknown
        return self._value(node)

    def _computed(self, node: fx.Node) -> Any:
        size = node.meta.get(VAL)
        if isinstance(size, SymTypes):
            self.by_size.append(size)
            return size.node.hint
        return super()._computed(node)


def follows(node: fx.Node) -> bool:
    """True if the values of a node follow from those of its operands, or from the sizes of the call."""
    value, target = node.meta.get(VAL), node.target
    if isinstance(value, SymTypes):
        return value.node.has_hint()
    if node.op == "get_attr":
        return bool(node.users) and all(user.target in _MADE_HERE for user in node.users)
    if node.op != "call_function" or target is operator.getitem:
        return node.op == "call_function"
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    if writes(node) and target is not _DETACH:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.name.partition("::")[2] in _ANY_MEMORY:
        return False
    return all(isinstance(x, Tensor) and _count(x) <= _MOST for x in pytree.tree_leaves(value))


def _count(x: Tensor) -> int:
    count: Any = x.numel()
    return int(count.node.hint or 0) if isinstance(count, torch.SymInt) else int(count)


def by_values(name: str, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a function of torch, or a method of this name, gives for a tensor whose values are known; None for others."""
    mode = get_proxy_mode()
    x = args[0] if args and name in (*_NUMBERS, *_SIZED_BY_VALUES) else None
    if not isinstance(x, FakeTensor) or mode is None or x.requires_grad or x.device.type == "meta":
        return None
    constants = _Constants(mode.tracer)
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        try:
            real = constants.of(x)
            found = function(real, *args[1:], **kwargs)
        except (_Unknown, RuntimeError, ValueError, IndexError):
            return None
    if constants.by_size and name in _READ_BY_A_GRAPH:
        return None
    for size in constants.by_size:
        bool(size == size.node.hint)  # a condition under which the graph serves a call
    return pytree.tree_map_only(Tensor, _made_here, found)


def _made_here(x: Tensor) -> Tensor:
    return torch.tensor(x.tolist(), dtype=x.dtype, device=x.device).reshape(x.shape)
