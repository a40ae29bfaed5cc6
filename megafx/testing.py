"""Test a pass or a pattern of yours in a few lines: trace a small graph, run the pass, compare text and numbers.

    def test_expand_row_parallel():
        before = graph(lambda x, w: transition(aten.mm(x, w), "I", src="P"), local=True,
                       x="bf16[t=4 k=8] S1@tp", w="bf16[k=8 n=6] S0@tp", out="I@tp", mesh="tp=2")
        after = run_pass(expand_transitions, before)
        expect(after, '''
            %0 = x                            # bf16[4 8/2] S1@tp
            %1 = w                            # bf16[8/2 6] S0@tp
            %2 = mm(%0, %1)                   # bf16[4 6]
            %3 = all_reduce(%2, 'sum', 'tp')  # bf16[4 6]
            %4 = wait_tensor(%3)              # bf16[4 6] I@tp
            return %4
        ''', t=2)
        assert_same(before, after, t=2)

A value is written `dtype[dim=size ...] placement@axis`; a dim without a size is dynamic (`bf16[b s k=8]`). Shapes are global;
`local=True` makes the graph one rank's (a result that is padded then needs its layout). Placements are I, R, P, M, S<dim> and
S<dim>/<layout>, such as `S0/2*(4x16+2x16)`.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_flatten, tree_map, tree_structure

from megafx.checks.simulate import Logical, relative_error, run_logical
from megafx.compiler.runner import Pass, PassFunction, Runner
from megafx.config import Config
from megafx.errors import UsageError
from megafx.ir import dump
from megafx.ir.contracts import verify
from megafx.ir.program import MADE_BY, PLACEMENT, VAL, Input, Output, Phase, Program, recompute_val
from megafx.ir.sizes import SizeEmitter, Sizes
from megafx.passes.backward.build_joint_graph import differentiate
from megafx.passes.canonicalize.canonicalize import canonicalize_program
from megafx.placements.types import I, Layout, Placement, S
from megafx.planner.context import CompileContext
from megafx.planner.hardware import Hardware
from megafx.rewrite.driver import rewrite
from megafx.rewrite.pattern import Pattern, check_pattern
from megafx.rewrite.trace import plain_modes

__all__ = ["assert_same", "expect", "graph", "make_context", "run_logically", "run_pass", "transition", "with_backward"]

_DTYPES = {short: getattr(torch, name) for name, short in dump._DTYPES.items()}
_VALUE = re.compile(r"(?P<param>param )?(?P<dtype>\w+)\[(?P<dims>[^\]]*)\](?: (?P<placement>[^@]+)@(?P<axis>\w+))?")
_HINTS = (5, 7, 11, 13, 17)  # of dynamic dims, in order of appearance: unequal, and divided by no number of ranks


def transition(x: Any, dst: str, src: str | None = None) -> Any:
    """In a function given to `graph`: move x to `dst`. src: where it is, if it is neither an input nor moved there."""
    if not isinstance(x, fx.Proxy):
        raise UsageError("testing.transition means something only inside a function that testing.graph traces")
    return x.tracer.create_proxy("call_function", transition, (x, dst), {"src": src})


def graph(fn: Callable[..., Any], *, out: str | tuple[str, ...] = "I@tp", mesh: str = "tp=2", local: bool = False,
          **values: str) -> Program:  # fmt: skip
    """A program of `fn`, which calls ATen ops on its arguments, one for each of `values`. Nothing is decomposed.

    out: placement of each result. The program is PLANNED, or PLACED where fn moves values; LOCAL with local=True.
    """
    axis, t = mesh.split("=")[0], int(mesh.split("=")[1])
    if (have := list(inspect.signature(fn).parameters)) != list(values):
        raise UsageError(f"the function takes {', '.join(have)}, but values are given for {', '.join(values)}")
    traced = fx.Tracer().trace(fn)
    maker = _Maker(traced, axis, t, local)
    inputs = [maker.placeholder(n, values[str(n.target)]) for n in traced.find_nodes(op="placeholder")]
    for node in list(traced.nodes):
        if node.op == "call_function":
            maker.call(node)
    output = traced.output_node()
    results = output.args[0] if isinstance(output.args[0], (list, tuple)) else (output.args[0],)
    output.args = (tuple(results),)
    outs = (out,) * len(results) if isinstance(out, str) else out
    for node, placement in zip(results, outs, strict=True):
        if isinstance(node, fx.Node) and PLACEMENT not in node.meta:
            node.meta[PLACEMENT] = maker.placement(placement.split("@")[0], node)
    traced.eliminate_dead_code()
    program = maker.program
    program.inputs = inputs
    program.outputs = [Output("user", str(i)) for i in range(len(results))]
    program.out_spec = tree_structure(tuple(results))
    program.gm.recompile()
    return program


class _Maker:
    """Gives a traced graph its values, placements and transitions."""

    def __init__(self, traced: fx.Graph, axis: str, t: int, local: bool) -> None:
        self.axis, self.t, self.local = axis, t, local
        self.shape_env = ShapeEnv()
        self.symbols: dict[str, torch.SymInt] = {}
        self.emitter: SizeEmitter | None = None
        gm, mode = fx.GraphModule(torch.nn.Module(), traced), FakeTensorMode(shape_env=self.shape_env)
        phase = Phase.LOCAL if local else Phase.PLANNED
        self.program = Program(gm, [], [], Sizes(), mode, tree_structure(()), phase=phase)
        self.program.gm.graph = traced

    def placeholder(self, node: fx.Node, text: str) -> Input:
        match = _VALUE.fullmatch(text)
        if match is None:
            raise UsageError(f"'{text}' is no value", fix="write it like 'bf16[t=4 k=8] S1@tp'")
        shape = [self._dim(d) for d in match["dims"].split()]
        node.meta[VAL] = self._fake(shape, _DTYPES[match["dtype"]])
        node.meta[MADE_BY] = ()
        if match["placement"] is not None:
            placement = self.placement(match["placement"], node, whole=True)
            node.meta[PLACEMENT] = placement
            if self.local and placement.is_shard:
                size = shape[placement.dim]
                dynamic = not isinstance(size, int)
                shape[placement.dim] = (size + (self.t - 1)) // self.t if dynamic else placement.cut.local_size(self.t)
                node.meta[VAL] = self._fake(shape, _DTYPES[match["dtype"]])
        return Input("param" if match["param"] else "user", str(node.target))

    def _dim(self, text: str) -> int | torch.SymInt:
        name, _, size = text.partition("=")
        if size or name.isdigit():
            return int(size or name)
        if name not in self.symbols:
            mode = self.program.fake_mode
            example = torch.empty(_HINTS[len(self.symbols) % len(_HINTS)])
            context: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC])
            found: Any = mode.from_tensor(example, symbolic_context=context).shape[0]
            self.symbols[name], symbol = found, found.node.expr
            self.program.sizes.symbols[name] = symbol
            self.program.sizes.workload_of[symbol] = example.shape[0]
        return self.symbols[name]

    def _fake(self, shape: list[int | torch.SymInt], dtype: torch.dtype) -> Tensor:
        with self.program.fake_mode:
            return torch.empty(shape, dtype=dtype)

    def placement(self, text: str, node: fx.Node, *, whole: bool = False) -> Placement:
        """'S1', 'S1/2*(4x16)', 'I', ... of a node's value. whole: its shape is global; else that of the program."""
        if text in ("I", "R", "P", "M"):
            return Placement(text)
        match = re.fullmatch(r"S(\d+)(?:/(?:(\d+)\*)?\(?([^()]+)\)?)?", text)
        if match is None:
            raise UsageError(f"'{text}' is no placement", fix="write I, R, P, M, S<dim> or S<dim>/<layout>")
        dim = int(match[1])
        if match[3]:
            cut = [b.partition("x") for b in match[3].split("+")]
            return S(dim, Layout.of([(int(n), int(unit or 1)) for n, _, unit in cut], self.t, int(match[2] or 1)))
        size = self.program.sizes.of(node.meta[VAL].shape[dim])
        return S(dim, Layout.contiguous(size if whole or not self.local else size * self.t, self.t))

    def call(self, node: fx.Node) -> None:
        node.meta[MADE_BY] = ()
        if node.target is transition:
            self._transition(node, *node.args, **node.kwargs)
            return
        if isinstance(node.target, torch._ops.OpOverloadPacket):
            packet = node.target
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta[VAL])
            with self.program.fake_mode:
                node.target = getattr(packet, torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs))
        recompute_val(self.program, node)

    def _transition(self, node: fx.Node, x: fx.Node, dst: str, src: str | None = None) -> None:
        start = x.meta.get(PLACEMENT) if src is None else self.placement(src, x)
        if start is None:
            raise UsageError(f"transition to {dst}: where its operand is placed is not known", fix="say src=")
        if start.is_shard and self.local and "/" not in dst and dst[0] == "S" and int(dst[1]) == start.dim:
            raise UsageError(f"transition {start} -> {dst}: write the layout of {dst}")
        end = self.placement(dst, x, whole=True)
        if self.emitter is None:
            self.emitter = SizeEmitter(self.program.graph, self.program.sizes)
        layouts = [[self.emitter(n) for n in p.flat_layout] for p in (start, end)]
        node.target = torch.ops.megafx.transition.default
        node.args = (x, start.tag, end.tag, *layouts, self.axis, self.t if self.local else 1)
        node.kwargs = {}
        node.meta[PLACEMENT] = end
        if not self.local:
            self.program.phase = Phase.PLACED
        recompute_val(self.program, node)


def with_backward(program: Program) -> Program:
    """The JOINT program of a LOCAL one: gradients of every floating input, of every floating output."""
    joint = program.copy()
    differentiate(joint, *_differentiable(joint))
    olds, news = ([*p.placeholders(), *p.results()] for p in (program, joint))
    tangents = sum(spec.kind == "tangent" for spec in joint.inputs)
    inputs = len(program.inputs)
    for old, new in zip(olds, news[:inputs] + news[inputs + tangents :], strict=False):
        if isinstance(old, fx.Node) and isinstance(new, fx.Node) and PLACEMENT in old.meta:
            new.meta.setdefault(PLACEMENT, old.meta[PLACEMENT])
    return joint


def make_context(
    t: int = 1, config: Config | None = None, *, hardware: str = "h100-nvlink", training: bool = True, **fields: Any
) -> CompileContext:
    """The record that a pass gets. training: gradients of all inputs are wanted. fields: further ones of CompileContext."""
    if training:
        fields.setdefault("wants_grad", lambda spec: True)
    return CompileContext(config or Config(), t, Hardware.load(hardware), **fields)


def run_pass(function: PassFunction, program: Program, context: CompileContext | None = None) -> Program:
    """What the pass makes of a copy of the program; phase contracts are checked before and after."""
    result = program.copy()
    verify(result)
    Runner(context or make_context()).run(result, [Pass.of(function)])
    verify(result)
    return result


def expect(program: Program, text: str, *, t: int | None = None) -> None:
    """The program's canonical text is `text` (indentation aside). t: ranks, for graphs without transitions."""
    found = dump.text(program, t=t)
    wanted = textwrap.dedent(text).strip("\n").rstrip()
    if found != wanted:
        raise AssertionError(f"the graph is\n\n{found}\n\nexpected\n\n{wanted}\n\n{dump.diff(wanted, found)}")


def assert_same(before: Program, after: Program, t: int = 2, *, tolerance: float = 1e-10, sizes: int = 9) -> None:
    """Both compute the same results and gradients, in fp64, on all t ranks (graphs with global shapes: on one).

    Programs up to LOCAL are differentiated here; a LOWERED one without backward has no gradients to compare. sizes: length
    of the first dynamic dim (the next ones are one longer each).
    """
    first, second = (run_logically(p, t, sizes=sizes) for p in (before, after))
    for name, wanted in first.outputs.items():
        _close(f"output {name}", second.outputs[name], wanted, tolerance)
    for name in first.gradients.keys() & second.gradients.keys():
        _close(f"gradient of {name}", second.gradients[name], first.gradients[name], tolerance)


def _close(what: str, found: Any, wanted: Any, tolerance: float) -> None:
    if not isinstance(wanted, Tensor) or not isinstance(found, Tensor):
        if found is not wanted and found != wanted:
            raise AssertionError(f"{what} is {found}, was {wanted}")
        return
    if found.shape != wanted.shape:
        raise AssertionError(f"{what} is of shape {tuple(found.shape)}, was {tuple(wanted.shape)}")
    if (error := relative_error(found, wanted)) > tolerance:
        raise AssertionError(f"{what} differs by {error:.1e}, more than {tolerance:.0e}")


def run_logically(program: Program, t: int, *, sizes: int = 9) -> Logical:
    """Results and gradients of a program in fp64 on random inputs, the same for every form of the same graph."""
    program = _in_fp64(program.copy())
    if program.phase < Phase.LOCAL:
        t = 1
    given = [(node, spec.name) for node, spec in program.input_nodes() if spec.kind != "tangent"]
    placements = {name: node.meta.get(PLACEMENT, I) for node, name in given}
    values, now = _random_inputs(program, placements, sizes)
    for name, p in placements.items():
        placements[name] = Placement.parse(p.tag, [_number_of(program, n, now) for n in p.flat_layout])
    if program.phase < Phase.LOCAL:
        return _run_with_autograd(program, values)
    if program.phase == Phase.LOCAL:
        program = with_backward(program)
    results = {o.name: n for o, n in zip(program.outputs, program.results(), strict=True) if o.kind != "gradient"}
    for i, spec in enumerate(s for s in program.inputs if s.kind == "tangent"):
        node: Any = results[spec.name]
        shape = _whole_shape(program, node, node.meta.get(PLACEMENT, I), now)
        values[spec.name] = _random_tangent(shape, 1 + i)
    return run_logical(program, values, placements, t)


def _in_fp64(program: Program) -> Program:
    """Inputs, casts and constants of other floating types become fp64."""

    def promoted(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    for node in program.graph.nodes:
        value = node.meta.get(VAL)
        if node.op == "placeholder" and isinstance(value, Tensor) and value.is_floating_point():
            with program.fake_mode:
                node.meta[VAL] = value.new_empty(value.shape, dtype=torch.float64)
        elif node.op == "call_function":
            node.args, node.kwargs = (fx.node.map_aggregate(a, promoted) for a in (node.args, node.kwargs))
            recompute_val(program, node)
    program.gm.recompile()
    return program


def _random_inputs(
    program: Program, placements: dict[str, Placement], sizes: int
) -> tuple[dict[str, Tensor], dict[Any, int]]:
    """(logical value by input name, value of each size symbol)."""
    now: dict[Any, int] = {}
    for symbol in program.sizes.symbols.values():
        now[symbol] = sizes + len(now)
    generator = torch.Generator().manual_seed(0)
    values: dict[str, Tensor] = {}
    for node, spec in program.input_nodes():
        if spec.kind == "tangent":
            continue
        value, shape = node.meta[VAL], _whole_shape(program, node, placements[spec.name], now)
        if value.is_floating_point():
            values[spec.name] = torch.randn(shape, dtype=torch.float64, generator=generator)
        else:
            values[spec.name] = torch.randint(0, 2, shape, generator=generator).to(value.dtype)
    return values, now


def _whole_shape(program: Program, node: fx.Node, placement: Placement, now: dict[Any, int]) -> list[int]:
    shape = [n if isinstance(n, int) else int(n.node.expr.xreplace(now)) for n in node.meta[VAL].shape]
    if placement.is_shard:
        shape[placement.dim] = _number_of(program, placement.cut.size, now)
    return shape


def _number_of(program: Program, structural: int, now: dict[Any, int]) -> int:
    return int(program.sizes.expr(structural).xreplace(now))


def _random_tangent(shape: Any, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _differentiable(program: Program) -> tuple[list[int], list[int]]:
    """(floating inputs, floating outputs)."""
    results: Any = program.results()
    inputs = [i for i, n in enumerate(program.placeholders()) if n.meta[VAL].is_floating_point()]
    outputs = [i for i, n in enumerate(results) if isinstance(n, fx.Node) and n.meta[VAL].is_floating_point()]
    return inputs, outputs


def _run_with_autograd(program: Program, values: dict[str, Tensor]) -> Logical:
    """A graph on global shapes, where transitions are identities, by eager autograd."""
    leaves = {n: v.requires_grad_() if v.is_floating_point() else v for n, v in values.items()}
    inputs, outputs = _differentiable(program)
    results = fx.Interpreter(program.gm).run(*leaves.values())
    tangents = [_random_tangent(results[o].shape, 1 + i) for i, o in enumerate(outputs)]
    names = [program.inputs[i].name for i in inputs]
    live = [(results[o], g) for o, g in zip(outputs, tangents, strict=True) if results[o].requires_grad]
    wanted = [leaves[n] for n in names]
    grads = torch.autograd.grad([r for r, _ in live], wanted, [g for _, g in live], allow_unused=True)
    found = {o.name: tree_map(lambda x: x.detach(), r) for o, r in zip(program.outputs, results, strict=True)}
    return Logical(found, dict(zip(names, grads, strict=True)))


@dataclass
class Fused:
    """A canonical program before and after; counts: matches by pattern; near_misses: reasons, whole ones first."""

    before: Program
    program: Program
    counts: dict[str, int]
    near_misses: list[str]

    @property
    def text(self) -> str:
        return dump.text(self.program)

    @property
    def ops(self) -> list[str]:
        """Names of the ops after the rewrite, in graph order."""
        return [dump.target_text(n.target) for n in self.program.graph.nodes if n.op == "call_function"]


def canonical(fn: Callable[..., Any], **values: str) -> Program:
    """The canonical program of an eager function of tensors, given as `x="bf16[b s h=8]"`, `w="param f32[h=8]"`."""
    graph = fx.Graph()
    maker = _Maker(graph, "tp", 1, False)
    nodes = {name: graph.placeholder(name) for name in values}
    inputs: list[Input] = [maker.placeholder(node, values[name]) for name, node in nodes.items()]
    fakes = [node.meta["val"] for node in nodes.values()]

    def call(*tensors: torch.Tensor) -> Any:
        return tree_flatten(fn(**dict(zip(values, tensors, strict=True))))[0]

    with plain_modes():
        gm = make_fx(call, tracing_mode="fake", pre_dispatch=True)(*fakes)
    program: Program = maker.program
    program.gm, program.inputs, program.phase = gm, inputs, Phase.CAPTURED
    for node in gm.graph.nodes:
        node.meta[MADE_BY] = ()
    output = gm.graph.output_node()
    results = output.args[0]
    output.args = (tuple(results),)
    program.outputs = [Output("user", str(i)) for i in range(len(results))]
    program.gm.recompile()
    canonicalize_program(program)
    return program


def fuse_with(
    patterns: type[Pattern] | Sequence[type[Pattern]], fn: Callable[..., Any] | Program, **values: str
) -> Fused:
    """Run patterns, and no others, on an eager function (or on a canonical program). Local patterns see the same shapes.

    fused = fuse_with(BiasGelu, lambda x, w, b: F.gelu(F.linear(x, w, b)),
                      x="f32[b s k=4]", w="param f32[n=8 k=4]", b="param f32[n=8]")
    expect(fused.program, "...")
    assert_same(fused.before, fused.program)       # results and every gradient, in fp64
    assert fused.counts == {"bias_gelu": 1}        # where none matches, fused.near_misses says why
    """
    chosen = [patterns] if isinstance(patterns, type) else list(patterns)
    for pattern in chosen:
        check_pattern(pattern)
    if isinstance(fn, Program) and values:
        raise UsageError("values are given for a program, which has its own")
    before = fn if isinstance(fn, Program) else canonical(fn, **values)
    after = before.copy()
    counts: dict[str, int] = {}
    misses = []
    for local in (False, True):
        done = rewrite(after, [p for p in chosen if p.local == local], "fuse_local" if local else "fuse")
        counts |= done.counts
        misses += done.near_misses
    after.graph.lint()
    after.gm.recompile()
    return Fused(before, after, counts, [m.reason for m in sorted(misses, key=lambda m: not m.whole)])
