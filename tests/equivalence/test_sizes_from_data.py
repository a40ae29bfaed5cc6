"""Sizes that code reads from tensors: one graph for all numbers, exact, and an error where numbers do not fit.

Covers: kernels/lengths.py, ir/data_sizes.py, passes/canonicalize/sizes.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from sizes_from_data import CASES, Split, of, x_of
from torch.utils import _pytree as pytree

import megafx
from megafx.errors import MegafxError

SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", CASES)
def test_one_graph_for_all_numbers(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    plain = case.model().double()
    model = megafx.parallelize(copy.deepcopy(plain), megafx.Config())
    for call in case.calls:
        results = []
        for each in (model, plain):
            each.zero_grad()
            found = pytree.tree_leaves(each(*call))
            found[0].backward()
            results.append((found, [None if p.grad is None else p.grad for p in each.parameters()]))
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
    assert model.megafx.captures == case.captures
    with pytest.raises((MegafxError, RuntimeError)) as error:
        model(*case.wrong)
    if isinstance(error.value, MegafxError):
        assert "read from a tensor" in str(error.value) and error.value.fix
    else:
        assert name == "repeated"  # the op's own


@pytest.mark.parametrize(
    ("name", "t"),
    [pytest.param(n, 2 + i % 2, marks=[] if n in ("split", "longest") else SLOW) for i, n in enumerate(CASES)]
    + [pytest.param(n, 3 - i % 2, marks=SLOW) for i, n in enumerate(CASES)],
)
def test_on_ranks(name: str, t: int) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    config = megafx.Config(tensor_model_parallel_size=t)
    verdict = megafx.verify(case.model().double(), config, example_inputs=case.calls[0], tolerance=1e-10)
    assert verdict and verdict.reference == "eager", verdict


def test_the_error_names_line_and_numbers() -> None:
    model = megafx.parallelize(Split().double(), megafx.Config())
    model(x_of(12, 8), of(3, 4, 5))
    with pytest.raises(megafx.MegafxError) as error:
        model(x_of(12, 8), of(3, 3, 5))
    text = str(error.value)
    assert "`parts = x.split(sizes.tolist())`" in text and "== 12 does not hold" in text
    model(x_of(12, 8), of(3, 4, 5)).backward()  # the model is usable
