"""Which code that stays eager computes each row by itself, forward and backward: data-parallel ranks run it on their own rows.

Shown by runs on made-up inputs of all magnitudes: on all rows, and on parts of them. What the parts give and what comes back
to their rows is joined; what comes back to a tensor that all parts read (a weight) is added up. Both have to be what the whole
gave. Code that reads a number of a tensor decides by it, and is never by rows. Neither is code that uses for rows what it makes
of all of them. The ops that it runs on a call are compared with these (`ByRows.ops`): what it reads elsewhere may have changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad as differentiate  # a capture replaces torch.autograd.grad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from megafx.ops.eager_call import ByRows, EagerCall, OpsRun, ResultSize
from megafx.ops.eager_probes import made_up, sizes_decide

RTOL = 1e-9
_SIZES = (59, 61, 67, 71, 73, 79, 83)  # of the symbols of made-up inputs
_PARTS = ((1, 23), (20, 20))  # the first of three parts
# (spread of values, that of gradients: powers of e; one value in how many is zero; what one gradient in three is): backward
# may bound gradients, or leave out those that are no numbers, and may differ at zero alone.
PROBES = (
    (0.0, 0.0, None, None),
    (1.0, 0.0, None, None),
    (30.0, 0.0, None, None),
    (0.0, 60.0, None, None),
    (0.0, 0.0, 3, None),
    (0.0, 0.0, 1, None),
    (0.0, 0.0, None, float("nan")),
    (0.0, 0.0, None, float("inf")),
)


class _MixesRows(Exception):
    """A value that was made of all rows comes back to rows."""


class _Watched(OpsRun):
    """Raises where what an op makes of all `rows` is used for rows, which may be right for the numbers at hand alone (a
    threshold)."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.of_all = rows, dict[int, Any]()  # by the address of a storage, which it keeps

    def has_rows(self, x: Tensor) -> bool:
        return any(n and n % self.rows == 0 for n in x.shape)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = super().__torch_dispatch__(func, types, args, kwargs)
        of_all = any(x.untyped_storage()._cdata in self.of_all for x in given)
        for x in pytree.tree_leaves(made):
            if not isinstance(x, Tensor):
                continue
            if of_all and self.has_rows(x):
                raise _MixesRows
            if of_all or (any(map(self.has_rows, given)) and not self.has_rows(x)):
                self.of_all[x.untyped_storage()._cdata] = x.untyped_storage()
        return made


def spread_out(x: Tensor, spread: float, seed: int) -> Tensor:
    """fp64 numbers whose magnitudes lie within e**(-spread) and e**spread of normal ones."""
    if not x.is_floating_point():
        return x
    generator = torch.Generator().manual_seed(seed)
    powers = spread * (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1)
    return x.double().cpu() * powers.exp()


def some_are(x: Tensor, every: int | None, value: Any) -> Tensor:
    """The tensor with `value` at one place in `every`."""
    if every is None or not x.is_floating_point():
        return x
    return torch.where((torch.arange(x.numel()) % every == 0).view(x.shape), value, x)


def by_rows(call: EagerCall, tensors: Sequence[Tensor]) -> ByRows | None:
    """How the call may be run on parts of its rows, along each size that varies; None where it may not be. Sizes of one number
    are taken to be one where the code does not take them otherwise (backward may be the first to bring them together)."""
    if call.random or not all(isinstance(s, ResultSize) for _, sizes in call.results for s in sizes):
        return None
    dims: list[Any] = [d for x in tensors for d in x.shape if isinstance(d, torch.SymInt)]
    plain = {d.node.expr: d.node.hint for d in dims if d.node.expr.is_symbol}
    alike = {e: next(o for o, n in plain.items() if n == hint) for e, hint in plain.items()}
    state = torch.get_rng_state()
    try:
        for same in ({}, alike):
            if (found := _Call(replace(call, autocast=()), tensors, same).by_rows()) is not None:
                return found
    finally:
        torch.set_rng_state(state)
    return None


class _Call:
    """same: symbol -> the one that has its size."""

    def __init__(self, call: EagerCall, tensors: Sequence[Tensor], same: dict[Any, Any]) -> None:
        self.call, self.tensors, self.same = call, tensors, same
        numbers = dict(zip(dict.fromkeys(same.values()), _SIZES, strict=False))
        self.given = {symbol: numbers[other] for symbol, other in same.items() if other in numbers}

    def size(self, d: Any) -> Any:
        expr = d.node.expr if isinstance(d, torch.SymInt) else None
        return self.same.get(expr, expr)

    def size_of_result(self, size: Any) -> Any:
        """That of an input that a dim of a result has."""
        if size.factor != 1 or len(size.dims) != 1:
            return None
        ((i, d),) = size.dims
        return self.size(self.tensors[i].shape[d])

    def by_rows(self) -> ByRows | None:
        inputs = [[self.size(d) for d in x.shape] for x in self.tensors]
        outputs = [[self.size_of_result(d) for d in dims] for _, dims in self.call.results]
        letters: dict[Any, str] = {}
        linear, ops = True, set[str]()
        for number, size in enumerate(dict.fromkeys(s for x in inputs for s in x if s is not None)):
            found = self.along([_only(x, size) for x in inputs], [_only(x, size) for x in outputs])
            if found is not None:
                letters[size] = f"r{number}"
                linear, ops = linear and found[0], ops | found[1]
        if not letters or self.sizes_decide():
            return None
        text = lambda name, dims: " ".join(letters.get(s, f"{name}d{d}!") for d, s in enumerate(dims))
        ins = ", ".join(text(f"x{i}", dims) for i, dims in enumerate(inputs))
        outs = "".join(f"; {text(f'y{i}', dims)}" for i, dims in enumerate(outputs))
        return ByRows(f"nl: {ins} -> *; *{outs}", linear, frozenset(ops))

    def sizes_decide(self) -> bool:
        run = lambda given: _run(self.call, given, None, lambda x: x, set())
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad():
                return sizes_decide(run, self.tensors, made_up(self.tensors, _SIZES, 1, self.given))
        except Exception:  # what does not take tensors without numbers
            return True

    def along(self, places: list[int | None], results: list[int | None]) -> tuple[bool, set[str]] | None:
        """(whether gradients are linear in those that come in, the ops run) where parts along these dims of tensors and of
        results give what the whole gives."""
        if -1 in places or -1 in results or None in results:
            return None
        linear, ran = True, set[str]()
        try:
            for (seed, (spread, of_gradients, zeros, odd)), lengths in itertools.product(enumerate(PROBES), _PARTS):
                with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad():
                    made = made_up(self.tensors, _SIZES, seed % 2, self.given)
                    whole = [some_are(spread_out(x, spread, seed), zeros, 0.0) for x in made]
                    change = lambda x: some_are(spread_out(x, of_gradients, 1), 3 if odd else None, odd)  # noqa: B023
                    total = next(x.shape[d] for x, d in zip(whole, places, strict=True) if d is not None)
                    values, grads, given = _run(self.call, whole, None, change, ran, total)
                    parts, start = [], 0
                    for n in (*lengths, total - sum(lengths)):
                        cut = lambda x, d: x if d is None else x.narrow(d, start, n)  # noqa: B023
                        own = [cut(x, d) for x, d in zip(whole, places, strict=True)]
                        of_own = [cut(g, d) for g, d in zip(given, results, strict=True)]
                        parts.append(_run(self.call, own, of_own, change, ran))
                        start += n
                    joined = [torch.cat([p[0][k] for p in parts], d or 0) for k, d in enumerate(results)]
                    wanted = [d for d, w in zip(places, self.call.wanted, strict=True) if w]
                    into = [
                        torch.stack([p[1][k] for p in parts]).sum(0)
                        if d is None
                        else torch.cat([p[1][k] for p in parts], d)
                        for k, d in enumerate(wanted)
                    ]
                    if not all(map(_same, [*values, *grads], [*joined, *into])):
                        return None
                    for scale in (7.0, 1e-30, 1e30) if not odd else ():
                        scaled = _run(self.call, whole, [g * scale for g in given], change, ran)[1]
                        linear = linear and all(map(_same, scaled, [g * scale for g in grads]))
        except Exception:  # what does not take such inputs
            return None
        return None if not ran.isdisjoint(_READ) else (linear, ran)


_READ = frozenset(["_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "bincount"])


def _only(sizes: list[Any], size: Any) -> int | None:
    """The one dim of this size; None where there is none, -1 where there are several."""
    found = [d for d, other in enumerate(sizes) if other == size]
    return None if not found else found[0] if len(found) == 1 else -1


def _run(
    call: EagerCall,
    given: list[Tensor],
    grads: list[Tensor] | None,
    change: Callable[[Tensor], Tensor],
    ran: set[str],
    rows: int = 0,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(results, gradients of the tensors that want one, those of the results)."""
    inputs = [x.detach().clone().requires_grad_(wants) for x, wants in zip(given, call.wanted, strict=True)]
    watch = _Watched(rows) if rows else OpsRun()
    with watch:
        results = [x for x in pytree.tree_leaves(call.run(inputs)) if isinstance(x, Tensor)]
    if grads is None:
        torch.manual_seed(1)
        grads = [change(torch.randn_like(r, dtype=torch.float64)).to(r.dtype) for r in results]
    pairs = [(r, g) for r, g in zip(results, grads, strict=True) if r.requires_grad]
    into = [x for x in inputs if x.requires_grad]
    with watch:
        found = differentiate([r for r, _ in pairs], into, [g for _, g in pairs], allow_unused=True)
    ran |= watch.names
    return (
        [r.detach() for r in results],
        [torch.zeros_like(x) if g is None else g for x, g in zip(into, found, strict=True)],
        grads,
    )


def _same(a: Tensor, b: Tensor) -> bool:
    finite = b.double().abs()[b.isfinite()]
    atol = 1e-12 * float(finite.median()) if finite.numel() else 0.0
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=RTOL, atol=atol, equal_nan=True)
