"""`megafx.replay`: compile a model again as a dump folder says, and name the first pass that leaves another graph."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from megafx.compiler.captured import capture
from megafx.compiler.pipeline import compile_program, plan_only
from megafx.compiler.runner import ABOUT
from megafx.config import Config
from megafx.debugging import debug
from megafx.errors import UsageError
from megafx.ir import dump
from megafx.ops.axes import AxisContext
from megafx.placements.data_axis import TENSOR_AXIS, DataAxis
from megafx.planner.context import CompileContext
from megafx.planner.hardware import Hardware
from megafx.planner.plan import Plan


@dataclass(frozen=True)
class Replayed:
    """True where every graph of the dump came out again. first: the pass after which one did not; diff: of that graph."""

    graphs: int
    first: str = ""
    diff: str = ""

    def __bool__(self) -> bool:
        return not self.first

    def __str__(self) -> str:
        if self:
            return f"the same {self.graphs} graphs"
        return f"the first graph that differs is that after '{self.first}' (- in the dump, + now)\n{self.diff}"


def replay_call(model: nn.Module, args: Any, kwargs: Mapping[str, Any], by_name: Any, folder: str | Path) -> Replayed:
    """Compile the call as the dump's about.json says, as rank 0 would, and compare each graph. Nothing is computed.

    by_name: the same call as the runtime has it, (args, kwargs). Of a data-parallel dump the graphs of all ranks are compared,
    not those of one. Raises UsageError where the folder has no about.json, or says that passes of the user's own were in the
    pipeline.
    """
    folder = Path(folder)
    about = read_about(folder)
    if about["config"]["passes"]:
        named = ", ".join(name for _, name in about["config"]["passes"])
        found = f"the dump was made with passes of your own ({named}), which a replay does not import"
        raise UsageError(found, fix="make the dump without Config.passes")
    files = {file.stem.partition("_")[2]: file for file in sorted(folder.glob("[0-9]*_*.txt"))}
    if "= args[" not in files["capture"].read_text():
        args, kwargs = by_name
    with tempfile.TemporaryDirectory() as made, debug(dump=made):
        _compile(model, args, kwargs, about, files)
        for name, file in files.items():
            again = Path(made) / file.name
            if again.is_file() and (found := dump.diff(file.read_text(), again.read_text())):
                return Replayed(len(files), name, found)
    return Replayed(len(files))


def read_about(folder: Path) -> Any:
    """What a dump folder says of its compile. Raises UsageError for another folder."""
    if not (folder / ABOUT).is_file():
        found = f"'{folder}' is not a dump folder: it has no {ABOUT}"
        raise UsageError(found, fix="make one with MEGAFX_DUMP=<folder>")
    return json.loads((folder / ABOUT).read_text())


def _compile(model: nn.Module, args: Any, kwargs: Any, about: dict[str, Any], passes: Collection[str]) -> None:
    """As far as the dump goes, dumping each graph."""
    config, t = Config.from_dict(about["config"]), about["t"]
    given = None if about["plan"] is None else Plan.from_json(json.dumps(about["plan"]))
    fixed = {} if given is None else {name: given.params[name] for name in about["fixed"]}
    data = None if about["data"] is None else DataAxis(**about["data"])
    wants_grad = (lambda spec: spec.kind == "param") if about["training"] else None
    axes = {TENSOR_AXIS: AxisContext(0, t, TENSOR_AXIS)} if t > 1 else None
    context = CompileContext(
        config, t, Hardware.load(about["hardware"]), data, wants_grad, fixed, given=given, axes=axes
    )
    program = capture(model, config, args, kwargs)
    if "localize_shapes" not in passes:
        plan_only(program, context)
        return
    compiled = compile_program(program, context)
    if data is None and "bind_mesh" in passes:
        compiled.executable()
