"""Covers: passes/lower/pair_casts.py: casts along both dims of a value read it once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from local_programs import local_program
from torch import Tensor, fx, nn

import megafx
import megafx.kernels.fp8.scaled_mm
from megafx.config import Config
from megafx.ir.program import Program
from megafx.passes.lower import pair_casts as under_test
from megafx.passes.lower.partition import partition
from megafx.testing import make_context

ops = torch.ops.megafx


def parts(function: Any, *inputs: Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Its graph before and after the pass."""
    program = local_program(function, {f"x{i}": x for i, x in enumerate(inputs)})
    context = make_context(1, Config(fp8="hybrid", fp8_recipe="rowwise"))
    partition(program, context)
    assert program.partition is not None
    before = program.partition.forward
    under_test.pair_casts(program, context)
    return before, program.partition.forward


def fp8_calls(gm: fx.GraphModule) -> Counter[str]:
    names = (str(n.target).removeprefix("megafx.").removesuffix(".default") for n in gm.graph.nodes)
    return Counter(name for name in names if name.startswith("fp8"))


def cast(
    x: Tensor, largest: Tensor, kept: int, format: str = "e4m3", plain: bool | None = None
) -> tuple[Tensor, Tensor]:
    """-> its bytes, its scale."""
    plain = kept == 0 if plain is None else plain
    q, qt, scale = ops.fp8_quantize(x, largest, kept, format, False, plain, not plain)
    return q if plain else qt, scale


@pytest.mark.parametrize("first", [0, 1])
def test_two_reads_in_place_of_four(first: int) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        largest = [ops.fp8_amax(x, kept, -1, [], "tp") for kept in (first, 1 - first)]
        (a, b), (c, d) = (cast(x, found, kept) for found, kept in zip(largest, (first, 1 - first), strict=True))
        return a, b, c, d

    x = torch.randn(6, 8)
    before, after = parts(function, x)
    assert fp8_calls(after) == {"fp8_amax_both": 1, "fp8_quantize_both": 1}
    for a, b in zip(after(x), before(x), strict=True):
        assert torch.equal(a, b)


def test_what_stays() -> None:
    """Casts in other formats, in one orientation, of other values; and a cast that is read before the other one is there."""

    def function(x: Tensor, y: Tensor, z: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        rows, columns = ops.fp8_amax(x, 0, -1, [], "tp"), ops.fp8_amax(z, 1, -1, [], "tp")
        found = [cast(x, rows, 0), cast(z, columns, 1)]
        found += [
            cast(y, rows, 0, "e5m2"),
            cast(y, columns, 1, "e4m3"),
            cast(u, columns, 1, plain=True),
            cast(u, rows, 0),
        ]
        early = cast(z, rows * found[1][1].sum(), 0)
        return tuple(value for pair in (*found, early) for value in pair)

    inputs = [torch.randn(6, 8) for _ in range(4)]
    before, after = parts(function, *inputs)
    assert fp8_calls(after) == fp8_calls(before) == {"fp8_amax": 2, "fp8_quantize": 7}
    assert str(after.graph) == str(before.graph)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("t", [1, 3])
def test_a_model(t: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[str] = Counter()
    plain = under_test.change_parts

    def counted(program: Program, *changes: Any) -> int:
        count = plain(program, *changes)
        assert program.partition is not None
        for found in (program.partition.forward, program.partition.backward):
            if found is not None:
                made.update(fp8_calls(found))
        return count

    monkeypatch.setattr(under_test, "change_parts", counted)
    torch.manual_seed(0)
    model = Model()
    options: Any = {
        "fp8": "hybrid",
        "fp8_recipe": "rowwise",
        "first_last_layers_bf16": False,
        "hardware": "h100-nvlink",
    }
    x = torch.randn(2, 7, 16).double()
    if t == 1:
        parallel = megafx.parallelize(model.double(), Config(**options), example_inputs=(x,))
        parallel(x).backward()
        # dy of two linears of two layers and x of the first; left are weights, and x of the second (backward reads what
        # tanh has made, and casts it again), forward and backward
        assert made == {"fp8_amax_both": 6, "fp8_quantize_both": 6, "fp8_amax": 12, "fp8_quantize": 12}
        return
    config = Config(tensor_model_parallel_size=t, sequence_parallel=True, **options)
    verdict = megafx.verify(model.double(), config, example_inputs=(x,), tolerance=1e-10)
    assert verdict.reference == "megafx at t=1" and verdict, str(verdict)
    assert made["fp8_amax_both"] and made["fp8_quantize_both"]


def test_both_orientations_by_one_scale() -> None:
    """Of a weight whose casts are kept; not where one is read before the other is made."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        largest = ops.fp8_amax(x, -1, -1, [], "tp")
        plain, scale, _ = cast_by(x, largest, True)
        between = plain.sum() if y.shape[0] == 3 else y
        turned, again, _ = cast_by(x, largest, False)
        return plain, scale, between, turned, again

    def cast_by(x: Tensor, largest: Tensor, plain: bool) -> tuple[Tensor, Tensor, Tensor]:
        q, qt, scale = ops.fp8_quantize(x, largest, -1, "e4m3", False, plain, not plain)
        return (q if plain else qt), scale, largest

    x = torch.randn(6, 8)
    for rows, left in ((2, 1), (3, 2)):
        y = torch.randn(rows, 4)
        before, after = parts(function, x, y)
        assert fp8_calls(after) == {"fp8_amax": 1, "fp8_quantize": left}
        for a, b in zip(after(x, y), before(x, y), strict=True):
            assert torch.equal(a, b)
