"""Covers: passes/lower/overlap_products.py, on all ranks in one process."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megafx
from megafx.distributed import exchange
from megafx.errors import PlacementError
from megafx.passes.lower import overlap_products


class Block(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.up, self.down = nn.Linear(width, 2 * width, bias=bias), nn.Linear(2 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), self.dropout, self.training)


class Net(nn.Module):
    def __init__(self, bias: bool = True, dropout: float = 0.1, blocks: int = 2) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(40, 24), nn.Embedding(16, 24)
        self.blocks = nn.ModuleList(Block(24, 6, bias, dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 40, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


def config(t: int, sp: bool = True, **options: object) -> megafx.Config:
    return megafx.Config(tensor_model_parallel_size=t, sequence_parallel=sp, tp_comm_overlap=True, **options)


@pytest.fixture
def calls(monkeypatch) -> Counter:
    """How many calls of each kind the pass writes for rank 0."""
    found: Counter = Counter()
    run = overlap_products._Overlap.run

    def counted(self):
        gm, changes = run(self)
        if self.end[1] == 0:
            found.update(
                n.target.__name__ for n in gm.graph.nodes if getattr(n.target, "__module__", "") == exchange.__name__
            )
        return gm, changes

    monkeypatch.setattr(overlap_products._Overlap, "run", counted)
    return found


def verify(t: int, batch: int, seq: int, sp: bool = True, **options: object):
    torch.manual_seed(0)
    own = {k: options.pop(k) for k in ("bias", "dropout", "blocks") if k in options}
    return megafx.verify(
        Net(**own).double(), config(t, sp, **options), example_inputs=(torch.randint(0, 40, (batch, seq)),)
    )


def is_wrong() -> bool:
    """Whether numbers differ, between ranks or from eager's."""
    try:
        return not verify(2, 2, 8, blocks=2)
    except PlacementError as error:
        return "differs between ranks" in str(error)


SLOW = pytest.mark.slow
REDUCE, WAIT = (getattr(torch.ops._c10d_functional, name).default for name in ("all_reduce", "wait_tensor"))
CASTS = {torch.ops.megafx.fp8_quantize.default, torch.ops.megafx.fp8_transposed.default}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("t", "batch", "seq", "bias"),
    [
        (2, 2, 8, True),
        (3, 3, 5, True),
        pytest.param(2, 1, 7, False, marks=SLOW),
        pytest.param(4, 2, 9, False, marks=SLOW),
    ],
)
def test_overlapped_graphs_are_exact(t, batch, seq, bias):
    verdict = verify(t, batch, seq, bias=bias)
    assert verdict, verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    ("t", "batch", "seq", "bias"), [(2, 2, 8, True), (3, 2, 5, False), pytest.param(4, 3, 7, True, marks=SLOW)]
)
def test_all_reduces_are_exact(t, batch, seq, bias, calls):
    """Without sequence parallelism; rows that the ranks do not divide."""
    verdict = verify(t, batch, seq, sp=False, bias=bias)
    assert verdict, verdict
    assert calls["regather_start"] >= 8 and calls["matmul_scatter_start"] >= 6


def test_all_reduces_that_the_library_is_faster_at_stay(monkeypatch):
    """By the cost model: small ones. On request all go in pieces."""
    found: list[tuple[bool, ...]] = []
    pays = overlap_products._Finder._pays

    def asked(self, node, elements, itemsize):
        wanted, self.always = self.always, False
        found.append(tuple(pays(self, node, n, 2) for n in (2**16, 2**20, 2**26)))
        self.always = wanted
        return pays(self, node, elements, itemsize)

    monkeypatch.setattr(overlap_products._Finder, "_pays", asked)
    assert verify(2, 2, 8, sp=False, blocks=1, hardware="h200-nvlink")
    assert {*found} == {(False, False, True)}


def test_what_overlaps(calls):
    """Gathers of forward have their products; so have scatters, but that of the embedding. Gathers of backward run beside
    gradients of weights. All but the last write what they gather into the slot: that one gathers a loss's gradient."""
    assert verify(2, 2, 8, bias=False, dropout=0.0)
    fused = {"gather_matmul": 5, "matmul_scatter_start": 8}
    assert dict(calls) == {
        **fused,
        "gather_start": 5,
        "gather_wait": 5,
        "scatter_start": 1,
        "scatter_wait": 9,
        "rows_of_next": 9,
        "begin": 2,
    }


@pytest.mark.parametrize(("t", "seq", "recipe"), [(2, 8, "tensorwise"), (3, 5, "rowwise")])
def test_products_of_fp8_overlap_alike(t, seq, recipe, calls, monkeypatch):
    """Those of forward run in pieces, all but the head, and in backward a gradient of a weight follows each start of a
    reduce-scatter. Numbers are those of one rank."""
    fp8 = {"fp8": "hybrid", "fp8_recipe": recipe, "first_last_layers_bf16": False, "hardware": "h100-nvlink"}
    orders, run = [], overlap_products._Overlap.run

    def kept(self):
        gm, changes = run(self)
        orders.append([(n.target, n.args) for n in gm.graph.nodes])
        return gm, changes

    monkeypatch.setattr(overlap_products._Overlap, "run", kept)
    verdict = verify(t, 2, seq, bias=False, dropout=0.0, **fp8)
    assert verdict and verdict.reference == "megafx at t=1", verdict
    fused = {"tensorwise": 4, "rowwise": 4 + 4}[recipe]  # with few bytes also of backward
    assert (calls["gather_matmul"], calls["matmul_scatter_start"]) == (fused, 8), calls
    for order in orders[:2]:  # while a largest magnitude is reduced, a weight is cast
        targets = [target for target, _ in order]
        largest = [i for i, (target, args) in enumerate(order) if target is REDUCE and args[1] == "max"]
        alone = [i for i in largest if not CASTS & {*targets[i : targets.index(WAIT, i)]}]
        assert len(largest) >= 8 and (recipe == "rowwise" or len(alone) <= len(largest) // 4), alone
    backward = [target for target, _ in orders[1]]
    for start in [i for i, target in enumerate(backward) if target is exchange.matmul_scatter_start]:
        meanwhile = backward[start : backward.index(exchange.scatter_wait, start)]
        assert torch.ops.megafx.scaled_mm.default in meanwhile


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fp8", [{}, {"fp8": "hybrid", "first_last_layers_bf16": False}])
def test_ranks_in_one_process_on_a_gpu(fp8):
    """The memory of an exchange is where the values are."""
    torch.manual_seed(0)
    ids, options = torch.randint(0, 40, (2, 8), device="cuda"), {"tolerance": 1e-4}
    assert megafx.verify(Net(dropout=0.0, blocks=1).cuda(), config(2, **fp8), example_inputs=(ids,), **options)


@pytest.mark.slow
def test_a_sum_that_leaves_out_a_rank_shows(monkeypatch):
    whole = exchange.scatter_wait
    monkeypatch.setattr(exchange, "scatter_wait", lambda pending, *end: whole(pending, *end) - pending.parts[-1])
    assert not verify(2, 2, 8, blocks=1)


@pytest.mark.slow
def test_memory_that_others_write_shows(monkeypatch):
    """Were what is gathered always left in the slot, backward would read what came there later."""
    gather = exchange.Exchange.gather
    monkeypatch.setattr(exchange.Exchange, "gather", lambda self, x, own: gather(self, x, False))
    assert is_wrong()


@pytest.mark.slow
def test_rows_that_are_written_over_too_early_show(monkeypatch):
    """What is made in a slot may be read until the third operation from it begins."""
    slots = exchange.Exchange._slots

    def one(self, shape, dtype):
        with monkeypatch.context() as m:
            m.setattr(exchange, "SLOTS", 1)
            return slots(self, shape, dtype)

    monkeypatch.setattr(exchange.Exchange, "_slots", one)
    assert is_wrong()
