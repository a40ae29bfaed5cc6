"""Mixtures whose rows are sorted by expert, where ranks share out the batch or the sequence: against eager at fp64.

Covers: passes/experts/group_by_expert.py, and the rules `outer` of kernels/experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sorted_mixtures import EXPERTS, FORMS, Mixture, Model, a_call, as_transformers
from torch import Tensor, nn
from torch.nn import functional as F

import megafx
from megafx.config import Config
from megafx.errors import PlanError
from megafx.ir.nodes import op_name
from megafx.ir.program import VAL, Program
from megafx.planner.context import CompileContext

SORTS = {"sort", "argsort", "cumsum", "one_hot", "index_put", "index_add"}


def verified(model: nn.Module, mesh: dict[str, int], *passes: Any, rows: int = 4, **options: Any) -> Any:
    config = Config(passes=passes, **options)
    with megafx.debug(check=1):
        return megafx.verify(model.double(), config, example_inputs=a_call(rows), mesh=mesh, tolerance=1e-10)


def kept(into: list[Program]) -> tuple[str, Any]:
    def keep(program: Program, context: CompileContext) -> int:
        into.append(program.copy())
        return 0

    return "after place_axes", keep


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"dp": 2, "tp": 2}, {}),
        ({"dp": 4}, {"data_parallel": "fsdp"}),
        ({"cp": 2}, {}),  # five tokens a row: one rank has a pad
        pytest.param({"dp": 3, "tp": 3}, {"data_parallel": "zero1"}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "cp": 2, "tp": 2}, {}, marks=pytest.mark.slow),
    ],
)
def test_as_one_process(mesh: dict[str, int], options: dict[str, Any]) -> None:
    programs: list[Program] = []
    verdict = verified(Model(*FORMS), mesh, kept(programs), rows=6 if mesh.get("dp") == 3 else 4, **options)
    assert verdict, str(verdict)
    found = [op_name(node) for node in programs[0].graph.nodes]
    assert not {*found} & (SORTS - {"one_hot"}) and found.count("group_order") == len(FORMS)
    assert found.count("group_rows") == 3 + 3 + 1 + 1 and found.count("ungroup_rows") == len(FORMS)


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 3}, {"cp": 2, "tp": 2}])
def test_whole_experts_on_tensor_parallel_ranks(mesh: dict[str, int]) -> None:
    overrides = {f"layers.0.{name}": "expert" for name in ("up", "down", "bias")}
    programs: list[Program] = []
    verdict = verified(Model(as_transformers), mesh, ("after join_experts", kept(programs)[1]), overrides=overrides)
    assert verdict, str(verdict)
    assert "grouped_mlp" in map(op_name, programs[0].graph.nodes)


@pytest.mark.parametrize("lost", ["the order of the ids", "the way back"])
def test_an_order_that_is_lost_is_noticed(lost: str) -> None:
    """Biases are then those of other experts, or rows those of other tokens."""

    def lose(program: Program, context: CompileContext) -> int:
        name, kept_dims = ("ungroup_rows", 2) if lost == "the way back" else ("group_rows", 1)
        found = [n for n in program.graph.nodes if op_name(n) == name and n.meta[VAL].dim() == kept_dims]
        node = next(n for n in found if kept_dims == 2 or not n.meta[VAL].is_floating_point())
        node.replace_all_uses_with(node.args[0])
        return 1

    assert not verified(Model(as_transformers), {"dp": 2}, ("after place_axes", lose))


def mixes_rows(of: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    ids = chosen[:, 0]
    order = ids.argsort()
    y = of.unit(x[order], F.one_hot(ids, EXPERTS).sum(0).cumsum(0)).cumsum(0)
    return y[order.argsort()]


def by_place(of: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Adds unsorted rows to sorted ones."""
    ids = chosen[:, 0]
    order = ids.argsort()
    y = of.unit(x[order], F.one_hot(ids, EXPERTS).sum(0).cumsum(0)) + x
    return y[order.argsort()]


def sorted_result(of: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    ids = chosen[:, 0]
    return of.unit(x[ids.argsort()], F.one_hot(ids, EXPERTS).sum(0).cumsum(0))


def drops(of: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    ids = chosen[:, 0]
    order = ids.argsort()
    y = F.dropout(of.unit(x[order], F.one_hot(ids, EXPERTS).sum(0).cumsum(0)), 0.5)
    return y[order.argsort()]


@pytest.mark.parametrize(
    ("form", "found"),
    [
        (mixes_rows, "cumsum, which mixes rows"),
        (by_place, "add of sorted rows and others"),
        (sorted_result, "reshape, which does not keep the rows"),
        (drops, "dropout, which draws by the number of a row"),
    ],
)
def test_what_is_not_of_each_row_by_itself_is_refused(form: Callable[..., Tensor], found: str) -> None:
    """With its line; what is advised works, and so does context parallelism, which gathers these rows."""
    with pytest.raises(PlanError, match=rf"rows are sorted by expert, and before they go back there is {found}"):
        verified(Model(form), {"dp": 2})
    average = Config(data_parallel_size=2, data_parallel_loss="average")
    assert megafx.plan(Model(form).double(), average, example_inputs=a_call())


def test_sequences_are_gathered_for_what_mixes_rows() -> None:
    verdict = verified(Model(mixes_rows, by_place), {"cp": 2})
    assert verdict, str(verdict)


def test_one_axis_leaves_the_graph_as_it_is() -> None:
    programs: list[Program] = []
    assert verified(Model(as_transformers), {"tp": 2}, ("after join_experts", kept(programs)[1]))
    found = {op_name(node) for node in programs[0].graph.nodes}
    assert "sort" in found and not found & {"group_order", "group_rows", "ungroup_rows"}
