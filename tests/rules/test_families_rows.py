"""Covers: rules/families_rows.py, passes/canonicalize/composites.py.

Ops that compute each row by itself, on two data-parallel ranks in this process, forward and gradient. What mixes rows is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megafx
from megafx.errors import PlanError
from megafx.rules import strategies
from megafx.rules.families_rows import BY_ROWS
from megafx.rules.strategies import outer_rule

CONFIG = megafx.Config(tensor_model_parallel_size=1, data_parallel_size=2, hardware="h100-nvlink")
LA, special = torch.linalg, torch.special
BY_FUNCTION: dict[str, set[str]] = {}
for _op, _function in BY_ROWS.items():
    BY_FUNCTION.setdefault(_function.__name__, set()).add(_op)


class Model(nn.Module):
    """Images [n, 6, 4, 4] -> a vector for each, of each of some functions."""

    def __init__(self, functions: dict[str, Callable[..., Any]], modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.linspace(0.5, 1.5, 4)), nn.Parameter(torch.linspace(-0.3, 0.4, 6))
        self.functions, self.parts = functions, nn.ModuleDict(modules)

    def forward(self, images: Tensor) -> list[Tensor]:
        x = images * self.scale + self.shift[:, None, None]
        found = [f(x) for f in self.functions.values()] + [part(x) for part in self.parts.values()]
        every = [y for ys in found for y in (ys if isinstance(ys, tuple) else (ys,))]
        return [y if y.dim() < 2 else y.flatten(1).mean(1) for y in every if y.is_floating_point()]


def vec(x: Tensor) -> Tensor:
    return x[:, :, 0].flatten(1)  # [n, 24]


def mat(x: Tensor) -> Tensor:
    return x[:, 0] @ x[:, 0].mT + 3 * torch.eye(4)


def image(x: Tensor, d: int) -> Tensor:
    return (x[..., 0], x, x.unsqueeze(-1) * torch.ones(3))[d - 1]


class Recurrent(nn.Module):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.inner = getattr(nn, kind)(6, 5, **options)
        self.first = options.get("batch_first", False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x[..., 0].transpose(1, 2)
        y, state = self.inner(x if self.first else x.transpose(0, 1))
        last = state[0] + state[1] if isinstance(state, tuple) else state
        return y if self.first else y.transpose(0, 1), last.transpose(0, 1)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm, self.tanh = nn.GRUCell(6, 5), nn.LSTMCell(6, 5), nn.RNNCell(6, 5)
        self.relu, self.pairs = nn.RNNCell(6, 5, nonlinearity="relu"), nn.Bilinear(6, 6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a, b = x[..., 0, 0], x[..., 1, 1]
        h, c = self.lstm(b, self.lstm(a))
        return self.gru(b, self.gru(a)), h + c, self.tanh(a), self.relu(b), self.pairs(a, b)


def resized(x: Tensor) -> Any:
    modes = {1: ("nearest", "linear", "nearest-exact"), 3: ("nearest", "trilinear", "nearest-exact")}
    modes[2] = ("nearest", "bilinear", "bicubic", "nearest-exact")
    every = [F.interpolate(image(x, d), scale_factor=1.5, mode=mode) for d, names in modes.items() for mode in names]
    return *every, F.interpolate(x, size=(3, 3), mode="bilinear", antialias=True)


def pooled(x: Tensor) -> Any:
    found = [getattr(F, f"adaptive_max_pool{d}d")(image(x, d), 2) for d in (1, 2, 3)]
    pools = [getattr(F, f"max_pool{d}d")(image(x, d), 2, padding=1, return_indices=True) for d in (2, 3)]
    found += [F.max_unpool2d(*pools[0], 2), F.max_unpool3d(*pools[1], 2), F.adaptive_avg_pool3d(image(x, 3), 2)]
    return tuple(found)


def losses(x: Tensor) -> Any:
    a, b, y = vec(x), vec(x).flip(1), torch.where(vec(x) > 0.3, 1.0, -1.0)
    return (
        F.margin_ranking_loss(a, b, y),
        F.hinge_embedding_loss(a, y),
        F.poisson_nll_loss(a, b.square(), full=True),
        F.cosine_embedding_loss(a, b, y[:, 0]),
        F.triplet_margin_loss(a, b, a.roll(1, 1)),
        F.pairwise_distance(a, b),
        F.multi_margin_loss(a, (b[:, 0] > 0.3).long()),
        F.multi_margin_loss(
            a, (b[:, 0] > 0.3).long(), p=2, weight=torch.linspace(1.0, 2.0, a.shape[1]), reduction="none"
        ),
        F.multilabel_margin_loss(a, (b > 0.3).long() * 3 - 1),
        F.multilabel_margin_loss(a, (b > 0.3).long() * 3 - 1, reduction="sum"),
    )


def solved(x: Tensor) -> Any:
    m = mat(x)
    lower = LA.cholesky(m)
    found = (LA.inv(m), LA.det(m), torch.logdet(m), torch.det(m), LA.slogdet(m)[1], lower, LA.solve(m, x[:, 0]))
    found += (LA.solve_triangular(lower, x[:, 1], upper=False), LA.qr(m).R, LA.eigvalsh(m), LA.svdvals(m))
    return *found, LA.eigh(m)[0], LA.svd(m)[1], LA.matrix_norm(m, "nuc"), LA.matrix_norm(m), LA.matrix_power(m, 3)


GROUPS: dict[str, tuple[dict[str, Callable[..., Any]], dict[str, Callable[[], nn.Module]]]] = {
    "elements": (
        {
            "of one": lambda x: (special.entr(x.sigmoid()), special.erfcx(x), special.i0e(x), special.i1(x), special.i1e(x)),
            "further": lambda x: (special.log_ndtr(x), special.ndtri(x.sigmoid()), torch.i0(x), torch.mvlgamma(x.abs() + 3, 2)),
            "of two": lambda x: (torch.complex(x, x.flip(1)).angle(), torch.ldexp(x, torch.tensor(2)), torch.frexp(x)[0]),
            "others": lambda x: (torch.polygamma(1, x.abs() + 1), F.prelu(x, torch.full((6,), 0.2))),
            "tables": lambda x: (
                x * torch.bucketize(x.detach(), torch.linspace(-1, 1, 5)),
                x * torch.searchsorted(torch.linspace(-1, 1, 5), x.detach()),
                x * torch.isin(x.detach().round(), torch.tensor([0.0, 1.0])),
            ),
        },
        {},
    ),
    "space": (
        {
            "resized": resized,
            "pooled": pooled,
            "channels": lambda x: (F.pixel_unshuffle(x, 2), F.pixel_shuffle(x[:, :4], 2), F.channel_shuffle(x, 3)),
            "windows": lambda x: (F.unfold(x, 3), F.fold(F.unfold(x, 2), (4, 4), 2), vec(x).unfold(1, 3, 2)),
            "sampled": lambda x: (
                F.grid_sample(x, x[:, :2].movedim(1, 3).tanh(), align_corners=False),
                F.grid_sample(image(x, 3), image(x, 3)[:, :3].movedim(1, 4).tanh(), align_corners=True),
            ),
        },
        {
            "1d": lambda: nn.Sequential(nn.Flatten(2), nn.ConvTranspose1d(6, 5, 3), nn.InstanceNorm1d(5, affine=True)),
            "2d": lambda: nn.Sequential(nn.ConvTranspose2d(6, 6, 2, stride=2, groups=3), nn.InstanceNorm2d(6)),
            "3d": lambda: nn.Sequential(nn.Unflatten(1, (3, 2)), nn.ConvTranspose3d(3, 2, 2)),
        },
    ),
    "recurrent": (
        {},
        {
            "lstm": lambda: Recurrent("LSTM", num_layers=2, bidirectional=True, batch_first=True),
            "gru": lambda: Recurrent("GRU"),
            "tanh": lambda: Recurrent("RNN", bidirectional=True),
            "relu": lambda: Recurrent("RNN", nonlinearity="relu", batch_first=True),
            "cells": Cells,
        },
    ),
    "matrices": ({"solved": solved, "exponential": lambda x: torch.matrix_exp(0.1 * mat(x))}, {}),
    "losses": ({"of rows": losses}, {}),
    "dims": (
        {
            "cosine": lambda x: (
                F.cosine_similarity(x, x.flip(2), dim=1),
                F.cosine_similarity(vec(x)[:, None], x[..., 0].repeat(1, 1, 6), dim=-1),
            ),
            "cross": lambda x: LA.cross(x[:, :3], x[:, 3:], dim=1),
            "renorm": lambda x: vec(x).renorm(2, 0, 1.0),
            "medians": lambda x: (vec(x).nanmedian(1).values, vec(x).quantile(0.3, 1), vec(x).nanquantile(0.3, 1)),
            "sums": lambda x: (vec(x).nansum(1), vec(x).nanmean(1), *torch.std_mean(vec(x), 1), *torch.var_mean(vec(x), 1)),
            "diagonals": lambda x: (torch.diag_embed(vec(x)), torch.diagonal_scatter(x, x[..., 0], 0, 2, 3)),
            "scattered": lambda x: (
                vec(x).scatter_reduce(1, (vec(x) > 0).long(), vec(x), "mean"),
                vec(x).index_reduce(1, torch.tensor([0, 2, 2]), x[:, :3, 0, 0], "mean"),
            ),
            "differences": lambda x: (vec(x).diff(dim=1), torch.trapezoid(vec(x)), torch.cumulative_trapezoid(vec(x))),
            "between": lambda x: [f(vec(x), torch.arange(24.0)) for f in (torch.trapezoid, torch.cumulative_trapezoid)][1],
            "turned": lambda x: (x.rot90(1, (2, 3)), torch.tensordot(vec(x), torch.ones(24, 3), 1)),
        },
        {},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Ops of which a rule on the axis of the batch was looked up."""
    seen: set[str] = set()

    def noted(target: Any, axis: str) -> Any:
        seen.add(str(target))
        return outer_rule(target, axis)

    monkeypatch.setattr(strategies, "outer_rule", noted)
    return seen


# ops of BY_ROWS, by the group that has them
OF_GROUP = {
    "elements": BY_FUNCTION["_elementwise"] | BY_FUNCTION["_looked_up"],
    "space": BY_FUNCTION["_over_space"]
    | BY_FUNCTION["_channels_and_space"]
    | BY_FUNCTION["_grid_sampler"]
    | {"aten.unfold.default"},
    "recurrent": BY_FUNCTION["_recurrent"] | BY_FUNCTION["_trilinear"],
    "losses": BY_FUNCTION["_margins"],
    "matrices": BY_FUNCTION["_of_matrices"],
    "dims": BY_FUNCTION["_along"] - {"aten.unfold.default"}
    | BY_FUNCTION["_statistics"]
    | BY_FUNCTION["_scattered"]
    | BY_FUNCTION["_on_diagonals"],
}


def test_each_op_has_a_group() -> None:
    assert set().union(*OF_GROUP.values()) == set(BY_ROWS)


@pytest.mark.parametrize("group", GROUPS)
def test_rows_are_computed_by_themselves(group: str, asked: set[str]) -> None:
    functions, modules = GROUPS[group]
    torch.manual_seed(0)
    model = Model(functions, {name: make() for name, make in modules.items()})
    report = megafx.verify(model, CONFIG, example_inputs=(torch.randn(4, 6, 4, 4),), mesh={"dp": 2})
    assert str(report).startswith("equal"), str(report)
    assert OF_GROUP.get(group, set()) - asked == set()


@pytest.mark.parametrize(
    "mixes",
    [
        lambda x: x.unfold(0, 2, 1),
        lambda x: vec(x).renorm(2, 1, 1.0),
        lambda x: vec(x).quantile(0.5, 0),
        lambda x: F.cosine_similarity(vec(x), vec(x).flip(1), dim=0),
        lambda x: LA.cross(x[:3], x[1:], dim=0),
        lambda x: LA.inv(x[:, 0, 0] @ x[:, 0, 1].T),
        lambda x: nn.functional.pixel_shuffle(x[:, :, 0, 0].reshape(1, -1, 1, 1)[:, :4], 2),
    ],
)
def test_what_mixes_rows_is_refused(mixes: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(PlanError):
        megafx.verify(Model({"mixes": mixes}, {}), CONFIG, example_inputs=(torch.randn(4, 6, 4, 4),), mesh={"dp": 2})
