"""Capture of a call, with the parts that cannot be traced left eager (`Config(uncaptured="eager")`).

Where code decides by the data of a tensor, the smallest part that holds that line is left eager, and the call is captured
again: a function that forward calls, if it only keeps books (capture/eager_parts.py), else the smallest submodule whose
call holds the line. That becomes an eager module (ops/eager_call.py), as if `Config(eager_modules=...)` named it, with those
of other layers that run the same code. The choice follows from the error alone, so that all ranks make the same. A line in the
model's own forward stays an error, as does what eager code could not do either: random numbers of Python or numpy, the clock,
files (capture/reads.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any

import sympy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from megafx.capture.conversions import Converting
from megafx.capture.dims import Traced
from megafx.capture.eager_parts import NotAlone, functions_on_line
from megafx.capture.export import capture_call
from megafx.config import Config
from megafx.errors import CaptureError, MegafxError
from megafx.ir.data_sizes import DataShapeEnv
from megafx.ir.nodes import NUMBERS
from megafx.ir.program import VAL, Note, Program
from megafx.ops.eager_call import matching
from megafx.passes.canonicalize.canonicalize import canonicalize_program
from megafx.planner.plan import INDEX
from megafx.units import bytes_text

LARGE = 0.1  # a share of the parameters from which a warning says so


class Uncaptured:
    """The parts of one model that could not be captured so far. reasons: FQN -> the error of each."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        self.model, self.config = model, config
        self.reasons: dict[str, CaptureError] = {}
        self.functions: dict[CodeType, CaptureError] = {}  # code of functions that are left eager
        self.refused: set[CodeType] = set()  # and of those that cannot be
        self.converting = Converting()
        self.earlier: dict[Hashable, Traced] = {}  # how captures went, see `capture_call`
        self.scaled = False  # see `Probes` of ops/eager_probes.py

    @property
    def eager(self) -> tuple[str, ...]:
        """Globs of all modules that are left eager."""
        return (*self.config.eager_modules, *self.reasons)

    def capture(self, *args: Any, **options: Any) -> Program:
        """As `capture_call`, of this model. Where a part that is left eager fails, too, the error is the one before, with a
        note."""
        before, functions, part = dict(self.reasons), dict(self.functions), str(options.get("part", ""))
        while True:
            try:
                options |= {"eager": self.eager, "functions": tuple(self.functions), "scaled": self.scaled}
                options["converting"] = self.converting
                self.converting.numbered.clear()
                program = capture_call(self.model, *args, earlier=self.earlier, **options)
                if "batch" not in program.sizes.symbols and self._keeps_batch(options):
                    continue
                _refuse_what_canonicalize_does(program)
                break
            except NotAlone as error:
                self.functions.pop(error.code, None)
                self.refused.add(error.code)
            except MegafxError as error:
                if isinstance(error, CaptureError) and (
                    self._converts(error) or self._keeps_batch(options) or self._leaves(error, part)
                ):
                    continue
                new, self.reasons, self.functions = self.reasons, before, functions
                inside = [n for n in new if n not in before and f"{error.module or ''}.".startswith(f"{n}.")]
                if not inside:
                    raise
                reason = new[inside[0]]
                reason.add_note(f"Left eager it fails, too: {error}")
                raise reason from None
        self._warn([name for name in self.reasons if name not in before])
        for name, found in self.reasons.items():
            self._note(program, name, found)
        for code, found in self.functions.items():
            self._note(program, code.co_qualname, found)
        return program

    def _keeps_batch(self, options: Mapping[str, Any]) -> bool:
        """True if the model is to be traced once more as data-parallel ranks cut its batch, which code has made a number."""
        if int(options.get("data_ranks", 1)) == 1 or not self.converting.keep_sizes():
            return False
        self.earlier.clear()  # by it the size would be fixed again
        return True

    def _converts(self, error: CaptureError) -> bool:
        """True if one more code is traced with `float`, `int` and `bool` of tensors as `.item()`."""
        code = error.converts
        if code is None or code in self.converting.codes:
            return False
        error.__traceback__ = error.__context__ = None  # it holds all that was traced
        self.converting.codes[code] = False
        return True

    def _leaves(self, error: CaptureError, part: str) -> bool:
        """True if one more module is left eager for this error. part: the submodule that is captured instead of the model."""
        name = error.part
        if self.config.uncaptured != "eager":
            return False
        on_line = functions_on_line(self.model.get_submodule(name), error.source) if name else ()
        for code in error.functions or on_line:
            if code not in self.functions and code not in self.refused:
                error.__traceback__ = error.__context__ = None  # it holds all that was traced
                self.functions[code] = error
                return True
        if self.functions and not self.scaled and not error.functions:  # the graph refuses sizes: perhaps those of one
            self.scaled = True
            return True
        if not name or name == part or name in self.reasons:
            return False
        if name in matching(self.model, self.config.eager_modules) or f"{part}.".startswith(f"{name}."):
            return False
        error.__traceback__ = error.__context__ = None  # it holds all that was traced
        numbered, kind = INDEX.sub(".*", name), type(self.model.get_submodule(name))
        for other, module in self.model.named_modules():  # the same line of other layers
            if type(module) is kind and INDEX.sub(".*", other) == numbered:
                self.reasons.setdefault(other, error)
        return True

    def _share(self, names: Iterable[str]) -> float:
        """Of the model's parameters."""
        numel = lambda modules: sum({id(p): p.numel() for m in modules for p in m.parameters()}.values())
        return numel(map(self.model.get_submodule, names)) / max(numel([self.model]), 1)

    def _warn(self, names: Sequence[str]) -> None:
        if (share := self._share(names)) >= LARGE:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            warnings.warn(
                f"megafx cannot capture '{names[0]}'{more}, with {share:.1%} of the model's parameters: this code is left "
                f"eager, each rank stores these whole and computes all of it. {self.reasons[names[0]]}",
                stacklevel=2,
            )

    def _note(self, program: Program, name: str, error: CaptureError) -> None:
        calls = [n for n in program.graph.nodes if n.target is torch.ops.megafx.eager_call.default]
        calls = [n for n in calls if str(n.args[4]).rpartition("@")[0] == name]
        if not calls:
            return
        parameters = {node for node, spec in program.input_nodes() if spec.kind == "param"}
        tensors = [x.meta[VAL] for n in calls for x in n.args[0] if x not in parameters]
        given = sum(_numel(program, x) * x.element_size() for x in tensors)
        text = (
            f"not captured: {error.found}; its code runs in each call, on {bytes_text(given)} that are gathered where ranks "
            "hold shards of it; every rank computes all of it"
        )
        if name in self.reasons:
            text += f", and stores all of its parameters ({self._share([name]):.1%} of the model's)"
            program.notes.append(Note("eager", text, name, error.source))
        else:
            program.notes.append(Note("eager", f"the function {name} is {text}", error.module or "", error.source))


def _numel(program: Program, x: torch.Tensor) -> int:
    """At the sizes of the call; sizes that data decides count as their hints."""
    count: Any = 1
    for size in x.shape:
        if isinstance(size, torch.SymInt):
            expr = sympy.sympify(size.node.expr).subs(program.sizes.of_call)
            size = int(expr) if expr.is_Integer else 128
        count *= size
    return int(count)


def _refuse_what_canonicalize_does(program: Program) -> None:
    """Raise its CaptureError now, where the graph has values that data decides."""
    env = program.fake_mode.shape_env

    def by_data(x: Any) -> bool:
        return isinstance(env, DataShapeEnv) and any(
            isinstance(n, torch.SymInt) and env.of_data(n.node.expr)
            for n in (x.shape if isinstance(x, torch.Tensor) else (x,))
        )

    for node in program.graph.nodes:
        if node.target in NUMBERS or any(map(by_data, pytree.tree_leaves(node.meta.get(VAL)))):
            canonicalize_program(program.copy())
            return


def capture(model: nn.Module, config: Config, *args: Any, **options: Any) -> Program:
    """`Uncaptured.capture` of a model that is captured once."""
    return Uncaptured(model, config).capture(*args, **options)
