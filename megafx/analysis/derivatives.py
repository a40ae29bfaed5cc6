"""Whether the backward that a model writes (`torch.autograd.Function`) is the derivative of its forward.

Three things have to hold on made-up numbers of all magnitudes:

numbers   backward gives what autograd gives for the operations of forward.
types     what backward gives is linear in the gradients that come in, as every derivative is: it type-checks by the sharding
          rules with these gradients partial. A limit on gradients does not, however far it is from the numbers at hand.
sides     each comparison and each limit, of forward or backward, has gone both ways; no size that varies has decided.

What cannot be shown is not assumed: the Function then runs as it is.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import Function
from torch.autograd import grad as differentiate  # a capture replaces torch.autograd.grad
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megafx.errors import PlacementError
from megafx.ir.nodes import is_zero, op_name
from megafx.ir.program import VAL
from megafx.ir.sizes import Sizes
from megafx.ops.eager_probes import MADE_UP, made_up, sizes_decide
from megafx.ops.eager_rows import PROBES, some_are, spread_out
from megafx.placements.types import P, R
from megafx.rules.inference import infer

RTOL = 1e-6  # hand-written derivatives have constants of 8 digits
_NUMBERS = (None, 0.25, 2.0)  # limits and scales are above 0; None: made-up ones, also below
_COMPARISONS = frozenset(["eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "signbit"])
_LIMITS = frozenset(["clamp", "clamp_min", "clamp_max", "minimum", "maximum", "fmin", "fmax", "nan_to_num", "hardtanh"])
_LIMITS |= frozenset(["threshold", "hardshrink", "softshrink"])
_READ = frozenset(["_local_scalar_dense", "equal", "is_nonzero"])  # numbers, by which Python may decide
_LINEAR_IN = {"index": (0,), "masked_select": (0,), "index_put": (0, 2)}  # also by masks, for which there is no rule


def same_gradient(function: type[Function], args: tuple[Any, ...]) -> bool:
    """Whether, for arguments like these, `backward` is the derivative of `forward`."""
    leaves, spec = pytree.tree_flatten(args)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    wanted = [x.requires_grad for x in tensors]
    sides: dict[int, set[bool]] = defaultdict(set)
    compared: set[int] = set()  # integers that integer tensors are compared with
    state = torch.get_rng_state()

    def call(apply: Callable[..., Any], given: Sequence[Tensor]) -> Any:
        torch.manual_seed(0)
        values = iter(given)
        return apply(*pytree.tree_unflatten([next(values) if isinstance(x, Tensor) else x for x in leaves], spec))

    def agree(probe: tuple[Any, ...], seed: int, number: float | None, index: int | None) -> bool:
        spread, of_gradients, zeros, odd = probe
        made = made_up(tensors, MADE_UP[0], seed % 2)  # indices and truth values of both kinds, too
        values = [_single(some_are(spread_out(x, spread, seed), zeros, 0.0), number) for x in made]
        values = [_with_index(x, index) for x in values]
        change = lambda x: some_are(spread_out(x, of_gradients, 1), 3 if odd else None, odd)
        found = []
        typed = _Typed(sides, compared, (seed, number, index) == (0, None, None))
        for typing, apply in ((typed, function.apply), (None, lambda *a: _forward(function, a))):
            inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in values]
            found.append(_gradients(lambda given: call(apply, given), inputs, wanted, change, typing))  # noqa: B023
        return all(_alike(a, b, bool(zeros or odd)) for a, b in zip(*found, strict=True))

    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad():
            numbers = _NUMBERS if any(x.numel() == 1 and x.is_floating_point() for x in tensors) else (None,)
            for (seed, probe), number in itertools.product(enumerate(PROBES), numbers):
                if not agree(probe, seed, number, None):
                    return False
            for index, seed in itertools.product(sorted(compared), (0, 1)):
                try:
                    same = agree(PROBES[0], seed, None, index)
                except (IndexError, RuntimeError):  # it is no index that the code takes
                    continue
                if not same:
                    return False
            if any(seen != {False, True} for seen in sides.values()):
                return False

            def run(given: list[Tensor]) -> None:
                inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in given]
                _gradients(lambda given: call(function.apply, given), inputs, wanted, lambda x: x)

            return not sizes_decide(run, tensors, made_up(tensors, MADE_UP[0], 1))
    except Exception:  # what cannot be run twice like this is left as it is
        return False
    finally:
        torch.set_rng_state(state)


def _single(x: Tensor, number: float | None) -> Tensor:
    return x if number is None or x.numel() != 1 or not x.is_floating_point() else torch.full_like(x, number)


def _with_index(x: Tensor, index: int | None) -> Tensor:
    if index is None or x.is_floating_point() or x.dtype == torch.bool:
        return x
    return torch.where((torch.arange(x.numel()) % 3 == 0).view(x.shape).to(x.device), index, x)


def _alike(a: Tensor, b: Tensor, only_finite: bool) -> bool:
    """Equal gradients, with some room where a derivative goes through zero. only_finite: where others are NaN, a function may
    give numbers of its own."""
    if only_finite:
        a, b = a[a.isfinite()], b[a.isfinite()]
    typical = float(b.abs().nanmedian()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=RTOL, atol=0.1 * RTOL * typical, equal_nan=True)


def _forward(function: Any, args: tuple[Any, ...]) -> Any:
    """The operations of `forward`, as autograd sees them."""
    if function.setup_context is not Function.setup_context:
        return function.forward(*args)
    context = _Context()
    context.needs_input_grad = tuple(isinstance(x, Tensor) and x.requires_grad for x in args)
    return function.forward(context, *args)


class _Context(FunctionCtx):
    """Takes what a forward saves for backward."""

    needs_input_grad: tuple[bool, ...] = ()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def _gradients(
    call: Callable[[list[Tensor]], Any],
    inputs: list[Tensor],
    wanted: list[bool],
    change: Callable[[Tensor], Tensor],
    typed: _Typed | None = None,
) -> list[Tensor]:
    """Gradients of inputs, for gradients of outputs that are random numbers, changed."""
    watched: Callable[[], Any] = contextlib.nullcontext if typed is None else lambda: typed
    with watched():
        output = call(inputs)
    results = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    into = [x for x, want in zip(inputs, wanted, strict=True) if want and x.requires_grad]
    torch.manual_seed(1)
    grads = [change(torch.randn_like(r, dtype=torch.float64)).to(r.dtype) for r in results]
    if typed is not None:
        typed.are_partial(grads)
    with watched():
        found = differentiate(results, into, grads, allow_unused=True)
    if typed is not None:
        typed.check_results(found)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(into, found, strict=True)]


class _NotShown(Exception):
    """An op that no derivative has, or whose rule is not known."""


class _Typed(TorchDispatchMode):
    """Types what runs: partial are the gradients that come in, and what is linear in them. What is neither raises.

    A storage is partial as a whole: views of it are. sides: of the k-th comparison or limit, which ways it has gone.
    """

    def __init__(self, sides: dict[int, set[bool]], compared: set[int], first: bool) -> None:
        """first: of the runs, which all run the same ops, since none reads numbers; the others note sides alone."""
        super().__init__()
        self.sides, self.compared, self.first = sides, compared, first
        self.graph, self.sizes, self.decisions = fx.Graph(), Sizes(), 0
        self.nodes: dict[int, fx.Node] = {}
        self.kept: list[Tensor] = []  # whose ids and storages are keys
        self.partial: set[int] = set()

    def are_partial(self, tensors: Sequence[Tensor]) -> None:
        self.kept += tensors
        self.partial.update(map(_storage, tensors))

    def check_results(self, found: Sequence[Tensor | None]) -> None:
        """What is not linear in the gradients that come in has to be zero."""
        for x in found:
            if self.first and x is not None and _storage(x) not in self.partial and bool(x.any()):
                raise _NotShown

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in _READ:
            raise _NotShown
        if not self.first:
            made = func(*args, **(kwargs or {}))
            self._note_sides(name, args, made)
            return made
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        written = given[0] if func._schema.is_mutable else None
        nodes = {id(x): self._node(x) for x in given}
        was_zero = written is not None and _is_zero(nodes[id(written)])
        made = func(*args, **(kwargs or {}))
        self._note_sides(name, args, made)
        if written is None:
            self._define(func, args, kwargs, nodes, made)
        elif any(_storage(x) in self.partial for x in given) or was_zero:
            self._write(func, args, kwargs, nodes, written, was_zero)
        return made

    def _node(self, x: Tensor) -> fx.Node:
        if id(x) not in self.nodes:
            self.kept.append(x)
            node = self.nodes[id(x)] = self.graph.placeholder(f"x{len(self.kept)}")
            node.meta[VAL] = x
        return self.nodes[id(x)]

    def _typed(
        self, target: Any, args: Any, kwargs: Any, nodes: dict[int, fx.Node], made: Any, views: bool = False
    ) -> tuple[fx.Node, Any]:
        """(the op as a node, what it makes of its operands: P or R, or a tuple of them). views: it makes views of them."""
        node_of = lambda x: nodes[id(x)] if isinstance(x, Tensor) else x
        node = self.graph.call_function(target, *pytree.tree_map(node_of, (tuple(args), kwargs or {})))
        node.meta[VAL] = made
        facts = {n: P for n in nodes.values() if _storage(n.meta[VAL]) in self.partial}
        if views or not facts:
            return node, R
        together = _LINEAR_IN.get(target._schema.name.partition("::")[2])
        if together is not None:
            if not facts.keys() <= {node.args[i] for i in together}:
                raise _NotShown
            if any(node.args[i] not in facts and not _is_zero(node.args[i]) for i in together):
                raise _NotShown
            return node, P
        try:
            return node, infer(node, facts, 2, self.sizes)
        except PlacementError as error:
            raise _NotShown from error

    def _define(self, func: Any, args: Any, kwargs: Any, nodes: dict[int, fx.Node], made: Any) -> None:
        several = isinstance(made, (tuple, list))
        results = made if several else (made,)
        views = {*map(_storage, filter(torch.is_tensor, results))} <= {_storage(n.meta[VAL]) for n in nodes.values()}
        node, found = self._typed(func, args, kwargs, nodes, made, views)
        for x, placement in zip(results, found if isinstance(found, tuple) else (found,) * len(results), strict=True):
            if isinstance(x, Tensor):
                self.kept.append(x)
                if not several:
                    self.nodes[id(x)] = node
                if placement == P:
                    self.partial.add(_storage(x))

    def _write(
        self, func: Any, args: Any, kwargs: Any, nodes: dict[int, fx.Node], written: Tensor, was_zero: bool
    ) -> None:
        """An op that writes its first operand is the op that returns what it would write."""
        at = _storage(written)
        whole = written.numel() * written.element_size() == written.untyped_storage().nbytes()
        name = func._schema.name.partition("::")[2]
        if name == "copy_":
            node, found = nodes[id(args[1])], P if _storage(args[1]) in self.partial else R
        else:
            packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
            if packet is None or not name.endswith("_") or func._overloadname not in packet.overloads():
                raise _NotShown  # out=
            node, found = self._typed(getattr(packet, func._overloadname), args, kwargs, nodes, written)
        if found == P and at not in self.partial and not (whole or was_zero):
            raise _NotShown  # beside other numbers
        if found == R and at in self.partial and not (whole or _is_zero(node)):
            raise _NotShown
        if found == P:
            self.partial.add(at)
        elif whole:
            self.partial.discard(at)
        for key, other in self.nodes.items():  # views of it, too, are what they were no more
            if _storage(other.meta[VAL]) == at:
                self.nodes[key] = self.graph.placeholder(f"x{len(self.kept)}")
                self.nodes[key].meta[VAL] = other.meta[VAL]

    def _note_sides(self, name: str, args: Any, made: Any) -> None:
        if name in _COMPARISONS:
            if len(args) > 1 and type(args[1]) is int and not args[0].is_floating_point():
                self.compared.add(args[1])
            went = made
        elif name in _LIMITS:
            went = made == args[0]
        else:
            return
        self.sides[self.decisions].update(went.unique().tolist())
        self.decisions += 1


def _is_zero(node: fx.Node) -> bool:
    constant = isinstance(node, fx.Node) and op_name(node) == "lift_fresh"
    return is_zero(node) or (constant and node.meta[VAL].numel() == 1 and not bool(node.meta[VAL].any()))


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
