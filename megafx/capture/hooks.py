"""Hooks of modules, while a model is captured: which are traced like the model's own code, and which run when the graph runs.

A hook may do anything with what it gets, and expects real tensors: it runs at the border of its module (ops/hook_call.py).
Traced, as if it were written in the model, are

- hooks that only compute: a function that reads nothing but its arguments, decides nothing, and calls methods of tensors and
  functions of torch alone (`lambda module, args, output: output * 2`). So they may change sizes and dtypes, and are sharded;
- hooks that read parameters of the model (`output + model.steering`), and name nothing else but data, modules, torch, and
  functions and methods that do the same: these parameters have gradients, and may be shards;
- pre-hooks that set what the module's forward then reads (`weight_norm`, `spectral_norm`, pruning), and hooks that store what
  forward reads later in the call (a U-Net's: hook_stores.py). A trace shows what it reads, and is then made once more;
- transformers' own that collect `output_hidden_states` and the like, which are outputs of the call.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional
from torch import Tensor, nn
from torch.nn.modules import module as of_all

from megafx.capture.code_names import codes, names_in_code, names_of
from megafx.capture.hook_stores import ANY_NAME, function_of, stores_of
from megafx.capture.reads import Reads
from megafx.errors import CaptureError
from megafx.ir.source_lines import is_user_file
from megafx.ops.eager_call import Order
from megafx.ops.hook_call import Around, Side, identity

HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BEFORE, _BEHIND = "_forward_pre_hooks", "_forward_hooks"
_TRACED = ("torch.nn.utils.", "transformers.utils.output_capturing", "transformers.utils.generic")
# Methods of tensors that give numbers, see autograd or change what a tensor is; what draws random numbers.
# fmt: off
_NOT_COMPUTED = frozenset([
    "item", "tolist", "numpy", "backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "data", "grad",
    "grad_fn", "set_", "storage", "untyped_storage", "share_memory_", "requires_grad", "is_leaf", "data_ptr", "cpu", "cuda",
    "save", "load", "seed", "manual_seed", "_version",
])
_DRAWS = frozenset([
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "normal", "uniform", "bernoulli",
    "multinomial", "poisson", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
    "gumbel_softmax", "rrelu", "uniform_", "normal_", "bernoulli_", "random_", "exponential_", "cauchy_", "geometric_",
    "log_normal_", "sample", "rsample",
])
# fmt: on


class Own(NamedTuple):
    """What a model holds: ids of its parameters, names of attributes that are modules, tensors or plain values."""

    parameters: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()

    @staticmethod
    def of(model: nn.Module) -> Own:
        names = {name for module in model.modules() for name in _data_of(module)}
        return Own(frozenset(map(id, model.parameters())), frozenset(names))


class Hooks(NamedTuple):
    """What a graph has to know of the hooks of one module: those before it and those behind it. Equal for tables of hooks
    that one graph serves.
    """

    before: Side
    behind: Side
    random: bool
    traced: frozenset[Hashable]  # identities
    always: bool  # some run after exceptions, too


def hooks_of(
    module: nn.Module,
    fqn: str,
    *,
    storing: Collection[Hashable] = (),
    read: Collection[str] = (),
    own: Own = Own(),  # noqa: B008  a constant
) -> Hooks | None:
    """The hooks on a module, those on all modules included; None where there are none.

    own: of the model.
    storing: identities of those that store what forward reads. read: names in the code of the model: hooks that may store
    something of such a name count as traced, for comparing sets of hooks.
    """
    tables: dict[str, dict[int, Any]] = {}
    for name in HOOK_TABLES:
        tables[name] = {**getattr(of_all, f"_global{name}"), **vars(module).get(name, {})}
    if not any(tables.values()):
        return None
    flag = vars(module).get("_is_full_backward_hook") if vars(module).get("_backward_hooks") else None
    if (flag if flag is not None else of_all._global_is_full_backward_hook) is False and tables["_backward_hooks"]:
        raise CaptureError(
            "a backward hook of the old kind, which gets gradients of the module's last operation alone",
            module=fqn,
            fix="register it with register_full_backward_hook",
        )
    always = {*vars(module).get("_forward_hooks_always_called", ()), *of_all._global_forward_hooks_always_called}
    traced, run = set(), dict[str, dict[int, Any]]()
    for name in (_BEFORE, _BEHIND):
        run[name] = {}
        for number, hook in tables[name].items():
            kind = identity(hook)
            sets = name == _BEFORE and _sets_what_forward_reads(hook, module)
            computes = (_is_traced(hook) or _computes_with(own, hook, module)) and number not in always
            if kind in storing or sets or computes or (read and not stores_of(hook, module).names.isdisjoint(read)):
                traced.add(kind)
            else:
                run[name][number] = hook
    backward = bool(tables["_backward_hooks"] or tables["_backward_pre_hooks"])
    named = {*vars(module).get("_forward_hooks_with_kwargs", ()), *of_all._global_forward_hooks_with_kwargs}
    with_kwargs = {_BEFORE: vars(module).get("_forward_pre_hooks_with_kwargs", ()), _BEHIND: named}
    needed = any(n in always for n in run[_BEHIND])
    kwargs = [any(n in with_kwargs[name] for n in run[name]) for name in (_BEFORE, _BEHIND)]
    sides = []
    for name, takes in ((_BEFORE, kwargs[0] or (needed and kwargs[1])), (_BEHIND, kwargs[1])):
        order = [None if n in run[name] else identity(hook) for n, hook in tables[name].items()]
        sides.append(Side.of(order, takes, backward, needed))
    return Hooks(
        before=sides[0],
        behind=sides[1],
        random=any(_draws(h) for hooks in run.values() for h in hooks.values()),
        traced=frozenset(traced),
        always=needed,
    )


def hooked_modules(
    model: nn.Module, outside: Collection[nn.Module], storing: Collection[Hashable] = (), read: Collection[str] = ()
) -> dict[str, Hooks]:
    """FQN -> hooks, of the modules that have any. outside: modules whose hooks are no matter of the graph; storing, read: as of
    hooks_of."""
    found, own = {}, Own.of(model)
    for fqn, module in model.named_modules():
        refuse_dispatch(module, fqn)
        if module not in outside:
            hooks = hooks_of(module, fqn, storing=storing, read=read, own=own)
            if hooks is not None:
                found[fqn] = hooks
    return found


def storing(model: nn.Module, outside: Collection[nn.Module], reads: Reads) -> set[Hashable]:
    """Identities of hooks that may store what a trace has read."""
    every = [hook for name in (_BEFORE, _BEHIND) for hook in getattr(of_all, f"_global{name}").values()]
    found = set()
    for module in model.modules():
        if module not in outside:
            own = [hook for name in (_BEFORE, _BEHIND) for hook in vars(module).get(name, {}).values()]
            found |= {identity(hook) for hook in (*every, *own) if stores_of(hook, module).read_by(reads)}
    return found


def names_in(model: nn.Module) -> frozenset[str]:
    """Names in the code of a model: of attributes, globals and variables of enclosing functions."""
    kinds: set[Any] = {type(module) for module in model.modules()}
    kinds_of_code = (types.FunctionType, types.MethodType)
    held = (f for m in model.modules() for f in vars(m).values() if isinstance(f, kinds_of_code))
    own = (names_in_code(f.__code__) for f in held)
    return frozenset().union(*map(_names_in_class, kinds), *own)


@functools.cache
def _names_in_class(kind: type) -> frozenset[str]:
    bases = [base for base in kind.__mro__ if not base.__module__.startswith("torch.") and base is not object]
    functions = (
        inspect.unwrap(getattr(f, "__func__", f)) for base in bases for f in vars(base).values() if callable(f)
    )
    return frozenset().union(*(names_in_code(f.__code__) for f in functions if hasattr(f, "__code__")))


def refuse_dispatch(module: nn.Module, fqn: str) -> None:
    """Raise where accelerate moves a module's weights or inputs around its forward (`device_map`, `cpu_offload`)."""
    hook = vars(module).get("_hf_hook")
    if hook is not None:
        raise CaptureError(
            f"accelerate's {type(hook).__name__} moves weights and inputs between devices in each call of this module",
            module=fqn,
            fix="take it off with accelerate.hooks.remove_hook_from_submodules(model) (load with device_map=None); what does "
            "not fit one device is sharded: tensor_model_parallel_size, data_parallel='fsdp'",
        )


def around(model: nn.Module, found: dict[str, Hooks], order: Order) -> list[Around]:
    """What replaces the calls of modules with hooks that are not traced: it calls those that are, too. The tables of other
    modules then hold hooks that are traced, and that of all modules is empty. The caller puts all back."""
    made = []
    every = {name: list(getattr(of_all, f"_global{name}").items()) for name in HOOK_TABLES}
    for name in HOOK_TABLES:
        getattr(of_all, f"_global{name}").clear()
    for fqn, hooks in found.items():
        module = model.get_submodule(fqn)
        if hooks.before.runs or hooks.behind.runs or any(every.values()):
            tables = [[*every[name], *vars(module).get(name, {}).items()] for name in (_BEFORE, _BEHIND)]
            sides = hooks.before, hooks.behind
            made.append(Around(module, fqn, order, *sides, hooks.random, hooks.traced, tables, hooks.always))
            for name in HOOK_TABLES:
                vars(module)[name] = OrderedDict()
    return made


@contextlib.contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Within, calls of the module run none of its own hooks."""
    tables = {name: vars(module)[name] for name in HOOK_TABLES}
    vars(module).update({name: OrderedDict() for name in tables})
    try:
        yield
    finally:
        vars(module).update(tables)


def _is_traced(hook: Any) -> bool:
    modules = [c.__module__ for c in type(hook).__mro__] + [getattr(hook, "__module__", "") or ""]
    return any(name.startswith(_TRACED) for name in modules) or _only_computes(hook)


# Names of instructions, or how they begin.
_STORES = ("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_DEREF", "STORE_SLICE", "DELETE_", "IMPORT_")
_BRANCHES = ("FOR_ITEM", "FOR_ITER", "YIELD_VALUE", "MAKE_FUNCTION", "RAISE_VARARGS", "LOAD_DEREF")


def _only_computes(hook: Any) -> bool:
    """True if a hook is a function that reads nothing but its arguments, has no branch, and only calls torch."""
    function = hook
    if not isinstance(function, types.FunctionType) or function.__closure__:
        return False
    code = function.__code__
    for each in dis.get_instructions(code):
        name = each.opname
        if "JUMP" in name or name in _BRANCHES or name.startswith(_STORES):
            return False
        if name == "LOAD_GLOBAL" and each.argval != "torch" and each.argval != "F":
            return False
        if name == "LOAD_GLOBAL" and function.__globals__.get(each.argval) not in (torch, torch.nn.functional):
            return False
        if name in ("LOAD_ATTR", "LOAD_METHOD") and not _computed(str(each.argval)):
            return False
    return True


def _computes_with(own: Own, hook: Any, module: nn.Module) -> bool:
    """True if a hook reads parameters of the model, stores nothing, and names only data, modules and what computes."""
    found, function = stores_of(hook, module), function_of(hook)
    if function is None or found.places or found.containers or own.parameters.isdisjoint(map(id, found.parameters)):
        return False
    holder = getattr(hook, "__self__", hook)
    return _names_what_computes(function, own.names | _data_of(holder) | _NAMESPACES, type(holder), set())


def _names_what_computes(
    function: types.FunctionType, named: frozenset[str], holder: type, seen: set[types.CodeType]
) -> bool:
    """named: attributes that are data. holder: the class whose methods a hook may call. seen: code that was looked at."""
    if function.__code__ in seen:
        return True
    seen.add(function.__code__)
    computes = lambda value: _is_function_of_the_user(value) and _names_what_computes(value, named, holder, seen)
    for name in {name for code in codes(function.__code__) for name in code.co_names}:
        value = function.__globals__.get(name)
        if name in _NOT_COMPUTED or not (_is_data(value) or computes(value)):
            return False
        method = inspect.getattr_static(holder, name, None)
        method = getattr(method, "__func__", method)  # of a static or class method
        if not (name in named or value is not None or _computed(name) or computes(method)):
            return False
    cells = map(_contents, function.__closure__ or ())
    return all(_is_data(value) or computes(value) for value in cells)


def _is_function_of_the_user(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and is_user_file(value.__code__.co_filename)


_NAMESPACES = frozenset(["nn", "functional", "float", "int", "len", "range", "abs", "min", "max"])


def _is_data(value: Any) -> bool:
    """True of modules, tensors and plain values, and of what torch has modules of Python for."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] == "torch"
    return value is None or isinstance(value, (nn.Module, Tensor, bool, int, float, str, torch.dtype, torch.device))


def _data_of(holder: Any) -> frozenset[str]:
    """Names of attributes of an object that are modules, tensors or plain values."""
    held = vars(holder) if hasattr(holder, "__dict__") else {}
    tables = [held, *(held.get(table) or {} for table in ("_modules", "_parameters", "_buffers"))]
    return frozenset(name for table in tables for name, value in table.items() if _is_data(value))


def _computed(name: str) -> bool:
    functional = getattr(torch.nn.functional, name, None)
    known = hasattr(Tensor, name) or functional is not None or hasattr(torch, name)
    return known and name not in _NOT_COMPUTED and name not in _DRAWS


def _sets_what_forward_reads(hook: Any, module: nn.Module) -> bool:
    """True if a pre-hook sets an attribute of its module that the module's forward reads, or any by a computed name."""
    own, read = vars(module), names_of(module)
    return any(holder is own and name in (*read, ANY_NAME) for holder, _, name in stores_of(hook, module).places)


def _draws(hook: Any, depth: int = 2) -> bool:
    """True if the code of a hook, or of functions that it calls by name, has a function that draws random numbers."""
    function = function_of(hook)
    if function is None:
        return False
    names = {name for code in codes(function.__code__) for name in code.co_names}
    if names & _DRAWS:
        return True
    cells = [_contents(c) for c in function.__closure__ or ()]
    called = [function.__globals__.get(n) for n in names] + cells
    return depth > 0 and any(
        _draws(f, depth - 1) for f in called if isinstance(f, (types.FunctionType, types.MethodType))
    )


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
