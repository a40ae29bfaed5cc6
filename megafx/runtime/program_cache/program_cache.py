"""The cache on disk: what calls were compiled to, for the next start of the same program (docs/cache.md).

An entry holds the program of all ranks, as it is before the passes that make one rank's graphs, or the plan of a training call,
or both. Its name is a digest of the situation: versions, Config, ranks, hardware, the modules and parameters of the model, the
call, torch's global settings. What can only be known once a model was traced is in the entry and is compared when it is read:
files of code, variables of the environment that code read, and the Python state that forward read (stored_state.py). Anything
that differs or cannot be compared is a miss.

Rank 0 of the tensor-parallel ranks reads; the others get the bytes from it and look whether the entry is for them too. All take
it, or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.utils import _pytree as pytree

from megafx.analysis.tables import Band, read_table
from megafx.capture.small_sizes import Line as ListingLine
from megafx.capture.small_sizes import Listing
from megafx.compiler.compiled import Compiled
from megafx.debugging import current, say
from megafx.distributed import agreement
from megafx.ir.program import Program
from megafx.ir.python_state import PythonState
from megafx.ir.stored import Reader, Unstorable, Writer
from megafx.planner.context import CompileContext
from megafx.planner.costed import CostedGraph, CostedOp, PricedTransition, Region
from megafx.planner.hardware import Hardware
from megafx.planner.plan import OpChoice, Plan, Removal, Transition
from megafx.planner.timeline import Part, Segment, StepTimes
from megafx.progress import remark, stage
from megafx.report.report import Fused, Line, Report
from megafx.runtime.keys import Call
from megafx.runtime.program_cache.cache_files import TRIED, changed_at, folder, packed, unpacked, write_entry
from megafx.runtime.program_cache.cache_key import (
    code_files,
    code_of_classes,
    file_digest,
    hidden,
    loss_text,
    of_model,
    of_process,
    packages,
    stat_of,
)
from megafx.runtime.program_cache.fingerprint import Fingerprint, digest
from megafx.runtime.program_cache.stored_state import state_form, state_of

PROGRAM = (Listing, ListingLine, Band)
_PLAN = (
    OpChoice,
    Transition,
    Removal,
    Report,
    Line,
    PricedTransition,
    Fused,
    CostedOp,
    Region,
    CostedGraph,
    Segment,
    Part,
    StepTimes,
)
_UNREADABLE = "what can be read"


@dataclass
class Found:
    """What an entry holds. captured: digest of the code of the captured graph."""

    plan: Plan | None = None
    compiled: Compiled | None = None
    captured: str = ""


@dataclass
class Situation:
    """One call that is to be compiled, as far as it decides what comes out. what: 'plan' or 'graph'."""

    what: str
    model: nn.Module
    call: Call
    context: CompileContext
    about: Any  # plain values: what the runtime knows of the call and the model
    loss_fn: Any
    group: dist.ProcessGroup | None
    device: torch.device
    refused: str = ""  # why nothing is stored
    notes: list[str] = field(default_factory=list)  # entries that were damaged, or made of other code
    environment: dict[str, str] = field(default_factory=dict)
    done: str = "not used"

    def __post_init__(self) -> None:
        self.key = self.variant = ""
        self.classes: dict[str, str] = {}
        self._state: PythonState | str = ""  # of the entry that was compared last, in this process
        self._differences: list[str] = []  # between this process and each entry of the call, the newest first

    def _identify(self) -> bool:
        """True if an entry may serve the call, or be made of it. Takes milliseconds: not where the cache is off."""
        if self.key or self.refused:
            return not self.refused
        try:
            sizes = [[*x.shape] for x in self.call.leaves if isinstance(x, torch.Tensor)]
            self.key = digest([self.what, self.about, of_process(), of_model(self.model), self._of_context()])[:40]
            self.variant = digest(sizes)[:12]
            self.classes = code_of_classes(self.model)
        except Unstorable as error:
            self.refused = str(error)
        except Exception as error:  # whatever a user's class does when it is looked at
            self.refused = f"{type(error).__name__}: {error}"
        return not self.refused

    def _of_context(self) -> Any:
        context = self.context
        if context.config.passes:
            raise Unstorable("Config.passes: code of your own in the pipeline")
        fixed = [[name, str(p), *p.flat_layout] for kept in (context.fixed, context.caches) for name, p in kept.items()]
        data = None if context.data is None else asdict(context.data)
        config = {k: v for k, v in context.config.to_dict().items() if k != "cache"}
        loss = None if self.loss_fn is None else loss_text(self.loss_fn, Fingerprint(self.model))
        parts = [context.t, data, config, context.hardware, context.fusions, context.gradients, context.at_call]
        return [*map(repr, parts), context.device_bytes, fixed, loss]

    def plan(self) -> Situation:
        """That of the plan of the call's training form."""
        return replace(self, what="plan", notes=self.notes, environment={})

    # -- reading

    def read(self) -> Found | None:
        """The entry of this call, where all ranks take it. Collective over the tensor-parallel ranks."""
        with stage("read the cache"):
            candidates = self._candidates() if self._has_files() else iter(())
            while True:
                path, data, opened = None, None, None
                try:
                    path, data, opened = next(candidates, (None, None, None))
                except Exception as error:  # the other ranks wait
                    self.notes.append(f"entries cannot be compared with this process ({type(error).__name__}: {error})")
                key, data = agreement.broadcast_object((self.key, data), self.group)
                if data is None:
                    self.notes += self._differences[:1]
                    return None
                self._identify()
                found: Found | str = self.refused or "what is compiled"
                if key == self.key and not self.refused:
                    try:
                        found = self._parse(data, opened)
                    except Exception as error:  # whatever json, torch and sympy raise at what is not in the format
                        self.notes.append(
                            f"an entry cannot be read, and is made anew ({type(error).__name__}: {error})"
                        )
                        found = _UNREADABLE
                        if path is not None:
                            path.unlink(missing_ok=True)
                rank = agreement.first_rank(isinstance(found, str), self.group)
                if rank is None and isinstance(found, Found):
                    self.done = "read"
                    return found
                assert rank is not None
                reason = agreement.broadcast_object(found if isinstance(found, str) else "", self.group, rank)
                if rank or reason != _UNREADABLE:  # which is noted
                    self._differences.append(f"compiled anew, since on rank {rank} {reason} is not what the entry has")

    def _has_files(self) -> bool:
        mine = self.group is None or dist.get_rank(self.group) == 0
        return mine and folder() is not None and self._identify()

    def _candidates(self) -> Iterator[tuple[Path, bytes, Any]]:
        """Entries that fit this process, and what is in them: the newest first, but for those of calls of the same sizes."""
        if (place := folder()) is None:
            return
        paths = sorted(place.glob(f"{self.key}-*"), key=lambda p: (self.variant not in p.name, -changed_at(p)))
        for path in paths[:TRIED]:
            try:
                data = path.read_bytes()
                opened = unpacked(data)
            except (OSError, ValueError, zlib.error, SafetensorError) as error:
                self.notes.append(f"an entry was damaged, and is made anew ({path.name}: {error})")
                path.unlink(missing_ok=True)
                continue
            reason = self._differs(opened[0])
            if not reason:
                with contextlib.suppress(OSError):
                    os.utime(path)
                yield path, data, opened
            else:
                self._differences.append(f"compiled anew, since {reason} is not what it was when the entry was made")

    def _differs(self, form: Any) -> str:
        """What is not as it was when the entry was made ('' if nothing)."""
        for path, was in form["files"]:
            if file_digest(path) != was:
                return f"'{path}'"
        if form["classes"] != self.classes:
            others = {k for k, _ in self.classes.items() ^ form["classes"].items()}
            return f"the code of the class '{min(others)}'"
        for path, *was in form["packages"]:
            if stat_of(path) != was:
                return f"'{path}'"
        for name, was in form["environment"].items():
            if hidden(os.environ.get(name)) != was:
                return f"the environment variable {name}"
        self._state = state_of(form["state"], self.model, Fingerprint(self.model))
        if isinstance(self._state, str):
            return self._state
        if form["program"] is not None and self.variant != form["variant"] and form["promises"]:
            return "the size of the call, for which a budget was met"
        return ""

    def _parse(self, data: bytes, opened: Any) -> Found | str:
        """What the entry holds; what differs, where it is not for this process. opened: as unpacked, where it was compared."""
        form, tensors = opened or unpacked(data)
        if opened is None and (differs := self._differs(form)):
            return differs
        found = Found(captured=form["captured"])
        if form["plan"] is not None:
            found.plan = _plan_of(form["plan"], self.context.hardware, self.device)
        if form["program"] is None:
            return found
        state = self._state
        assert isinstance(state, PythonState)
        tree = (self.call.args, self.call.kwargs, self.call.loss_inputs, state.values())
        reader = Reader(PROGRAM, self.device, form["shared"])
        program = reader.program(form["program"], pytree.tree_structure(tree))
        assert program.call is not None
        program.call = replace(program.call, state=state)
        call = self.call
        if program.call.mismatch(*call.tree) is not None:
            return "the call"
        program.constants = {n: self._constant(c, state, tensors) for n, c in form["constants"].items()}
        program.table = cache(lambda name: read_table(self.model.get_buffer(name)))
        if any(read_table(self.model.get_buffer(name)) != table for name, table in program.assumed.items()):
            return "a table"
        if program.before_reduction is not None:
            program.before_reduction = replace(
                program.before_reduction, call=program.call, constants=program.constants, table=program.table
            )
        context = replace(self.context, agree=None)
        context.config = context.config.replace(activation_memory_budget=form["budget"]["amount"])
        context.fits = form["budget"]["fits"]
        context.plan = _plan_of(form["used"], self.context.hardware, self.device)
        found.compiled = Compiled(program, context)
        return found

    def _constant(self, form: Any, state: PythonState, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        kind, where = form
        if kind == "state":
            return state.guards[where][0].get()
        return tensors[where].to(self.device) if kind == "here" else tensors[where]

    # -- writing

    def write(self, program: Program, plan: Plan | None, compiled: Compiled | None = None, captured: str = "") -> None:
        """Keep what was made. program: whose state the entry depends on."""
        if not self._has_files() or (place := folder()) is None:
            return
        try:
            with stage("write the cache"):
                data = self._packed(program, plan, compiled, captured)
                write_entry(place, f"{self.key}-{self.variant}-{hashlib.sha256(data).hexdigest()[:8]}", data)
                self.done = "written"
        except Unstorable as error:
            self.refused = str(error)
        except Exception as error:  # whatever it is: the call itself is compiled
            self.refused = f"{type(error).__name__}: {error}"

    def _packed(self, program: Program, plan: Plan | None, compiled: Compiled | None, captured: str) -> bytes:
        assert program.call is not None
        state = program.call.state
        if not state.holds():
            raise Unstorable("state that forward itself changes")
        own = Fingerprint(self.model)
        form: dict[str, Any] = {
            "state": state_form(state, self.model, own),
            "captured": captured,
            "variant": self.variant,
            "classes": self.classes,
        }
        files = code_files(own, self.model, form["state"], program if compiled is None else compiled.program)
        form |= {"files": files, "packages": packages(), "environment": self.environment}
        form |= {"plan": None if plan is None else _plan_form(plan, self.device), "program": None, "promises": False}
        tensors: dict[str, torch.Tensor] = {}
        if compiled is not None:
            writer, made = Writer(PROGRAM, self.device), compiled.program
            form["program"] = writer.program(made)
            form["shared"] = writer.shared
            form["constants"] = {}
            for name, value in made.constants.items():
                form["constants"][name] = self._constant_form(name, value, state, tensors)
            config = compiled.context.config
            form["budget"] = {"amount": config.activation_memory_budget, "fits": compiled.context.fits}
            form["promises"] = config.activation_memory_budget is not None
            form["used"] = _plan_form(replace(compiled.plan, report=None), self.device)
        return packed(form, tensors)

    def _constant_form(
        self, name: str, value: Any, state: PythonState, tensors: dict[str, torch.Tensor]
    ) -> tuple[str, Any]:
        held = [i for i, (place, _) in enumerate(state.guards) if place.get() is value]
        if held:
            return "state", held[0]
        if type(value) is not torch.Tensor or value.is_meta:
            raise Unstorable(f"the constant {name}, a {type(value).__name__}")
        shared = [p.name for p, _ in state.guards if isinstance(x := p.get(), torch.Tensor) and _overlap(x, value)]
        if shared:
            raise Unstorable(f"the constant {name}, which shares memory with '{shared[0]}'")
        tensors[name] = value.detach().cpu().contiguous().clone()
        return ("here" if value.device == self.device else "cpu"), name


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        not a.is_meta and type(a) is torch.Tensor and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    )


def _plan_form(plan: Plan, device: torch.device) -> Any:
    writer = Writer((*_PLAN, Hardware), device)
    values = {name: value for name, value in vars(plan).items() if name != "sizes"}
    if plan.report is not None:  # the profile is that of the reader
        costed = None if plan.report.costed is None else replace(plan.report.costed, hardware=None)
        values["report"] = replace(plan.report, costed=costed, predict=None, emitted=None)
    form = {name: writer(value) for name, value in values.items()}
    return {"values": form, "sizes": writer.sizes(plan.sizes), "shared": writer.shared}


def _plan_of(form: Any, hardware: Hardware, device: torch.device) -> Plan:
    reader = Reader((*_PLAN, Hardware), device, form["shared"])
    values = {name: reader(value) for name, value in form["values"].items()}
    plan = Plan(**values, sizes=reader.sizes(form["sizes"]))
    if plan.report is not None and plan.report.costed is not None:
        plan.report.costed.hardware = hardware
    return plan


def tell(situation: Situation) -> str:
    """One line about the cache, for the report and the log."""
    text = f"nothing is kept: {situation.refused}" if situation.refused else situation.done
    if situation.refused:
        remark(f"nothing is kept for the next start: {situation.refused}")
    elif situation.done == "written":
        for line in situation.notes:
            remark(line)
        remark(f"kept in {folder()} for the next start")
    if current().level >= 1:
        say("\n".join(f"megafx cache: {line}" for line in (*situation.notes, f"{situation.what} {text}")))
    return text
