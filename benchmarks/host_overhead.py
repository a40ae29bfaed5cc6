"""Host time that the runtime adds to a training step, per parameter, against plain autograd parameters.

    python benchmarks/host_overhead.py [--params 291]
    python benchmarks/host_overhead.py --kernels        # host time of a call of each fused op; needs a CUDA device
    python benchmarks/host_overhead.py --calls          # host time of telling other ranks of a call, twice a step
    python benchmarks/host_overhead.py --guards         # host time of checking what forward reads, once a call

A step is forward, backward and gradients in place, of graphs that compute nothing, so that what is left is the runtime: keys,
inputs, autograd edges, wrapping of gradients. Budget: 10 us a parameter at 291 parameters (Llama-8B has 291).
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import sympy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from megafx.capture.export import capture_call
from megafx.compiler.executable import Kept
from megafx.compiler.kept_values import KeptValues
from megafx.config import Config
from megafx.distributed.agreement import sample
from megafx.distributed.board import BYTES, Entry, SharedBoard
from megafx.distributed.mesh import Meshes
from megafx.ir.call_spec import CallSpec, Leaf, OutputLeaf, call_tree
from megafx.ir.nodes import changed_copy
from megafx.ir.program import Input, Output, Program, Reached
from megafx.ir.sizes import Sizes
from megafx.passes.lower.call_directly import call_node_directly
from megafx.placements.types import I, Layout, Placement, S
from megafx.planner.hardware import Hardware
from megafx.runtime.bound_graph import CompiledCall
from megafx.runtime.keys import Call
from megafx.runtime.module import make_parallel
from megafx.runtime.runtime import Runtime


class Many(nn.Module):
    """A model of `count` small parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(8, 8)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


class Nothing:
    """An executable that computes no more than gradients of the right shape."""

    rooms, read_in_backward, gathered_names = None, (), ()

    def __init__(self) -> None:
        self.casts = KeptValues()

    def forward(self, inputs: list[Any]) -> tuple[list[Any], Any]:
        return [inputs[-1].sum()], Kept(inputs, [], [], [], len(inputs))

    def backward(self, kept: Any, tangents: list[Any], retain: bool = False) -> list[Any]:
        return [torch.empty_like(x) for x in kept.values[:-1]]


def compile_nothing(placements: dict[str, Placement]) -> Any:
    def compile_call(*_: Any, **options: Any) -> CompiledCall:
        names = list(placements)
        graph = torch.fx.Graph()
        last = [graph.placeholder(f"i{i}") for i in range(len(names) + 1)][-1]
        graph.output((graph.call_function(torch.sum, (last,)),))
        gm = torch.fx.GraphModule({}, graph)
        inputs = [*(Input("param", n) for n in names), Input("user", "kwargs[x]")]
        program = Program(gm, inputs, [Output("user", "", True)], Sizes(), None, pytree.tree_structure(0))  # type: ignore[arg-type]
        program.reached = Reached({name: {""} for name in names}, {})
        leaf = Leaf("kwargs[x]", True, torch.float32, (sympy.Symbol("s0"),))
        in_spec = pytree.tree_structure((*call_tree((), {"x": 0}, {}), {}))
        program.call = CallSpec(in_spec, (leaf,), pytree.tree_structure(0), (OutputLeaf(0),))
        return CompiledCall(program, Nothing(), list(range(len(names))), [0], placements, shards=[None])

    return compile_call


def measure(model: nn.Module, accumulate: bool, steps: int = 100) -> float:
    """Seconds of the fastest step."""
    x = torch.ones(3)
    best = float("inf")
    params = list(model.parameters())
    gc.collect()
    gc.disable()
    for _ in range(steps):
        if not accumulate:
            for p in params:
                p.grad = None
        start = time.perf_counter()
        model(x).backward()
        best = min(best, time.perf_counter() - start)
    gc.enable()
    return best


CALLS, ROUNDS = 20, 25  # calls are fewer than the device's queue holds


def host_us(call: Callable[[], Any]) -> float:
    """Microseconds that the host is busy with one call, the device working meanwhile: the median of rounds of calls."""
    for _ in range(5):
        call()
    found = []
    gc.collect()
    gc.disable()
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - start) / CALLS * 1e6)
    gc.enable()
    torch.cuda.synchronize()
    return statistics.median(found)


def fused_calls() -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """Name -> op, its arguments; small tensors, so that no call waits for the device."""
    ops = torch.ops.megafx

    def rand(*shape: int, grad: bool = True) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)

    def heads(count: int) -> torch.Tensor:
        return rand(1, 128, count, 64, grad=False).transpose(1, 2).requires_grad_()

    seed = torch.zeros((), dtype=torch.int64, device="cuda")
    drawn = (seed, 0.1, 1, -1, [], "")
    rows, vector = (128, 1024), (1024,)
    table = (1, 1, 128, 64)
    return {
        "aten gelu": (torch.nn.functional.gelu, [rand(*rows)]),
        "bias_act gelu": (ops.bias_act, [rand(*rows), rand(*vector), "gelu"]),
        "glu silu": (ops.glu, [rand(*rows), rand(*rows), "silu"]),
        "bias_dropout_add": (ops.bias_dropout_add, [rand(*rows), rand(*vector), rand(*rows), *drawn]),
        "layer_norm": (ops.layer_norm, [rand(*rows), rand(*vector), rand(*vector), 1e-5]),
        "rms_norm": (ops.rms_norm, [rand(*rows), rand(*vector), 1e-5, 0.0]),
        "add + rms_norm": (
            ops.bias_dropout_add_rms_norm,
            [rand(*rows), None, rand(*rows), rand(*vector), 1e-5, 0.0, None, 0.0, 0, -1, [], ""],
        ),
        "rope_qk": (
            ops.rope_qk,
            [heads(8), heads(2), rand(*table, grad=False), rand(*table, grad=False), False, False],
        ),
        "softmax causal": (
            ops.scale_mask_softmax,
            [rand(1, 8, 128, 128), None, 0.125, True, 0, float("-inf"), None, 0.0, 0, -1, [], ""],
        ),
        "attention dropout": (
            ops.attention,
            [heads(8), heads(2), heads(2), None, None, None, None, seed, 0.125, True, 0, 0.0, 0, 0.1, 1, -1, [], ""],
        ),
    }


def measure_kernels() -> dict[str, list[float]]:
    """Print and return microseconds of the forward call without gradient, with, and with a backward after it; then of the
    first and the last as compiled graphs make them."""
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/host_overhead.py --kernels needs a CUDA device: torch sees none here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {' '.join(sys.argv)}; host us")
    print(
        f"{'a call of':20s} {'no grad':>8s} {'forward':>8s} {'fwd+bwd':>8s}   in a graph: {'fwd':>8s} {'fwd+bwd':>8s}"
    )
    result = {}
    for name, (op, args) in fused_calls().items():
        steps = Steps(op, args)
        forward, joint = steps.graph(steps.outputs), steps.graph(steps.both)
        with torch.no_grad():
            plain, *graphs = (host_us(f) for f in (steps.outputs, forward, joint))
        result[name] = [plain, host_us(steps.outputs), host_us(steps.both), *graphs]
        print("{:20s} {:8.1f} {:8.1f} {:8.1f}               {:8.1f} {:8.1f}".format(name, *result[name]), flush=True)
    return result


class Steps:
    """A call, alone and with a backward after it."""

    def __init__(self, op: Callable[..., Any], args: list[Any]) -> None:
        self.op, self.args = op, args
        self.tensors = [x for x in args if isinstance(x, torch.Tensor)]
        self.tangents = [torch.randn_like(y) for y in self.outputs() if y.requires_grad]

    def outputs(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        given = iter(tensors or self.tensors)
        found = self.op(*[next(given) if isinstance(x, torch.Tensor) else x for x in self.args])
        return list(found) if isinstance(found, tuple) else [found]

    def both(self, *tensors: torch.Tensor) -> Any:
        leaves = [x for x in tensors or self.tensors if x.requires_grad]
        made = [y for y in self.outputs(*tensors) if y.requires_grad]
        return torch.autograd.grad(made, leaves, self.tangents)

    def graph(self, step: Callable[..., Any]) -> Callable[[], Any]:
        """What a compiled graph runs for it."""
        gm = changed_copy(make_fx(step)(*self.tensors), call_node_directly)[0]
        return lambda: gm.forward(*self.tensors)


def main() -> dict[str, Any]:
    """Print and return microseconds a parameter and step; with --kernels, of the calls of fused ops."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--params", type=int, default=291)
    parser.add_argument("--kernels", action="store_true", help="host time of a call of each fused op, instead")
    parser.add_argument("--calls", action="store_true", help="host time of telling other ranks of a call, instead")
    parser.add_argument("--guards", action="store_true", help="host time of checking what forward reads, instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.calls:
        return measure_calls()
    if options.guards:
        return measure_guards()
    return measure_kernels() if options.kernels else measure_parameters(options.params)


def _exchange(boards: list[SharedBoard], entry: Entry) -> None:
    for board in boards:
        board.exchange(entry)


def measure_calls() -> dict[str, float]:
    """Microseconds in which a rank tells the others of a call, and compares it with theirs (distributed/board.py)."""
    entry = Entry(0, 7, "what ranks agree on beyond sizes" * 20, [4, 512, 4, 512])
    call, result = Call.of((), {name: torch.ones(4, 512, dtype=torch.int64) for name in ("ids", "labels")}), {}

    def fastest(step: Callable[[], Any], count: int) -> float:
        times = []
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(100):
                step()
            times.append((time.perf_counter() - start) / 100 / count * 1e6)
        return min(times)

    result["sizes and values of two inputs on the CPU"] = fastest(call.numbers, 1)
    named = [(f"weights.{i}", p.detach()) for i, p in enumerate(Many(291).parameters())]
    result["elements of 291 parameters, in a call of 100"] = fastest(functools.partial(sample, named), 100)
    for ranks in (2, 8):
        with tempfile.TemporaryFile(buffering=0) as file:
            file.truncate(ranks * BYTES)
            boards = [SharedBoard(rank, ranks, False, file, 1.0) for rank in range(ranks)]
            result[f"an entry, {ranks} ranks one after another"] = fastest(
                functools.partial(_exchange, boards, entry), ranks
            )
    for name, value in result.items():
        print(f"{name:48s} {value:6.2f} us")
    return result


class Reader(nn.Module):
    """A module that reads a flag, a number and a function of its own, as layers of Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale, self.on, self.act = nn.Parameter(torch.ones(4)), 0.5, True, torch.tanh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(x * self.weight) * self.scale if self.on else x


def measure_guards(modules: int = 500) -> dict[str, float]:
    """Microseconds in which a call finds that nothing has changed of what forward read at capture (ir/python_state.py)."""
    model = nn.Sequential(*[Reader() for _ in range(modules)])
    spec = capture_call(model, (torch.ones(2, 4),)).call
    assert spec is not None and spec.state.holds()
    times = []
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(20):
            spec.state.holds()
        times.append((time.perf_counter() - start) / 20 * 1e6)
    result = {f"{len(spec.state.guards)} guards of {modules} modules": min(times)}
    for name, value in result.items():
        print(f"{name:48s} {value:6.2f} us a call")
    return result


def measure_parameters(count: int) -> dict[str, float]:
    """Microseconds a parameter and step."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    names = [f"weights.{i}" for i in range(count)]
    result: dict[str, float] = {}
    for label, sharded in (("plain parameters (t=1)", None), ("DTensor parameters", True)):
        placements = {n: S(0, Layout.contiguous(8, 1)) if sharded and i % 3 else I for i, n in enumerate(names)}
        model = Many(count)
        config, meshes = Config(check_inputs_every=0), Meshes(mesh if sharded else None)
        runtime = Runtime(model, config, meshes, Hardware.load("cpu-gloo"), compile=compile_nothing(placements))
        make_parallel(runtime)
        for accumulate in (False, True):
            name = f"{label}, {'accumulating' if accumulate else 'grad set to None'}"
            result[name] = measure(model, accumulate) / count * 1e6
    dist.destroy_process_group()
    for name, value in result.items():
        print(f"{name:48s} {value:6.2f} us a parameter and step")
    return result


if __name__ == "__main__":
    main()
