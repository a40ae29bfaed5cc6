"""Runs an ordered list of passes over a program: timing, logging, dumping, checking, skipping. Knows no pass by name.

A pass is a function `(program, context) -> number of changes` whose module says `REQUIRES` (the phase, or phases, that it
accepts) and `ENSURES` (the phase that it leaves; absent where it leaves the one it found).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from megafx.config import Config
from megafx.debugging import Debug, current, is_reporting_rank, say
from megafx.errors import ConfigError, MegafxError, PlacementError
from megafx.ir import dump
from megafx.ir.call_spec import no_autocast
from megafx.ir.contracts import verify
from megafx.ir.program import Phase, Program
from megafx.planner.context import CompileContext
from megafx.progress import stage
from megafx.versions import version_of

ABOUT = "about.json"  # in a dump folder
PassFunction = Callable[[Program, CompileContext], int]


class Check(Protocol):
    """What looks at a program before the first pass of a list and after each."""

    def start(self, program: Program) -> None: ...

    def after(self, name: str, program: Program) -> None: ...


class PipelineStopped(MegafxError):
    """MEGAFX_STOP_AFTER stopped the pipeline; `program` is what the named pass left."""

    def __init__(self, name: str, program: Program) -> None:
        super().__init__(
            f"the pipeline stopped after pass '{name}'", fix="unset MEGAFX_STOP_AFTER to run it to the end"
        )
        self.program = program


@dataclass(frozen=True)
class Pass:
    """A named pass. requires: phases that it accepts; ensures: the phase it leaves (None: the one it found)."""

    name: str
    run: PassFunction
    requires: tuple[Phase, ...] = tuple(Phase)
    ensures: Phase | None = None

    @staticmethod
    def of(function: PassFunction) -> Pass:
        """The function as a pass, with the contract of its module."""
        module = sys.modules[function.__module__]
        requires = getattr(module, "REQUIRES", tuple(Phase))
        requires = (requires,) if isinstance(requires, Phase) else tuple(requires)
        return Pass(function.__name__, function, requires, getattr(module, "ENSURES", None))

    def is_users(self, config: Config) -> bool:
        """True if it is one of Config.passes."""
        return any(function is self.run for _, function in config.passes)


@dataclass(frozen=True)
class PassRecord:
    """What one pass did."""

    index: int
    name: str
    changes: int
    nodes_before: int
    nodes_after: int
    duration_ms: float
    skipped: bool = False

    def __str__(self) -> str:
        if self.skipped:
            return f"megafx {self.index:02d} {self.name:<24} skipped"
        delta = self.nodes_after - self.nodes_before
        return (
            f"megafx {self.index:02d} {self.name:<24} {self.changes:>5} changes  {self.nodes_after:>6} nodes"
            f" ({delta:+d})  {self.duration_ms:.1f} ms"
        )


@dataclass
class Dumps:
    """Numbered text files of one pipeline run; writes nothing without a folder or off the reporting rank."""

    folder: Path | None
    count: int = 0

    def write(self, name: str, graph_text: str) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{self.count:02d}_{name}.txt").write_text(graph_text + "\n")
        self.count += 1

    def describe(self, context: CompileContext) -> None:
        """What was compiled, for `megafx.replay`: about.json."""
        if self.folder is not None:
            versions = {"megafx": version_of("megafx"), "torch": version_of("torch")}
            made = {
                "t": context.t,
                "hardware": context.config.hardware or context.hardware.name,
                "training": context.training,
            }
            made |= {"data": None if context.data is None else asdict(context.data), "fixed": sorted(context.fixed)}
            made |= {"plan": None if context.given is None else json.loads(context.given.to_json())}
            about = {"versions": versions, **made, "config": context.config.to_dict()}
            (self.folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")


_runs_in_folder: dict[str, int] = {}


def _dumps(settings: Debug) -> Dumps:
    """The first run of this process dumps into the folder itself, the n-th further one into its `graph<n>`."""
    if settings.dump is None or not is_reporting_rank():
        return Dumps(None)
    run = _runs_in_folder.get(settings.dump, 0)
    _runs_in_folder[settings.dump] = run + 1
    return Dumps(Path(settings.dump) / (f"graph{run}" if run else ""))


def insert_user_passes(stages: Sequence[list[Pass]], config: Config) -> None:
    """Put `config.passes` at their places in the lists, in the order given."""
    for where, function in config.passes:
        side, name = where.split()
        mine, names = Pass.of(function), [p.name for stage in stages for p in stage]
        if name not in names:
            found = f"Config.passes says '{where}', but the pipeline has no such pass"
            raise ConfigError(found, fix=f"passes: {', '.join(names)}")
        if mine.name in names:
            found = f"Config.passes brings a second pass '{mine.name}'"
            raise ConfigError(found, fix="give your function another name")
        for passes in stages:
            for i in [i for i, p in enumerate(passes) if p.name == name]:
                passes.insert(i + (side == "after"), mine)


class Runner:
    """Runs lists of passes over one program, one after another; the numbering of records and dumps goes on.

    known: names that flags may name, in addition to those of a list that runs. start: what the first dump is called.
    """

    def __init__(
        self, context: CompileContext, known: Sequence[str] = (), settings: Debug | None = None, start: str = "capture"
    ) -> None:
        self.context, self.known, self.start = context, known, start
        self.settings = current() if settings is None else settings
        self.records: list[PassRecord] = []
        self.dumps = _dumps(self.settings)

    @property
    def shows_nothing(self) -> bool:
        """True if nobody sees single passes, or stops at one."""
        return not self.settings.level and self.settings.stop_after is None and self.dumps.folder is None

    def run(self, program: Program, passes: Sequence[Pass], check: Check | None = None) -> list[PassRecord]:
        """Run the passes in order, in place. Raises PipelineStopped where `stop_after` says."""
        settings = self.settings
        _check_names([*(step.name for step in passes), *self.known], settings)
        wants_text = self.dumps.folder is not None or settings.level >= 2
        text = _text(program) if wants_text else ""
        if not self.records:
            self.dumps.write(self.start, text)
            self.dumps.describe(self.context)
        if check is not None:
            check.start(program)
        for step in passes:
            index = len(self.records) + 1
            if step.name in settings.skip:
                nodes = len(program.graph.nodes)
                self.records.append(PassRecord(index, step.name, 0, nodes, nodes, 0.0, skipped=True))
                self._log(1, str(self.records[-1]))
                continue
            _check_phase(step, program, settings)
            self.records.append(self._run(step, index, program))
            self._log(1, str(self.records[-1]))
            if wants_text:
                before, text = text, _text(program)
                self.dumps.write(step.name, text)
                self._log(2, dump.diff(before, text) if settings.level >= 2 else "")
                self._log(4, text)
            if settings.check >= 1:
                _verify(step, program)
            if check is not None:
                check.after(step.name, program)
            if step.name == settings.stop_after:
                program.gm.recompile()
                raise PipelineStopped(step.name, program)
        program.graph.lint()
        program.gm.recompile()  # once: passes read graphs, not code, and writing the code of each is a tenth of a compile
        if program.partition is not None and any(step.is_users(self.context.config) for step in passes):
            parts = program.partition
            for gm in (parts.forward, parts.backward, parts.last_backward, parts.lazy_graph):
                if gm is not None:
                    gm.recompile()
        return self.records

    def _run(self, step: Pass, index: int, program: Program) -> PassRecord:
        nodes, phase = len(program.graph.nodes), program.phase
        whole = _calls(program) if program.partition is not None and step.is_users(self.context.config) else None
        start = time.perf_counter()
        with no_autocast(), stage(step.name):
            changes = step.run(program, self.context)
        duration_ms = 1e3 * (time.perf_counter() - start)
        expected = phase if step.ensures is None else step.ensures
        if program.phase != expected:
            raise MegafxError(
                f"pass '{step.name}' left phase {program.phase.name}, but its contract says {expected.name}",
                fix="set program.phase at the end of the pass, or correct ENSURES",
            )
        if whole is not None and whole != _calls(program):
            raise MegafxError(
                f"pass '{step.name}' changes program.graph after it was cut into a forward and a backward graph, which are "
                "what runs",
                fix="change program.partition.forward and program.partition.backward, or put the pass 'before partition'",
            )
        if changes:  # else the graph is as it was
            program.graph.lint()
        _check_sizes(step, program)
        return PassRecord(index, step.name, changes, nodes, len(program.graph.nodes), duration_ms)

    def _log(self, level: int, message: str) -> None:
        if self.settings.level >= level and message:
            say(message)


def _calls(program: Program) -> list[tuple[Any, ...]]:
    return [(n, n.target, n.args, n.kwargs) for n in program.graph.nodes]


def _check_sizes(step: Pass, program: Program) -> None:
    """Sizes that vary stay symbols: a graph that has the traced number in their place is right for no other."""
    known = getattr(program.fake_mode.shape_env, "replacements", {})
    fixed = {name: known[s] for name, s in program.sizes.symbols.items() if s in known and known[s].is_Integer}
    if fixed:
        what = ", ".join(f"'{name}' to {number}" for name, number in fixed.items())
        raise MegafxError(
            f"pass '{step.name}' fixes the size {what}, which varies between calls",
            fix="an op of the model asks for the number itself: write it with symbolic sizes, or give a longer example",
        )


def _text(program: Program) -> str:
    """The graph, or those that it was cut into."""
    if program.partition is None:
        return dump.text(program, details=True)
    parts = program.partition
    graphs = {"forward": parts.forward, "backward": parts.backward, "last backward": parts.last_backward}
    if parts.last_backward is parts.backward:
        del graphs["last backward"]
    graphs["lazy outputs"] = parts.lazy_graph
    return "\n\n".join(f"# {name}\n{dump.graph_text(program, gm)}" for name, gm in graphs.items() if gm is not None)


def _check_names(names: Sequence[str], settings: Debug) -> None:
    names = list(dict.fromkeys(names))
    for flag, asked in (("MEGAFX_SKIP", settings.skip), ("MEGAFX_STOP_AFTER", (settings.stop_after,))):
        for name in asked:
            if name is not None and name not in names:
                raise ConfigError(f"{flag} names '{name}', which is no pass", fix=f"passes: {', '.join(names)}")


def _check_phase(step: Pass, program: Program, settings: Debug) -> None:
    if program.phase in step.requires:
        return
    wanted = " or ".join(phase.name for phase in step.requires)
    found = f"pass '{step.name}' requires phase {wanted}, but the program is at {program.phase.name}"
    if settings.skip:
        raise ConfigError(found, fix=f"do not skip {', '.join(settings.skip)}: a later pass needs what it does")
    raise MegafxError(
        found, fix="put the pass where its phase holds (Config.passes: 'after <pass>' or 'before <pass>')"
    )


def _verify(step: Pass, program: Program) -> None:
    try:
        verify(program)
    except PlacementError as error:
        error.add_note(f"pass '{step.name}' left this program")
        raise
