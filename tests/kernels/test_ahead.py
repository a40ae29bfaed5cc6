"""Covers: kernels/common/ahead.py, kernels/common/recording.py (Foreseen)."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_triton import fake_triton
from fused_calls import BF16, CALLS, op_of
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import megafx
from megafx.compiler import executable
from megafx.ir.program import VAL
from megafx.kernels.attention import attention_reference
from megafx.kernels.common import ahead
from megafx.kernels.common.ahead import apart, compile_ahead, compiles_here, foresee
from megafx.ops.axes import AxisContext, on_mesh
from megafx.placements.types import Layout

pytest.importorskip("triton")
from triton.runtime import build
from triton.runtime.jit import JITFunction


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled ahead, as where there is a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(ahead, "_ready", [])


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    with fake_triton(monkeypatch) as log:
        yield log


def graph_of(call: Any, args: list[Any]) -> fx.Graph:
    """One node, whose operands are placeholders."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def operand(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [operand(y) for y in x]
        if not isinstance(x, Tensor):
            return x
        node = graph.placeholder("x")
        node.meta[VAL] = mode.from_tensor(x)
        return node

    graph.output(graph.call_function(call, tuple(operand(x) for x in args)))
    return graph


# Ops of several steps, which call launchers and products: 24 classes on 2 ranks.
_ROWS, _WEIGHT, _LABELS = torch.randn(8, 16).to(BF16), torch.randn(12, 16).to(BF16), torch.arange(8)
_RANK = [[*Layout.contiguous(24, 2).flat()], 2, "tp"]
_LAYER = [_ROWS, _WEIGHT, None, _LABELS]
_STATS = torch.rand(2, 8, 4)
STEPS = [
    ("megafx.linear_ce_stats.default", [*_LAYER, *_RANK]),
    ("megafx.linear_ce_loss.default", [*_LAYER, _STATS, -100, 0.0, False, *_RANK]),
    ("megafx.linear_ce_loss_backward.default", [torch.rand(8), *_LAYER, _STATS, None, -100, 0.0, *_RANK]),
    ("megafx.linear_cross_entropy_forward.default", [*_LAYER, -100, 0.0, True]),
]
ALL = CALLS + STEPS


@pytest.mark.parametrize("name,args", ALL, ids=[f"{n.split('.')[1]}-{i}" for i, (n, _) in enumerate(ALL)])
def test_what_ops_will_launch_is_what_they_launch(launches: list[Any], name: str, args: list[Any]) -> None:
    """Compiled ahead: each kernel that the op launches, and no other."""
    with on_mesh({"tp": AxisContext(0, 2)}):
        found = foresee(graph_of(op_of(name), args), {})
        for launch in found.values():
            launch.compile()
        ready = {id(c) for x in found.values() for c in x.kernel.device_caches[0][0].values()}
        assert not launches
        op_of(name)(*args)
    assert {id(compiled) for compiled, _, _ in launches} == ready
    assert ready or (name, args) not in STEPS


def test_sizes_are_those_of_the_call(launches: list[Any]) -> None:
    """Of a graph with symbols: the kernel for rows of one element is another one than that for 16."""
    env = ShapeEnv()
    mode, rows = FakeTensorMode(shape_env=env), StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    real = torch.randn(6, 32).to(BF16)
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta[VAL] = mode.from_tensor(real, symbolic_context=rows, source=ConstantSource("x"))
    graph.output(graph.call_function(torch.ops.megafx.glu_packed.default, (x, None, "silu")))
    symbol = x.meta[VAL].shape[0].node.expr
    for n in (1, 16, 17):
        launches.clear()
        found = foresee(graph, {symbol: n})
        torch.ops.megafx.glu_packed(real[:1].expand(n, 32).contiguous(), None, "silu")
        (launch,) = found.values()
        launch.compile()
        compiled = {id(c) for c in launch.kernel.device_caches[0][0].values()}
        assert {id(x) for x, _, _ in launches} <= compiled
    assert foresee(graph, {}) == {}, "a size that nobody knows"


def test_tables_that_are_kept_are_no_fakes(launches: list[Any]) -> None:
    """Attention's rank has 16 of 32 queries, in two pieces: launchers make tables of where they lie, once."""
    layout = [*Layout.contiguous(32, 2).flat()]
    q, k = torch.zeros(2, 4, 16, 48, dtype=BF16), torch.zeros(2, 4, 32, 48, dtype=BF16)
    args = [q, k, k, None, None, None, None, torch.tensor(3), 0.2, True, 0, 0.0, 0, 0.1, 7, 2, layout, "tp"]
    op = torch.ops.megafx.attention_forward.default
    with on_mesh({"tp": AxisContext(1, 2)}):
        found = foresee(graph_of(op, args), {})
        where = attention_reference.where_is(16, 2, attention_reference.Inputs.of(args[:8], args[8:]).draw)
        assert where is not None
        table = attention_reference.places_of(*where, "cpu")
    assert len(found) == 1 and type(table) is Tensor and table.tolist() == [*range(16, 32)]


def test_threads_compile_each_kernel_once(launches: list[Any], on_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second graph has what the first one has, and more; all is there when it says so, and launches find it. One more
    kernel gets Triton ready."""
    calls = [c for c in CALLS if c[0] == "megafx.rms_norm_forward.default"]
    more = [*calls, *(c for c in CALLS if c[0] == "megafx.glu.default")]
    graphs = []
    for some in (calls, more):
        graph = fx.Graph()
        for name, args in some:
            graph.graph_copy(graph_of(op_of(name), args), {})
        graphs.append(graph)
    compiled, slow = [], JITFunction._do_compile

    def compile(self: Any, *args: Any) -> Any:
        time.sleep(0.2)
        compiled.append(threading.current_thread().name)
        assert compiles_here()
        return slow(self, *args)

    monkeypatch.setattr(JITFunction, "_do_compile", compile)
    turn = sys.getswitchinterval()
    first, second = compile_ahead(graphs, {})
    assert sys.getswitchinterval() == ahead.TURN < turn
    assert (len(first.jobs), len(second.jobs)) == (len(calls), len(more) - len(calls))
    first.finish()
    assert len(compiled) > len(calls)
    second.finish()
    assert len(compiled) == 1 + len(more) and threading.current_thread().name not in compiled and not compiles_here()
    for name, args in more:
        op_of(name)(*args)
    assert 1 + len(launches) == 1 + len(more) == len(compiled)
    deadline = time.monotonic() + 10
    while sys.getswitchinterval() != turn:  # the last job's end is told to others before that
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_cannot_be_compiled_says_so_at_its_launch(
    launches: list[Any], on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(JITFunction, "_do_compile", refuse)
    ((name, args),) = (c for c in CALLS if c[0] == "megafx.glu.default")
    (compiling,) = compile_ahead([graph_of(op_of(name), args)], {})
    assert len(compiling.jobs) == 1
    compiling.finish()
    with pytest.raises(RuntimeError, match="no such kernel"):
        op_of(name)(*args)


def test_a_model_finds_its_kernels(launches: list[Any], on_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From `parallelize` on kernels are compiled; forward and backward of the first step compile none."""
    during: list[str] = []
    slow = JITFunction._do_compile

    def compile(self: Any, *args: Any) -> Any:
        during.append(threading.current_thread().name)
        return slow(self, *args)

    monkeypatch.setattr(JITFunction, "_do_compile", compile)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.RMSNorm(32), torch.nn.Linear(32, 32), torch.nn.GELU())
    x = torch.randn(8, 32)
    model = megafx.parallelize(model, megafx.Config(cache=False), example_inputs=x)
    model(x).sum().backward()
    assert len(during) >= 3 and threading.current_thread().name not in during
    assert {compiled.key[0] for compiled, _, _ in launches} >= {"norm_forward", "norm_backward"}


def test_a_model_on_the_cpu_asks_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(ahead, "_can_compile", lambda: True)
    monkeypatch.setattr(ahead, "_start", lambda launches, threads: refuse() if launches else [])
    monkeypatch.setattr(torch.cuda, "current_device", refuse)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.RMSNorm(32))
    megafx.parallelize(model, megafx.Config(cache=False), example_inputs=torch.randn(8, 32))
    assert not ahead._ready


def test_plans_compile_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(executable, "compile_ahead", refuse)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.RMSNorm(32), torch.nn.Linear(32, 32))
    two, x = megafx.Config(tensor_model_parallel_size=2, cache=False), torch.randn(8, 32)
    megafx.plan(model, two, example_inputs=x)
    megafx.predict_memory(model, two, example_inputs=x)
    with pytest.raises(AssertionError):
        megafx.parallelize(model, two.replace(tensor_model_parallel_size=1), example_inputs=x)


LAUNCHER = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher_of_a_test", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launcher_of_a_test(void) { return PyModule_Create(&module); }
"""


def load_as_triton(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_launchers_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "launcher.c").write_text(LAUNCHER)
    paths = [str(tmp_path / f"{number}.so") for number in (1, 2)]
    for number, path in enumerate(paths):
        command = ["cc", "-shared", "-fPIC", f"-DNUMBER={number}", f"-I{sysconfig.get_paths()['include']}"]
        subprocess.run([*command, str(tmp_path / "launcher.c"), "-o", path], check=True)

    def after_another_load(load: Any) -> int:
        load("launcher_of_a_test", paths[0])
        second = load("launcher_of_a_test", paths[1])
        load("launcher_of_a_test", paths[0])  # by another thread, before this one reads
        return int(second.launch())

    assert after_another_load(load_as_triton) == 0  # what this is about: the first one's launcher
    assert after_another_load(apart(load_as_triton)) == 1


def test_triton_loads_by_it_before_threads_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_load_module_from_path", load_as_triton, raising=False)
    ahead._keep_launchers_apart()
    once = build._load_module_from_path
    ahead._keep_launchers_apart()
    assert once is not load_as_triton and build._load_module_from_path is once
