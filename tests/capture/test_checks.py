"""Covers: capture/messages.py, passes/canonicalize/names.py (numbers read for a check go): checks of data stay out of
the graph."""

from __future__ import annotations

from collections.abc import Callable

import checks_of_data
import pytest
import torch
from torch import nn

import megafx
from megafx.capture.export import capture_call
from megafx.errors import CaptureError

TWO = megafx.Config(tensor_model_parallel_size=2)


class Checked(nn.Module):
    def __init__(self, check: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.check = check
        self.table, self.up, self.down = nn.Embedding(9, 6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.check(ids)
        loss: torch.Tensor = self.down(self.up(self.table(ids)).relu()).square().sum()
        return loss


@pytest.mark.parametrize(
    "check",
    [
        checks_of_data.asserted,
        checks_of_data.asserted_of_two,
        checks_of_data.raised,
        checks_of_data.raised_unless,
        checks_of_data.warned,
    ],
)
def test_a_check_that_only_complains_is_left_out_with_a_note(check: Callable[[torch.Tensor], object]) -> None:
    ids = torch.arange(5)
    program = capture_call(Checked(check).double(), (ids,))
    notes = [n.message for n in program.notes if "a check of values is not in the graph" in n.message]
    assert notes and all("checks_of_data.py" in n for n in notes)
    found = megafx.verify(Checked(check).double(), TWO, example_inputs=(ids,))
    assert found.ok, str(found)


@pytest.mark.parametrize(
    "check",
    [checks_of_data.changes_something, checks_of_data.raises_else_changes, checks_of_data.returns_before_it_raises],
)
def test_other_decisions_are_asked_of_each_call(check: Callable[[torch.Tensor], object]) -> None:
    program = capture_call(Checked(check).double(), (torch.arange(5),))
    assert program.call is not None and program.call.mismatch((torch.arange(5).flip(0),)) is None
    assert program.call.mismatch((torch.arange(5) + 9,)) == "forward decides otherwise by the values of its arguments"
    assert any("checks_of_data.py" in n.message and "a graph for each answer" in n.message for n in program.notes)
    found = megafx.verify(Checked(check).double(), TWO, example_inputs=(torch.arange(5),))
    assert found.ok, str(found)


def test_other_uses_are_errors_with_their_line() -> None:
    check = checks_of_data.decides_inside_of_a_check
    with pytest.raises(CaptureError) as caught:
        megafx.plan(Checked(check), TWO.replace(uncaptured="error"), example_inputs=(torch.arange(5),))
    assert caught.value.source is not None and caught.value.source.file.endswith("checks_of_data.py")
    assert "data" in caught.value.found


class Talkative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        print("mean", x.mean().item())
        return x.square().mean()


def test_what_forward_prints_is_noted_and_a_hook_prints_it(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Also on the logger of megafx, once for each line."""
    model, x = Talkative(), torch.randn(2, 4)
    note = next(text for text in map(str, capture_call(model, (x,)).notes) if "print" in text)
    assert "test_checks.py" in note and "`print(" in note and "forward hook" in note
    model.up.register_forward_hook(lambda module, args, output: print("hooked", output.mean().item()))
    megafx.parallelize(model)(x)
    assert capsys.readouterr().out == f"hooked {model.up(x).mean().item()}\n"
    megafx.parallelize(Talkative())(x)
    (told,) = [r.getMessage() for r in caplog.records if r.name == "megafx" and r.levelname == "WARNING"]
    assert "test_checks.py:" in told and "calls of a graph of megafx do neither" in told
