"""Host time that the runtime adds to a training step, per parameter, against plain autograd parameters.

    python benchmarks/host_overhead.py [--params 291]

A step is forward, backward and gradients in place, of graphs that compute nothing, so that what is left is the runtime: keys,
inputs, autograd edges, wrapping of gradients. Budget: 10 us a parameter at 291 parameters (Llama-8B has 291).
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from typing import Any

import sympy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

from megafx.call_spec import CallSpec, Leaf, OutputLeaf, call_tree
from megafx.ir import Input, Output, Program
from megafx.placements import I, Layout, Placement, S
from megafx.runtime import CompiledCall, CompileRequest, make_parallel
from megafx.sizes import Sizes


class Many(nn.Module):
    """A model of `count` small parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(8, 8)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


class Nothing:
    """An executable that computes no more than gradients of the right shape."""

    def forward(self, inputs: list[Any]) -> tuple[list[Any], Any]:
        return [inputs[-1].sum()], inputs

    def backward(self, kept: Any, tangents: list[Any], retain: bool = False) -> list[Any]:
        return [torch.empty_like(x) for x in kept[:-1]]


def compile_nothing(placements: dict[str, Placement]) -> Any:
    def compile_call(request: CompileRequest) -> CompiledCall:
        names = list(placements)
        gm = torch.fx.GraphModule({}, torch.fx.Graph())
        gm.graph.output(())
        gm.recompile()
        inputs = [*(Input("param", n) for n in names), Input("user", "kwargs[x]")]
        program = Program(gm, inputs, [Output("user", "", True)], Sizes(), None, pytree.tree_structure(0))  # type: ignore[arg-type]
        leaf = Leaf("kwargs[x]", True, torch.float32, (sympy.Symbol("s0"),))
        in_spec = pytree.tree_structure(call_tree((), {"x": 0}, {}))
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


def main() -> dict[str, float]:
    """Print and return microseconds a parameter and step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--params", type=int, default=291)
    count = parser.parse_args().params
    torch.set_num_threads(1)
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
        make_parallel(model, compile_nothing(placements), mesh if sharded else None, check_inputs_every=0)
        for accumulate in (False, True):
            name = f"{label}, {'accumulating' if accumulate else 'grad set to None'}"
            result[name] = measure(model, accumulate) / count * 1e6
    dist.destroy_process_group()
    for name, value in result.items():
        print(f"{name:48s} {value:6.2f} us a parameter and step")
    return result


if __name__ == "__main__":
    main()
