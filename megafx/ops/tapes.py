"""Code of the user's that runs inside of a graph, once a call, and is differentiated by autograd.

A graph runs without autograd. Around such code autograd is on: the code gets tensors of its own, and what it returns hangs on
these. That is a tape. It waits for backward under a handle, a tensor that the graph keeps as it keeps other values, and is
dropped with it.

Code may also keep what it got (a hook that records activations), and the user may compute a loss with that. So the tensors
that it gets hang on the call: `anchor` is a tensor whose gradient function runs the backward graph. Autograd runs that function
last, and what has come back to the tensors by then is added to their gradients. A tape is cut where such a hook sees a value
inside of the code: what the hook keeps hangs on the call alone, and the code goes on from a leaf.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from megafx.errors import UsageError, UsageRuntimeError

_AUTOGRAD = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")


class Returned:
    """Gradients that have come back to the tensors that code was given, other than from what it returned.

    inside: whether the gradient of what it returned is being computed.
    """

    def __init__(self, count: int) -> None:
        self.gradients: list[Tensor | None] = [None] * count
        self.inside = False

    def add(self) -> int:
        self.gradients.append(None)
        return len(self.gradients) - 1

    def take(self) -> list[Tensor | None]:
        found, self.gradients = self.gradients, [None] * len(self.gradients)
        return found


@dataclass
class Tape:
    """leaves: of the tensors that code was given, then those of `cuts`: values in it that hooks see, in order. results: what it
    returned, differentiable."""

    leaves: list[Tensor]
    results: list[Tensor]
    returned: Returned
    cuts: list[Tensor]


@dataclass
class Running:
    """One run of a forward graph, and its backward."""

    anchor: Tensor | None = None  # None where nothing is differentiated
    ranks: int = 1
    returned: list[Returned] = field(default_factory=list)
    waiting: dict[Any, list[Any]] = field(default_factory=dict)  # what a node leaves for a later one
    tangents: set[str] = field(default_factory=set)  # names of the outputs that bring a gradient
    results: Mapping[str, Sequence[Sequence[Any]]] = field(default_factory=dict)  # as `Reached.results`
    # key of a call -> which of its tensors have got a gradient
    used: dict[str, set[int]] = field(default_factory=dict)
    # what has begun, and is called where the run fails (hook_call.py)
    open: dict[Any, Any] = field(default_factory=dict)
    # (FQN, results or gradients of a module that is left eager, whether results) -> those of all ranks
    agree: Callable[[str, list[Tensor], bool], list[Tensor]] | None = None
    writes: bool = False  # whether modules that are left eager change their own buffers
    read: frozenset[str] = frozenset()  # FQNs of those that the graph reads
    wrote: list[str] = field(default_factory=list)  # of those that were changed
    own: frozenset[int] = frozenset()  # ids of what the graph differentiates with respect to

    def any_of(self, sources: Sequence[Any]) -> bool:
        """True if a gradient comes from one of these (ir/program.py: Source)."""
        return any(s in self.tangents if isinstance(s, str) else s[1] in self.used.get(s[0], ()) for s in sources)

    def comes_to(self, key: str, result: int) -> bool:
        """True if that result of a call gets a gradient, False if it gets zeros in place of none."""
        return key not in self.results or self.any_of(self.results[key][result])


_tapes: dict[int, Tape] = {}
_numbers = itertools.count()
_here = threading.local()


def current() -> Running:
    """The run of a graph that this thread is in; one for all that is no call of a model (the simulator's)."""
    if not hasattr(_here, "running"):
        _here.running = Running()
    found: Running = _here.running
    return found


@contextlib.contextmanager
def running(run: Running) -> Iterator[None]:
    """Within, code that the graph calls belongs to this run."""
    before, _here.running = current(), run
    try:
        yield
    except Exception:  # whatever it is, it is raised on: backwards that wait for this run must end
        while run.open:
            run.open.popitem()[1].fail()
        raise
    finally:
        _here.running = before


class _Given(Function):
    """A tensor as code gets it: connected to the call, and to the leaf of its tape."""

    @staticmethod
    def forward(ctx: Any, returned: Returned, index: int, anchor: Tensor | None, leaf: Tensor, copy: bool) -> Tensor:
        ctx.returned, ctx.index = returned, index
        ctx.set_materialize_grads(False)
        return leaf.clone() if copy else leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        returned: Returned = ctx.returned
        if returned.inside:
            return None, None, None, gradient, None
        if gradient is not None:
            before = returned.gradients[ctx.index]
            returned.gradients[ctx.index] = gradient if before is None else before + gradient
        return None, None, None, None, None


@contextlib.contextmanager
def autograd_on() -> Iterator[None]:
    """Autograd on: an operator's implementation runs below it."""
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        exclude = exclude - torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    include = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def record(
    code: Callable[[list[Tensor]], Any], tensors: Sequence[Tensor], wanted: Sequence[bool], *, copy: bool, fqn: str
) -> tuple[Any, list[Tensor], Tensor]:
    """(what code(tensors) returns, the tensors in it, the handle of its tape).

    wanted: which tensors require a gradient. copy: the code gets copies: it may keep them, and write into them. fqn: of the
    module, for messages.
    """
    run = current()
    returned = Returned(len(tensors))
    differentiated = any(wanted)
    versions = [x._version for x in tensors if not x.is_inference()]
    cuts: list[Tensor] = []
    off = torch.no_grad()  # which code may switch on, to differentiate; not so in inference mode
    recording = contextlib.nullcontext() if torch.is_inference_mode_enabled() else autograd_on()
    with recording, contextlib.nullcontext() if differentiated else off:
        leaves = [x.detach().requires_grad_(needs) for x, needs in zip(tensors, wanted, strict=True)]
        given = [
            _Given.apply(returned, i, run.anchor, x, copy) if x.requires_grad else x.clone() if copy else x
            for i, x in enumerate(leaves)
        ]
        with _cutting(leaves, cuts, returned, run.anchor) if differentiated and not copy else contextlib.nullcontext():
            output = code(given)
    if versions != [x._version for x in tensors if not x.is_inference()]:
        raise UsageError(
            "a module that is left eager writes into one of its inputs",
            module=fqn,
            fix="let it write into a copy (`x = x.clone()`); if it fills its parameters by the first batch, call the model "
            "once on a batch before megafx.parallelize",
        )
    results = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
    if not differentiated:
        return output, results, torch.tensor(-1)
    if any(id(x) in run.own for x in _outside([*results, *cuts], leaves)):
        raise UsageError(
            "a hook, or a module that stays eager, computes with a parameter of the model that it is not given",
            module=fqn,
            fix="read it by its name (`output + model.steering`) in a hook that only computes: that is part of the graph; "
            "pass it to a module as an argument; or use parameter.detach(), where it needs no gradient",
        )
    number = next(_numbers)
    _tapes[number] = Tape(leaves, results, returned, cuts)
    run.returned.append(returned)
    memory = array.array("q", [number])
    weakref.finalize(memory, _tapes.pop, number, None)
    return output, results, torch.frombuffer(memory, dtype=torch.int64).reshape(())


def is_handle(x: Any) -> bool:
    """True if x is the handle of a tape: hooks on what autograd saves get none."""
    return (
        isinstance(x, Tensor)
        and x.dim() == 0
        and x.dtype == torch.int64
        and x.device.type == "cpu"
        and int(x) in _tapes
    )


def gradients(
    handle: Tensor,
    grads: Sequence[Tensor],
    of: Sequence[int],
    wanted: Sequence[int],
    within: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> list[Tensor | None]:
    """Gradients of the tensors `wanted` that code was given, for `grads` of those of its results that `of` names. within():
    is entered while the code's backward runs."""
    tape = _tapes.get(int(handle))
    if tape is None:
        return [None] * len(wanted)
    pairs = [(tape.results[i], g) for i, g in zip(of, grads, strict=True) if tape.results[i].requires_grad]
    more = tape.returned.take()
    given = len(tape.leaves) - len(tape.cuts)
    into = [tape.leaves[i] for i in wanted if tape.leaves[i].requires_grad] + tape.leaves[given:]
    inputs = [*into, *_outside([*(r for r, _ in pairs), *tape.cuts], tape.leaves)]
    keep = torch._C._current_graph_task_id() != -1 and torch._C._autograd._get_current_graph_task_keep_graph()

    def gradient(i: int) -> Tensor | None:
        extra, found = more[i], tape.leaves[i].grad
        return found if extra is None else extra if found is None else found + extra

    for leaf in tape.leaves:
        leaf.grad = None
    tape.returned.inside = True
    try:
        with autograd_on(), within():
            if pairs and inputs:
                results = [r for r, _ in pairs]
                retain = keep or bool(tape.cuts)
                torch.autograd.backward(results, [g for _, g in pairs], retain_graph=retain, inputs=inputs)
            for i, cut in reversed([*enumerate(tape.cuts, given)]):
                if (of_cut := gradient(i)) is not None:
                    torch.autograd.backward(cut, of_cut, retain_graph=keep or i > given, inputs=inputs)
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
        raise UsageRuntimeError(
            "a loss depends on a value that a hook, or a module that stays eager, has kept beside what it returned: backward "
            "of the one has freed what the other needs",
            fix="call backward(retain_graph=True), or return the value from the model's forward",
        ) from error
    finally:
        tape.returned.inside = False
    found = [gradient(i) for i in wanted]
    for leaf in tape.leaves:
        leaf.grad = None
    return found


@contextlib.contextmanager
def _cutting(leaves: list[Tensor], cuts: list[Tensor], returned: Returned, anchor: Tensor | None) -> Iterator[None]:
    """Within, what forward hooks of modules see is cut, and noted."""
    thread = threading.get_ident()

    def seen(hooks: str, module: nn.Module, values: Any) -> Any:
        others = getattr(torch_module, f"_global{hooks}")
        if (
            threading.get_ident() != thread
            or not torch.is_grad_enabled()
            or len(others) + len(getattr(module, hooks)) < 2
        ):
            return None
        return _cut(values, leaves, cuts, returned, anchor)

    handles = [
        torch_module.register_module_forward_pre_hook(lambda module, args: seen("_forward_pre_hooks", module, args)),
        torch_module.register_module_forward_hook(lambda module, _, output: seen("_forward_hooks", module, output)),
    ]
    tables: list[Any] = [torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks]
    for table, handle in zip(tables, handles, strict=True):
        table.move_to_end(handle.id, last=False)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cut(x: Any, leaves: list[Tensor], cuts: list[Tensor], returned: Returned, anchor: Tensor | None) -> Any:
    if isinstance(x, tuple) and type(x) is tuple:
        return tuple(_cut(y, leaves, cuts, returned, anchor) for y in x)
    if not isinstance(x, Tensor) or not x.requires_grad or isinstance(x.grad_fn, _Given._backward_cls):
        return x
    cuts.append(x)
    leaves.append(x.detach().requires_grad_())
    return _Given.apply(returned, returned.add(), anchor, leaves[-1], False)


def _outside(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Leaves other than the tape's own that the results depend on: tensors of the user's that require a gradient."""
    own, seen, found = {id(x) for x in leaves}, set[Any](), list[Tensor]()
    todo = [r.grad_fn for r in results]
    while todo:
        function = todo.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        variable = getattr(function, "variable", None)
        if variable is not None and id(variable) not in own:
            found.append(variable)
        if not isinstance(function, _Given._backward_cls):  # beyond is the call
            todo += [f for f, _ in function.next_functions]
    return found


def check_all_taken(returned: Sequence[Returned]) -> None:
    """Raise where gradients came back to a tensor that the backward graph has no place for."""
    if any(g is not None for each in returned for g in each.gradients):
        for each in returned:
            each.take()
        raise UsageError(
            "a loss depends on what a hook recorded in a part of the model that no output of the call depends on: its gradient "
            "would be lost",
            fix="return the recorded value from the model's forward, or record it with detach()",
        )
