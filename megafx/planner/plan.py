"""The plan: a placement for every value of one graph, as a plain object that can be printed, saved, compared and loaded.

A plan names nodes by their graph name and parameters by FQN. Layout sizes that depend on batch or sequence are written as
expressions of those names, so a plan saved today loads on a graph captured tomorrow.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy

from megafx.errors import PlanError
from megafx.ir.sizes import Sizes
from megafx.placements.types import Layout, Owned, Placement, S, owned

FORMAT = 1  # version of the JSON form


@dataclass(frozen=True)
class OpChoice:
    """The strategy of one op. ins: one placement per operand of its rule; factor: the factor that is sharded, if one is."""

    ins: tuple[Placement, ...]
    out: Placement
    factor: str = ""
    fqn: str = ""
    note: str = ""


@dataclass(frozen=True)
class Transition:
    """One transition of a value: from a placement that it has to one that a user wants."""

    src: Placement
    dst: Placement


@dataclass(frozen=True)
class Removal:
    """Strategies that a policy or an override took away from an op or a parameter, and why."""

    node: str
    fqn: str
    count: int
    reason: str


@dataclass
class Plan:
    """placement of everything on axis `axis` of size `t`.

    params: FQN -> storage placement (I or S). ops: node name -> OpChoice. transitions: node name -> transitions of its
    value, in the order in which they are made. cost_us: modelled time of one step, microseconds.
    """

    t: int
    axis: str = "tp"
    sequence_parallel: bool = False
    params: dict[str, Placement] = field(default_factory=dict)
    ops: dict[str, OpChoice] = field(default_factory=dict)
    transitions: dict[str, tuple[Transition, ...]] = field(default_factory=dict)
    removals: list[Removal] = field(default_factory=list)
    replicated: dict[str, str] = field(default_factory=dict)  # FQN or node -> why it is not sharded
    cost_us: float = 0.0
    hardware: str = ""
    workload: dict[str, int] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=Sizes, repr=False)  # what the symbols in layouts mean
    report: Any = field(default=None, repr=False)  # megafx.report.Report of the graph that was planned

    def placement_of(self, param: str) -> Placement:
        """Storage placement of a parameter by FQN; raises PlanError for an unknown one."""
        if param not in self.params:
            close = difflib.get_close_matches(param, self.params, 3)
            fix = f"did you mean {', '.join(close)}?" if close else ""
            raise PlanError(f"the plan has no parameter '{param}'", fix=fix)
        return self.params[param]

    def __str__(self) -> str:
        say = self.text_of
        lines = [f"plan on {self.axis}={self.t}, sequence_parallel={self.sequence_parallel}, hardware {self.hardware}"]
        lines += [f"  {fqn:48s} {say(p)}" for fqn, p in self.params.items()]
        for name, op in self.ops.items():
            ins = ", ".join(map(say, op.ins))
            moves = "  ".join(f"[{say(c.src)}->{say(c.dst)}]" for c in self.transitions.get(name, ()))
            lines.append(f"  {name:32s} {ins} -> {say(op.out)}  {op.factor}  {moves}".rstrip())
        return "\n".join(lines)

    def text_of(self, placement: Placement) -> str:
        """'S2' where the cut follows from the dim's size (elements in t ranges), else with it: 'S0/3*(25x64)'."""
        if not placement.is_shard:
            return placement.kind
        if isinstance(placement, Owned):
            return str(placement)
        cut, text = placement.cut, self.sizes.text
        if cut.simple() and (cut.blocks[0].unit == 1 or not cut.padded(self.t)):
            return placement.tag
        blocks = "+".join(text(count) + (f"x{text(unit)}" if unit != 1 else "") for count, unit in cut.blocks)
        return f"{placement.tag}/" + (f"{text(cut.rep)}*({blocks})" if cut.rep != 1 else blocks)

    def diff(self, other: Plan) -> str:
        """Unified diff of the two plans' text; empty when they place everything alike."""
        a, b = str(self).splitlines(), str(other).splitlines()
        return "\n".join(difflib.unified_diff(a, b, "this", "other", lineterm="", n=0))

    def to_json(self) -> str:
        sizes = _SizeText(self.sizes)

        def texts(placements: Iterable[Placement]) -> list[list[Any]]:
            return [_encode(p, sizes) for p in placements]

        plain = ("t", "axis", "sequence_parallel", "hardware", "workload", "cost_us")
        data: dict[str, Any] = {"format": FORMAT} | {name: getattr(self, name) for name in plain}
        data["params"] = {k: _encode(p, sizes) for k, p in self.params.items()}
        data["ops"] = {
            k: {"ins": texts(o.ins), "out": _encode(o.out, sizes), "factor": o.factor, "fqn": o.fqn, "note": o.note}
            for k, o in self.ops.items()
        }
        data["conversions"] = {k: [texts((c.src, c.dst)) for c in v] for k, v in self.transitions.items()}
        data["replicated"] = self.replicated
        data["removals"] = [[r.node, r.fqn, r.count, r.reason] for r in self.removals]
        return json.dumps(data, indent=1)

    @staticmethod
    def from_json(text: str, sizes: Sizes | None = None) -> Plan:
        """sizes: of the graph that the plan is for; without, the plan can be read and compared but not applied."""
        data = json.loads(text)
        if (found := data.pop("format", None)) != FORMAT:
            raise PlanError(f"plan format {found!r}, expected {FORMAT}", fix="plan again")
        sizes = Sizes() if sizes is None else sizes
        for name in data["workload"]:
            sizes.symbols.setdefault(name, sympy.Symbol(name, integer=True, positive=True))
        reader = _SizeText(sizes)

        def all_of(items: Iterable[list[Any]]) -> tuple[Placement, ...]:
            return tuple(_decode(p, reader) for p in items)

        data["params"] = {k: _decode(p, reader) for k, p in data["params"].items()}
        data["ops"] = {
            k: OpChoice(all_of(o["ins"]), _decode(o["out"], reader), o["factor"], o["fqn"], o["note"])
            for k, o in data["ops"].items()
        }
        conversions = data.pop("conversions")
        data["transitions"] = {k: tuple(Transition(*all_of(c)) for c in v) for k, v in conversions.items()}
        data["removals"] = [Removal(*r) for r in data["removals"]]
        return Plan(**data, sizes=sizes)

    def bind(self, sizes: Sizes) -> Plan:
        """The same plan in the sizes of another capture of the graph."""
        return Plan.from_json(self.to_json(), sizes)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        return Plan.from_json(Path(path).read_text())


class _SizeText:
    """Structural sizes as JSON: integers, or expressions in the names of their symbols."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.name_of = {s: sympy.Symbol(name, integer=True, positive=True) for name, s in sizes.symbols.items()}
        self.symbol_of = {name: symbol for symbol, name in self.name_of.items()}

    def encode(self, size: int) -> int | str:
        return size if self.sizes.is_static(size) else str(self.sizes.expr(size).xreplace(self.name_of))

    def decode(self, size: int | str) -> int:
        if isinstance(size, int):
            return size
        known = {str(s): s for s in (*self.symbol_of, *self.name_of)}
        expr = sympy.sympify(size, locals=known).xreplace(self.symbol_of)
        return self.sizes.of_expr(expr)


def _encode(p: Placement, text: _SizeText) -> list[Any]:
    if isinstance(p, Owned):
        return ["O", p.owner, p.cut.size]
    return [p.tag, *(text.encode(n) for n in p.flat_layout)]


def _decode(data: list[Any], text: _SizeText) -> Placement:
    tag, *flat = data
    if tag == "O":
        owner, rows = flat
        return owned(rows, owner)
    if not tag.startswith("S"):
        return Placement.parse(tag)
    return S(int(tag[1:]), Layout.from_flat(text.decode(n) for n in flat))
