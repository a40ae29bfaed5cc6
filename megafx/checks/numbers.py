"""MEGAFX_CHECK=2: run the program before and after each pass, and name the first pass that changed its numbers.

The inputs are made up from the graph's own shapes. Until shapes are local, the graph runs on one rank; afterwards on all
ranks, in the simulator. Data-parallel ranks join in from `place_axes` on (`Program.batch`), each with its part of one longer
batch; if each rank has a loss of its own, all get the same rows, so that each computes what one rank does. Gradients appear
when the joint graph is built: they are first compared with autograd's, on the last graph of global shapes and one batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from megafx.checks.simulate import TOLERANCE, Logical, relative_error, run_logical
from megafx.errors import MegafxError, PlacementError
from megafx.ir.program import PLACEMENT, VAL, Input, Phase, Program
from megafx.ops.axes import AxisContext, on_mesh
from megafx.placements.data_axis import TENSOR_AXIS, DataAxis
from megafx.placements.types import Placement

# Passes that round, as the user asked -> the relative difference that this explains. FP8 products are off by 3 to 6%.
ROUNDS = {"scaled_products": 0.3, "store_activation_inputs": 0.3}

# -- the check


class NumberCheck:
    """What a program computes on made-up inputs. ranks: size of the axis once shapes are local. data: data parallelism."""

    before: Program  # the last graph of global shapes and one batch

    def __init__(self, ranks: int, data: DataAxis | None = None) -> None:
        self.ranks, self.data = ranks, data
        self.parts = 1  # in which a batch is cut by now
        self.values: dict[str, Any] = {}
        self.storage: dict[str, Placement] = {}
        self.expected = Logical()
        self.random = False

    def start(self, program: Program) -> None:
        """The program before the first pass."""
        self.expected = self._run(program)
        self.random = self._is_random(program)
        self.before = program.copy()

    def after(self, name: str, program: Program) -> None:
        """Compare with what the program computed before pass `name`; raises MegafxError where it differs."""
        if program.batch is not None and program.batch.whole and self.parts == 1:
            self.parts = program.batch.ranks  # from now on the batch is that of all data-parallel ranks
            for node, spec in program.input_nodes():
                if spec.name in program.batch.inputs:
                    dim = program.batch.inputs[spec.name].dim
                    self.values[spec.name] = _made_up(spec, node.meta[VAL], dim, self.parts)
            self.expected = run_logical(self.before, self.values, {}, 1)
        try:
            found = self._run(program)
            if found.gradients and not self.expected.gradients:
                self.expected = replace(self.expected, gradients=self._autograd(self.before, found))
        except PlacementError as error:
            error.add_note(f"pass '{name}' left this program")
            raise
        allowed = ROUNDS.get(name, 0.0)
        differences = {} if self.random else _differences(found, self.expected)
        differences = {what: error for what, error in differences.items() if error > allowed}
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
            self.before = program.copy()

    def _is_random(self, program: Program) -> bool:
        """True if two runs differ: until canonicalize, dropout draws from torch's own generator (attention's too)."""
        ops = (n.target for n in program.graph.nodes if isinstance(n.target, torch._ops.OpOverload))
        may_draw = any(torch.Tag.nondeterministic_seeded in op.tags for op in ops)
        return may_draw and bool(_differences(self._run(program), self.expected))

    def _run(self, program: Program) -> Logical:
        self._make_up_inputs(program)
        if program.batch is not None:
            assert self.data is not None
            local = program.phase > Phase.PLACED
            self.storage.update(_storage(program) if local else {})
            ranks = self.ranks if local else 1
            return run_logical(program, self.values, self.storage, ranks, data=self.data)
        if program.phase <= Phase.PLACED:
            return run_logical(program, self.values, {}, 1)
        self.storage.update(_storage(program))  # kept: later passes need not carry placements on
        return run_logical(program, self.values, self.storage, self.ranks)

    def _make_up_inputs(self, program: Program) -> None:
        """A value for each input that has none yet, by its name alone: passes may add inputs, never change one."""
        for node, spec in program.input_nodes():
            if spec.kind == "constant" or spec.name in self.values:
                continue
            if spec.kind == "tangent":
                like = self.expected.outputs[spec.name]
                self.values[spec.name] = torch.ones_like(like) if like.ndim == 0 else _noise(spec, like)
            else:
                self.values[spec.name] = _made_up(spec, node.meta[VAL])

    def _autograd(self, program: Program, found: Logical) -> dict[str, Tensor | None]:
        """Gradients of a graph with global shapes, for the tangents of the joint graph."""
        leaves = {name: self.values[name].detach().clone().requires_grad_() for name in found.gradients}
        inputs = [
            program.constants[s.name] if s.kind == "constant" else leaves.get(s.name, self.values[s.name])
            for s in program.inputs
        ]
        with on_mesh({TENSOR_AXIS: AxisContext(0, 1)}):
            results = fx.Interpreter(program.gm).run(*inputs)
        pairs = [
            (value, self.values[spec.name])
            for spec, value in zip(program.outputs, results, strict=True)
            if spec.name in self.values and isinstance(value, Tensor) and value.requires_grad
        ]
        outputs, tangents = zip(*pairs, strict=True)
        gradients = torch.autograd.grad(outputs, list(leaves.values()), tangents, allow_unused=True)
        return dict(zip(leaves, gradients, strict=True))


def _storage(program: Program) -> dict[str, Placement]:
    given = program.input_nodes()
    return {s.name: node.meta[PLACEMENT] for node, s in given if s.kind == "param" and PLACEMENT in node.meta}


def _made_up(spec: Input, value: Any, dim: int = 0, times: int = 1) -> Any:
    """A value like the placeholder's, with `times` as many rows in `dim`. Whole numbers (ids, labels, masks) are 0 or 1."""
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


def _generator(spec: Input) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(spec.name.encode()))


def _noise(spec: Input, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=_generator(spec), dtype=torch.float64).to(like.dtype)


def _differences(found: Logical, expected: Logical) -> dict[str, float]:
    """Results beyond rounding: 'output x', 'gradient of y', 'buffer z' -> relative error."""
    pairs: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        ("output", found.outputs, expected.outputs),
        ("gradient of", found.gradients, expected.gradients),
        ("buffer", found.mutations, expected.mutations),
    ]
    errors: dict[str, float] = {}
    for what, theirs, ours in pairs:
        # a value that is zero but for rounding (the gradient of a key bias) is compared with the largest of its kind
        floats = (x for x in ours.values() if isinstance(x, Tensor) and x.dtype.is_floating_point)
        floor = max((float(x.double().norm()) for x in floats), default=0.0) / 100
        errors |= {f"{what} '{name}'": _error(theirs[name], ours[name], floor) for name in theirs if name in ours}
    return {what: error for what, error in errors.items() if error > 0.0}


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
