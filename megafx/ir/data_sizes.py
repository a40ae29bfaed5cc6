"""Sizes that the data of a tensor decides: how many rows an expert gets.

torch.export gives such a size an unbacked symbol, on which code cannot branch. In a `Program` it is an ordinary
size with a hint, like those of the inputs: planning, fusing and differentiating need know nothing of it. It is the size of the
result of `megafx.rows` (kernels/nonzero.py), which finds it by its name here, so that running the op on fakes again gives the
same size. Hints are primes above those of capture/dims.py. As with every size, what is traced holds for 0 and 1 too.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ClassVar

import networkx as nx
import sympy
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv

from megafx.ir.source_lines import is_user_file

FIRST_HINT = 127


class DataShapeEnv(ShapeEnv):
    """A ShapeEnv that knows sizes decided by data by name, and assumes while tracing that there are rows.

    Code that asks (`if rows.numel() == 0: continue`) skips work on no rows. That work changes nothing if done on no rows, so a
    graph without the branch computes the same. asked: called at each branch decided by that assumption.

    decided: conditions on sizes that hold in the trace and that the model's code asked about, in order. Those that hold for
    all sizes of at least 2 are in it too, for which ShapeEnv makes no guard.
    """

    model_runs: ClassVar[bool] = False  # one thread traces at a time
    latest: ClassVar[DataShapeEnv | None] = None

    def __init__(self, asked: Callable[[], None] = lambda: None, **options: Any) -> None:
        super().__init__(**options)
        self.asked = asked
        self.decided: dict[sympy.Basic, None] = {}
        self._answers: set[tuple[Any, Any]] = set()  # those that are in `decided`
        self.row_counts: dict[str, torch.SymInt] = {}
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

            hint = FIRST_HINT - 1
            for _ in range(len(self.row_counts) + 1):
                hint = int(sympy.nextprime(hint))
            source = ConstantSource(f"rows_{name}")
            symbol = self.create_symbol(hint, source, DimDynamic.DYNAMIC)
            self.row_counts[name] = self.create_symintnode(symbol, hint=hint, source=source)  # type: ignore[assignment]  # no int
        return self.row_counts[name]

    @classmethod
    @contextlib.contextmanager
    def recording(cls) -> Iterator[None]:
        """While the model's forward runs: what its code asks is kept in `decided`."""
        cls.model_runs = True
        try:
            yield
        finally:
            cls.model_runs = False

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            answer = super().evaluate_expr(orig_expr, *args, **kwargs)
            if self.model_runs:
                self._note_answer(orig_expr, answer)
            return answer
        except GuardOnDataDependentSymNode:
            answer = if_there_are_rows(self.simplify(orig_expr), self.is_unbacked_symint)
            if answer is None:
                raise
            self.asked()
            return sympy.true if answer else sympy.false

    def guard_or_defer_runtime_assert(self, orig_expr: Any, *args: Any, **kwargs: Any) -> bool:  # type: ignore[override]  # torch caches its own
        held = super().guard_or_defer_runtime_assert(orig_expr, *args, **kwargs)
        if self.model_runs:
            self._note_answer(orig_expr, sympy.sympify(bool(held)))
        return held

    def _note_answer(self, question: Any, answer: Any) -> None:
        symbols = getattr(question, "free_symbols", ())
        if not symbols or (question, answer) in self._answers or any(map(self.is_unbacked_symint, symbols)):
            return
        if _asked_by_code():
            self._answers.add((question, answer))
            truth = answer in (sympy.true, sympy.false)
            holds = (question if answer else sympy.Not(question)) if truth else sympy.Eq(question, answer)
            self.decided[holds] = None


def _asked_by_code() -> bool:
    """Whether the model's code, or a function of torch that it calls, asks the question that is being answered.

    Otherwise an op asks, while its result is made up: how it is laid out in memory, whether an operand is broadcast. That
    changes nothing of the graph, nor of the sizes of results, except where an op removes dims of size 1.
    """
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if is_user_file(file):
            return True
        if name in _MAKES_RESULTS and file.endswith(_MAKES_RESULTS[name]):
            return frame.f_locals.get("func") in _REMOVES_DIMS
        frame = frame.f_back
    return True


_MAKES_RESULTS = {"_dispatch_impl": "_subclasses/fake_tensor.py", "proxy_call": "experimental/proxy_tensor.py"}
_REMOVES_DIMS = (torch.ops.aten.squeeze.default, torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims)


def same_rows(shape_env: ShapeEnv) -> dict[sympy.Symbol, sympy.Symbol]:
    """unbacked symbol -> the first that it must be equal to, as ops between values with these numbers of rows demand.

    Two masks that are computed alike have a symbol each, until the rows that they select are added up.
    """
    equal = nx.Graph()
    for demands in shape_env.deferred_runtime_asserts.values():
        for expr in (shape_env.replace(demand.expr) for demand in demands):
            if isinstance(expr, sympy.Eq) and all(s.is_Symbol and shape_env.is_unbacked_symint(s) for s in expr.args):
                equal.add_edge(*expr.args)
    found: dict[sympy.Symbol, sympy.Symbol] = {}
    for group in nx.connected_components(equal):
        first, *others = sorted(group, key=lambda s: (len(s.name), s.name))
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
