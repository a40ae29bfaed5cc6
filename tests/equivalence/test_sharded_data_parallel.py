"""Parameters that data-parallel ranks hold shards of (ZeRO-1, FSDP, HSDP), in the simulator: results are those of one process,
bytes are those of the formula, and of gathered parameters no more is there at once than one layer's.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from functools import cache
from typing import Any

import pytest
import torch
from data_mesh import compile_on, inputs_on, run_on, seeded, storage
from harness import Case, errors
from lowered import parts_of
from torch import Tensor, fx, nn
from torch.nn import functional as F

from megafx.analysis.communication import is_region_gather, is_start
from megafx.capture.export import capture_call
from megafx.checks.simulate import Logical, simulate
from megafx.compiler.compiled import Compiled
from megafx.errors import PlacementError
from megafx.ir.program import VAL
from megafx.placements.data_axis import COPY_AXIS, REPLICA_AXIS, SHARD_AXIS, DataAxis
from megafx.placements.slices import shard_slices
from megafx.placements.tensors import cut_tensor, put_together
from megafx.placements.types import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, I, Layout, S, cut_further, payload

RTOL, ROWS = 1e-10, 12


@cache
def gpt2() -> Case:
    return Case.of("gpt2", dropout=0.2, layers=2)


FORMS = {"fsdp": DataAxis(3, "fsdp", 3, 6000), "zero1": DataAxis(2, "zero1", 2), "hsdp": DataAxis(4, "fsdp", 2)}


@pytest.mark.parametrize("t", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_shards_cover_a_parameter_once(t, ranks, dim):
    shape = (7, 19)
    full = torch.arange(1.0, 7 * 19 + 1).view(shape)
    blocks = [(shape[dim], 1)] if dim else [(2, 2), (3, 1)]
    for tensor in (I, S(dim, Layout.of(blocks, t))):
        cuts = cut_further(tensor, shape, t, ranks)
        assert len(cuts) == 1 + (tensor.is_shard and t > 1)
        locals_ = [cut_tensor(full, cuts, r) for r in range(t * ranks)]
        assert len({x.shape for x in locals_}) == 1
        assert torch.equal(put_together(locals_, cuts), full)
        seen = torch.zeros(shape)
        for rank, local in enumerate(locals_):
            kept = torch.zeros_like(local)
            for box in shard_slices(shape, cuts, rank):
                assert torch.equal(local[box.local], full[box.original])
                kept[box.local] = local[box.local]
                seen[box.original] += 1
            assert torch.equal(kept, local)  # what is in no box is zero
        assert bool((seen == 1).all())


@cache
def wanted() -> Logical:
    return gpt2().run(gpt2().compile(1), seeded(gpt2(), ROWS))


def worst(compiled: Compiled, data: DataAxis) -> float:
    found = run_on(gpt2(), compiled, data, seeded(gpt2(), ROWS))
    one = dataclasses.replace(wanted(), outputs={n: wanted().outputs[n] for n in found.outputs})
    assert one.outputs and one.gradients
    return max(errors(found, one).values())


@pytest.mark.parametrize(
    ("form", "t"),
    [
        ("fsdp", 2),
        pytest.param("zero1", 3, marks=pytest.mark.slow),
        ("hsdp", 1),
        pytest.param("hsdp", 2, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_compute_what_one_process_does(form, t):
    data = FORMS[form]
    compiled = compile_on(gpt2(), data, t, sequence_parallel=t > 1)
    assert worst(compiled, data) <= RTOL
    # what comes of the last sum of gradients, lost on the way
    axis = REPLICA_AXIS if form == "hsdp" else SHARD_AXIS
    start = [
        n for n in compiled.program.graph.nodes if is_start(n) and n.args[-1] == axis and "reduce" in str(n.target)
    ][-1]
    (wait,) = start.users
    users = list(wait.users)
    with compiled.program.graph.inserting_after(wait):
        lost = compiled.program.graph.call_function(torch.ops.aten.zeros_like.default, (wait,))
    for user in users:
        user.replace_input_with(wait, lost)
    compiled.program.gm.recompile()
    try:
        assert worst(compiled, data) > 1e-3
    except PlacementError as error:
        assert "differs between ranks" in str(error)


@pytest.mark.parametrize("t", [2, 1])
def test_a_step_sends_what_the_formula_says(t):
    """FSDP: a gather in forward, one in backward of what that needs, and a reduce-scatter, n (d - 1) / d bytes each."""
    data = DataAxis(4, "fsdp", 2)
    compiled = compile_on(gpt2(), data, t)
    sent = compiled.communication(data.mesh | {"dp": 4, COPY_AXIS: 2 * t})
    stored, program = storage(compiled, data, gpt2()), compiled.program
    nodes = dict(program.input_nodes())
    gathers = scatters = forward_only = head = 0
    for node, spec in nodes.items():
        if spec.kind == "param":
            n = 2 if len(stored[spec.name]) > 1 or t == 1 else 2 * t
            value = node.meta[VAL]
            once = payload(ALL_GATHER, value.numel() * n, n) * 8
            tied = spec.name == "transformer.wte.weight"  # gathered for the embedding, and for the head
            gathers += once * (1 + tied)
            head += (
                once if tied and t == 1 else 0
            )  # the fused head and loss of one rank make their gradients in forward
            looked_up = spec.name in ("transformer.wte.weight", "transformer.wpe.weight")
            added = spec.name.endswith("bias") and "c_fc" not in spec.name  # that one is inside of an activation
            forward_only += once if looked_up or added else 0
            scatters += value.numel() * 8  # half of the two ranks' rows

    def total(direction: str, collective: str) -> int:
        axes = (SHARD_AXIS, COPY_AXIS, REPLICA_AXIS)
        return sum(
            c.bytes_moved for c in sent if (c.direction, c.collective) == (direction, collective) and c.axis in axes
        )

    assert total("forward", ALL_GATHER) == gathers
    assert total("backward", ALL_GATHER) == gathers - forward_only - head
    assert total("backward", REDUCE_SCATTER) == scatters
    assert total("backward", ALL_REDUCE) == payload(ALL_REDUCE, scatters // 8, 2) * 8


def test_a_region_takes_one_collective_each_way():
    compiled = compile_on(gpt2(), DataAxis(2, "fsdp", 2, bucket_bytes=1), 1)
    sent = compiled.communication({SHARD_AXIS: 2, COPY_AXIS: 2})
    regions = ["before the layers", "transformer.h.0", "transformer.h.1", "after transformer.h.1"]

    def of(direction: str, collective: str) -> list[str]:
        return [c.fqn for c in sent if (c.direction, c.collective) == (direction, collective)]

    assert of("forward", ALL_GATHER) == regions
    assert of("backward", ALL_GATHER) == regions[2:0:-1]  # what one rank's fused head and loss need is done
    assert len(of("backward", REDUCE_SCATTER)) == 4  # final norm; each layer; embeddings, of which one is the head


class Gathered:
    """Watches a simulated run: bytes of gathered parameters that rank 0 has at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.regions: dict[str, int] = {}

    def __call__(self, node: fx.Node, values: list[Any]) -> None:
        if is_region_gather(node):
            size, name = values[0].numel() * values[0].element_size(), node.meta["fqn"]
            self.regions[name] = self.regions.get(name, 0) + size
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(values[0].untyped_storage(), self.freed, size)  # views of it count as it does

    def freed(self, size: int) -> None:
        self.now -= size


def run_halves(case: Case, compiled: Compiled, data: DataAxis, *watches: Gathered) -> tuple[list[Any], list[Any]]:
    """What each rank's backward graph gives, and what the joint graph gives. watches: of forward, of backward."""
    parts, mesh = parts_of(compiled.program), {**data.mesh, "tp": compiled.plan.t}
    per_rank = inputs_on(case, compiled, data, seeded(case, 4))
    count = len(parts.forward.graph.find_nodes(op="placeholder"))
    forward, backward = watches or (None, None)
    made = simulate(parts.forward, [mine[:count] for mine in per_rank], mesh=mesh, watch=forward)
    outputs = sum(o.kind != "gradient" for o in compiled.program.outputs)
    given = []
    for mine, results in zip(per_rank, made, strict=True):
        values = iter(results[outputs:])
        given.append([mine[s.index] if s.kind == "input" else next(values) for s in parts.saved] + mine[count:])
    del made
    assert parts.backward is not None
    found = simulate(parts.backward, given, mesh=mesh, watch=backward)
    return found, [r[outputs:] for r in simulate(compiled.program, per_rank, mesh=mesh)]


def assert_halves_agree(found: list[Any], wanted: list[Any]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert len(mine) == len(theirs) > 0
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("t", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_of_gathered_parameters_there_are_a_region_and_the_next_one(t):
    case, data, watches = Case.of("gpt2", dropout=0.2, layers=3), DataAxis(2, "fsdp", 2), (Gathered(), Gathered())
    assert_halves_agree(*run_halves(case, compile_on(case, data, t), data, *watches))
    for run in watches:
        sizes = [*run.regions.values()]
        assert all(f"transformer.h.{i}" in run.regions for i in range(3)) and run.now == 0
        assert max(sizes) < run.most <= max(a + b for a, b in itertools.pairwise(sizes)) < sum(sizes)


class Gated(nn.Module):
    """Two layers of queries, keys and values of one value, and a gated unit."""

    def __init__(self, h: int, ffn: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(67, h), nn.Linear(h, 67, bias=False)
        self.h = nn.ModuleList()
        for _ in range(2):
            layer = nn.Module()
            layer.attn, layer.mlp, layer.norm = nn.Module(), nn.Module(), nn.LayerNorm(h)
            layer.attn.q, layer.attn.k, layer.attn.v, layer.attn.o = (nn.Linear(h, h, bias=False) for _ in range(4))
            layer.mlp.gate, layer.mlp.up = (nn.Linear(h, ffn, bias=False) for _ in range(2))
            layer.mlp.down = nn.Linear(ffn, h)
            self.h.append(layer)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        b, s, h = x.shape
        for layer in self.h:
            y = layer.norm(x)
            q, k, v = (p(y).view(b, s, 4, -1).transpose(1, 2) for p in (layer.attn.q, layer.attn.k, layer.attn.v))
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h)
            x = x + layer.attn.o(a)
            x = x + layer.mlp.down(F.silu(layer.mlp.gate(x)) * layer.mlp.up(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def gated(h: int, ffn: int) -> Case:
    torch.manual_seed(0)

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        ids, labels = torch.randint(0, 67, (2, batch, seq), generator=torch.Generator().manual_seed(1))
        return {"ids": ids, "labels": labels}

    model = Gated(h, ffn).double()
    return Case(model, inputs, capture_call(model, (), inputs(2, 16)))


@pytest.mark.slow
@pytest.mark.parametrize(("form", "t"), [("fsdp", 2), ("zero1", 1), pytest.param("fsdp", 1, marks=pytest.mark.slow)])
def test_linears_whose_parameters_are_gathered_side_by_side_are_merged(form, t):
    case, data = gated(32, 64), DataAxis(2, form, 2)
    inputs = seeded(case, 4, 8)
    compiled = compile_on(case, data, t, fusion_profile="all")
    merged = [f.fqn for f in compiled.program.fusions if f.stage == "merge_linears"]
    assert sorted(merged) == ["h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp"]
    for part in (compiled.program.gm, parts_of(compiled.program).backward):  # nothing is copied together
        assert part is not None and not any("join_parameters" in str(n.target) for n in part.graph.nodes)
    alone = case.run(case.compile(1), inputs)
    found = run_on(case, compiled, data, inputs)
    one = dataclasses.replace(alone, outputs={n: alone.outputs[n] for n in found.outputs})
    assert one.outputs and max(errors(found, one).values()) <= RTOL
    if form == "fsdp":
        assert_halves_agree(*run_halves(case, compiled, data))


def test_linears_with_gaps_between_their_parameters_are_not_merged():
    compiled = compile_on(gated(24, 50), DataAxis(2, "fsdp", 2), 1, fusion_profile="all")
    assert not any(f.stage == "merge_linears" for f in compiled.program.fusions)
    told = [n.message for n in compiled.program.notes if n.topic == "merge"]
    assert any("not gathered side by side" in text for text in told), told
