"""Covers: passes/lower/compile_chains.py, megafx/kernels/common/chain.py."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from local_programs import local_program
from torch import Tensor, fx, nn
from torch.nn import functional as F

import megafx
from megafx.ir.nodes import shows_operand
from megafx.kernels.common import chain
from megafx.kernels.common.chain import Chain
from megafx.passes.lower import compile_chains as this
from megafx.passes.lower.compile_chains import chains_of, compile_chains, with_chains
from megafx.passes.lower.partition import partition
from megafx.testing import make_context


class Layer(nn.Module):
    """Ops that megafx has no kernels for, among products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(torch.tanh(x * self.scale) + x.abs())
        y = (y.sigmoid() * y.exp().clamp(max=3)) / (1 + y.square())
        return x + self.down(y).cos() * self.scale


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        return functools.reduce(lambda value, layer: layer(value), self.layers, x).square().mean()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The code of each chain that is compiled: by a compiler that leaves it as it is, and asks what Inductor asks."""
    found: list[str] = []

    def compiler(gm: fx.GraphModule, fakes: list[Any], mode: Any) -> Callable[..., Any]:
        found.append(gm.code)
        with mode, torch.no_grad():
            gm(*fakes)
        return gm.forward

    monkeypatch.setattr(chain, "inductor", compiler)
    monkeypatch.setattr(this, "_chains", {})
    yield found


def trained(layers: int, batches: list[int], **config: Any) -> list[Tensor]:
    """Loss and gradients of a call of each batch size."""
    torch.manual_seed(0)
    model = megafx.parallelize(Stack(layers).double(), megafx.Config(**config))
    found = []
    for batch in batches:
        loss = model(torch.randn(batch, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(batch)))
        found += [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    return found


def test_like_layers_and_other_sizes_compile_nothing_anew(compilations: list[str]) -> None:
    """The first layer, the last and one between them have all chains that there are."""
    want = trained(4, [3, 4, 1])
    trained(3, [3], compile=True)
    first = len(compilations)
    assert first and len(set(compilations)) == first
    got = trained(4, [3, 4, 1], compile=True)
    assert len(compilations) == first, compilations[first:]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


@pytest.mark.slow
def test_inductor_computes_what_eager_does() -> None:
    for a, b in zip(trained(2, [3, 1, 6], compile=True), trained(2, [3, 1, 6]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)


class Normed(nn.Module):
    """Layers between norms, whose tokens ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.norms, self.layers = (
            nn.ModuleList(nn.LayerNorm(8) for _ in range(2)),
            nn.ModuleList(Layer() for _ in range(2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x.square().mean()


def is_chain_or_view(node: fx.Node) -> bool:
    return isinstance(node.target, Chain) or shows_operand(node) or node.target is operator.getitem


def test_collectives_and_overlap_are_as_without_it(compilations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph with chains, everything that is no part of a chain stands in the same order."""
    seen: list[str] = []

    def compared(program: Any, gm: fx.GraphModule) -> fx.GraphModule:
        inside = {n for chain in chains_of(gm.graph) for n in chain.inside}
        fixed = lambda graph: [str(n.target) for n in graph.nodes if n not in inside and not is_chain_or_view(n)]
        changed = with_chains(program, gm)
        seen.extend(fixed(gm.graph))
        assert fixed(changed.graph) == fixed(gm.graph)
        return changed

    monkeypatch.setattr(this, "with_chains", compared)
    torch.manual_seed(0)
    config = megafx.Config(tensor_model_parallel_size=2, sequence_parallel=True, tp_comm_overlap=True, compile=True)
    verdict = megafx.verify(Normed().double(), config, example_inputs=(torch.randn(2, 4, 8).double(),))
    assert verdict, verdict
    assert compilations and any("gather_matmul" in n for n in seen) and any("scatter_wait" in n for n in seen)


def of(function: Any, *inputs: Tensor, varying: tuple[str, ...] = ()) -> tuple[fx.GraphModule, Any]:
    names = {f"x{i}": x for i, x in enumerate(inputs)}
    program = local_program(function, names, varying=varying)
    partition(program, make_context())
    assert program.partition is not None
    return program.partition.forward, program


def same(gm: fx.GraphModule, program: Any, *inputs: Tensor) -> fx.GraphModule:
    changed = with_chains(program, gm)
    for a, b in zip(changed(*inputs), gm(*inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
        assert a.stride() == b.stride()
    return changed


def calls(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if isinstance(n.target, Chain)]


def test_views_that_others_read_stay(compilations: list[str]) -> None:
    def function(x0: Tensor, x1: Tensor) -> tuple[Tensor, ...]:
        a = x0 + x1
        seen = a.transpose(0, 1)
        b = (seen * 2).exp()
        return b, seen, a.view(-1)[2:]

    x, y = torch.randn(3, 4).double(), torch.randn(3, 4).double()
    gm, program = of(function, x, y)
    changed = same(gm, program, x, y)
    (call,) = calls(changed)
    assert len(call.users) == 2, "the sum and the exponential; views are made of the sum outside"


def test_several_results_of_one_op(compilations: list[str]) -> None:
    def function(x0: Tensor) -> tuple[Tensor, ...]:
        variance, mean = torch.var_mean(x0, -1, keepdim=True)
        return ((x0 - mean) * torch.rsqrt(variance + 1e-5), mean)

    x = torch.randn(3, 4).double()
    gm, program = of(function, x)
    assert len(calls(same(gm, program, x))) == 1


def test_products_part_chains_and_single_ops_stay(compilations: list[str]) -> None:
    def function(x0: Tensor, x1: Tensor) -> tuple[Tensor, ...]:
        y = F.silu(x0) * 2
        z = y @ x1
        return (z.exp() @ x1,)

    x, w = torch.randn(3, 4).double(), torch.randn(4, 4).double()
    gm, program = of(function, x, w)
    changed = same(gm, program, x, w)
    assert len(calls(changed)) == 1 and sum("matmul" in str(n.target) for n in changed.graph.nodes) == 2
    assert any("exp" in str(n.target) for n in changed.graph.nodes)


def test_views_by_megafx_part_chains(compilations: list[str]) -> None:
    """Inductor refuses operators of others whose result may be their operand."""

    def function(x0: Tensor) -> tuple[Tensor, ...]:
        return (torch.ops.megafx.pad_rows((x0 + 1).exp(), 4).sin().square(),)

    x = torch.randn(3, 4).double()
    gm, program = of(function, x)
    changed = with_chains(program, gm)
    assert len(calls(changed)) == 2 and torch.equal(changed(x)[0], gm(x)[0])


def test_random_numbers_and_other_devices_are_no_part(compilations: list[str]) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, device="meta")
    drawn = graph.call_function(torch.ops.aten.rand_like.default, (x,))
    drawn.meta["val"] = torch.empty(3, device="meta")
    there = graph.call_function(torch.ops.aten._to_copy.default, (drawn,), {"device": "cpu"})
    there.meta["val"] = torch.empty(3)
    graph.output((there,))
    assert chains_of(graph) == []


def test_a_chain_is_compiled_again_where_a_conclusion_does_not_hold(compilations: list[str]) -> None:
    graph = fx.Graph()
    x, n = graph.placeholder("x"), graph.placeholder("n")
    parts = graph.call_function(torch.ops.aten.view.default, (x, [n, -1]))
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (parts, parts)),))
    made = Chain(fx.GraphModule({}, graph), [chain.Operand(("a",), (1,), torch.float64, torch.device("cpu")), "b"], {})
    for size, rows in ((12, 3), (20, 4), (12, 3), (6, 6)):
        value = torch.randn(size).double()
        assert torch.equal(made(value, rows)[0], 2 * value.view(rows, -1))
    assert 1 < len(compilations) < 4


def test_other_strides_than_in_the_trace_and_no_elements(compilations: list[str]) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, 2)),))
    operand = chain.Operand(("a", 4), (4, 1), torch.float64, torch.device("cpu"))
    made = Chain(fx.GraphModule({}, graph), [operand], {})
    for value in (torch.randn(3, 4).double(), torch.randn(4, 3).double().t(), torch.randn(0, 4).double()):
        assert torch.equal(made(value)[0], 2 * value)
    assert len(compilations) == 1


def test_auto_stays_eager_where_that_is_as_fast_and_says_so(compilations: list[str]) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8)
    plain = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))
    quiet = megafx.parallelize(plain, megafx.Config(compile="auto"))
    quiet(x).sum().backward()
    assert not compilations and "the graphs run without Inductor" in str(megafx.explain(quiet))
    busy = megafx.parallelize(Stack(2), megafx.Config(compile="auto"))
    busy(x).backward()
    assert compilations and "Inductor compiles chains of ops" in str(megafx.explain(busy))


def test_nothing_without_compile() -> None:
    _, program = of(lambda x0: (x0.exp().cos(),), torch.randn(3))
    before = program.partition
    assert compile_chains(program, make_context()) == 0 and program.partition is before
