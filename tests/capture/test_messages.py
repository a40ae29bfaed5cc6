"""What forward warns is shown when a graph is captured (megafx/capture/messages.py)."""

from __future__ import annotations

import linecache
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megafx
from megafx.capture.export import capture_call


class Warns(nn.Module):
    """Warns of sizes and values, as does torch of the shapes of a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        if x.shape[0] > 2:
            warnings.warn(f"{x.shape[0]} rows of mean {x.mean().item():.3f}, {x}", FutureWarning, stacklevel=1)
        return F.mse_loss(x, y)


ROWS = torch.randn(5, 4), torch.randn(5)


def test_a_warning_is_shown_once_with_its_line_and_category() -> None:
    model = megafx.parallelize(Warns())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(*ROWS)
        model(*ROWS)
    mine = [w for w in caught if w.filename == __file__ and w.category is FutureWarning]
    assert [str(w.message) for w in mine] == ["? rows of mean ?, ?"]  # a graph serves calls of other sizes and values
    assert "warnings.warn(" in linecache.getline(__file__, mine[0].lineno)
    of_torch = [w for w in caught if "Using a target size" in str(w.message)]
    assert len(of_torch) == 1 and of_torch[0].filename == __file__


def test_a_warning_that_is_an_error_is_raised_and_a_note_tells_of_it() -> None:
    model = megafx.parallelize(Warns())
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        with pytest.raises(FutureWarning, match="rows of mean"):
            model(*ROWS)
        warnings.simplefilter("ignore")
        notes = [str(note) for note in capture_call(Warns(), ROWS).notes]
        assert model(*ROWS).requires_grad
    assert any("test_messages.py" in note and "FutureWarning: ? rows of mean" in note for note in notes)
