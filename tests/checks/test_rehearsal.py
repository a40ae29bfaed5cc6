"""Covers: megafx/rehearsal.py, megafx.rehearse: classes of ranks, orders of collectives, faults that are planted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import megafx
from megafx import rehearsal
from megafx.analysis.communication import collective_nodes
from megafx.api import _compiled
from megafx.compiler.compiled import Compiled
from megafx.errors import ConfigError, PlacementError
from megafx.example_call import ExampleCall
from megafx.ir.program import VAL, Program
from megafx.ops.axes import Mesh
from megafx.rehearsal import Collective, check_orders, rehearse_compiled

Change = Callable[[fx.Graph], None]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(width), Block(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).pow(2).sum()


def compiled(width: int = 64, **fields: Any) -> Compiled:
    config = megafx.Config(**{"overrides": {"*.up": "column", "*.down": "row"}} | fields)
    with torch.device("meta"):
        call = ExampleCall.of(Net(width), config, (torch.ones(8, 4, 16),), None, runs=False)
    return _compiled(call)


@pytest.fixture(scope="module")
def whole() -> Compiled:
    """12 ranks: tp 3 x dp 4."""
    return compiled(tensor_model_parallel_size=3, data_parallel_size=4, data_parallel="zero1", hardware="h100-nvlink")


def on_rank(axis: str, of: int, change: Change, direction: str = "forward") -> Any:
    """An edit of what ranks of this place run."""

    def edit(program: Program, places: Any) -> None:
        if places[axis].rank == of:
            change(getattr(program.partition, direction).graph)

    return edit


def of_axis(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in collective_nodes(graph) if str(n.args[-1]).startswith("tp")]


def left_out(graph: fx.Graph) -> None:
    node = of_axis(graph)[0]
    wait = next(iter(node.users))
    wait.replace_all_uses_with(node.args[0])
    graph.erase_node(wait)
    graph.erase_node(node)


def other_shape(graph: fx.Graph) -> None:
    operand: Any = of_axis(graph)[0].args[0]
    operand.meta[VAL] = operand.meta[VAL].new_empty(3, 5)


def other_reduction(graph: fx.Graph) -> None:
    node = of_axis(graph)[0]
    node.args = (node.args[0], "avg", *node.args[2:])


def exchanged(graph: fx.Graph) -> None:
    """Two of one shape, of different modules, in the other order."""
    first, second = of_axis(graph)[:2]
    first.meta, second.meta = second.meta, first.meta
    a: Any = first.args[0]
    b: Any = second.args[0]
    a.meta, b.meta = b.meta, a.meta


def test_of_a_mesh(whole: Compiled) -> None:
    found = rehearse_compiled(whole, 12)
    assert found and found.world == sum(c.ranks for c in found.classes) == 12
    assert (
        found.groups["tp"][:2] == (4, 3)
        and sum(calls for *_, calls in found.groups.values()) == found.classes[0].collectives
    )
    assert found.step_us > 0 and found.to_dict()["fits"] is True
    text = str(found)
    assert text.startswith("12 ranks: ") and "data-parallel collectives" in text and "not shown" not in text


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("change", [left_out, other_shape, other_reduction, exchanged])
def test_a_fault_of_one_place_is_found(whole: Compiled, change: Change, rank: int) -> None:
    with pytest.raises(PlacementError, match=r"differ at collective \d+: .*forward ") as error:
        rehearse_compiled(whole, 12, on_rank("tp", rank, change))
    assert error.value.module is not None and error.value.source is not None and "test_rehearsal.py" in str(error.value)


def test_a_fault_of_backward_is_found(whole: Compiled) -> None:
    with pytest.raises(PlacementError, match=r"differ at collective \d+: .*backward "):
        rehearse_compiled(whole, 12, on_rank("tp", 1, left_out, "last_backward"))


def test_classes_and_what_is_taken_as_alike(whole: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(c.name, c.ranks, c.first, c.last) for c in rehearse_compiled(whole, 12).classes] == [
        ("tp 0", 4, 0, 9),
        ("tp 1-2", 8, 1, 11),
    ]  # rank 0 alone adds the bias of a row-parallel linear
    monkeypatch.setattr(rehearsal, "WHOLE", 4)
    made = rehearse_compiled(compiled(tensor_model_parallel_size=6), 6)
    assert made.groups.keys() == {"tp"} and "data-parallel" not in str(made)
    assert made.not_seen == ("that ranks 2 to 3 of 'tp' are like rank 1",) and "not shown: that" in str(made)


def test_too_large() -> None:
    made = compiled(tensor_model_parallel_size=2, hardware="h100-nvlink")
    made.context.device_bytes = 2**20
    found = rehearse_compiled(made, 2)
    assert not found and " no\n" in str(found)


def test_other_numbers_of_ranks() -> None:
    with torch.device("meta"):
        model, batch = Net(), torch.ones(8, 4, 16)
    with pytest.raises(ConfigError, match="7 ranks are no multiple of the 2"):
        megafx.rehearse(model, megafx.Config(tensor_model_parallel_size=2), 7, example_inputs=(batch,))
    with pytest.raises(ConfigError, match="has 8 ranks, not 4"):
        config = megafx.Config(tensor_model_parallel_size=2, data_parallel_size=4)
        megafx.rehearse(model, config, 4, example_inputs=(batch,))
    one = megafx.rehearse(model, megafx.Config(tensor_model_parallel_size=2), 4, example_inputs=(batch,))
    assert one.world == 4 and one.mesh["tp"] == 2
    config = megafx.Config(tensor_model_parallel_size=2, data_parallel="fsdp", data_parallel_shard_size=2)
    copies = megafx.rehearse(model, config, 8, example_inputs=(batch,))
    assert copies.groups["dp_shard"][:2] == (4, 2) and copies.groups["dp_replicate"][:2] == (4, 2)


def test_ranks_that_wait_in_a_circle() -> None:
    """Every group's order is the same for its ranks, but ranks of a diagonal take the groups in another order."""
    x, y = (Collective("all_reduce", axis, ("float32[4]",), ("sum",), "forward", axis) for axis in ("dp", "tp"))
    mesh = Mesh({"dp": 2, "tp": 2})
    check_orders(
        mesh, [0, 0, 1, 1], {0: [x, y], 1: [y, x]}
    )  # tp groups of one class each: tp goes first in one, then dp
    with pytest.raises(PlacementError, match=r"rank \d waits at collective 0, forward all_reduce\(float32\[4\], sum\)"):
        check_orders(mesh, [0, 1, 1, 0], {0: [x, y], 1: [y, x]})
    check_orders(mesh, [0, 0, 0, 0], {0: [x, y]})
