"""`megafx.verify` on a mesh: data-parallel times tensor-parallel ranks run what real ones run, each its own graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megafx
from megafx.checks.sabotage import without_transition
from megafx.checks.types import check_batch_types
from megafx.config import Config
from megafx.errors import PlacementError, UsageError
from megafx.ir.contracts import is_transition
from megafx.ir.nodes import draw_of, is_draw, set_arguments
from megafx.ir.program import Program
from megafx.planner.context import CompileContext


class Block(nn.Module):
    """Two linears and a norm; a loss of the labels that count, and a penalty on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.up, self.down, self.head = nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 11, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None, drop: float = 0.0) -> torch.Tensor:
        x = F.dropout(self.embed(ids), drop)
        h = F.gelu(self.up(self.norm(x)))  # tensor-parallel ranks cut it: two of them evenly, three with padding
        x = x + self.down(h) + h.mean(-1, keepdim=True)
        logits = self.head(x)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.1 * self.up.weight.norm()


def a_call(rows: int = 4, labels: bool = True) -> dict[str, torch.Tensor]:
    ids = torch.randint(11, (rows, 5), generator=torch.Generator().manual_seed(0))
    counted = ids.clone()
    counted[0, :3] = -100  # ranks count unequal numbers of labels
    return {"ids": ids, "labels": counted} if labels else {"ids": ids}


@pytest.mark.parametrize(
    ("mesh", "options", "text"),
    [
        ({"dp": 2, "tp": 2}, {}, "4 ranks (dp 2 x tp 2)"),
        ({"dp": 2, "tp": 3}, {"data_parallel": "fsdp"}, "6 ranks (dp_replicate 1 x dp_shard 2 x tp 3)"),
        ({"dp": 4}, {"data_parallel": "zero1", "data_parallel_shard_size": 2}, "(dp_replicate 2 x dp_shard 2 x tp 1)"),
    ],
)
def test_all_ranks_of_a_mesh_compute_what_one_process_does(mesh, options, text):
    with megafx.debug(check=1):
        verdict = megafx.verify(
            Block().double(), Config(**options), example_inputs=a_call(), mesh=mesh, tolerance=1e-10
        )
    assert verdict, str(verdict)
    assert text in str(verdict) and len(verdict.gradients) == 8


class Pooled(nn.Module):
    """Masks and pooling as transformers writes them, with indices that number the rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, 4)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, seen, (rows, columns) = self.embed(ids), ids > 2, map(torch.arange, ids.shape)
        shown = seen[rows[:, None, None], columns] & (columns[:, None] >= columns)
        scores = (x @ x.mT).masked_fill(~shown, torch.finfo(x.dtype).min)
        x = scores.softmax(-1) @ x
        last = (columns * seen).argmax(-1)
        pair = x[rows[:, None], torch.stack([last, last - ids.shape[1]], 1)]  # from the front, and from the end
        return F.cross_entropy(self.out(x[rows, last] + pair.tanh().sum(1)), labels.clamp(min=0)[:, 0] % 4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"cp": 2}])
def test_rows_of_the_batch_may_be_numbered(mesh):
    verdict = megafx.verify(Pooled().double(), example_inputs=a_call(), mesh=mesh, tolerance=1e-10)
    assert verdict, str(verdict)


class Layer(nn.Module):
    """The second half reads what the first one's bias is added to, so that backward recomputes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(2))
        self.halves = nn.ModuleList(nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, half in zip(self.norms, self.halves, strict=True):
            x = x + half(norm(x))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("t", [2, 3])
def test_all_ranks_gather_the_same_parameters_in_backward(t):
    """Also a bias that the first rank alone adds."""
    torch.manual_seed(0)
    options = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    model = nn.Sequential(nn.Linear(3, 6), Layer(), Layer(), nn.Linear(6, 1)).double()
    config, x = Config(data_parallel="fsdp", **options), torch.randn(4, 5, 3, dtype=torch.float64)
    verdict = megafx.verify(
        model, config, example_inputs=(x,), loss_fn=lambda y: y.square().mean(), mesh={"dp": 2, "tp": t}
    )
    assert verdict, str(verdict)


def test_outputs_of_all_ranks_are_those_of_the_whole_batch():
    verdict = megafx.verify(Block().double(), example_inputs=a_call(6, False), mesh={"dp": 3, "tp": 2}, tolerance=1e-10)
    assert verdict, str(verdict)


@pytest.mark.parametrize("t", [1, 3])
def test_types_of_the_outer_axis_find_each_lost_transition(t):
    kept: list[Program] = []

    def keep(program: Program, context: CompileContext) -> int:
        kept.append(program.copy())
        return 0

    config = Config(passes=(("after scaled_products", keep),))
    call = a_call() | {"drop": 0.5}
    assert megafx.verify(Block(), config, example_inputs=call, mesh={"dp": 2, "tp": t}, types=True)
    (joint,) = kept
    outer = [n for n in joint.graph.nodes if is_transition(n, "dp")]
    assert len(outer) >= 4  # labels counted, the loss, and their gradients
    for node in outer:
        with without_transition(joint.graph, node), pytest.raises(PlacementError):
            check_batch_types(joint)
    for drawn in filter(is_draw, list(joint.graph.nodes)):  # a mask of the rank's rows alone
        axis = draw_of(drawn).axis
        set_arguments(drawn, axis="tp")
        with pytest.raises(PlacementError, match="draws"):
            check_batch_types(joint)
        set_arguments(drawn, axis=axis)
    check_batch_types(joint)


def without_a_sum(program: Program, context: CompileContext) -> int:
    """A pass that loses a sum over data-parallel ranks."""
    node = program.graph.find_nodes(op="call_function", target=torch.ops.megafx.transition.default)[0]
    node.replace_all_uses_with(node.args[0])
    return 1


def test_a_lost_sum_over_data_parallel_ranks_is_noticed():
    config = Config(passes=(("after place_axes", without_a_sum),))
    verdict = megafx.verify(Block().double(), config, example_inputs=a_call(), mesh={"dp": 2})
    assert not verdict and "MEGAFX_CHECK=2 names the pass" in str(verdict)


def test_what_no_mesh_can_run_is_refused():
    with pytest.raises(UsageError, match="an axis 'pp'"):
        megafx.verify(Block(), example_inputs=a_call(), mesh={"pp": 2, "tp": 2})
    with pytest.raises(
        UsageError, match=r"ids\]' has 3 rows, which 2 ranks .*\n.*fix: give example_inputs with 4 rows"
    ):
        megafx.verify(Block(), example_inputs=a_call(3), mesh={"dp": 2})
    with pytest.raises(UsageError, match="no loss of one batch"):
        config = Config(data_parallel_loss="average")
        megafx.verify(Block(), config, example_inputs=a_call(), mesh={"dp": 2})
    with pytest.raises(UsageError, match="simulated ranks"):
        megafx.verify(Block(), example_inputs=a_call(), mesh={"dp": 2}, on_ranks=True)
    rounded = Config(fp8="e4m3", first_last_layers_bf16=False)
    for mesh in ({"dp": 2, "tp": 2}, {"cp": 2}):
        with pytest.raises(UsageError, match=r"scale by the rows.*\n.*\(mesh=\{'tp': 2\}\), and this mesh with"):
            megafx.verify(Block(), rounded, example_inputs=a_call(), mesh=mesh)
    for config, mesh in ((rounded, {"tp": 2}), (rounded.replace(fp8=None), {"dp": 2, "tp": 2})):
        assert megafx.verify(Block(), config, example_inputs=a_call(), mesh=mesh, tolerance=1e-4)
