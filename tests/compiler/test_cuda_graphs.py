"""Covers: compiler/cuda_graphs.py: whose memory is whose. On a CPU a recording is a function that runs again on the memory of
its first run, as a CUDA graph does; `test_on_a_gpu` has real ones."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import megafx
from megafx.compiler import cuda_graphs
from megafx.compiler.compiled import Compiled


class Graph:
    """What a recorded graph does: the same work, on the memory of the recording, which it holds."""

    def __init__(self, run, inputs, results) -> None:
        self.run, self.inputs, self.results = run, [*inputs], results

    def pool(self) -> None:
        return None

    def reset(self) -> None:
        self.run = None

    def replay(self) -> None:
        for target, value in zip(self.results, self.run(self.inputs), strict=True):
            if isinstance(target, Tensor):
                target.copy_(value)


@pytest.fixture
def replays(monkeypatch) -> list[str]:
    """Models with Config(cuda_graphs=True) are recorded without a GPU. Fills with 'replay' for each replay, and with notes."""
    found: list[str] = []

    def record(self, run, inputs, pool):
        trial = run([x.clone() if isinstance(x, Tensor) else x for x in inputs])  # a recording computes nothing
        results = [x.clone() if isinstance(x, Tensor) else x for x in trial]
        return Graph(run, inputs, results), results

    def replayed(self, arguments, copied):
        found.append("replay")
        replay(self, arguments, copied)

    def executable(self, *args):
        made = make(self, *args)
        return made.recorded(True, found.append) if self.context.config.cuda_graphs else made

    replay, make = cuda_graphs._Recorded.replay, Compiled.executable
    monkeypatch.setattr(cuda_graphs.CudaGraphs, "_graph", record)
    monkeypatch.setattr(cuda_graphs.CudaGraphs, "_timed", lambda self, here, inputs: list(self._forward(*inputs)))
    monkeypatch.setattr(cuda_graphs._Recorded, "replay", replayed)
    monkeypatch.setattr(Compiled, "executable", executable)
    return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(20, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        x = x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits


def pair(**options: object) -> tuple[nn.Module, nn.Module]:
    """(a model whose calls are recorded, the same without)"""
    torch.manual_seed(0)
    model = Net().double()
    models = [copy.deepcopy(model) for _ in range(2)]
    configs = [megafx.Config(tensor_model_parallel_size=1, cuda_graphs=graphs, **options) for graphs in (True, False)]
    return tuple(megafx.parallelize(m, c) for m, c in zip(models, configs, strict=True))  # type: ignore[return-value]


def batches(count: int, shape: tuple[int, int] = (3, 5)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 20, shape, generator=generator) for _ in range(count)]


def train(
    model: nn.Module, ids: list[Tensor], *, together: int = 1, every: int = 1, in_place: bool = False
) -> list[Tensor]:
    """Losses and weights of SGD. together: forwards before their backwards; every: calls that share a step; in_place:
    gradients are set to zero, after forward, and not given back."""
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    found = []
    torch.manual_seed(3)
    for i in range(0, len(ids), together):
        if i % every == 0 and not in_place:
            optimizer.zero_grad()
        made = [model(x)[0] for x in ids[i : i + together]]
        if i % every == 0 and in_place:
            optimizer.zero_grad(set_to_none=False)
        for loss in made:
            loss.backward()
        found += [loss.detach() for loss in made]
        if (i + together) % every == 0:
            optimizer.step()
    return [*found, *(p.detach().clone() for p in model.parameters())]


def equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("loop", [{}, {"every": 3}, {"together": 2, "every": 2}, {"in_place": True}])
def test_replayed_steps_are_bit_equal(replays, loop):
    recorded, ordinary = pair()
    ids = batches(12)
    assert equal(train(recorded, ids, **loop), train(ordinary, ids, **loop))
    assert replays.count("replay") >= 5


def test_every_set_of_sizes_has_its_own(replays):
    recorded, ordinary = pair()
    ids = [x for pair_ in zip(batches(5), batches(5, (2, 7)), strict=True) for x in pair_]
    assert equal(train(recorded, ids), train(ordinary, ids))
    assert replays.count("replay") == 12  # forward and backward of three calls of each


def test_logits_are_those_of_their_call(replays):
    """Lazy ones are computed when they are read, perhaps after the next call."""
    recorded, ordinary = pair()
    found: list[list[Tensor]] = []
    for model in (recorded, ordinary):
        torch.manual_seed(3)
        outputs = [model(x) for x in batches(6)]
        found.append([torch.as_tensor(logits).detach().clone() for _, logits in outputs])
    assert equal(*found)
    assert "replay" in replays


def test_backward_twice_and_evaluation_between(replays):
    recorded, ordinary = pair()
    found: list[list[Tensor]] = []
    for model in (recorded, ordinary):
        torch.manual_seed(3)
        seen: list[Tensor] = []
        for x in batches(5):
            loss = model(x)[0]
            loss.backward(retain_graph=True)
            model.eval()
            with torch.no_grad():
                seen.append(model(x)[0])
            model.train()
            loss.backward()
            seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append(seen)
    assert equal(*found)


def test_parameters_that_moved_are_read_where_they_are(replays):
    recorded, ordinary = pair()
    ids = batches(4)
    assert equal(train(recorded, ids), train(ordinary, ids))
    for model in (recorded, ordinary):
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.5
    assert equal(train(recorded, ids), train(ordinary, ids))


def test_values_that_a_replay_overwrites_show(replays, monkeypatch):
    """The tests above see it when a forward does not look whether the values of the one before are still held."""
    monkeypatch.setattr(cuda_graphs._Sizes, "is_held", lambda self: False)
    recorded, ordinary = pair()
    ids = batches(12)
    assert not equal(train(recorded, ids, together=2, every=2), train(ordinary, ids, together=2, every=2))


def test_a_process_group_that_ends_has_no_graphs_any_more(replays, tmp_path):
    """NCCL waits for the last graph that holds one of its collectives: `destroy_process_group` did not return."""
    recorded, ordinary = pair()
    ids = batches(4)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert equal(train(recorded, ids), train(ordinary, ids))
        before = [graphs for graphs in cuda_graphs._all if graphs.sizes]
        assert before
    finally:
        dist.destroy_process_group()
    assert not any(graphs.sizes for graphs in before)
    seen = replays.count("replay")
    assert equal(train(recorded, ids), train(ordinary, ids)) and replays.count("replay") > seen


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a CUDA device")
@pytest.mark.parametrize("wanted", [True, "auto"])
def test_without_a_gpu_the_report_says_that_nothing_is_recorded(wanted):
    model = megafx.parallelize(Net().double(), megafx.Config(tensor_model_parallel_size=1, cuda_graphs=wanted))
    train(model, batches(4))
    assert any("calls run op by op: there is no CUDA device" in note for note in megafx.explain(model).notes)


@pytest.mark.parametrize(("host", "recorded"), [(0.9, True), (0.7, False)])
def test_auto_records_where_launching_takes_about_as_long_as_running(monkeypatch, host, recorded):
    """In units of the time of the GPU."""
    told = []

    class Event:
        synchronize = lambda self: None
        elapsed_time = lambda self, other: 1000.0

    def timed(self, here, inputs):
        here.host, here.events = host, (Event(), Event())
        return list(self._forward(*inputs))

    monkeypatch.setattr(cuda_graphs.CudaGraphs, "_timed", timed)
    monkeypatch.setattr(
        cuda_graphs.CudaGraphs, "_graph", lambda self, run, given, pool: (Graph(run, given, made := run(given)), made)
    )
    graphs = cuda_graphs.CudaGraphs(lambda x: [x + 1], None, 1, (), False, told.append)
    found = [graphs.forward(torch.tensor(float(i)))[0].item() for i in range(5)]
    assert found == [1.0, 2.0, 3.0, 4.0, 5.0]
    (note,) = told
    assert (next(iter(graphs.sizes.values())).forward is not None) is recorded
    assert f"the host is {'' if recorded else 'not '}the limit (it launches forward in {host * 1e3:.1f} ms" in note


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("loop", [{}, {"every": 3}, {"together": 2, "every": 2}, {"in_place": True}])
def test_on_a_gpu(loop, monkeypatch):
    replay, count, sizes = cuda_graphs._Recorded.replay, [], []
    monkeypatch.setattr(cuda_graphs._Recorded, "replay", lambda self, *a: (count.append(1), replay(self, *a))[1])
    monkeypatch.setattr(cuda_graphs, "_Sizes", lambda made=cuda_graphs._Sizes: sizes.append(made()) or sizes[-1])
    recorded, ordinary = (model.float().cuda() for model in pair())  # ops of the library's fp64 forms wait for the GPU
    ids = [x.cuda() for x in batches(12)]
    assert equal(train(recorded, ids, **loop), train(ordinary, ids, **loop))
    assert len(count) >= 5, [(s.calls, s.refused, s.waits, s.missed, s.is_held()) for s in sizes]
