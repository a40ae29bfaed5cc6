"""MEGAFX_CHECK=2: run the program before and after each pass, and name the first pass that changed its numbers.

The inputs are made up from the graph's own shapes. Until shapes are local the graph runs on one rank; afterwards on all of
them, in the simulator. Data-parallel ranks join in from `place_batch` on, with the parts of one longer batch. Gradients, which
appear when the joint graph is built, are first compared with autograd's on the last graph of global shapes and one batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from megafx.check_numbers_data import rows_dim, run_on_data
from megafx.collectives import AxisContext, on_mesh
from megafx.data_axis import DataAxis
from megafx.errors import MegafxError, PlacementError
from megafx.ir import PLACEMENT, VAL, Input, Phase, Program
from megafx.placements import Placement
from megafx.simulate import TOLERANCE, Logical, relative_error, run_logical

AXIS = "tp"


class NumberCheck:
    """What a program computes on made-up inputs. ranks: size of the axis once shapes are local. data: of data parallelism."""

    def __init__(self, program: Program, ranks: int, data: DataAxis | None = None) -> None:
        self.ranks, self.data = ranks, data
        self.parts = 1  # in which a batch is cut by now
        self.values: dict[str, Any] = {}
        self.storage: dict[str, Placement] = {}
        self.expected = self._run(program)
        self.random = self._is_random(program)
        self.before = _snapshot(program)

    def after(self, name: str, program: Program) -> None:
        """Compare with what the program computed before pass `name`; raises MegafxError where it differs."""
        if program.batch is not None and program.batch.whole and self.parts == 1:
            self._lengthen(program, program.batch.ranks)
        try:
            found = self._run(program)
            if found.gradients and not self.expected.gradients:
                self.expected = replace(self.expected, gradients=self._autograd(self.before, found))
        except PlacementError as error:
            error.add_note(f"pass '{name}' left this program")
            raise
        differences = {} if self.random else _differences(found, self.expected)
        if differences:
            worst = max(differences, key=lambda what: differences[what])
            raise MegafxError(
                f"pass '{name}' changed numbers: {worst} by {differences[worst]:.1e}, "
                f"{len(differences)} of {len(found.outputs) + len(found.gradients)} results differ",
                fix=f"compare the graphs before and after it: MEGAFX_DEBUG=2 or MEGAFX_DUMP; stop there: "
                f"MEGAFX_STOP_AFTER={name}",
            )
        self.expected = found
        self.random = self._is_random(program)
        if program.phase <= Phase.PLACED and program.batch is None:
            self.before = _snapshot(program)

    def _is_random(self, program: Program) -> bool:
        """Whether two runs differ: until canonicalize, dropout draws from torch's own generator."""
        return _may_draw(program) and bool(_differences(self._run(program), self.expected))

    def _run(self, program: Program) -> Logical:
        self._make_up_inputs(program)
        if program.batch is not None:
            assert self.data is not None
            local = program.phase > Phase.PLACED
            self.storage.update(_storage(program) if local else {})
            return run_on_data(program, self.values, self.storage, self.data, self.ranks if local else 1)
        if program.phase <= Phase.PLACED:
            return run_logical(program, self.values, {}, 1)
        self.storage.update(_storage(program))  # kept: later passes need not carry placements on
        return run_logical(program, self.values, self.storage, self.ranks)

    def _lengthen(self, program: Program, parts: int) -> None:
        """From now on the batch is that of all data-parallel ranks."""
        self.parts = parts
        for node, spec in zip(program.placeholders(), program.inputs, strict=True):
            dim = rows_dim(program, node.meta[VAL]) if spec.kind == "user" else None
            if dim is not None:
                self.values[spec.name] = _made_up(spec, node.meta[VAL], dim, parts)
        self.expected = run_logical(self.before, self.values, {}, 1)

    def _make_up_inputs(self, program: Program) -> None:
        """A value for each input that has none yet, by its name alone: passes may add inputs, never change one."""
        for node, spec in zip(program.placeholders(), program.inputs, strict=True):
            if spec.kind == "constant" or spec.name in self.values:
                continue
            if spec.kind == "tangent":
                like = self.expected.outputs[spec.name]
                self.values[spec.name] = torch.ones_like(like) if like.ndim == 0 else _noise(spec, like)
            else:
                self.values[spec.name] = _made_up(spec, node.meta[VAL])

    def _autograd(self, program: Program, found: Logical) -> dict[str, Tensor | None]:
        """Gradients of a graph with global shapes, for the tangents of the joint graph."""
        leaves = {}
        for name in found.gradients:
            leaves[name] = self.values[name].detach().clone().requires_grad_()
        inputs = [
            program.constants[s.name] if s.kind == "constant" else leaves.get(s.name, self.values[s.name])
            for s in program.inputs
        ]
        with on_mesh({AXIS: AxisContext(0, 1)}):
            results = fx.Interpreter(program.gm).run(*inputs)
        pairs = [
            (value, self.values[spec.name])
            for spec, value in zip(program.outputs, results, strict=True)
            if spec.name in self.values and isinstance(value, Tensor) and value.requires_grad
        ]
        outputs, tangents = zip(*pairs, strict=True)
        gradients = torch.autograd.grad(outputs, list(leaves.values()), tangents, allow_unused=True)
        return dict(zip(leaves, gradients, strict=True))


def _snapshot(program: Program) -> Program:
    """The program as it is now: its own graph, shared values."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    gm = fx.GraphModule(program.gm, graph)
    return replace(program, gm=gm, inputs=list(program.inputs), outputs=list(program.outputs))


def _storage(program: Program) -> dict[str, Placement]:
    pairs = zip(program.placeholders(), program.inputs, strict=True)
    return {s.name: node.meta[PLACEMENT] for node, s in pairs if s.kind == "param" and PLACEMENT in node.meta}


def _may_draw(program: Program) -> bool:
    """Whether some op can draw from torch's own generator (attention can; it does where its dropout is not 0)."""
    return any(
        isinstance(n.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in n.target.tags
        for n in program.graph.nodes
    )


def _made_up(spec: Input, value: Any, dim: int = 0, times: int = 1) -> Any:
    """A value like the placeholder's: 0 or 1 for whole numbers, which are ids, labels, masks or token types.

    times: as often the rows in `dim`.
    """
    if not isinstance(value, Tensor):
        return _hint(value)
    shape = [_hint(n) * (times if i == dim else 1) for i, n in enumerate(value.shape)]
    like = torch.empty(shape, dtype=value.dtype)
    if spec.kind == "seed":
        return torch.tensor(1234)
    if value.dtype == torch.bool:
        return torch.ones_like(like)
    if not value.dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=_generator(spec)).to(value.dtype)
    noise = _noise(spec, like)
    return {"param": noise / 8, "buffer": noise.abs() + 0.5}.get(spec.kind, noise)  # a buffer may be a variance


def _hint(size: int | torch.SymInt) -> int:
    """The size in the trace. (int(size) would fix the symbol to it.)"""
    return size if isinstance(size, int) else size.node.hint


def _noise(spec: Input, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=_generator(spec), dtype=torch.float64).to(like.dtype)


def _generator(spec: Input) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(spec.name.encode()))


def _differences(found: Logical, expected: Logical) -> dict[str, float]:
    """Results beyond rounding: 'output x', 'gradient of y', 'buffer z' -> relative error."""
    pairs: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        ("output", found.outputs, expected.outputs),
        ("gradient of", found.gradients, expected.gradients),
        ("buffer", found.mutations, expected.mutations),
    ]
    errors: dict[str, float] = {}
    for what, theirs, ours in pairs:
        # what is zero but for rounding, as a key bias's gradient, is held against the largest of its kind
        largest = max((float(x.double().norm()) for x in ours.values() if _is_float(x)), default=0.0)
        errors |= {
            f"{what} '{name}'": _error(theirs[name], ours[name], largest / 100) for name in theirs if name in ours
        }
    return {what: error for what, error in errors.items() if error > 0.0}


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype.is_floating_point


def _error(found: Any, expected: Any, floor: float) -> float:
    """0 where equal up to rounding, not-a-number included; infinite where shapes or kinds differ."""
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        given = [x for x in (found, expected) if isinstance(x, Tensor)]
        same = not given[0].any() if given else found == expected  # no gradient is a gradient of zeros
        return 0.0 if same else float("inf")
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if torch.equal(found, expected):
        return 0.0
    error = relative_error(found, expected, floor)
    return error if error > TOLERANCE.get(found.dtype, 0.0) else 0.0
