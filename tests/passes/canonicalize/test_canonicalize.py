"""Covers: passes/canonicalize/. Each rewrite: what it makes (golden) and that it computes the same (fp64, gradients)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functions import Function, _counting, ids_of, x_of
from interpret import run_program
from torch import nn

from megafx.capture.export import capture_call
from megafx.ir.dump import text
from megafx.ir.program import VAL, Phase, Program
from megafx.passes.canonicalize.canonicalize import canonicalize_program

aten = torch.ops.aten


MAKERS = {"x": x_of, "ids": ids_of}


@dataclass
class Case:
    name: str
    fn: Callable[..., Any]
    expected: str
    inputs: str = "x"
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    train: bool = True


def _in_place(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[:, 0] = x[:, 1]
    view = y.transpose(0, 1)
    view[1].mul_(3.0)
    y += x
    return view.sum() + y.mean()


def _no_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = m.w.exp()
        with torch.enable_grad():
            also = m.w * scale
    return x * scale + also


def _idle_native_dropout(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Unlike dropout it returns a copy: what is written into that is not in x."""
    y, _ = torch.native_dropout(x * 3, 0.0, True)
    return y + torch.native_dropout(x, 0.5, m.training)[0].mul_(2)


def _heads(m: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = F.linear(x, m.w).view(x.shape[0], x.shape[1], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


CASES = [
    Case(
        "conv1d",
        lambda m, x: torch.addmm(m.b, x.view(-1, 8), m.w).view(x.shape[0], x.shape[1], 6),
        """\
        %0 = w                        # f64[8 6] param
        %1 = b                        # f64[6] param
        %2 = args[0]                  # f64[batch seq 8]
        %3 = transpose.int(%0, 0, 1)  # f64[6 8]
        %4 = linear(%2, %3, %1)       # f64[batch seq 6]
        return %4""",
        parameters={"w": (8, 6), "b": (6,)},
    ),
    Case(
        "matmul_plus_bias",
        lambda m, x: m.b + x @ m.w.T,
        """\
        %0 = w                   # f64[6 8] param
        %1 = b                   # f64[6] param
        %2 = args[0]             # f64[batch seq 8]
        %3 = linear(%2, %0, %1)  # f64[batch seq 6]
        return %3""",
        parameters={"w": (6, 8), "b": (6,)},
    ),
    Case(
        "split",
        lambda m, x: (lambda q, k, v: q + k * v)(*F.linear(x, m.w).split(4, -1)),
        """\
        %0 = w                    # f64[12 8] param
        %1 = args[0]              # f64[batch seq 8]
        %2 = linear(%1, %0)       # f64[batch seq 12]
        %3 = slice(%2, 2, 0, 4)   # f64[batch seq 4]
        %4 = slice(%2, 2, 4, 8)   # f64[batch seq 4]
        %5 = slice(%2, 2, 8, 12)  # f64[batch seq 4]
        %6 = mul(%4, %5)          # f64[batch seq 4]
        %7 = add(%3, %6)          # f64[batch seq 4]
        return %7""",
        parameters={"w": (12, 8)},
    ),
    Case(
        "chunk_narrow_negative",
        lambda m, x: x.chunk(2, -1)[1] * x.narrow(-1, 2, 4) + x[..., -4:],
        """\
        %0 = args[0]             # f64[batch seq 8]
        %1 = slice(%0, 2, 4, 8)  # f64[batch seq 4]
        %2 = slice(%0, 2, 2, 6)  # f64[batch seq 4]
        %3 = mul(%1, %2)         # f64[batch seq 4]
        %4 = slice(%0, 2, 4, 8)  # f64[batch seq 4]
        %5 = add(%3, %4)         # f64[batch seq 4]
        return %5""",
    ),
    Case(
        "views",
        lambda m, x: x.mT.unsqueeze(-1).squeeze(-1).flatten(1).unflatten(1, (8, -1)).movedim(1, 2).expand(-1, -1, 8),
        """\
        %0 = args[0]                   # f64[batch seq 8]
        %1 = sym_size.int(%0, 0)       # int batch
        %2 = sym_size.int(%0, 1)       # int seq
        %3 = transpose.int(%0, 1, 2)   # f64[batch 8 seq]
        %4 = unsqueeze(%3, 3)          # f64[batch 8 seq 1]
        %5 = reshape(%4, [%1, 8, %2])  # f64[batch 8 seq]
        %6 = transpose.int(%5, 1, 2)   # f64[batch seq 8]
        return %6""",
    ),
    Case(
        "in_place",
        _in_place,
        """\
        %0 = args[0]                       # f64[batch seq 8]
        %1 = mul(%0, 2)                    # f64[batch seq 8]
        %2 = select.int(%0, 1, 1)          # f64[batch 8]
        %3 = select_scatter(%1, %2, 1, 0)  # f64[batch seq 8]
        %4 = transpose.int(%3, 0, 1)       # f64[seq batch 8]
        %5 = select.int(%4, 0, 1)          # f64[batch 8]
        %6 = mul(%5, 3.0)                  # f64[batch 8]
        %7 = select_scatter(%4, %6, 0, 1)  # f64[seq batch 8]
        %8 = transpose.int(%7, 0, 1)       # f64[batch seq 8]
        %9 = add(%8, %0)                   # f64[batch seq 8]
        %10 = transpose.int(%9, 0, 1)      # f64[seq batch 8]
        %11 = sum(%10)                     # f64[]
        %12 = mean(%9)                     # f64[]
        %13 = add(%11, %12)                # f64[]
        return %13""",
    ),
    Case(
        "buffer_mutation",
        _counting,
        """\
        %0 = count        # i64[] buffer
        %1 = args[0]      # f64[batch seq 8]
        %2 = add(%0, 1)   # i64[]
        %3 = mul(%1, %2)  # f64[batch seq 8]
        return %3  # user
        return %2  # mutation count""",
    ),
    Case(
        "no_grad",
        _no_grad,
        """\
        %0 = w            # f64[8] param
        %1 = args[0]      # f64[batch seq 8]
        %2 = exp(%0)      # f64[8]
        %3 = detach(%2)   # f64[8]
        %4 = mul(%0, %3)  # f64[8]
        %5 = mul(%1, %3)  # f64[batch seq 8]
        %6 = add(%5, %4)  # f64[batch seq 8]
        return %6""",
        parameters={"w": (8,)},
    ),
    Case(
        "cross_entropy",
        lambda m, x, ids: F.cross_entropy(F.linear(x, m.w).flatten(0, 1), ids.flatten(), label_smoothing=0.1),
        """\
        %0 = w                                        # f64[9 8] param
        %1 = args[0]                                  # f64[batch seq 8]
        %2 = args[1]                                  # i64[batch seq]
        %3 = sym_size.int(%1, 0)                      # int batch
        %4 = sym_size.int(%1, 1)                      # int seq
        %5 = operator.mul(%3, %4)                     # int batch*seq
        %6 = linear(%1, %0)                           # f64[batch seq 9]
        %7 = reshape(%6, [%5, 9])                     # f64[batch*seq 9]
        %8 = reshape(%2, [%5])                        # i64[batch*seq]
        %9 = cross_entropy(%7, %8, -100, 0.1, False)  # f64[batch*seq]
        %10 = ne.Scalar(%8, -100)                     # bool[batch*seq]
        %11 = sum(%9)                                 # f64[]
        %12 = sum(%10)                                # i64[]
        %13 = div(%11, %12)                           # f64[]
        return %13""",
        inputs="x ids",
        parameters={"w": (9, 8)},
    ),
    Case(
        "nll_of_log_softmax",
        lambda m, x, ids: F.nll_loss(F.log_softmax(x.view(-1, 8), -1), ids.view(-1), reduction="sum", ignore_index=3),
        """\
        %0 = args[0]                               # f64[batch seq 8]
        %1 = args[1]                               # i64[batch seq]
        %2 = sym_size.int(%0, 0)                   # int batch
        %3 = sym_size.int(%0, 1)                   # int seq
        %4 = operator.mul(%2, %3)                  # int batch*seq
        %5 = reshape(%0, [%4, 8])                  # f64[batch*seq 8]
        %6 = reshape(%1, [%4])                     # i64[batch*seq]
        %7 = cross_entropy(%5, %6, 3, 0.0, False)  # f64[batch*seq]
        %8 = sum(%7)                               # f64[]
        return %8""",
        inputs="x ids",
    ),
    Case(
        "loss_of_elements",
        lambda m, x: F.smooth_l1_loss(x, x * 2, beta=0.5),
        """\
        %0 = args[0]                         # f64[batch seq 8]
        %1 = mul(%0, 2)                      # f64[batch seq 8]
        %2 = smooth_l1_loss(%0, %1, 0, 0.5)  # f64[batch seq 8]
        %3 = mean(%2)                        # f64[]
        return %3""",
    ),
    Case(
        "dropout_in_eval",
        lambda m, x: F.dropout(x, 0.1, m.training).contiguous().clone().to(x.dtype) * 2,
        """\
        %0 = args[0]     # f64[batch seq 8]
        %1 = mul(%0, 2)  # f64[batch seq 8]
        return %1""",
        train=False,
    ),
    Case(
        "native_dropout_that_is_off",
        _idle_native_dropout,
        """\
        %0 = args[0]      # f64[batch seq 8]
        %1 = mul(%0, 3)   # f64[batch seq 8]
        %2 = mul(%0, 2)   # f64[batch seq 8]
        %3 = add(%1, %2)  # f64[batch seq 8]
        return %3""",
        train=False,
    ),
    Case(
        "detach",
        lambda m, x, ids: x.detach() * m.w + ids.detach().unsqueeze(-1),
        """\
        %0 = w                 # f64[8] param
        %1 = args[0]           # f64[batch seq 8]
        %2 = args[1]           # i64[batch seq]
        %3 = detach(%1)        # f64[batch seq 8]
        %4 = mul(%3, %0)       # f64[batch seq 8]
        %5 = unsqueeze(%2, 2)  # i64[batch seq 1]
        %6 = add(%4, %5)       # f64[batch seq 8]
        return %6""",
        inputs="x ids",
        parameters={"w": (8,)},
    ),
    Case(
        "sizes",
        lambda m, x: (x + 1).sum(-1).reshape(-1) + torch.arange((x * 2).shape[1] * x.shape[0]),
        """\
        %0 = args[0]                                   # f64[batch seq 8]
        %1 = sym_size.int(%0, 0)                       # int batch
        %2 = sym_size.int(%0, 1)                       # int seq
        %3 = operator.mul(%1, %2)                      # int batch*seq
        %4 = add(%0, 1)                                # f64[batch seq 8]
        %5 = sum.dim_IntList(%4, [-1])                 # f64[batch seq]
        %6 = reshape(%5, [%3])                         # f64[batch*seq]
        %7 = arange(%3, device=cpu, pin_memory=False)  # i64[batch*seq]
        %8 = add(%6, %7)                               # f64[batch*seq]
        return %8""",
    ),
    Case(
        "duplicates",
        lambda m, x, ids: x * (ids == 2).unsqueeze(-1) + (ids == 2).unsqueeze(-1),
        """\
        %0 = args[0]           # f64[batch seq 8]
        %1 = args[1]           # i64[batch seq]
        %2 = eq.Scalar(%1, 2)  # bool[batch seq]
        %3 = unsqueeze(%2, 2)  # bool[batch seq 1]
        %4 = mul(%0, %3)       # f64[batch seq 8]
        %5 = add(%4, %3)       # f64[batch seq 8]
        return %5""",
        inputs="x ids",
    ),
    Case(
        "names",
        lambda m, x: torch.clip(torch.true_divide(torch.multiply(x, m.w), 2.0), 0.0, 1.0),
        """\
        %0 = w                    # f64[8] param
        %1 = args[0]              # f64[batch seq 8]
        %2 = mul(%1, %0)          # f64[batch seq 8]
        %3 = div(%2, 2.0)         # f64[batch seq 8]
        %4 = clamp(%3, 0.0, 1.0)  # f64[batch seq 8]
        return %4""",
        parameters={"w": (8,)},
    ),
    Case(
        "indices_of_all_rows_and_columns",
        lambda m, x: x[torch.arange(x.shape[0])[:, None, None], torch.arange(x.shape[1])].tanh(),
        """\
        %0 = args[0]                      # f64[batch seq 8]
        %1 = sym_size.int(%0, 0)          # int batch
        %2 = sym_size.int(%0, 1)          # int seq
        %3 = reshape(%0, [%1, 1, %2, 8])  # f64[batch 1 seq 8]
        %4 = tanh(%3)                     # f64[batch 1 seq 8]
        return %4""",
    ),
    Case(
        "indices_of_all_rows_and_some_columns",
        lambda m, x, ids: x[torch.arange(x.shape[0])[:, None], ids[0, :3] % 2 - 1].tanh(),
        """\
        %0 = args[0]                  # f64[batch seq 8]
        %1 = args[1]                  # i64[batch seq]
        %2 = select.int(%1, 0, 0)     # i64[seq]
        %3 = slice(%2, 0, 0, 3)       # i64[3]
        %4 = remainder.Scalar(%3, 2)  # i64[3]
        %5 = sub(%4, 1)               # i64[3]
        %6 = index(%0, [None, %5])    # f64[batch 3 8]
        %7 = tanh(%6)                 # f64[batch 3 8]
        return %7""",
        inputs="x ids",
    ),
    Case(
        "indices_of_a_column_of_each_row",
        lambda m, x, ids: x[torch.arange(x.shape[0]), ids.argmax(-1) - x.shape[1]].tanh(),
        """\
        %0 = args[0]                  # f64[batch seq 8]
        %1 = args[1]                  # i64[batch seq]
        %2 = sym_size.int(%0, 0)      # int batch
        %3 = sym_size.int(%0, 1)      # int seq
        %4 = argmax(%1, -1)           # i64[batch]
        %5 = sub(%4, %3)              # i64[batch]
        %6 = lt.Scalar(%5, 0)         # bool[batch]
        %7 = add(%5, %3)              # i64[batch]
        %8 = where.self(%6, %7, %5)   # i64[batch]
        %9 = reshape(%8, [%2, 1, 1])  # i64[batch 1 1]
        %10 = expand(%9, [%2, 1, 8])  # i64[batch 1 8]
        %11 = gather(%0, 1, %10)      # f64[batch 1 8]
        %12 = tanh(%11)               # f64[batch 1 8]
        %13 = reshape(%12, [%2, 8])   # f64[batch 8]
        return %13""",
        inputs="x ids",
    ),
    Case(
        "heads",
        _heads,
        """\
        %0 = w                                          # f64[24 8] param
        %1 = args[0]                                    # f64[batch seq 8]
        %2 = sym_size.int(%1, 0)                        # int batch
        %3 = sym_size.int(%1, 1)                        # int seq
        %4 = linear(%1, %0)                             # f64[batch seq 24]
        %5 = reshape(%4, [%2, %3, 3, 2, 4])             # f64[batch seq 3 2 4]
        %6 = permute(%5, [2, 0, 3, 1, 4])               # f64[3 batch 2 seq 4]
        %7 = select.int(%6, 0, 0)                       # f64[batch 2 seq 4]
        %8 = select.int(%6, 0, 1)                       # f64[batch 2 seq 4]
        %9 = select.int(%6, 0, 2)                       # f64[batch 2 seq 4]
        %10 = scaled_dot_product_attention(%7, %8, %9)  # f64[batch 2 seq 4]
        %11 = transpose.int(%10, 1, 2)                  # f64[batch seq 2 4]
        %12 = reshape(%11, [%2, %3, 8])                 # f64[batch seq 8]
        return %12""",
        parameters={"w": (24, 8)},
    ),
]


AUTOCAST = """\
        %0 = w                         # f32[8 8] param
        %1 = args[0]                   # f32[batch seq 8]
        %2 = to.dtype(%1, bf16)        # bf16[batch seq 8]
        %3 = to.dtype(%0, bf16)        # bf16[8 8]
        %4 = linear(%2, %3)            # bf16[batch seq 8]
        %5 = linear(%4, %3)            # bf16[batch seq 8]
        %6 = transpose.int(%5, 1, 2)   # bf16[batch 8 seq]
        %7 = matmul(%5, %6)            # bf16[batch seq seq]
        %8 = to.dtype(%7, f32)         # f32[batch seq seq]
        %9 = pow.Tensor_Scalar(%8, 2)  # f32[batch seq seq]
        %10 = sum(%9)                  # f32[]
        return %10"""


def _build(case: Case) -> tuple[Function, Program]:
    torch.manual_seed(0)
    model = Function(case.fn, case.parameters).train(case.train)
    return model, capture_call(model, [MAKERS[name]() for name in case.inputs.split()])


def _assert_same(model: Function, program: Program, inputs: list[torch.Tensor]) -> None:
    """Outputs, buffers and every gradient of the graph are those of eager, in fp64."""
    wanted_of = [*model.parameters(), *(v for v in inputs if v.requires_grad)]
    buffers = {k: v.clone() for k, v in model.named_buffers()}
    results = []
    for run in (model, lambda *args: run_program(program, model, args)):
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        out = run(*inputs)
        torch.manual_seed(1)
        grads = torch.autograd.grad(out, wanted_of, torch.randn(out.shape, dtype=out.dtype), allow_unused=True)
        results.append([out, *grads, *(v.clone() for v in model.buffers())])
    for wanted, found in zip(*results, strict=True):
        assert (wanted is None) == (found is None)
        if wanted is not None:
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def _dedent(expected: str) -> str:
    return "\n".join(line.strip() for line in expected.splitlines())


def _text(program: Program) -> str:
    return "\n".join(line.rstrip() for line in text(program).splitlines())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_rewrite(case: Case) -> None:
    model, program = _build(case)
    assert canonicalize_program(program) >= 0
    assert program.phase is Phase.CANONICAL
    assert _text(program) == _dedent(case.expected)
    assert program.call is not None
    for batch, seq in ((2, 5), (3, 7), (1, 4)):
        inputs = [MAKERS[name](batch, seq) for name in case.inputs.split()]
        if not program.call.undecided(inputs):  # else a call of one row is captured by itself (test_small_sizes.py)
            _assert_same(model, program, inputs)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_captured_graph_computes_the_same(case: Case) -> None:
    model, program = _build(case)
    if case.name != "buffer_mutation":  # as captured, the graph changes the buffer in place
        _assert_same(model, program, [MAKERS[name](3, 6) for name in case.inputs.split()])


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_twice_changes_nothing(case: Case) -> None:
    _, program = _build(case)
    canonicalize_program(program)
    before = _text(program)
    assert canonicalize_program(program) == 0
    assert _text(program) == before


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_values_and_sizes_are_well_formed(case: Case) -> None:
    """Every node has a value of the right shape, and no size is taken of an intermediate."""
    _, program = _build(case)
    canonicalize_program(program)
    placeholders = set(program.placeholders())
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        assert node.meta.get(VAL) is not None, node
        if node.target is aten.sym_size.int:
            assert node.args[0] in placeholders
        if isinstance(node.target, torch._ops.OpOverload) and isinstance(node.meta[VAL], torch.Tensor):
            values = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta[VAL])
            with program.fake_mode, torch.no_grad():
                again = node.target(*values[0], **values[1])
            assert str(again.shape) == str(node.meta[VAL].shape)
            assert again.dtype == node.meta[VAL].dtype


def test_autocast_becomes_casts() -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.linear(F.linear(x, m.w), m.w)
            z = y @ y.transpose(-1, -2)
        return z.float().pow(2).sum()

    torch.manual_seed(0)
    model = Function(fn, {"w": (8, 8)}).float()
    program = capture_call(model, (x_of().float(),))
    canonicalize_program(program)
    assert _text(program) == _dedent(AUTOCAST)
    x = x_of(3, 7).float()
    wanted = torch.autograd.grad(model(x), (model.w, x))
    found = torch.autograd.grad(run_program(program, model, (x,)), (model.w, x))
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_number_of_the_host_is_written_to_the_device() -> None:
    """As Transformers' T5 sets the first token of its decoder. No GPU is needed: the graph is that of a model on meta."""

    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y[:, 1:] = x[:, :-1]
        y[:, 0] = torch.tensor(3.0, device="cpu")
        return y

    with torch.device("meta"):
        model, x = Function(fn, {}), torch.zeros(2, 6, 8)
    program = capture_call(model, (x,), device=torch.device("meta"))
    canonicalize_program(program)
    moved = program.graph.find_nodes(op="call_function", target=aten.to.device)
    assert [n.meta[VAL].device.type for n in moved] == ["meta"]


def test_a_cast_that_changes_numbers_is_no_count_of_rows() -> None:
    model = Function(lambda m, x: x[torch.arange(x.shape[0]).bool().long()] * 2, {})
    inputs = [x_of(3)]
    program = capture_call(model, inputs)
    canonicalize_program(program)
    assert program.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    _assert_same(model, program, inputs)
