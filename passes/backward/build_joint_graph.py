"""Build forward and backward as one graph.

Before:  %loss = f(%w, %x)                       # one rank's forward, transitions whole
After:   %loss = f(%w, %x)
         %dw = df/dw(%w, %x, %tangent)           # phase 'backward'; a transition's backward is its dual transition
         return loss, dw
Legal because: it is what autograd dispatches when the forward runs on fake tensors; at one rank it is bit-equal to eager.

Composite ops decompose here (linear to view, t and mm; matmul to bmm); custom ops stay whole. What a forward node's autograd
functions dispatch in backward carries its line and module; sums of gradients carry those of the function that ran last.
"""

from __future__ import annotations

import contextlib
import math
import operator
import string
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._decomp import decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.functions import Max, Min

from megafx.errors import MegafxError
from megafx.ir.nodes import ASSERTS, BACKWARD, RESHAPES, argument, aten_ops, in_backward, own_gradients, shows_operand
from megafx.ir.program import (
    MADE_BY,
    PHASE,
    PLACEMENT,
    VAL,
    Builder,
    Input,
    Output,
    Phase,
    Program,
    differentiable_outputs,
    inherit,
    is_floating,
    located,
    number_sizes,
    recompute_val,
)
from megafx.ir.size_arithmetic import remembering
from megafx.ir.sizes import SizeEmitter, size_sources
from megafx.meanwhile import meanwhile
from megafx.passes.backward.functional import functional
from megafx.passes.backward.node_gradients import NodeGradients
from megafx.placements.moves import same_sizes
from megafx.planner.context import CompileContext
from megafx.rewrite.trace import without_code

REQUIRES, ENSURES = Phase.LOCAL, Phase.JOINT
NAME = "build_joint_graph"
aten = torch.ops.aten


def build_joint_graph(program: Program, context: CompileContext) -> int:
    """Append the backward of the loss alone, or of all `differentiable_outputs`; return the number of its nodes."""
    assert context.wants_grad is not None
    wrt = [
        i
        for i, (node, spec) in enumerate(program.input_nodes())
        if spec.kind in ("param", "user") and is_floating(node) and context.wants_grad(spec)
    ]
    losses = [i for i, spec in enumerate(program.outputs) if spec.loss]
    if program.call is not None:  # of a captured model, whose loss may come of frozen parameters alone
        losses = [i for i in losses if program.outputs[i].requires_grad]
    if losses and not context.config.differentiable_outputs:
        return differentiate(program, wrt, losses)
    return differentiate(program, wrt, differentiable_outputs(program))


def differentiate(program: Program, wrt: list[int], differentiated: list[int]) -> int:
    """Append the backward; return the number of its nodes.

    wrt: indices of inputs whose gradients are wanted. differentiated: indices of outputs that have a gradient; each brings
    an Input('tangent', output name), in this order, after all other inputs. Each of wrt brings an
    Output('gradient', input name), in this order; its element of the output tuple is None where no output depends on it.
    """
    _check_floating(program, wrt, differentiated)
    primals = [_traced(program, node, i in wrt) for i, node in enumerate(program.placeholders())]
    tangents = [_traced(program, program.results()[i], False) for i in differentiated]
    symbols = set(size_sources(program.graph))
    traced: list[NodeGradients] = []
    lost: list[str] = []

    def joint(*args: Any) -> tuple[Any, ...]:
        values, seeds = args[: len(primals)], args[len(primals) :]
        nodes = NodeGradients(program, symbols, NAME)
        traced.append(nodes)
        results = nodes.forward(_dispatch, values)
        outputs = [results[i] for i in differentiated]
        if wrt and program.call is not None:
            lost[:] = [
                program.outputs[i].name for i, x in zip(differentiated, outputs, strict=True) if not x.requires_grad
            ]
        gradients = nodes.backward(outputs, seeds, wrt)
        return (*map(nodes.tensor, results), *gradients)

    with _tracing(program), without_code():
        program.gm = functional(make_fx(joint, tracing_mode="real")(*primals, *tangents), [*primals, *tangents])
    _check_symbols(program, symbols, traced[-1])
    if lost:
        raise MegafxError(
            f"output '{lost[0]}' requires a gradient in eager mode, and in the graph nothing that it is made of does",
            fix="report it: gradients would be lost; Config(eager_modules=...) leaves the module that makes it as it is",
        )
    program.inputs += [Input("tangent", program.outputs[i].name) for i in differentiated]
    program.outputs += [Output("gradient", program.inputs[i].name) for i in wrt]
    _drop_noise(program)
    _reroot_sizes(program)
    _free_of_strides(program)
    own_gradients(program, NAME)
    program.erase_unused()
    number_sizes(program.graph)
    _finish_meta(program)
    program.gm.recompile()
    program.phase = ENSURES
    return sum(1 for n in program.graph.nodes if in_backward(n))


# -- what is traced


def _check_floating(program: Program, wrt: list[int], differentiated: list[int]) -> None:
    placeholders, results = program.placeholders(), program.results()
    assert isinstance(results, (tuple, list))
    named: list[tuple[str, str, Any]] = [("input", program.inputs[i].name, placeholders[i]) for i in wrt]
    named += [("output", program.outputs[i].name, results[i]) for i in differentiated]
    for what, name, node in named:
        value = node.meta.get(VAL) if isinstance(node, fx.Node) else node
        if not (isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())):
            raise MegafxError(f"{what} '{name}' has no gradient: it is no floating tensor but {value!r}")


def _traced(program: Program, node: Any, differentiable: bool) -> Any:
    """A leaf with the node's size on the program's own symbols. Contiguous: `Executable` makes inputs so."""
    value = node.meta[VAL]
    if not isinstance(value, torch.Tensor):
        return value
    with program.fake_mode:
        return torch.empty(value.shape, dtype=value.dtype, device=value.device, requires_grad=differentiable)


@contextlib.contextmanager
def _tracing(program: Program) -> Iterator[None]:
    """Autograd on, one thread (a deterministic order), no ambient autocast: dtypes are what the graph says."""
    devices = {n.meta[VAL].device.type for n in program.placeholders() if isinstance(n.meta[VAL], torch.Tensor)}
    with contextlib.ExitStack() as stack:
        for device in sorted(devices - {"meta"}):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.set_detect_anomaly(False))  # it reads values, and there are none
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        # Nodes get no "tensor_meta": to find out how a value of varying sizes lies in memory takes longer than to compute it.
        # Strides of parts are products of Max(1, size), which torch 2.11 has no function for.
        handlers: dict[Any, Any] = {Max: torch.sym_max, Min: torch.sym_min, **proxy_tensor._sympy_handlers()}
        own = {
            "_extract_tensor_metadata": lambda value: None, "_sympy_handlers": lambda: handlers,
            "_build_proxy_for_sym_expr": _in_pairs(proxy_tensor._build_proxy_for_sym_expr),
        }  # fmt: skip
        stack.enter_context(meanwhile(proxy_tensor, **own))
        stack.enter_context(program.fake_mode)
        stack.enter_context(remembering(program.fake_mode.shape_env))
        stack.enter_context(enable_python_dispatcher())  # C++ decompositions of some ops (pad) fix dynamic sizes
        yield


def _in_pairs(make: Any) -> Any:
    """Products of three sizes have nodes, and sums: torch gives all of them to a function of two."""

    def made(tracer: Any, expr: sympy.Expr, out: Any = None) -> Any:
        if (
            expr.func in (sympy.Mul, sympy.Add, Max, Min)
            and len(expr.args) > 2
            and expr not in tracer.sympy_expr_tracker
        ):
            first, *others = expr.args
            expr = expr.func(first, expr.func(*others), evaluate=False)
        return make(tracer, expr, out)

    return made


def _dispatch(target: Any, args: Any, kwargs: Any) -> Any:
    if target is aten.multilabel_margin_loss.default:
        return _multilabel_margin(*args, **kwargs)
    if target is aten.cumprod.default and args[0].requires_grad and args[0].dim() and not args[0].is_complex():
        return _Cumprod.apply(*args, kwargs.get("dtype"))
    if target is aten.affine_grid_generator.default:
        return decompositions.affine_grid_generator(*args, **kwargs)
    found = _product_of(*args) if target is aten.einsum.default and not kwargs else None
    return target(*args, **kwargs) if found is None else found


def _multilabel_margin(x: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    """Of scores [rows, classes] or [classes], and the labels of each row before its first -1. torch's decomposition (2.13)
    takes each label from the first -1 on for a 0."""
    scores, labels = torch.atleast_2d(x), torch.atleast_2d(target)
    classes = scores.shape[1]
    counts = (labels == -1).cumsum(1) == 0
    numbers = torch.arange(classes, device=x.device)
    others = (numbers != torch.where(counts, labels, -1).unsqueeze(2)).all(1)
    margins = torch.relu(1 - scores.gather(1, torch.where(counts, labels, 0)).unsqueeze(2) + scores.unsqueeze(1))
    each = torch.where(counts.unsqueeze(2) & others.unsqueeze(1), margins, 0.0).sum((1, 2)) / classes
    each = each if x.dim() == 2 else each[0]
    return each if reduction == 0 else each.mean() if reduction == 1 else each.sum()


class _Cumprod(torch.autograd.Function):
    """Products of the elements up to each. torch's own gradient makes a term for each element, so that it fixes their number,
    where it is not given values that it could ask for zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
        y = torch.cumprod(x, dim, dtype=dtype)
        ctx.dim = dim
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x, y), dim = ctx.saved_tensors, ctx.dim
        grad = grad.to(x.dtype)
        zero = x == 0
        zeros = zero.cumsum(dim)
        before, after = zeros == 0, zeros == 1  # the first zero is the one after `before`; the next ones change nothing
        following = torch.where(before, grad * y, 0).flip(dim).cumsum(dim).flip(dim)
        first = zero & after
        others = torch.cumprod(torch.where(first, 1, x), dim)  # without that zero
        of_first = torch.where(after, grad * others, 0).sum(dim, keepdim=True)
        return torch.where(before, following / x, torch.where(first, of_first, 0)).to(x.dtype), None, None


def _product_of(equation: str, operands: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """einsum of two operands as the bmm that torch makes of it, its dims grouped by letter; None for other forms.

    torch groups them by size: a dim of which a rank has one row would be summed with the contracted ones, which means something
    else to types.
    """
    terms, _, out = equation.replace(" ", "").partition("->")
    letters = terms.split(",")
    if "->" not in equation or len(letters) != 2 or len(operands) != 2:
        return None
    free = [c for c in string.ascii_letters if c not in equation]  # for the dims of '...', aligned from the right
    dots = [
        x.dim() - len(term.replace("...", "")) if "." in term else 0 for term, x in zip(letters, operands, strict=True)
    ]
    left, right = (term.replace("...", "".join(free[:n][::-1])) for term, n in zip(letters, dots, strict=True))
    out = out.replace("...", "".join(free[: max(dots)][::-1]))
    size = dict(zip(left, operands[0].shape, strict=True))
    if any(len({*term}) != len(term) for term in (left, right, out)) or {*out} - {*left, *right}:
        return None
    if any(
        not statically_known_true(size.setdefault(c, n) == n) for c, n in zip(right, operands[1].shape, strict=True)
    ):
        return None  # one row for all of the other's
    summed = sorted({*left, *right} - {*out})
    if any(c not in left or c not in right for c in summed):
        return None
    if not summed and operands[0].dtype != operands[1].dtype:
        return None  # torch multiplies elements there, of two dtypes too
    both = [c for c in out if c in left and c in right]
    rows, columns = ([c for c in out if c in term and c not in both] for term in (left, right))

    def flat(operand: torch.Tensor, letters: str, *groups: list[str]) -> torch.Tensor:
        turned = operand.permute([letters.index(c) for group in groups for c in group])
        return turned.reshape([math.prod(size[c] for c in group) for group in groups])

    product = torch.bmm(flat(operands[0], left, both, rows, summed), flat(operands[1], right, both, summed, columns))
    order = [*both, *rows, *columns]
    return product.reshape([size[c] for c in order]).permute([order.index(c) for c in out])


def _check_symbols(program: Program, before: set[Any], traced: NodeGradients) -> None:
    """Tracing must not have fixed a size that varies, nor have decided by it."""
    fixed, node = before - set(size_sources(program.graph)) | traced.decided, traced.fixing
    if fixed:
        raise MegafxError(
            f"differentiating the model fixes the sizes {sorted(map(str, fixed))} to the traced ones"
            + (f", at {node.target}" if node is not None else ""),
            fix="the op or its gradient asks for the number itself: write it with symbolic sizes, or give it a plain number, "
            "int(x.shape[0]), for each of which there is a graph then",
            **(located(node) if node is not None else {}),
        )


# -- cleaning


def _drop_noise(program: Program) -> None:
    """Remove what does nothing without autograd: detach, alias, transposes in pairs, views to the same shape, asserts."""
    for node in list(program.graph.nodes):
        if node.target in ASSERTS:  # of composite ops that are traced anew, such as one_hot
            program.graph.erase_node(node)
        elif node.target is aten._linalg_check_errors.default:
            what = f"{node.args[1]} raises no error for a matrix that it cannot take: what it gives then means nothing"
            program.note("unchecked", what, node)
            program.graph.erase_node(node)
        elif node.op == "call_function" and (source := _same_as(node)) is not None:
            node.replace_all_uses_with(source)


def _same_as(node: fx.Node) -> fx.Node | None:
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target in (aten.detach.default, aten.alias.default):
        return source
    if node.target is aten.t.default and source.target is aten.t.default:
        return source.args[0]
    if node.target is aten.copy.default:  # into memory of this form: a copy that changes nothing but the memory
        given = node.args[1]
        value = given.meta[VAL]
        alike = value.dtype == node.meta[VAL].dtype and value.device == node.meta[VAL].device
        forms = [[*v.shape, *v.stride()] for v in (value, node.meta[VAL])]
        return given if alike and same_sizes(*forms) else None
    return source if node.target in RESHAPES and same_sizes(node.meta[VAL].shape, source.meta[VAL].shape) else None


def _reroot_sizes(program: Program) -> None:
    """Every size is computed once, at the top, from the sizes of inputs."""
    graph, known = program.graph, set(size_sources(program.graph))
    found = {n: None for n in graph.nodes if n.op == "call_function" and isinstance(n.meta.get(VAL), torch.SymInt)}
    emit = SizeEmitter(graph, program.sizes)
    for node in found:
        if not node.meta[VAL].node.expr.free_symbols <= known:
            continue  # depends on data
        size = emit(program.sizes.of(node.meta[VAL]))
        for user in [u for u in node.users if u not in found]:  # a size at the top may be before `size`
            user.args, user.kwargs = _replaced(user.args, node, size), _replaced(user.kwargs, node, size)


def _replaced(arguments: Any, old: fx.Node, new: int | fx.Node) -> Any:
    return fx.map_arg(arguments, lambda a: new if a is old else a)


# Ops whose result lies in memory as it was traced, whatever the operands are like; and where operands lie as they were traced.
_LAYS_OUT = aten_ops("mm bmm addmm baddbmm embedding embedding_dense_backward full new_zeros zeros arange")
# Of contiguous operands too it lies otherwise than traced: by the order in which the transform takes the dims (torch 2.11).
_BY_PLAN = aten_ops("_fft_r2c _fft_c2c _fft_c2r")
_OWN_FORMS = ("megafx.", "scaled_dot_product")
_FOLLOWS = aten_ops(
    "add.Tensor sub.Tensor mul.Tensor div.Tensor mul.Scalar add.Scalar neg exp rsqrt sqrt pow.Tensor_Scalar _to_copy clone "
    "relu sigmoid tanh gelu silu sigmoid_backward tanh_backward gelu_backward silu_backward threshold_backward where.self "
    "ge.Scalar lt.Scalar eq.Scalar ne.Scalar"
)
_NEEDS_ROWS = {torch.ops.megafx.transition.default, aten.view_as_complex.default}


def _free_of_strides(program: Program) -> None:
    """Where kernels may lay a result out other than traced, views of it are reshapes, and what needs it contiguous makes it so.

    Fake tensors follow formulas of their own: elu_backward and _log_softmax of transposed heads differ from those on a CPU.
    """
    unsure: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op != "call_function" or argument(node, "memory_format") is torch.contiguous_format:
            continue
        operands = [n for n in node.all_input_nodes if not isinstance(n.meta.get(VAL), (int, torch.SymInt))]
        loose = [n for n in operands if n in unsure]
        if node.target in _NEEDS_ROWS and loose:
            rows = Builder(program, node, node, NAME)(aten.contiguous.default, loose[0])
            rows.meta |= {k: loose[0].meta[k] for k in (PHASE, PLACEMENT) if k in loose[0].meta}
            node.replace_input_with(loose[0], rows)
            if not node.meta[VAL].is_contiguous():  # its users were traced on other strides than it has now
                recompute_val(program, node)
                unsure.add(node)
        elif shows_operand(node) or node.target is operator.getitem:
            unsure.update([node] if loose else [])
            if loose and node.target in RESHAPES:
                node.target = aten.reshape.default
        elif node.target not in _LAYS_OUT and not any(name in str(node.target) for name in _OWN_FORMS):
            rows_only = node.target not in _BY_PLAN and all(
                n.meta[VAL].is_contiguous() for n in operands if isinstance(n.meta.get(VAL), torch.Tensor)
            )
            if (loose or not (rows_only or node.target in _FOLLOWS)) and not _is_a_row(node):
                unsure.add(node)
    output, results = program.output_node(), list(program.results())
    for i, spec in enumerate(program.outputs):
        if spec.kind == "gradient" and results[i] in unsure:
            build = Builder(program, output, results[i], NAME)
            results[i] = build(aten.contiguous.default, results[i])
            results[i].meta[PHASE] = BACKWARD
    output.args = (tuple(results),)


def _is_a_row(node: fx.Node) -> bool:
    """True if at most one dim is longer than 1: there is one way to lay it out."""
    value = node.meta.get(VAL)
    return isinstance(value, torch.Tensor) and sum(not (isinstance(n, int) and n == 1) for n in value.shape) <= 1


def _finish_meta(program: Program) -> None:
    """Nodes that autograd made outside any function take line and module from an operand or, failing that, a user."""
    for node in [n for n in program.graph.nodes if n.op == "call_function" and MADE_BY not in n.meta]:
        phase = node.meta.get(PHASE)
        around = (*node.all_input_nodes, *node.users)
        near = next((n for n in around if n.op == "call_function" and MADE_BY in n.meta), None)
        if near is not None:
            inherit(node, near, NAME)
        node.meta.setdefault(MADE_BY, (NAME,))
        node.meta.pop(PHASE, None)
        if phase is not None:
            node.meta[PHASE] = phase
