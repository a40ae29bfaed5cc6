"""Covers: weights/constructor_log.py, initialize.py, index_random.py. Constructors replayed on meta models: eager's values."""

from __future__ import annotations

import pytest
import torch
import zoo
from torch import nn
from weight_models import FACTORIES, Odd, on_meta, parts_of, tensors

import megafx
from megafx.errors import UsageError
from megafx.placements.slices import ShardSlice
from megafx.placements.tensors import shard_tensor
from megafx.placements.types import I, Layout, S
from megafx.weights.constructor_log import record, replay
from megafx.weights.index_random import IndexRandom, rows_of
from megafx.weights.initialize import fill, initialize, recorded


@pytest.mark.parametrize("name", sorted(FACTORIES))
def test_values_and_generator_are_eagers(name: str) -> None:
    make = FACTORIES[name]
    torch.manual_seed(11)
    wanted = make()
    after = torch.get_rng_state()
    model = on_meta(make)
    parameters = list(model.parameters())
    torch.manual_seed(11)
    own = name in ("bert", "gpt2", "llama", "t5", "neox", "mixtral")
    assert initialize(model, None if own else make) is model
    assert torch.equal(torch.get_rng_state(), after)
    found, expected = tensors(model), tensors(wanted)
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
        assert found[key].requires_grad == value.requires_grad
    if "odd" not in name:  # which has an LSTM
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))  # optimizers stay valid
    ties = {n: [m for m in expected if expected[m] is expected[n]] for n in expected}
    assert ties == {n: [m for m in found if found[m] is found[n]] for n in found}


PLANNED = [("gpt2", 3), ("llama", 3), ("neox", 2)]
MORE = [
    ("gpt2", 2),
    ("gpt2", 4),
    ("llama", 2),
    ("llama", 5),
    ("t5", 2),
    ("t5", 3),
    ("neox", 4),
    ("nanogpt", 2),
    ("nanogpt", 5),
]


@pytest.mark.parametrize("name, t", [*PLANNED, *[pytest.param(*case, marks=pytest.mark.slow) for case in MORE]])
def test_every_rank_gets_slices_of_eagers_values(name: str, t: int) -> None:
    make = FACTORIES[name]
    torch.manual_seed(2)
    wanted = tensors(make())
    model = on_meta(make)
    inputs = {} if name not in zoo.ZOO else {"example_inputs": zoo.ZOO[name]()[1](2, 16)}
    planned = megafx.plan(model, megafx.Config(tensor_model_parallel_size=t, hardware="h100-nvlink"), **inputs).params
    assert sum(p.is_shard for p in planned.values()) > 5
    for rank in range(t):
        parts = parts_of(model, planned, rank, t)
        torch.manual_seed(2)
        fill(recorded(model, make), parts)
        for part in parts:
            placement = next((planned[n] for n in part.names if n in planned), I)
            assert torch.equal(part.local, shard_tensor(wanted[part.name].detach(), placement, rank, t)), part.name


def test_one_tensor_is_held_at_a_time() -> None:
    def make() -> nn.Module:
        net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)])
        return net.apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)

    log = record(make)
    held: list[int] = []
    most = replay(log, {r.storage for r in log.refs.values()}, lambda number, memory: held.append(number))
    assert len(held) == 40 and most <= 64 * 64 * 4 + 64 * 4


@pytest.mark.parametrize("t", [1, 2, 3, 7])
def test_draws_by_index_are_the_same_at_any_degree(t: int) -> None:
    whole = initialize(on_meta(Odd), Odd, seed=5)
    other = initialize(on_meta(Odd), Odd, seed=6)
    assert not torch.equal(whole.recurrent.weight_hh_l0, other.recurrent.weight_hh_l0)
    cuts = {
        "table.weight": S(0, Layout.of([(19, 1)], t)),
        "recurrent.weight_hh_l0": S(1, Layout.of([(3, 1)], t, rep=2)),
        "recurrent.weight_ih_l0": S(0, Layout.of([(3, 2)], t, rep=4)),
        "inner.weight": S(1, Layout.of([(6, 1)], t)),
        "free": S(1, Layout.of([(6, 1)], t)),
        "column": S(0, Layout.of([(4, 1)], t)),
    }
    before = torch.get_rng_state()
    for rank in range(t):
        model = on_meta(Odd)
        parts = parts_of(model, cuts, rank, t)
        fill(recorded(model, Odd, seed=5), parts, seed=5)
        for part in parts:
            placement = cuts.get(part.name, I)
            wanted = shard_tensor(tensors(whole)[part.name].detach(), placement, rank, t)
            assert torch.equal(part.local, wanted), part.name
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_by_index_have_the_distribution_that_was_asked_for() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.normal = nn.Parameter(torch.empty(300, 501).normal_(1.0, 0.5))
            self.uniform = nn.Parameter(torch.empty(300, 501).uniform_(-2.0, 3.0))

    import numpy as np
    from scipy import stats

    model = initialize(on_meta(Wide), Wide, seed=1)
    normal, uniform = (p.detach().flatten().double().numpy() for p in model.parameters())
    assert stats.kstest(normal, "norm", (1.0, 0.5)).pvalue > 1e-3
    assert stats.kstest(uniform, "uniform", (-2.0, 5.0)).pvalue > 1e-3
    assert abs(np.corrcoef(normal[:-1], normal[1:])[0, 1]) < 0.01


@pytest.mark.parametrize("at", [0, 2**34 - 8, 2**36 + 4])
def test_draws_by_index_do_not_depend_on_where_a_run_starts(at: int) -> None:
    log = record(
        lambda: nn.ParameterList([torch.empty(2, 2, dtype=torch.float64).normal_(), torch.empty(3).uniform_()])
    )
    for step, dtype in zip(
        [s for s in log.steps if s.generator is not None], (torch.float64, torch.float32), strict=True
    ):
        draw = lambda start, n, s=step, d=dtype: IndexRandom(3)._draw(torch.tensor([start]), n, s, 0.0, 1.0, d)
        whole = draw(at, 16)
        assert whole.unique().numel() == 16
        for skip, n in ((0, 5), (1, 9), (3, 13), (8, 8), (11, 1)):
            assert torch.equal(draw(at + skip, n), whole[:, skip : skip + n])


def test_rows_of_a_box() -> None:
    for offsets, sizes in (((0, 0), (3, 4)), ((1, 0), (2, 4)), ((0, 1), (3, 2)), ((2, 3), (1, 1))):
        flat = torch.arange(12).view(3, 4)
        starts, run = rows_of(ShardSlice(offsets, offsets, sizes), (3, 4))
        found = [s + i for s in starts for i in range(run)]
        assert found == flat[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))].flatten().tolist()
    assert rows_of(ShardSlice((), (), ()), ()) == ([0], 1)


class Seeding(nn.Module):
    """Seeds generators in between, and makes what it draws depend on what it drew."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.rand(7))
        self.layers = nn.ParameterList()
        for i in range(3):
            generator.manual_seed(i)
            self.layers.append(nn.Parameter(torch.empty(4, 3).normal_(generator=generator)))
        self.scale = self.first.max().item()
        while torch.rand(()).item() < 0.7:
            self.first.data.add_(1)
        self.rest = nn.Parameter(torch.randn(3) * self.scale + torch.randperm(3))
        torch.manual_seed(7)
        self.seeded = nn.Parameter(torch.randn(2))
        torch.manual_seed(8)


def test_constructors_may_seed_and_look_at_what_they_drew() -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        wanted = Seeding(torch.Generator())
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        model = Seeding(torch.Generator())
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        torch.manual_seed(seed)
        initialize(model, lambda: Seeding(torch.Generator()))
        for name, p in wanted.named_parameters():
            assert torch.equal(p, model.get_parameter(name)), name
        assert torch.equal(torch.get_rng_state(), after)


class Refused(nn.Module):
    def __init__(self, what: str, outside: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        if what == "selects":
            self.extra = nn.Parameter(self.weight[self.weight > 0])
        if what == "bare":
            self.extra = nn.Parameter(torch.empty(3))
        if outside is not None:
            outside.add_(1)


@pytest.mark.parametrize(
    "what, text",
    [
        ("selects", "makes something of the values of a tensor"),
        ("bare", "'extra' is written by no initialiser"),
        ("outside", r"writes a tensor that was there before(.|\n)*outside.add_\(1\)"),
    ],
)
def test_what_cannot_be_replayed_is_refused(what: str, text: str) -> None:
    model = on_meta(lambda: Refused("bare" if what == "bare" else ""))
    outside = torch.zeros(2) if what == "outside" else None
    state = torch.get_rng_state()
    with pytest.raises(UsageError, match=text):
        initialize(model, lambda: Refused(what, outside))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.is_meta for p in model.parameters()) and (outside is None or not outside.any())


def test_a_factory_of_another_model_is_refused_with_all_that_differs() -> None:
    model = on_meta(lambda: nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 3)}))
    with pytest.raises(UsageError, match=r"'a.weight' is \(5, 3\)(.|\n)*'b.weight' is not in") as error:
        initialize(model, lambda: nn.ModuleDict({"a": nn.Linear(3, 5)}))
    assert "'b.bias' is not in" in str(error.value)
    with pytest.raises(UsageError, match="how a ModuleDict is built is not known"):
        initialize(model)


def test_arrays_of_other_libraries_are_taken_as_they_are() -> None:
    import numpy as np

    def make() -> nn.Module:
        net = nn.Linear(4, 3)
        net.extra = nn.Parameter(torch.from_numpy(np.arange(3.0)))
        net.scaled = nn.Parameter(torch.from_numpy(np.arange(4.0)) * 2)
        return net

    model = make()
    with torch.no_grad():
        model.extra.zero_(), model.scaled.zero_()
    initialize(model, make)
    assert model.extra.tolist() == [0, 1, 2] and model.scaled.tolist() == [0, 2, 4, 6]
