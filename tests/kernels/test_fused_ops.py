"""Covers: what every fused op has to do as an operator, whatever it computes: gradients, strides, empty batches, tracing with
symbolic sizes, torch's checks of operators, sharding rules. On the GPU where there is one."""

import logging

import pytest
import torch
import torch.utils._pytree as pytree
from functorch.compile import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import megafx.kernels.attention.attention as attention
import megafx.kernels.dropout.dropout as dropout
import megafx.kernels.experts.grouped_mlp
import megafx.kernels.experts.grouped_mm
import megafx.kernels.loss.vocab_linear_cross_entropy  # noqa: F401  registers the ops
from megafx.checks.rules import check_rules
from megafx.ir.facts import declared
from megafx.kernels.common import op
from tests.support.flash_attention import on_cpu

ops = torch.ops.megafx
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEED = torch.tensor(1234567, device=DEVICE)
DRAW = (SEED, 0.25, 3, -1, [], "tp")
B, S, H, N, E, V = 2, 5, 16, 2, 8, 11


def classes(x):
    return torch.arange(x.shape[0], device=DEVICE) % V


# Shapes of the floating operands, for a batch of b, and the op on them.
OPS = {
    "dropout": (lambda b: [(b, S, H)], lambda x: ops.dropout(x, *DRAW)),
    "bias_act": (lambda b: [(b, S, H), (H,)], lambda x, c: ops.bias_act(x, c, "gelu")),
    "glu": (lambda b: [(b, S, H), (b, S, H)], lambda x, y: ops.glu(x, y, "silu")),
    "glu_packed": (lambda b: [(b, S, 2 * H), (2 * H,)], lambda x, c: ops.glu_packed(x, c, "gelu")),
    "bias_dropout_add": (lambda b: [(b, S, H), (H,), (b, S, H)], lambda x, c, r: ops.bias_dropout_add(x, c, r, *DRAW)),
    "layer_norm": (lambda b: [(b, S, H), (H,), (H,)], lambda x, w, c: ops.layer_norm(x, w, c, 1e-5)),
    "rms_norm": (lambda b: [(b, S, H), (H,)], lambda x, w: ops.rms_norm(x, w, 1e-5, 1.0)),
    "bias_dropout_add_layer_norm": (
        lambda b: [(b, S, H), (H,), (b, S, H), (H,), (H,)],
        lambda x, c, r, w, d: ops.bias_dropout_add_layer_norm(x, c, r, w, d, 1e-5, *DRAW)[:2],
    ),
    "bias_dropout_add_rms_norm": (
        lambda b: [(b, S, H), (b, S, H), (H,)],
        lambda x, r, w: ops.bias_dropout_add_rms_norm(x, None, r, w, 1e-5, 0.0, *DRAW)[:2],
    ),
    "scale_mask_softmax": (
        lambda b: [(b, N, S, S)],
        lambda x: ops.scale_mask_softmax(x, None, 0.5, True, 0, -1e38, *DRAW),
    ),
    "scale_mask_softmax with a bias": (
        lambda b: [(b, N, S, S), (1, N, S, S)],
        lambda x, m: ops.scale_mask_softmax(x, m.transpose(2, 3), 0.5, False, 0, 0.0, None, 0.0, *DRAW[2:]),
    ),
    "cross_entropy": (lambda b: [(b * S, V)], lambda x: ops.cross_entropy(x, classes(x), -100, 0.1, False)),
    "cross_entropy with lse": (
        lambda b: [(b * S, V)],
        lambda x: ops.cross_entropy(x, classes(x), -100, 0.0, True).unbind(),
    ),
    "linear_cross_entropy": (
        lambda b: [(b * S, H), (V, H), (V,)],
        lambda x, w, c: ops.linear_cross_entropy(x, w, c, classes(x), -100, 0.1),
    ),
    "rope": (lambda b: [(b, N, S, E)], lambda x: ops.rope(x, *tables(x), False, False)),
    "rope_qk": (lambda b: [(b, N, S, E), (b, 1, S, E)], lambda q, k: ops.rope_qk(q, k, *tables(q), True, False)),
    "attention": (
        lambda b: [(b, N, S, E), (b, 1, S, E), (b, 1, S, E)],
        lambda q, k, v: ops.attention(q, k, v, None, None, None, None, SEED, 0.5, True, 3, 0.0, 0, *DRAW[1:]),
    ),
    "attention with a bias": (
        lambda b: [(b, N, S, E), (b, N, S, E), (b, N, S, E), (1, N, S, S)],
        lambda q, k, v, m: ops.attention(
            q, k, v, m, None, None, None, None, 0.5, False, 0, 20.0, 0, 0.0, 0, -1, [], "tp"
        ),
    ),
}


def tables(x):
    angles = torch.arange(S * E, device=DEVICE, dtype=x.dtype).view(1, 1, S, E)
    return angles.cos(), angles.sin()


def strided(x):
    """The same values with gaps, and in another order of dims."""
    if not x.dim():
        return x
    wide = torch.stack((x, torch.zeros_like(x)), -1).flatten(-2)
    if x.dim() > 1:
        wide = wide.transpose(0, 1).contiguous().transpose(0, 1)
    return wide[..., ::2]


def outcome(function, inputs, move):
    """Results and gradients; move: what is done to inputs and to gradients of results."""
    torch.manual_seed(1)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*(move(x) for x in leaves))
    results = list(out) if isinstance(out, (tuple, list)) else [out]
    grads = [move(torch.randn(r.shape, device=DEVICE)) for r in results]
    return [*results, *torch.autograd.grad(results, leaves, grads)]


@pytest.mark.parametrize("name", OPS)
def test_strides_change_nothing(name):
    torch.manual_seed(0)
    shapes, function = OPS[name]
    inputs = [torch.randn(shape, device=DEVICE) for shape in shapes(B)]
    assert not any(strided(x).is_contiguous() for x in inputs)
    for ours, wanted in zip(outcome(function, inputs, strided), outcome(function, inputs, lambda x: x), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)


class AsTheirFakes(TorchDispatchMode):
    """Results of our ops have the strides that graphs were traced with: a view of them is a view when it runs."""

    def __init__(self):
        super().__init__()
        self.checked, self.other = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "megafx":
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                moved = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs or {}))
                fake = func(*moved[0], **moved[1])
            strides = [[x.stride() for x in pytree.tree_leaves(o) if isinstance(x, torch.Tensor)] for o in (out, fake)]
            self.checked.append(func)
            self.other += [(func, *strides)] if strides[0] != strides[1] else []
        return out


@pytest.mark.parametrize("name", OPS)
def test_results_are_laid_out_as_traced(name):
    torch.manual_seed(0)
    shapes, function = OPS[name]
    inputs = [torch.randn(shape, device=DEVICE) for shape in shapes(B)]
    with AsTheirFakes() as seen:
        outcome(function, inputs, strided)
    assert len(seen.checked) >= 2 and not seen.other


@pytest.mark.parametrize("name", OPS)
def test_an_empty_batch_gives_empty_results(name):
    """Gradients of what all of the batch share are zeros."""
    shapes, function = OPS[name]
    whole = [torch.randn(shape, device=DEVICE) for shape in shapes(B)]
    inputs = [torch.randn(shape, device=DEVICE) for shape in shapes(0)]
    empty, full = outcome(function, inputs, lambda x: x), outcome(function, whole, lambda x: x)
    for ours, other in zip(empty, full, strict=True):
        assert ours.dtype == other.dtype and ours.shape in (other.shape, (0, *other.shape[1:]))
        assert not ours.any()


class Calls(TorchDispatchMode):
    """The calls of our operators that are made within."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "megafx":
            self.made.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def calls_of(name, b=B):
    """(function, inputs, calls of our operators in its forward and backward)."""
    torch.manual_seed(0)
    shapes, function = OPS[name]
    inputs = [torch.randn(shape, device=DEVICE) for shape in shapes(b)]
    with Calls() as calls:
        outcome(function, inputs, lambda x: x)
    return function, inputs, calls.made


@pytest.mark.parametrize("name", OPS)
def test_gradients_are_those_of_the_value(name):
    torch.manual_seed(0)
    shapes, function = OPS[name]
    inputs = [torch.randn(s, device=DEVICE, dtype=torch.float64, requires_grad=True) for s in shapes(1)]
    assert torch.autograd.gradcheck(function, inputs)


# What is kept for backward: numbers of operands, and shapes of other tensors (rows' statistics, the seed, a sum).
SAVED = {
    "dropout": [()],
    "bias_act": [0, 1],
    "glu": [0, 1],
    "glu_packed": [0, 1],
    "bias_dropout_add": [()],
    "layer_norm": [0, 1, (B, S), (B, S)],
    "rms_norm": [0, 1, (B, S)],
    "bias_dropout_add_rms_norm": [2, (B, S, H), (), (B, S)],
}


@pytest.mark.parametrize("name", SAVED)
def test_what_is_saved(name):
    shapes, function = OPS[name]
    inputs = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes(B)]
    which = {x.data_ptr(): i for i, x in enumerate(inputs)}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        function(*inputs)
    found = [which.get(x.data_ptr(), tuple(x.shape)) for x in saved]
    assert sorted(found, key=str) == sorted(SAVED[name], key=str)


@pytest.mark.parametrize("name", OPS)
def test_one_graph_for_every_batch(name):
    """Traced with symbolic sizes: the operators of a call, forward and backward, are its nodes; numbers at another size."""
    function, inputs, calls = calls_of(name)

    def step(*inputs):
        out = function(*inputs)
        results = list(out) if isinstance(out, (tuple, list)) else [out]
        return [*results, *torch.autograd.grad(results, inputs, [r.detach().sin() for r in results])]

    leaves = [x.requires_grad_() for x in inputs]
    graph = make_fx(step, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*leaves)
    assert [n.target for n in graph.graph.nodes if "megafx" in str(n.target)] == [func for func, *_ in calls]
    larger = [torch.randn(s, device=DEVICE, requires_grad=True) for s in OPS[name][0](B + 1)]
    for ours, wanted in zip(graph(*larger), step(*larger), strict=True):
        torch.testing.assert_close(ours, wanted)


class Traced(Exception):
    """The graph is there. On a CPU it cannot run."""


def stop(graph, inputs):
    raise Traced


@pytest.mark.timeout(60)  # sympy takes minutes where the size of a block is an expression
@pytest.mark.parametrize("name", OPS)
def test_launchers_are_traced_with_symbolic_sizes(name, monkeypatch):
    """As torch.compile traces them."""
    pytest.importorskip("triton")
    calls = calls_of(name)[2]
    for module in (op, attention, dropout):
        monkeypatch.setattr(module, "runs_triton", lambda x: x.dtype != torch.float64)
    monkeypatch.setattr(
        logging.root.manager, "disable", logging.CRITICAL
    )  # torch finds no driver, and says so at length
    for func, args, kwargs in calls:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = {i: x.detach() for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}

        def call(*given, func=func, leaves=leaves, spec=spec, where=tuple(tensors)):
            own = dict(zip(where, given, strict=True))
            args, kwargs = pytree.tree_unflatten([own.get(i, x) for i, x in enumerate(leaves)], spec)
            return func(*args, **kwargs)

        with pytest.raises(Traced):
            aot_function(call, fw_compiler=stop, dynamic=True)(*tensors.values())


@pytest.mark.parametrize("name", OPS)
def test_torchs_checks_of_operators(name):
    for func, args, kwargs in calls_of(name)[2]:
        if "backward" in str(func):  # it has no derivative
            args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        torch.library.opcheck(func, args, kwargs)


GATED = ["bias_act_backward", "glu", "glu_packed", "glu_packed_backward"]


@pytest.mark.parametrize("ops", [GATED, pytest.param(None, marks=pytest.mark.slow)])
def test_rules_by_brute_force(ops):
    """Every row right, none missing; of all ops on two ranks: checks/test_rules.py."""
    names = [op for op, facts in declared().items() if op.startswith("megafx.") and facts.samples]
    assert len(names) > 30
    with on_cpu():  # attention ops of aten that are for GPUs alone
        report = check_rules(sorted(names) if ops is None else [f"megafx.{op}.default" for op in ops])
    assert report.ok, str(report)
    assert not report.of("unchecked"), str(report)
    rows = {(f.op.split(".")[1], f.row) for f in report.of("ok")}
    assert {
        ("bias_act_backward", f"{r}") for r in ("S0 S0 R -> S0 P S0", "S1 S1 S0 -> S1 S0 S1", "P R R -> P P R")
    } <= rows
    assert ("glu", "R P -> P") in rows  # linear in up
    assert ("glu_packed", "S2/2*(2x3) S0/2*(2x3) -> S2") in rows  # each half is cut
    assert not [r for op, r in rows if "packed" in op and r.startswith("S2 S0")]
