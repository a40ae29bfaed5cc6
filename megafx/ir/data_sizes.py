"""Sizes that the data of a tensor decides: how many rows an expert gets, how many patches an image has.

torch.export gives such a size an unbacked symbol, on which code cannot branch. In a `Program` it is an ordinary
size with a hint, like those of the inputs: planning, fusing and differentiating need know nothing of it. It is the size of
the result of an op (`megafx.rows`, `megafx.length`), which finds it by its name here, so that running the op on fakes again
gives the same size. Hints are primes above those of capture/dims.py, or smaller where the trace relies on relations between
sizes (`u0 + u1 == batch`), which hints have to meet. As with every size, what is traced holds for 0 and 1 too.
"""

from __future__ import annotations

import contextlib
import math
import operator
import random
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, ClassVar

import sympy
import torch
from sympy.core.function import Application
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Min, Mod, PythonMod
from torch.utils._sympy.symbol import SymT, symbol_is_type

from megafx.ir.groups import Groups
from megafx.ir.source_lines import is_user_file
from megafx.meanwhile import meanwhile

FIRST_HINT = 127
_ATTEMPTS, _GREATEST_HINT = 200, 130  # of a search for hints
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
}
_FUNCTIONS |= {"Min": min, "Max": max, "PowByNatural": pow, "FloatPow": pow, "ToFloat": float}
_FUNCTIONS |= {"FloatTrueDiv": operator.truediv, "IntTrueDiv": operator.truediv, "RoundToInt": round}
_FUNCTIONS |= {"CeilToInt": math.ceil, "FloorToInt": math.floor, "TruncToInt": math.trunc}


LARGEST = 2**48  # of sizes that data decides


class DataShapeEnv(ShapeEnv):
    """A ShapeEnv that knows sizes decided by data by name, and assumes while tracing that there are rows.

    Code that asks (`if rows.numel() == 0: continue`) skips work on no rows. That work changes nothing if done on no rows, so a
    graph without the branch computes the same. asked(answer): called at each branch that this would decide; whether it may.

    decided: conditions on sizes that hold in the trace and that the model's code asked about, in order. Those that hold for
    all sizes of at least 2 are in it too, for which ShapeEnv makes no guard. laid_out: those that `x.contiguous()` asked about:
    whether it copies. questions: how often it may have asked. general: numbers of guards whose answer is the one that torch
    goes on with where it cannot know (`guard_or_true`): what follows is right for the other answer, too.

    read: where `reads_sizes`, what sizes were that code needed as numbers (a text, a loop, a logarithm). Elsewhere they stay
    sizes, which data-parallel ranks cut.
    """

    model_runs: ClassVar[bool] = False  # one thread traces at a time
    reads_sizes: ClassVar[bool] = False
    latest: ClassVar[DataShapeEnv | None] = None

    def __init__(self, asked: Callable[[bool], bool] = lambda answer: True, **options: Any) -> None:
        super().__init__(**options)
        self.asked = asked
        self.asked_for: set[sympy.Symbol] = set()  # numbers of rows that the model's code takes for at least one
        self.decided: dict[sympy.Basic, None] = {}
        self.laid_out: dict[sympy.Basic, None] = {}
        self.read: dict[sympy.Basic, None] = {}
        self.questions, self.general = 0, set[int]()
        self._answers: set[tuple[Any, Any]] = set()  # those that are in `decided`
        self.row_counts: dict[str, torch.SymInt] = {}
        self._taken: set[int] = set()
        self.hint_of: dict[str, int] = {}  # of sizes that are not made yet
        self.relied_on: list[sympy.Basic] = []  # see `rely`
        self.traced: dict[sympy.Symbol, sympy.Symbol] = {}  # symbol of a row count -> the unbacked one of the trace
        self._named: dict[sympy.Symbol, sympy.Symbol] = {}  # and back
        self._demanded: list[sympy.Basic] = []
        self._rows_of_slices: dict[sympy.Symbol, sympy.Expr] = {}
        self._equal: list[sympy.Expr] = []  # sums of sizes that are zero
        self._settled: dict[sympy.Expr, sympy.Expr] = {}
        DataShapeEnv.latest = self

    @classmethod
    def end_trace(cls) -> None:
        """Let go of the inputs of the latest trace: torch's caches have these objects as keys, and keep them."""
        if cls.latest is not None and cls.latest.tracked_fakes is not None:
            cls.latest.tracked_fakes.clear()
        cls.latest = None

    def row_count(self, name: str) -> torch.SymInt:
        """The size called `name`: the same at each call."""
        if name not in self.row_counts:
            from torch._dynamo.source import ConstantSource  # export has imported it; importing megafx need not

            hint = self.hint_of.get(name) or int(sympy.nextprime(max([FIRST_HINT - 1, *self._taken])))
            self._taken.add(hint)
            source = ConstantSource(f"rows_{name}")
            symbol = self.create_symbol(hint, source, DimDynamic.DYNAMIC)
            self.row_counts[name] = self.create_symintnode(symbol, hint=hint, source=source)  # type: ignore[assignment]  # no int
        return self.row_counts[name]

    # -- after the trace: sizes get names and hints

    def whole(self, size: Any) -> sympy.Expr:
        """int | SymInt -> its expression in symbols of the trace; x[a:b] has b - a rows."""
        expr = self.replace(size.node.expr) if isinstance(size, torch.SymInt) else sympy.Integer(size)
        return expr.xreplace(self._rows_of_slices)

    def of_data(self, expr: sympy.Expr) -> bool:
        return any(map(self.is_unbacked_symint, expr.free_symbols))

    def demand(self, relations: list[sympy.Basic], rows: dict[sympy.Symbol, sympy.Expr]) -> None:
        """Rely on further relations. rows: symbols, and what they are if these hold."""
        self._demanded += [r for r in relations if r not in (sympy.true, *self._demanded)]
        self._rows_of_slices |= rows

    def rely(self, masks: Collection[sympy.Symbol]) -> None:
        """Note what the trace relies on between sizes that data decides and others: the graph has to check it. masks: numbers
        of rows that masks select; what ops assume of these alone, they check themselves. Hints have to meet it, too."""
        asserts = [a.expr for each in self.deferred_runtime_asserts.values() for a in each]
        found = [self._in_one(e.xreplace(self._rows_of_slices)) for e in (*asserts, *self._demanded)]
        self.relied_on = [
            e for e in dict.fromkeys(found) if self.of_data(e) and not ({*e.args} <= {*masks} or _says_not_negative(e))
        ]
        hints = hints_that_meet(self.relied_on, self.backed_var_to_val)
        self.hint_of |= {str(s): n for s, n in hints.items()}

    def name(self, names: Mapping[sympy.Symbol, str]) -> None:
        """Make symbols of the trace the sizes of these names, where there are such. From here on, sizes that the relations say
        to be equal are one size: `u0 + u1` is `batch`."""
        for symbol, name in sorted(names.items(), key=str):
            if name in self.row_counts:
                self._named[symbol] = self.row_counts[name].node._expr
                self.traced.setdefault(self._named[symbol], symbol)
        for relation in self.relied_on:
            left, right = (self.with_names(side) for side in relation.args)
            if isinstance(relation, sympy.Le):  # then this is the lesser one
                left, right = Min(left, right), left
            elif not isinstance(relation, sympy.Eq):
                continue
            if left != right and not (left - right).free_symbols.isdisjoint(self.traced):
                self._equal.append(sympy.expand(left - right))
                self._forget()

    def with_names(self, expr: Any, settled: bool = True) -> Any:
        """In symbols with hints in place of those of the trace. settled: and equal sizes are one."""
        found = expr.xreplace(self._named)
        return self.replace(found) if settled else found

    def _forget(self) -> None:
        """What `replace` gives has changed: sizes keep it by torch's number of such changes."""
        self._settled.clear()
        self._replacements_version_counter = getattr(self, "_replacements_version_counter", 0) + 1

    def replace(self, expr: Any) -> Any:  # type: ignore[override]  # torch caches its own
        expr = super().replace(expr)
        if not self._equal or self.traced.keys().isdisjoint(expr.free_symbols):
            return expr
        if expr not in self._settled:
            self._settled[expr] = self._one_size(expr)
        return self._settled[expr]

    def _one_size(self, expr: Any) -> Any:
        if not isinstance(expr, sympy.Expr):
            return expr.func(*map(self.replace, expr.args)) if expr.args else expr
        inner = {f: f.func(*map(self.replace, f.args)) for f in expr.atoms(Application)}
        best = sympy.expand(expr.xreplace(inner))
        while True:  # each is zero: adding a multiple of it changes nothing
            terms = best.as_coefficients_dict()
            others = [
                sympy.expand(best - terms[term] / factor * zero)
                for zero in self._equal
                for term, factor in zero.as_coefficients_dict().items()
                if term in terms and term.free_symbols
            ]
            other = min(others, key=self._length, default=best)
            if self._length(other) >= self._length(best):
                return expr if best == sympy.expand(expr) else best
            best = other

    def _length(self, expr: sympy.Expr) -> tuple[Any, ...]:
        of_data = expr.free_symbols & self.traced.keys()
        rounded = sum(not f.free_symbols.isdisjoint(of_data) for f in expr.atoms(Application))
        return rounded, len(sympy.Add.make_args(expr)), len(of_data), expr.count_ops(), str(expr)

    def _without_guard(self, question: Any) -> sympy.Basic | None:
        """The answer to a question about sizes of data: as in the trace, else by the hints. A guard would fix a size."""
        answer = self._maybe_evaluate_static(question.xreplace(self.traced))
        if answer is not None:
            return answer
        # equal hints are an accident
        if isinstance(question, (sympy.Eq, sympy.Ne)) and not question.has(Mod, PythonMod):
            return sympy.sympify(isinstance(question, sympy.Ne))
        answer = question.xreplace({s: sympy.Integer(n) for s, n in self.backed_var_to_val.items()})
        return answer if answer in (sympy.true, sympy.false) else None

    @classmethod
    def recording(cls, reads_sizes: bool = False) -> contextlib.AbstractContextManager[None]:
        """While the model's forward runs: what its code asks is kept in `decided`."""
        return meanwhile(cls, model_runs=True, reads_sizes=reads_sizes)

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        if self.traced and not self.traced.keys().isdisjoint(getattr(orig_expr, "free_symbols", ())):
            known = self._without_guard(orig_expr)
            if known is not None:
                return known
        if self.reads_sizes and (value := self._read(orig_expr)) is not None:
            return value
        try:
            known, answer = len(self.guards), super().evaluate_expr(orig_expr, *args, **kwargs)
            if (general := kwargs.get("fallback_value")) is not None and bool(answer) == general:
                self.general.update(range(known, len(self.guards)))
            if self.model_runs:
                self._note_answer(orig_expr, answer)
            return answer
        except GuardOnDataDependentSymNode:
            if isinstance(orig_expr, sympy.Eq) and 1 not in orig_expr.args and _copies():
                return sympy.sympify(self.guard_or_defer_runtime_assert(orig_expr, "rows of copy_"))
            answer = if_there_are_rows(self.simplify(orig_expr), self.is_unbacked_symint)
            if answer is None or not self.asked(answer):
                raise
            if _asked_by() is not None:
                self.asked_for |= orig_expr.free_symbols
            return sympy.true if answer else sympy.false

    def _read(self, asked: Any) -> Any:
        """What a number made of sizes is in this trace, or that a size is this number, where the model's code asks; None for
        other questions."""
        symbols = getattr(asked, "free_symbols", ())
        if not symbols or not symbols <= self.backed_var_to_val.keys() or _asked_by() != "":
            return None
        sizes = {s: sympy.Integer(self.backed_var_to_val[s]) for s in symbols}
        value = asked.xreplace(sizes)
        if not isinstance(asked, sympy.Expr) and (len(symbols) > 1 or (type(asked), value) not in _FIXES_A_SIZE):
            return None
        self.read |= dict.fromkeys(sympy.Eq(s, n) for s, n in sizes.items())
        return value

    def _in_one(self, relation: sympy.Basic) -> sympy.Basic:
        """With one size for all equal ones; unchanged where it makes a size a number, and so must be checked."""
        replaced = super().replace(relation)
        return replaced if replaced.free_symbols else relation

    def make_one(self, equal: sympy.Eq) -> None:
        """Sizes that are found to be equal are one size from here on. Of rows * (s0 + 1) == rows * s1 torch solves for the
        largest symbol alone, and then knows nothing of s0 and s1."""
        left, right = equal.args
        if not equal.has(FloorDiv, Mod, PythonMod):
            for size in left.free_symbols & right.free_symbols:
                while all(x.subs(size, 0) == 0 for x in (left, right)):
                    left, right = (sympy.expand(x / size) for x in (left, right))
        relation = sympy.Eq(left, right)
        if isinstance(relation, sympy.Eq) and not (left.is_number or right.is_number):  # which would not be checked
            self._maybe_guard_rel(relation)

    def _constrain_range_for_size(self, a: sympy.Symbol, min: int | None = None, max: int | None = None) -> None:
        """torch solves equations such as u0 == 4 * s1 in floats, in which its own bound of sizes, 2**63 - 2, is 2**63."""
        super()._constrain_range_for_size(a, min, LARGEST if max is None or max > LARGEST else max)

    def guard_or_defer_runtime_assert(self, orig_expr: Any, *args: Any, **kwargs: Any) -> bool:  # type: ignore[override]  # torch caches its own
        held = super().guard_or_defer_runtime_assert(orig_expr, *args, **kwargs)
        # torch 2.11 has those of numbers with fractions there, too
        if without_size := self.deferred_runtime_asserts.pop(None, None):
            for each in without_size:
                fractions = [s for s in each.expr.free_symbols if symbol_is_type(s, SymT.UNBACKED_FLOAT)]
                of = max(fractions, key=lambda s: (len(s.name), s.name), default=None)
                self.deferred_runtime_asserts.setdefault(of, []).append(each)
        if self.model_runs:
            self._note_answer(orig_expr, sympy.sympify(bool(held)))
        return held

    def _note_answer(self, question: Any, answer: Any) -> None:
        symbols = getattr(question, "free_symbols", ())
        if not symbols or any(map(self.is_unbacked_symint, symbols)):
            return
        if (question, answer) in self._answers:
            self.questions += 1
        elif (by := _asked_by()) is not None:
            self.questions += 1
            if by is not _CONTIGUOUS:  # another may ask the same
                self._answers.add((question, answer))
            truth = answer in (sympy.true, sympy.false)
            holds = (question if answer else sympy.Not(question)) if truth else sympy.Eq(question, answer)
            (self.laid_out if by is _CONTIGUOUS else self.decided)[holds] = None


def _asked_by() -> Any:
    """Who asks the question that is being answered: `_CONTIGUOUS` for that method, "" for all other code of the model.

    None where an op asks, while its result is made up: how it is laid out in memory, whether an operand is broadcast. That
    changes nothing of the graph, nor of the sizes of results, except where an op removes dims of size 1.
    """
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if is_user_file(file):
            return ""
        if name in _MAKES_RESULTS and file.endswith(_MAKES_RESULTS[name]):
            return "" if frame.f_locals.get("func") in _REMOVES_DIMS else None
        if name == "__torch_function__" and frame.f_locals.get("func") is _CONTIGUOUS:
            return _CONTIGUOUS
        frame = frame.f_back
    return ""


def _copies() -> bool:
    """True if `x.copy_(y)` or `x[a:b] = y` asks. Torch 2.11 asks whether the sizes are equal; later ones leave that to the run,
    as all other ops do."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if frame.f_code.co_name == "meta_copy_" or frame.f_locals.get("func") is torch.Tensor.__setitem__:
            return True
        frame = frame.f_back
    return False


_FIXES_A_SIZE = ((sympy.Eq, sympy.true), (sympy.Ne, sympy.false))
_CONTIGUOUS = torch.Tensor.contiguous
_MAKES_RESULTS = {"_dispatch_impl": "_subclasses/fake_tensor.py", "proxy_call": "experimental/proxy_tensor.py"}
_REMOVES_DIMS = (torch.ops.aten.squeeze.default, torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims)


def _says_not_negative(relation: sympy.Basic) -> bool:
    return isinstance(relation, sympy.Le) and relation.lhs == 0 and relation.rhs.is_Symbol


def size_named(operand: torch.Tensor, name: str) -> Any:
    """The size called `name` where `operand` is a fake of a program; a new one for other fakes."""
    env = getattr(getattr(operand, "fake_mode", None), "shape_env", None)
    return env.row_count(name) if isinstance(env, DataShapeEnv) else torch.library.get_ctx().new_dynamic_size()


def same_rows(shape_env: ShapeEnv) -> dict[sympy.Symbol, sympy.Symbol]:
    """unbacked symbol -> the first that it must be equal to, as ops between values with these numbers of rows demand.

    Two masks that are computed alike have a symbol each, until the rows that they select are added up.
    """
    equal: Groups[sympy.Symbol] = Groups()
    for demands in shape_env.deferred_runtime_asserts.values():
        for expr in (shape_env.replace(demand.expr) for demand in demands):
            if isinstance(expr, sympy.Eq) and all(s.is_Symbol and shape_env.is_unbacked_symint(s) for s in expr.args):
                equal.join(*expr.args)
    found: dict[sympy.Symbol, sympy.Symbol] = {}
    for group in equal.all():
        first, *others = sorted_by_name(group)
        found |= dict.fromkeys(others, first)
    return found


def if_there_are_rows(question: Any, from_data: Callable[[sympy.Symbol], bool]) -> bool | None:
    """Result of a comparison with a number of rows if it is the same for all numbers but 0; else None."""
    if not isinstance(question, sympy.core.relational.Relational) or len(question.free_symbols) != 1:
        return None
    (rows,) = question.free_symbols
    difference = sympy.expand(question.lhs - question.rhs)
    if not from_data(rows) or not difference.is_polynomial(rows) or sympy.degree(difference, rows) != 1:
        return None
    equal = -difference.coeff(rows, 0) / difference.coeff(rows, 1)  # the number for which the two sides are equal
    if isinstance(question, (sympy.Eq, sympy.Ne)):
        one_answer = equal < 1 or not equal.is_Integer
    else:
        first, last = (bool(question.subs(rows, n)) for n in (1, sympy.Max(sympy.ceiling(equal), 1) + 1))
        one_answer = first == last
    return bool(question.subs(rows, 1)) if one_answer else None


def hints_that_meet(relations: Sequence[sympy.Basic], known: Mapping[sympy.Symbol, int]) -> dict[sympy.Symbol, int]:
    """A value for each symbol that is not known, so that all relations hold; those for which none is found are left out.

    Where `a <= b` is one of them, b - a is a size, too: at least 2, if that is possible.
    """
    together: Groups[sympy.Symbol] = Groups()
    for relation in relations:
        unknown = sorted_by_name(relation.free_symbols - known.keys())
        if unknown:
            together.join(*unknown)
    found: dict[sympy.Symbol, int] = {}
    for group in map(sorted_by_name, together.all()):
        theirs = [
            r.xreplace({s: sympy.Integer(n) for s, n in known.items()}) for r in relations if r.free_symbols & {*group}
        ]
        apart = [sympy.Le(r.lhs + 2, r.rhs) if isinstance(r, sympy.Le) else r for r in theirs]
        found |= _values(group, apart) or _values(group, theirs) or {}
    return found


def sorted_by_name(symbols: Iterable[sympy.Symbol]) -> list[sympy.Symbol]:
    return sorted(symbols, key=lambda s: (len(s.name), s.name))


def _values(symbols: list[sympy.Symbol], relations: list[sympy.Basic]) -> dict[sympy.Symbol, int] | None:
    """By chance: random values for all but one, and all for that one; of at least 2, for torch takes 1 for a constant."""
    holds = sympy.lambdify(symbols, sympy.And(*relations, evaluate=False), modules=[_FUNCTIONS, "math"])
    draw = random.Random(0)
    for attempt in range(_ATTEMPTS):
        values = [draw.randint(2, 3 + attempt // 10) for _ in symbols]
        at = draw.randrange(len(symbols))
        for value in range(_GREATEST_HINT, 1, -1):
            values[at] = value
            if holds(*values):
                return dict(zip(symbols, values, strict=True))
    return None
