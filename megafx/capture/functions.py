"""Gradients that a model writes itself (`torch.autograd.Function`), while it is captured.

A trace holds the operations of `forward`, and a graph differentiates those. Where `backward` computes the same (a hand-written
GeLU), nothing is lost (analysis/derivatives.py shows it). Where it does not (straight-through estimators, bounded or scaled
gradients), the function stays as it is: each call is one node that runs the function's own code, forward and backward, on
whole tensors on every rank (as `eager_modules` do), with a note.

`torch.utils.checkpoint` is such a Function too (use_reentrant=True), or hooks on what autograd keeps. The function that it is
given is traced as if called directly, and its nodes are marked (ir.REGION): `choose_kept` makes them again in backward. So are
Functions of users that do the same (`computed_again`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as checkpoint
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.autograd.function import _SingleLevelFunction
from torch.fx import traceback
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from megafx.analysis.derivatives import same_gradient
from megafx.capture.code_names import chains, codes, writes_attributes_of
from megafx.errors import CaptureError
from megafx.ir.python_state import PLAIN
from megafx.ir.source_lines import current_user_line
from megafx.meanwhile import meanwhile, replacing
from megafx.ops.eager_call import in_eager_code
from megafx.ops.eager_probes import FindsRows, eager_call_of
from megafx.ops.eager_rows import by_rows

_OURS = ("torch.", "megafx.")
_REGION = "megafx_region"
BUILT_IN = isinstance(vars(Function)["apply"], types.ClassMethodDescriptorType)
# Whose `apply` is replaced: below `Function`, whose bound `apply` models may hold; there is no such place for a built-in.
APPLY_OF: type = Function if BUILT_IN else _SingleLevelFunction
_modules: dict[type[Function], nn.Module] = {}  # graphs hold weak references


_CODE = (nn.Module, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
CodeRunBy = Callable[[Any], tuple[Any, set[types.CodeType]]]


class _Applied(nn.Module):
    """A Function as a module."""

    def __init__(self, function: type[Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function.apply(*args)


class Regions:
    """Numbers the calls of checkpoint in a trace, and marks what is traced inside. Calls inside of others are part of them.

    note(text) informs the user of writes by forward inside. left(): its writes so far, by name, with what distinguishes
    two writes.
    """

    def __init__(self, note: Callable[[str], None], left: Callable[[], dict[str, Any]]) -> None:
        self.note, self.left = note, left
        self.count, self.inside = 0, False

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        if self.inside:
            yield
            return
        self.count, self.inside = self.count + 1, True
        before = self.left()
        try:
            with traceback.preserve_node_meta(), _annotated({_REGION: self.count}):
                yield
        finally:
            self.inside = False
        new = [name for name, state in self.left().items() if name not in before or before[name] != state]
        if new and torch.is_grad_enabled():
            shown = ", ".join(map(repr, new[:3])) + (f" and {len(new) - 3} more" if len(new) > 3 else "")
            self.note(
                f"forward writes {shown} in a region of torch.utils.checkpoint: once in each call; in eager mode the region "
                "runs again in backward, and writes again"
            )


@contextlib.contextmanager
def _annotated(marks: dict[str, Any]) -> Iterator[None]:
    """As `traceback.annotate`, whose end fails with KeyError('custom') where another thread has meanwhile put another dict in
    place of `traceback.current_meta`, which is one for all threads (`preserve_node_meta` and fx.Interpreter do)."""
    before = traceback.current_meta.get("custom")
    traceback.current_meta["custom"] = {**(before or {}), **marks}
    try:
        yield
    finally:
        if before is None:
            traceback.current_meta.pop("custom", None)
        else:
            traceback.current_meta["custom"] = before


def current_region() -> int | None:
    """The number of the outermost call of checkpoint that runs in a trace."""
    found: int | None = traceback.current_meta.get("custom", {}).get(_REGION)
    return found


def mark_region(node: fx.Node, region: int) -> None:
    node.meta["custom"] = {**node.meta.get("custom", {}), _REGION: region}


def region_of(node: fx.Node) -> int | None:
    """The number of the outermost call of checkpoint in which a node was traced."""
    found: int | None = node.meta.get("custom", {}).get(_REGION)
    return found


class Applied:
    """Calls of Functions in a trace: those whose gradient is not that of their forward are nodes of what is traced.

    A call is seen at `Function.apply`. From torch 2.15 on that is a built-in: one that a model has bound before the capture
    (`relu = MyRelu.apply`) is not looked up again, so such a call is seen where it reaches the class's `forward`.
    """

    def __init__(
        self,
        note: Callable[[str], None],
        regions: Regions,
        inlined: Callable[[type[Function]], None],
        code_run_by: CodeRunBy,
    ) -> None:
        """inlined: is called with each Function whose operations are traced, and whose backward is not run any more.
        code_run_by: that of hook_stores.py."""
        self.note, self.regions, self.inlined, self.busy = note, regions, inlined, False
        self.code_run_by = code_run_by

    def apply(self, cls: type[Function], *args: Any) -> Any:
        """What replaces `APPLY_OF`."""
        plain = super(APPLY_OF, cls).apply  # type: ignore[arg-type]  # mypy knows that it is a type, not which
        return self._call(cls, args, lambda: plain(*args), torch.is_grad_enabled())

    @replacing
    def forward(self, cls: type[Function], old: Callable[..., Any], *args: Any) -> Any:
        """What replaces `cls.forward`, which built-in code calls without gradients."""
        given = args if cls.setup_context is not Function.setup_context else args[1:]
        return self._call(cls, given, lambda: old(*args), True)

    def _call(self, cls: type[Function], args: tuple[Any, ...], plain: Callable[[], Any], enabled: bool) -> Any:
        if cls is checkpoint.CheckpointFunction:
            function, _, *given = args
            if enabled and not any(isinstance(x, Tensor) and x.requires_grad for x in given):  # nor has what it gives
                checkpoint.check_backward_validity(given)
                with torch.no_grad():
                    return function(*given)
            with self.regions.enter():
                return function(*given)
        tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
        differentiated = enabled and any(x.requires_grad for x in tensors)
        if self.busy or cls.__module__.startswith(_OURS):
            return plain()
        with meanwhile(self, busy=True):
            again = computed_again(cls, args) if differentiated else None
        if again is not None:
            self.inlined(cls)
            with self.regions.enter():
                return again()
        self.busy = True
        try:
            if not differentiated:
                return plain()
            does_more = self._does_more(cls, pytree.tree_leaves(args))
            if not does_more and same_gradient(cls, args):
                self.inlined(cls)
                return plain()
            if any(isinstance(x, _CODE) for x in pytree.tree_leaves(args)):
                raise CaptureError(
                    f"{cls.__qualname__} ({cls.__module__}) is given a function or module, as checkpointing does, and its "
                    "backward is not that of what it computes: gradients of what that holds would be lost",
                    source=current_user_line(),
                    fix="call the function outside of it, or give `apply` the numbers and tensors that it reads "
                    "(module.scale, module.weight); torch.utils.checkpoint is left out by itself",
                )
            self.note(
                f"{cls.__qualname__} ({cls.__module__}) has a backward that is not the derivative of its forward, does more "
                "than compute, or could not be compared with it: its own code runs on every rank, on whole tensors (where it "
                "computes each row by itself, on a data-parallel rank's rows)"
            )
            context = next(iter(inspect.signature(cls.forward).parameters), "")
            runs = [cls.forward, cls.backward]
            if cls.setup_context is not Function.setup_context:
                context, runs = next(iter(inspect.signature(cls.setup_context).parameters)), [*runs, cls.setup_context]
            finds = None if does_more else of_rows(self.code_run_by, *runs, context=context)
            return eager_call_of(_modules.setdefault(cls, _Applied(cls)), cls.__qualname__, args, finds)
        finally:
            self.busy = False

    def _does_more(self, cls: type[Function], given: list[Any]) -> bool:
        """True if backward, or what it may call of what the Function is given, may do more than compute."""
        if has_effects(cls.backward, self.code_run_by):
            return True
        code = getattr(inspect.unwrap(cls.backward), "__code__", None)
        names = {name for part in codes(code) for name in part.co_names} if code is not None else set()
        for x in given:
            if isinstance(x, _CODE):
                if has_effects(x, self.code_run_by):
                    return True
            elif not isinstance(x, (Tensor, type, *PLAIN)):  # an object: a meter, a logger
                of = [n for base in type(x).__mro__ for n, f in vars(base).items() if isinstance(f, types.FunctionType)]
                if callable(x) or not names.isdisjoint(of):
                    return True
        return False


def classes_bound_early() -> list[type[Function]]:
    """All Functions, where `apply` is a built-in that models may hold; else none."""
    if not BUILT_IN:
        return []
    found, todo = [], [Function]
    while todo:
        subclasses = todo.pop().__subclasses__()
        todo += subclasses
        found += [c for c in subclasses if not c.__module__.startswith(_OURS)]
    return found


# What runs round a checkpointed function (use_reentrant=False): the second name is that of torch 2.15.
GENERATOR = "_checkpoint_without_reentrant_generator"
GENERATOR = next(name for name in (f"{GENERATOR}_impl", GENERATOR) if hasattr(checkpoint, name))


def checkpointing_of_capture(note: Callable[[str], None], regions: Regions) -> Callable[..., Iterator[None]]:
    """What replaces `GENERATOR`: it marks a region."""

    def generator(function: Any, *given: Any, **options: Any) -> Iterator[None]:
        if options.get("context_fn", (*given, None, None)[1]) is not checkpoint.noop_context_fn:
            note(
                "context_fn of torch.utils.checkpoint is not followed: all of the region is computed again from its inputs. "
                "Config(activation_memory_budget=...) chooses value by value"
            )
        with regions.enter():
            yield

    return generator


_CHANGES = ("append", "extend", "add", "update", "insert", "pop", "clear", "setdefault")
_TELLS = ("write", "print", "log", "debug", "info", "warning", "warn", "error")


def has_effects(function: Any, code_run_by: CodeRunBy, context: str = "") -> bool:
    """True if a function's code may do more than compute: it assigns to attributes (but for those of the variable called
    `context`), globals or variables of enclosing functions, or calls what changes containers, prints or logs. Functions of
    the user's that it calls may do so, too."""
    code = getattr(function := inspect.unwrap(function), "__code__", None)  # in once_differentiable, custom_bwd
    if code is None:
        return False
    kinds = {kind for part in codes(code) for kind, _ in chains(part)}
    if context and all(base == context for part in codes(code) for base in writes_attributes_of(part)):
        kinds.discard("assigned")
    named = {name for part in codes(code) for name in part.co_names}
    stores, inside = code_run_by(function)
    tells = {name for each in inside for part in codes(each) for name in part.co_names}
    return bool(
        not (_STORED.isdisjoint(kinds) and named.isdisjoint(_CHANGES) and (named | tells).isdisjoint(_TELLS))
        or stores.places
        or stores.containers
    )


_STORED = frozenset(["stored", "freed", "assigned"])
_NUMBERS_OF = ("numpy", "tolist", "item", "data_ptr", "asarray", "array")


def of_rows(code_run_by: CodeRunBy, *functions: Any, context: str = "") -> FindsRows | None:
    """What finds out whether functions compute each row by itself; None for those that do more than compute, may read numbers
    of tensors, by which they could decide, past torch's dispatch, or have no code to look at. Attributes of the argument
    called `context` may be written."""
    for function in functions:
        plain = inspect.unwrap(getattr(function, "__func__", function))
        if not isinstance(plain, types.FunctionType) or has_effects(plain, code_run_by, context):
            return None
        run = {part for each in (plain.__code__, *code_run_by(plain)[1]) for part in codes(each)}
        if not all(set(part.co_names).isdisjoint(_NUMBERS_OF) for part in run):
            return None
    return by_rows


def computed_again(cls: type[Function], args: tuple[Any, ...]) -> Callable[[], Any] | None:
    """A call of the function among the arguments, if the Function computes nothing else, and recomputes it in backward:
    checkpointing that users write themselves (guided-diffusion, latent diffusion). None for other Functions. The Function
    is run once on made-up numbers, with a known function in place of its own, and the gradients are compared."""
    functions = [i for i, x in enumerate(args) if callable(x) and not isinstance(x, (type, Tensor))]
    if len(functions) != 1:
        return None
    calls: list[list[Any]] = []  # its arguments: a number for the tensor at that place of `args`, or what is given
    state = torch.get_rng_state()
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad():
            places = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
            generator = torch.Generator().manual_seed(0)
            values = {
                i: torch.rand(3, generator=generator, dtype=torch.float64).requires_grad_() for i in [*places, -1]
            }

            def stand_in(*given: Any) -> Tensor:
                used = dict(values)  # also those that it is not given, as a module uses its parameters
                calls.append([])
                for x in given:
                    at = next((i for i in places if isinstance(x, Tensor) and torch.equal(x, values[i])), None)
                    calls[-1].append((at, x))
                    if at is not None:
                        used[at] = x
                return torch.stack([(i + 2) * x * x for i, x in used.items()]).sum(0)

            output = cls.apply(*(stand_in if i in functions else values.get(i, x) for i, x in enumerate(args)))
            wanted = torch.stack([(i + 2) * x * x for i, x in values.items()]).sum(0)
            if not isinstance(output, Tensor) or len(calls) != 1 or not torch.equal(output, wanted):
                return None
            output.sum().backward()
            missing = [i for i, x in values.items() if x.grad is None or not torch.allclose(x.grad, 2 * (i + 2) * x)]
    except Exception:  # it is another kind of Function
        return None
    finally:
        torch.set_rng_state(state)
    given = {id(x) for x in args}
    owner = getattr(args[functions[0]], "__self__", args[functions[0]])
    named = isinstance(owner, nn.Module) and all(id(p) in given for p in owner.parameters() if p.requires_grad)
    if len(calls) != 2 or missing not in ([], [-1]) or (missing and not named):  # it may read what has no gradient then
        return None
    return lambda: args[functions[0]](*(x if at is None else args[at] for at, x in calls[0]))


# -- functions of TorchScript


@replacing
def op_by_op(old: Callable[..., Any], /, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of one, not optimised: torch calls the Python function that it was made from where it is asked by a library, as
    this one may be, during an export, and gives a method `self` twice."""
    if torch.is_grad_enabled() and not in_eager_code():
        _refuse_hidden_gradients(self)
    _forget_plans(self)
    try:
        with torch.jit.optimized_execution(False), meanwhile(torch.compiler, _is_exporting_flag=False):
            return old(self, *args, **kwargs)
    finally:
        _forget_plans(self)


def _forget_plans(scripted: Any) -> None:
    """An executor of before profiling (`torch._C._jit_set_profiling_executor(False)`) cannot, and keeps a plan that is not
    optimised beside the others."""
    with contextlib.suppress(RuntimeError):
        scripted._debug_flush_compilation_cache()


def _refuse_hidden_gradients(scripted: Any) -> None:
    """Raise where a trace would not see which gradients there are."""
    if _GRAD_MODE in str(scripted.inlined_graph):
        raise CaptureError(
            f"'{scripted.name}' of torch.jit.script switches gradients off or on inside, of which a trace learns nothing",
            source=current_user_line(),
            fix="call the Python function that it was made from, or use x.detach() in it",
        )
    owner = scripted.owner if isinstance(scripted, torch._C.ScriptMethod) else None
    if owner is not None and any(p.requires_grad for p in torch.jit._recursive.wrap_cpp_module(owner).parameters()):
        raise CaptureError(
            "a module of torch.jit that is no submodule of the model has parameters that are trained",
            source=current_user_line(),
            fix="register the Python module that it was made from as a submodule, or freeze it: p.requires_grad_(False) for "
            "each of its parameters",
        )


_GRAD_MODE = "grad_mode"
