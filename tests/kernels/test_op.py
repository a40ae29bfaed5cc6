"""Covers: kernels/common/op.py (direct calls, gradients), kernels/common/replay.py, kernels/common/recording.py,
passes/lower/call_directly.py."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_triton import fake_triton, seen
from fused_calls import CALLS, op_of, replay_of
from kernel_checks import run_as_script
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from megafx.ir.nodes import changed_copy
from megafx.kernels.common import op as module
from megafx.kernels.common.op import define_gradient, define_op, direct, launch, new_like
from megafx.kernels.common.recording import Launch, Recording
from megafx.kernels.common.replay import Replay
from megafx.ops.axes import AxisContext, on_mesh
from megafx.passes.lower.call_directly import FUNCTIONS, METHODS, call_node_directly

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

BF16 = torch.bfloat16


@triton.jit
def _shift(x, y, n, step, factor, flag, C: tl.constexpr):
    at = tl.program_id(0) * C + tl.arange(0, C)
    value = tl.load(x + at, mask=at < n, other=0.0) * factor + step
    tl.store(y + at, tl.where(flag, value, 0.0).to(y.dtype.element_ty), mask=at < n)


def shift(x: Tensor, n: int, step: int, factor: float, flag: bool) -> Tensor:
    y = new_like(x)
    launch(_shift, (n, 1), x, x, y, n, step, factor, flag, C=32, num_warps=1)
    return y


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    with fake_triton(monkeypatch) as log:
        yield log


def forms(replay: Replay) -> list[Any]:
    return list(replay.forms.values())


def test_each_form_of_a_call_starts_the_kernel_that_triton_picks_for_it(launches: list[Any]) -> None:
    """Alignment of starts, numbers that are 1, that 16 divides, of 64 bits, dtypes, flags; forms mixed at random."""
    even, half = torch.randn(65).to(BF16), torch.randn(64).half()
    assert even.data_ptr() % 16 == 0
    cases: list[tuple[Any, ...]] = [
        (x, n, step, factor, flag)
        for x in (even[:64], even[1:], even[:63], half)
        for n, step, factor, flag in (
            (16, 2, 0.5, True),
            (32, 2, 0.5, True),
            (17, 2, 2.0, True),
            (1, 2, 1.0, True),
            (2, 1, 0.5, False),
            (2, 16, 0.5, True),
            (16, 2**33, 0.5, True),
            (16, 2**33 + 1, 0.5, True),
            (16, 2**31, 0.0, True),
            (16, -16, -0.5, False),
        )
    ]
    runs = []

    def counted(*case: Any) -> Tensor:
        runs.append(case)
        return shift(*case)

    replay = Replay(counted)
    picked = []
    for case in cases:
        shift(*case)
        picked.append(launches.pop()[0])
    by_case = {id(c): p for c, p in zip(cases, picked, strict=True)}
    assert len({id(p) for p in picked}) >= 24, "these cases do not tell variants apart"
    order = [c for c in cases for _ in range(4)]
    random.Random(0).shuffle(order)
    for case in order:
        y = replay(*case)
        compiled, grid, values = launches.pop()
        assert not launches and compiled is by_case[id(case)] and grid == (case[1], 1, 1)
        assert [v.data_ptr() if isinstance(v, Tensor) else v for v in values] == [
            case[0].data_ptr(),
            y.data_ptr(),
            *case[1:],
            32,
        ]
        assert [type(v) for v in values[2:]] == [int, int, float, bool, int]
        assert y.shape == case[0].shape and y.dtype == case[0].dtype and y.is_contiguous()
    assert len(forms(replay)) == len(cases) and all(isinstance(f, Recording) for f in forms(replay))
    assert len(runs) == 2 * len(cases), "the launcher runs twice for a form, and then no more"


def test_new_memory_is_read_at_each_call(launches: list[Any]) -> None:
    """The same tensor twice when recorded, two tensors later; views of one storage when recorded, apart later."""

    def add(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first, second = torch.empty_like(x), x.new_empty(y.shape[::-1]).t()
        launch(_shift, (1,), x, x[1:], y.view(-1), 3, second[:, 1], first, second.t(), C=32)
        return first, second

    replay = Replay(add)
    storage = torch.randn(2, 8, 4)
    same, views = storage[0].clone(), (storage[0], storage[1])
    for pair in ((same, same), (same, same), (same, same), views, (storage[0].clone(), storage[1].clone()), views):
        first, second = replay(*pair)
        _, grid, values = launches.pop()
        where = [v if isinstance(v, int) else v.data_ptr() for v in values]
        x, y = pair
        assert where[0] == x.data_ptr() + 16 and where[1] == y.data_ptr() and where[2] == 3
        assert where[3] == second.data_ptr() + second.stride(1) * 4
        assert where[4] == first.data_ptr() and where[5] == second.data_ptr()
        assert second.shape == (8, 4) and second.stride() == (1, 8) and grid == (1, 1, 1)
        assert first.data_ptr() != second.data_ptr()
    assert [type(f) for f in forms(replay)] == [Recording]


def test_hooks_on_launches_and_negative_views_are_not_passed_by(launches: list[Any]) -> None:
    runs = []

    def counted(x: Tensor) -> Tensor:
        runs.append(x.is_neg())
        return shift(x, 2, 1, 0.5, True)

    replay, x = Replay(counted), torch.randn(4)
    for _ in range(5):
        replay(x)
    assert len(runs) == 2
    hooks, told = triton.knobs.runtime.launch_enter_hook, []
    hooks.add(told.append)
    try:
        replay(x)
    finally:
        hooks.remove(told.append)
    replay(x)
    assert len(runs) == 3
    negative = torch._neg_view(x)
    for _ in range(3):
        y = replay(negative)
    address = launches[-1][2][0]
    assert not any(runs) and y.shape == x.shape and (address if isinstance(address, int) else 0) != negative.data_ptr()


def _strided(x: Any) -> Any:
    """The same with the dims in memory the other way round."""
    turned = tuple(range(x.dim()))[::-1] if isinstance(x, Tensor) else ()
    return x.permute(turned).contiguous().permute(turned) if isinstance(x, Tensor) else x


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name,args", CALLS, ids=[f"{n.split('.')[1]}-{i}" for i, (n, _) in enumerate(CALLS)])
def test_fused_ops_repeat_their_launches(launches: list[Any], name: str, args: list[Any], strided: bool) -> None:
    """Whatever the op allocates, copies and launches the first time, it does at the third, on other memory."""
    args = [_strided(x) for x in args] if strided else args
    call = op_of(name)
    rounds = []
    with on_mesh({"tp": AxisContext(0, 2)}):
        for _ in range(4):
            given = [x.clone() if isinstance(x, Tensor) else x for x in args]
            found = call(*given)
            results = [found] if isinstance(found, Tensor) else [r for r in found if r is not None]
            operands = [x for x in given if isinstance(x, Tensor)]
            rounds.append(
                [seen(x, operands, results) for x in launches]
                + [(r.shape, r.stride(), r.dtype, r.device) for r in results]
            )
            kept = list(launches), results  # noqa: F841  memory must not come back while addresses are compared
            launches.clear()
    assert rounds[0] == rounds[1] == rounds[2] == rounds[3]
    replay = replay_of(call)
    assert replay is not None
    if name == "megafx.attention_mask_backward.default":  # sums beside its kernel
        assert forms(replay) == ["it calls aten.mul.Tensor"]
        return
    assert [type(f) for f in forms(replay)] == [Recording], forms(replay)
    assert any(isinstance(step, Launch) for step in forms(replay)[0].steps)


def test_results_are_made_in_memory_that_is_given(launches: list[Any]) -> None:
    """Where launches are repeated, kernels write there; before that, and where the memory does not fit, a copy does."""
    address = lambda v: v.data_ptr() if isinstance(v, Tensor) else v
    call = torch.ops.megafx.rms_norm_forward.default
    into = module.writes_into(call)
    assert into is not None and module.writes_into(torch.ops.aten.mm.default) is None
    x, w = torch.randn(4, 32).to(BF16), torch.ones(32, dtype=BF16)
    for turn in range(4):
        slots = torch.zeros(3, 4, 32, dtype=BF16)
        y, rstd = into(slots[1], 0, x, w, 1e-5, 0.0)
        values = launches.pop()[2]
        written = [address(v) for v in values]
        assert y.data_ptr() == slots[1].data_ptr() and rstd.shape == (4,)
        assert (slots[1].data_ptr() in written) == (turn > 1), turn
    odd = torch.zeros(4 * 32 + 1, dtype=BF16)[1:].view(4, 32)  # not where Triton compiled for
    y, _ = into(odd, 0, x, w, 1e-5, 0.0)
    written = [address(v) for v in launches.pop()[2]]
    assert y is odd and odd.data_ptr() not in written
    _, rstd = into(torch.empty(4), 1, x, w, 1e-5, 0.0)
    assert rstd.data_ptr() in [address(v) for v in launches.pop()[2]]


def test_copies_are_repeated_and_what_reads_values_is_not() -> None:
    def copies(x: Tensor, n: int) -> Tensor:
        return x.contiguous() if n else torch.zeros(3).copy_(x[:3, 0])

    def reads(x: Tensor, n: int) -> Tensor:
        return torch.full((2,), float(x.sum()) + n)

    def returns_a_view(x: Tensor, n: int) -> Tensor:
        return torch.zeros(6).copy_(x.flatten()[:6])[2:4]

    def returns_its_operand(x: Tensor, n: int) -> Tensor:
        return x

    def returns_some_of_its_operand(x: Tensor, n: int) -> Tensor:
        return x[n:]

    for function, n, recorded in (
        (copies, 1, True),
        (copies, 0, True),
        (reads, 1, False),
        (returns_a_view, 1, False),
        (returns_its_operand, 1, True),  # as operators do that write in place
        (returns_some_of_its_operand, 1, False),
    ):
        replay = Replay(function)
        for _ in range(4):
            x = torch.randn(4, 3).t() if function is copies and n else torch.randn(4, 3)
            found = replay(x, n)
            assert torch.equal(found, function(x, n)) and (found is x) == (function is returns_its_operand)
        assert [isinstance(f, Recording) for f in forms(replay)] == [recorded], forms(replay)
        gc.disable()
        x = torch.randn(4, 3)
        replay(x, n)
        last = weakref.ref(x)
        del x
        gc.enable()
        assert last() is None, "freed with its last use, not when cycles are collected"
    second, (x, y) = Replay(lambda x, y: x.copy_(y)), torch.randn(2, 3)
    assert all(second(x, x) is x for _ in range(3)) and second(x, y) is x and second(y, x) is y
    second = Replay(lambda x, y: (None, y))
    assert all(second(x, x)[1] is x for _ in range(3)) and second(x, y)[1] is y and second(y, x)[1] is x


def test_a_rank_has_its_own_recording(launches: list[Any]) -> None:
    call = torch.ops.megafx.bias_dropout_add.default
    args = (torch.zeros(4, 6), None, torch.zeros(4, 6), torch.tensor(1), 0.5, 3, 0, [1, 8, 1], "tp")
    found = []
    for rank in (0, 1, 0, 1, 0, 1, 0):
        with on_mesh({"tp": AxisContext(rank, 2)}):
            call(*args)
        compiled, _, values = launches.pop()
        found.append([v for v, is_pointer in zip(values, compiled.pointers, strict=True) if not is_pointer])
    assert found[0] == found[2] == found[4] == found[6] and found[1] == found[3] == found[5] and found[0] != found[1]


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_and_profilers_see_the_op() -> None:
    call = direct(torch.ops.megafx.glu.default)
    assert call is not None and call is direct(torch.ops.megafx.glu.default) and call.__name__ == "glu"
    x = torch.randn(3, 4)
    expected = call(x, x, "silu")
    with Names() as mode:
        found = call(x, x, "silu")
    assert torch.equal(found, expected)
    assert mode.names == ["megafx.glu.default"]
    with torch.profiler.profile() as profile:
        call(x, x, "silu")
    assert "megafx::glu" in {e.name for e in profile.events()}
    with torch._subclasses.FakeTensorMode() as fakes:
        assert isinstance(call(fakes.from_tensor(x), fakes.from_tensor(x), "silu"), torch._subclasses.FakeTensor)
    assert direct(torch.ops.aten.mul.Tensor) is None and direct(torch.mul) is None


def test_graphs_call_without_the_dispatcher_numbers_as_the_schema_has_them() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    normed = graph.call_function(torch.ops.megafx.rms_norm_forward.default, (x, w, 1), {"offset": 0})
    y = graph.call_function(torch.ops.aten.mul.Tensor, (graph.call_function(lambda t: t[0], (normed,)), 2))
    graph.output(
        (y, graph.call_function(torch.ops.megafx.rms_norm_forward.default, (x, w, graph.placeholder("e"), 0.0)))
    )
    gm = fx.GraphModule({}, graph)
    called = changed_copy(gm, call_node_directly)[0]
    nodes = {n.name: n for n in called.graph.nodes if n.op == "call_function"}
    norm, other = nodes["rms_norm_forward_default"], nodes["rms_norm_forward_default_1"]
    assert norm.target is direct(torch.ops.megafx.rms_norm_forward.default) and norm.kwargs == {}
    assert norm.args[2:] == (1.0, 0.0) and all(type(a) is float for a in norm.args[2:])
    assert other.target is torch.ops.megafx.rms_norm_forward.default  # the number may be an int when it runs
    a, b = torch.randn(3, 4), torch.randn(4)
    torch.testing.assert_close(called(a, b, 0.5), gm(a, b, 0.5), rtol=0, atol=0)


def test_bindings_are_the_same_operators() -> None:
    """On static and dynamic sizes, every one of METHODS and those of FUNCTIONS that are torch's."""
    torchs = {*METHODS, *(f for f in FUNCTIONS if f.namespace == "aten")}

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = torch.mm(x.view(-1, x.shape[-1]), w.t())
        z = torch.addmm(y, y, y.t() @ y, beta=2, alpha=0.5).view(x.shape[0], x.shape[1], -1)
        return torch.bmm(z, z.transpose(1, 2)), z.permute(2, 0, 1)

    for mode, (b, n) in (("real", (2, 3)), ("symbolic", (2, 5))):
        gm = make_fx(function, tracing_mode=mode)(torch.randn(2, 3, 4), torch.randn(6, 4))
        called = changed_copy(gm, call_node_directly)[0]
        before, after = ({n.target for n in g.graph.nodes} for g in (gm, called))
        assert before >= torchs and not after & torchs
        x, w = torch.randn(b, n, 4), torch.randn(6, 4)
        with Names() as plain:
            expected = gm(x, w)
        with Names() as names:
            found = called(x, w)
        assert names.names == plain.names
        for got, right in zip(found, expected, strict=True):
            assert torch.equal(got, right) and got.stride() == right.stride()


def test_gradients_are_those_of_the_formula_and_know_what_is_wanted() -> None:
    wanted = []

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        wanted.append(ctx.needs_input_grad)
        (y,) = ctx.saved_tensors
        return grad * y, grad * ctx.n, None

    def saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, y, ctx.n = inputs
        ctx.save_for_backward(y)

    define_op(
        "_test_scaled(Tensor x, Tensor y, int n) -> Tensor",
        rule="nl: ..., ... -> ...",
        reference=lambda x, y, n: x * y + n,
        fake=lambda x, y, n: new_like(x),
    )
    define_gradient("_test_scaled", backward, saves)
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    out = torch.ops.megafx._test_scaled(x, y, 2)
    (dx,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(dx, y) and wanted[0][:3] == (True, False, False)
    assert not torch.ops.megafx._test_scaled(y, y, 2).requires_grad
    with torch.no_grad():
        assert not torch.ops.megafx._test_scaled(x, y, 2).requires_grad


def gpu_checks() -> None:

    def recordings(call):
        cells = [c.cell_contents for c in module._implementations[call].__closure__]
        return [f for c in cells if hasattr(c, "forms") for f in c.forms.values()]

    bf = torch.bfloat16
    M = torch.ops.megafx

    def rand(*shape, dtype=bf):
        return torch.randn(shape, device="cuda").to(dtype)

    seed = torch.tensor(5, device="cuda")
    CALLS = [
        (M.bias_act.default, lambda: (rand(33, 70), rand(70), "gelu")),
        (M.bias_act.default, lambda: (rand(33, 71)[:, 1:], rand(71)[1:], "gelu")),  # starts that 16 bytes do not divide
        (M.bias_act_backward.default, lambda: (rand(64, 96), rand(64, 96), rand(96), "silu", True)),
        (M.glu.default, lambda: (rand(8, 512), rand(8, 512), "silu")),
        (M.rms_norm_forward.default, lambda: (rand(4, 1, 256), rand(256), 1e-5, 0.0)),
        (
            M.rms_norm_backward.default,
            lambda: (rand(9, 256), rand(9, 256), rand(256), rand(9, dtype=torch.float32), 0.0, True),
        ),
        (M.bias_dropout_add.default, lambda: (rand(5, 64), rand(64), rand(5, 64), seed, 0.3, 2, -1, [], "")),
        (
            M.rope_qk.default,
            lambda: (
                rand(2, 7, 4, 16).transpose(1, 2),
                rand(2, 7, 2, 16).transpose(1, 2),
                rand(1, 1, 7, 16),
                rand(1, 1, 7, 16),
                False,
                False,
            ),
        ),
        (
            M.scale_mask_softmax_forward.default,
            lambda: (rand(2, 2, 9, 40), None, 0.3, True, 0, -1e4, None, 0.0, 0, -1, [], ""),
        ),
        (
            M.attention_forward.default,
            lambda: (
                rand(2, 4, 48, 32),
                rand(2, 2, 48, 32),
                rand(2, 2, 48, 32),
                None,
                None,
                None,
                None,
                seed,
                0.2,
                True,
                0,
                0.0,
                0,
                0.1,
                3,
                -1,
                [],
                "",
            ),
        ),
    ]

    def flat(x):
        return [x] if isinstance(x, torch.Tensor) else [y for y in x if y is not None]

    real, module.replay.supported = module.replay.supported, lambda: False
    expected, given = [], []
    torch.manual_seed(0)
    for call, make in CALLS:
        given.append([make() for _ in range(5)])
        expected.append([[y.clone() for y in flat(call(*args))] for args in given[-1]])
    module.replay.supported = real
    assert real(), "this Triton is not known"
    side = torch.cuda.Stream()
    for (call, _), all_args, wanted in zip(CALLS, given, expected, strict=True):
        for i, (args, right) in enumerate(zip(all_args, wanted, strict=True)):
            if i == 3:  # on another stream, waiting for the first
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    found = flat(call(*args))
                torch.cuda.current_stream().wait_stream(side)
            elif i == 4:  # in a graph of CUDA
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    found = flat(module.direct(call)(*args))
                graph.replay()
            else:
                found = flat(call(*args))
            torch.cuda.synchronize()
            for a, b in zip(found, right, strict=True):
                assert a.stride() == b.stride() and torch.equal(a, b), (call, i)
        assert any(isinstance(f, Recording) for f in recordings(call)), (call, recordings(call))
    if torch.cuda.device_count() > 1:
        for call, make in CALLS:
            args = [a.to("cuda:1") if isinstance(a, torch.Tensor) else a for a in make()]
            first = flat(call(*args))
            for _ in range(3):
                assert all(torch.equal(a, b) for a, b in zip(flat(call(*args)), first, strict=True))
                assert torch.cuda.current_device() == 0


def test_on_a_gpu_repeated_calls_give_what_launchers_give() -> None:
    """Other streams, CUDA graphs, a second device; starts that are not aligned."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    run_as_script(__file__, 120)


if __name__ == "__main__":
    gpu_checks()
