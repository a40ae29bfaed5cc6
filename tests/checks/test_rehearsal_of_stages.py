"""Covers: megafx/rehearsal_of_stages.py, megafx.rehearse of pipelines: faults of one stage, memory of schedules, the step."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import megafx
from megafx.compiler.cut_stages import StageGraph
from megafx.errors import ConfigError, PlacementError
from megafx.example_call import ExampleCall
from megafx.ir.program import VAL, Program
from megafx.rehearsal import Rehearsal
from megafx.rehearsal_of_stages import proposed, rehearse_stages

ROWS, LENGTH, WIDTH = 8, 6, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied, and its last stage reads what the first one makes: two values cross each cut."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(64, WIDTH), nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first = x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x + first).flatten(0, 1), labels.flatten())


def rehearsed(
    world: int,
    stages: int | Sequence[str],
    microbatches: int = 4,
    schedule: str = "1F1B",
    layers: int = 4,
    edit: Any = None,
    change: Any = None,
    rows: int = ROWS,
    **fields: Any,
) -> Rehearsal:
    overrides = {"*.up": "column", "*.down": "row"} if fields.get("tensor_model_parallel_size") else {}
    config = megafx.Config(hardware="h100-nvlink", overrides=overrides, **fields)
    config, asked, world = proposed(config, world, stages, microbatches, schedule)
    with torch.device("meta"):
        model, ids = Net(layers), torch.zeros(rows, LENGTH, dtype=torch.long)
    return rehearse_stages(ExampleCall.of(model, config, (ids, ids), None, runs=False), asked, world, edit, change)


def test_of_a_pipeline() -> None:
    found = rehearsed(12, 3, tensor_model_parallel_size=2, data_parallel="zero1")
    assert found and dict(found.mesh) == {"pp": 3, "dp_replicate": 1, "dp_shard": 2, "tp": 2}
    assert sum(c.ranks for c in found.classes) == 12 and {c.name[:4] for c in found.classes} == {"pp 0", "pp 1", "pp 2"}
    assert {c.name[3]: c.alive for c in found.classes} == {"0": 3, "1": 2, "2": 1}
    assert found.groups["pp"] == (
        4,
        3,
        2 * 4 * 4,
    )  # of the middle rank: two values there, two gradients back, both ways
    assert found.groups["tp"][:2] == (6, 2) and found.groups["dp_shard"][:2] == (6, 2)
    assert found.parts_us["idle pipeline ranks"] > 0 and found.parts_us["messages between stages"] > 0
    text = str(found)
    assert text.startswith("12 ranks: pp 3 x dp_shard 2 x tp 2\n") and "both ends of each message" in text
    assert "not shown: sums of parameters that several stages hold" in text


def test_of_stages_that_context_parallel_ranks_share() -> None:
    """Types of both axes are checked in each stage, whose inputs are a rank's own tokens."""
    with megafx.debug(check=1):
        found = rehearsed(
            16, 2, 2, layers=2, context_parallel_size=2, tensor_model_parallel_size=2, data_parallel_size=2
        )
    assert dict(found.mesh) == {"pp": 2, "dp": 2, "cp": 2, "tp": 2} and found.groups["cp"][:2] == (8, 2)
    assert found.groups["dp_cp"][:2] == (4, 4), "gradients are summed over the ranks of a sequence too"
    with pytest.raises(
        ConfigError, match="12 ranks are no pipeline of .*, context_parallel_size=2 and data_parallel_size=4"
    ):
        rehearsed(12, 2, 2, layers=2, context_parallel_size=2, data_parallel_size=4)


@pytest.mark.slow
def test_gradients_are_reduced_after_the_last_micro_batch() -> None:
    two, four = (rehearsed(4, 2, m, data_parallel_size=2).groups["dp"][2] for m in (2, 4))
    sharded = [rehearsed(4, 2, m, data_parallel_size=2, data_parallel="zero1") for m in (2, 4)]
    reduced = [sum(n for axis, (*_, n) in found.groups.items() if axis.startswith("dp_shard")) for found in sharded]
    assert reduced[0] == reduced[1] > 0  # once, however many micro-batches
    assert 0 < two <= four


def of_stage(number: int, alter: Callable[[StageGraph], StageGraph]) -> Any:
    return lambda k, graph: alter(graph) if k == number else graph


def test_a_send_that_one_stage_leaves_out() -> None:
    less = of_stage(1, lambda graph: dataclasses.replace(graph, sends=graph.sends[:-1]))
    with pytest.raises(
        PlacementError, match=r"ends of message \d+ differ: rank 1 \(pp 1\) sends .*, rank 2 \(pp 2\) rec"
    ):
        rehearsed(3, 3, change=less)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_two_sends_that_one_stage_swaps(schedule: str) -> None:
    """Both have one shape and dtype: numbers would be wrong, without an error."""
    stages, ranks = (4, 2) if schedule.startswith("I") else (3, 3)
    other = of_stage(1, lambda graph: dataclasses.replace(graph, sends=graph.sends[::-1]))
    with pytest.raises(PlacementError, match=r"two ends of message \d+ differ"):
        rehearsed(ranks, stages, schedule=schedule, change=other, data_parallel_size=1)


def in_graph(number: int, change: Callable[[fx.Graph], None], direction: str, rank: int | None = None) -> Any:
    """An edit of what ranks of one stage run; of one of them alone."""

    def edit(program: Program, places: Any) -> None:
        if places["pp"].rank == number and rank in (None, places["tp"].rank):
            change(getattr(program.partition, direction).graph)

    return edit


def other_dtype(graph: fx.Graph) -> None:
    results: Any = graph.output_node().args[0]
    for node in results:
        value = node.meta[VAL] if isinstance(node, fx.Node) else None
        if isinstance(value, torch.Tensor) and value.dim() == 3:
            node.meta[VAL] = value.to(torch.bfloat16)


@pytest.mark.parametrize("direction", ["forward", "last_backward"])
def test_a_stage_that_gives_another_dtype(direction: str) -> None:
    with pytest.raises(PlacementError, match=r"two ends of message \d differ: .*bfloat16\[2 6 16\] of micro-batch 0"):
        rehearsed(3, 3, edit=in_graph(1, other_dtype, direction))


def a_collective_less(graph: fx.Graph) -> None:
    node = next(n for n in graph.nodes if "all_reduce" in str(n.target))
    wait = next(iter(node.users))
    wait.replace_all_uses_with(node.args[0])
    graph.erase_node(wait)
    graph.erase_node(node)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_collective_that_one_rank_of_a_stage_leaves_out(rank: int) -> None:
    fault = in_graph(1, a_collective_less, "forward", rank)
    with pytest.raises(PlacementError, match=r"differ at collective \d+: .*forward all_reduce") as error:
        rehearsed(6, 3, edit=fault, tensor_model_parallel_size=2)
    assert "of stage 1" in str(error.value) and error.value.source is not None


def test_memory_of_the_micro_batches_that_a_schedule_keeps() -> None:
    """GPipe: each further one adds the same to both ranks. 1F1B: nothing but its ids and labels."""
    found = {}
    for schedule in ("GPipe", "1F1B"):
        for m in (4, 6, 8):
            made = rehearsed(2, 2, m, schedule, rows=2 * m)
            found[schedule, m] = [c.memory_bytes for c in made.classes]
            assert [c.alive for c in made.classes] == ([m, m] if schedule == "GPipe" else [2, 1])
    for rank in (0, 1):
        four, six, eight = (found["GPipe", m][rank] for m in (4, 6, 8))
        assert six - four == eight - six > 2 * 2 * LENGTH * WIDTH * 4  # two micro-batches of two rows: a value at least
        four, six, eight = (found["1F1B", m][rank] for m in (4, 6, 8))
        assert six - four == eight - six <= 2 * (2 * 2 * LENGTH * 8 + 8)  # ids, labels, and the count of labels
        assert found["1F1B", 4][rank] < found["GPipe", 4][rank]


def test_stages_by_name() -> None:
    found = rehearsed(2, ["layers.3"])
    even = rehearsed(2, 2)
    assert found.step_us > even.step_us  # the cut that was asked for is priced
