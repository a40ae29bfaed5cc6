"""Errors that name the user's module path and source line, what was found, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from types import CodeType


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's own model code: `file:line` and the code on it."""

    file: str
    line: int
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" `{self.code}`" if self.code else "")


class MegafxError(Exception):
    """Base of every error that megafx raises on purpose.

    found: what was found; fix: what to do about it; module: FQN in the user's model; source: the user's line.
    what_to_do: of the class, where an error says nothing else. docs/errors.md lists them all.
    """

    what_to_do = "Make a dump folder (MEGAFX_DUMP) and report it with the output of `megafx version`."

    def __init__(
        self, found: str, *, fix: str = "", module: str | None = None, source: SourceLine | None = None
    ) -> None:
        self.found, self.fix, self.module, self.source = found, fix, module, source
        where = []
        if module is not None:
            where.append(f"in module '{module or '<root>'}'")
        if source is not None:
            where.append(f"at {source}")
        text = found + (f"\n  {' '.join(where)}" if where else "") + (f"\n  fix: {fix}" if fix else "")
        super().__init__(text)


class ConfigError(MegafxError, ValueError):
    """A Config field is out of range, unknown, or contradicts another."""

    what_to_do = "Correct the field; `help(megafx.Config)` lists what each takes."


class CaptureError(MegafxError):
    """The model (or this call of it) cannot be captured as one graph.

    raised: the exception that the model's own code raised while it was traced, if that is what it was.
    """

    raised: Exception | None = None
    what_to_do = "Change the line that is named, or leave its module out of the graph: `Config(eager_modules=[...])`."
    part = ""  # FQN of the smallest submodule whose call holds the line, where it can be left eager
    # of those that its forward has called, and that hold the line, the deepest first
    functions: tuple[CodeType, ...] = ()
    # code whose `float()`, `int()` or `bool()` of a tensor failed (capture/conversions.py)
    converts: CodeType | None = None

    def caught_as(self, kind: type[BaseException]) -> CaptureError:
        """The same error, in a form that `except` catches as it does an error of this class."""
        also = next((ALSO[base] for base in kind.__mro__ if base in ALSO), CaptureError)
        return also(self.found, fix=self.fix, module=self.module, source=self.source)


_BASES = (AttributeError, IndexError, KeyError, NameError, NotImplementedError, RuntimeError, TypeError, ValueError)
ALSO: dict[type[Exception], type[CaptureError]] = {  # what eager mode would raise, too
    base: type(f"Capture{base.__name__}", (CaptureError, base), {"__module__": __name__, "__str__": Exception.__str__})
    for base in _BASES
}
globals().update({kind.__name__: kind for kind in ALSO.values()})  # where pickle looks for them


class PlanError(MegafxError):
    """No plan satisfies the constraints (an override that matches nothing or cannot be met)."""

    what_to_do = "Lift an override, or plan again; `megafx explain` shows what is possible."


class PlacementError(MegafxError):
    """The type checker found a value used at a placement that it does not have."""

    what_to_do = (
        "A fault of megafx, or of a pass or rule of your own: MEGAFX_CHECK=1 names the pass. Report it with a dump."
    )


class AgreementError(MegafxError):
    """Ranks disagree on weights, plan, inputs or world size."""

    what_to_do = "Start all ranks alike: the same code, versions, weights, config and inputs."


class UsageError(MegafxError):
    """The parallelized model is used in a way that would be silently wrong."""

    what_to_do = "Change the call as it says."


class UsageRuntimeError(UsageError, RuntimeError):
    """A use that torch refuses in eager mode, too, with a RuntimeError: backward through a freed graph, for instance."""

    what_to_do = "Call backward once for each forward, before anything that it needs is changed; or do as it says."


class CheckpointError(MegafxError):
    """A checkpoint is damaged or incomplete, cannot be written, or does not fit the model."""

    what_to_do = "Take another checkpoint: `megafx.latest_checkpoint` finds the newest valid one."


class LostRankError(MegafxError, RuntimeError):
    """Another rank ended, did not reach a call of all ranks, or made another call."""

    what_to_do = "Look for the first error among the logs of all ranks; the others follow from it."


class NumericError(MegafxError, ArithmeticError):
    """A loss or a gradient is not finite."""

    what_to_do = "Look at the learning rate, the data and the loss scale of the step before."


def in_part(error: CaptureError) -> CaptureError:
    """An error for what code of a submodule does by data, which the submodule can do when it is left eager."""
    error.part = error.module or ""
    return error


def or_leave_eager(fix: str, module: str | None) -> str:
    """`fix`, and the alternative for code that depends on data: to leave its module eager."""
    if not module:
        return fix
    return (
        f'{fix}; or leave the module out of the graph, if it holds few parameters: Config(eager_modules=["{module}"])'
    )
