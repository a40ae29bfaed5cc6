"""Covers: megafx/capture/reads.py, writes.py, host_numbers.py, followed.py. Refusals; tests/loop has the users' situations."""

from __future__ import annotations

import array
import copy
import io
import itertools
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import megafx
from megafx.capture.export import capture_call
from megafx.errors import CaptureError


class Calling(nn.Module):
    """Calls a function in forward."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function
        self.generator, self.history, self.numbers = np.random.default_rng(0), [], itertools.count(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.function(self)
        x = self.linear(x)
        return x * found if isinstance(found, (int, float)) else x


LOG, BYTES, ARRAY = io.StringIO("before"), io.BytesIO(), array.array("d")
FILE = tempfile.TemporaryFile("w+")  # noqa: SIM115
REFUSED = {
    "random": (lambda model: random.random(), "a random number of Python's `random`"),
    "numpy": (lambda model: float(np.random.rand()), "a random number of numpy"),
    "own generator": (lambda model: float(model.generator.random()), "the generator of 'generator'"),
    "iterator": (lambda model: next(model.numbers), "the next value of the iterator 'numbers'"),
    "clock": (lambda model: time.time(), "the clock"),
    "file": (lambda model: len(open(__file__).read()), "a file"),  # noqa: SIM115
    "path": (lambda model: Path(__file__).read_text(), "forward opens a file"),
    "array file": (lambda model: np.save(io.BytesIO(), np.zeros(2)), "forward opens a file"),
    "saved": (lambda model: torch.save(model.linear.weight, io.BytesIO()), "forward opens a file"),
    "environment": (
        lambda model: os.environ.__setitem__("MEGAFX_OF_A_TEST", "1"),
        r"forward sets os.environ\['MEGAFX_OF_A_TEST'\]",
    ),
    "stream": (lambda model: LOG.write("a line"), "forward changes '.*LOG' .* cannot follow"),
    "bytes": (lambda model: BYTES.write(b"a line"), "forward changes '.*BYTES' .* cannot follow"),
    "open file": (lambda model: FILE.write("a line"), "forward changes '.*FILE' .* cannot follow"),
    "printed": (lambda model: print("a line", file=LOG), "forward changes '.*LOG' .* cannot follow"),
    "array": (lambda model: ARRAY.append(1.0), "forward changes '.*ARRAY' .* cannot follow"),
    "submodule": (lambda model: setattr(model, "late", nn.Linear(4, 4)), "forward changes 'late' .* cannot follow"),
    "parameter": (
        lambda model: setattr(model, "bias", nn.Parameter(torch.zeros(4))),
        "forward changes 'bias' .* cannot follow",
    ),
    "object": (
        lambda model: setattr(model, "path", [Path(".")]),
        "forward changes 'path' .* that a graph cannot follow",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_repeat_is_an_error(name: str) -> None:
    function, text = REFUSED[name]
    with pytest.raises(CaptureError, match=text) as caught:
        capture_call(Calling(function), (torch.randn(3, 4),))
    if name == "iterator":  # its advice
        capture_call(
            Calling(lambda model: setattr(model, "calls", getattr(model, "calls", 0) + 1)), (torch.randn(3, 4),)
        )
    if name not in ("submodule", "parameter", "object"):
        assert caught.value.source is not None and caught.value.source.file == __file__
    assert (LOG.getvalue(), LOG.tell(), BYTES.getvalue(), len(ARRAY)) == ("before", 0, b"", 0)
    assert "MEGAFX_OF_A_TEST" not in os.environ
    # The advice works: the number comes from torch, or as an argument; nothing is left behind by the refusal.
    capture_call(Calling(lambda model: None), (torch.randn(3, 4),))


HANDLER = logging.StreamHandler()


def test_streams_that_others_write_into_are_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard ones, which are files here, and those of handlers of logging: megafx itself reports progress meanwhile."""

    def write(model: Any) -> None:
        for stream in (sys.stderr, HANDLER.stream):
            stream.write("a line\n" if HANDLER.level == 0 else "")

    with open(tmp_path / "log", "w+") as log, open(tmp_path / "errors", "w+") as errors:
        monkeypatch.setattr(HANDLER, "stream", log)
        monkeypatch.setattr(sys, "stderr", errors)
        capture_call(Calling(write), (torch.randn(3, 4),))
    assert (tmp_path / "log").read_text() != ""


def test_state_is_as_before_after_a_capture() -> None:
    model = Calling(lambda model: setattr(model, "aux", model.linear.weight.sum()))
    before = copy.copy(vars(model))
    capture_call(model, (torch.randn(3, 4),))
    assert vars(model) == before


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        rate = 0.5 ** (self.calls // 2)
        return self.linear(x) * rate + (1 if self.calls > 3 else 0)


def test_numbers_that_forward_computes_are_inputs_and_decisions() -> None:
    program = capture_call(Counting(), (torch.randn(3, 4),))
    assert program.call is not None
    state = program.call.state
    assert [*state.inputs] == ["calls #0"] and [*state.writes] == ["calls"] and len(state.decisions) == 1


def test_an_input_keeps_one_graph_for_all_values_and_a_decision_makes_another() -> None:
    plain = Counting()
    model, x = megafx.parallelize(copy.deepcopy(plain)), torch.randn(3, 4)
    for _ in range(6):
        torch.testing.assert_close(model(x), plain(x))
    assert (model.calls, model.megafx.captures) == (6, 2)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def test_a_changed_attribute_is_named() -> None:
    model, x = Scaled(), torch.randn(3, 4)
    program = capture_call(model, (x,))
    assert program.call is not None and program.call.mismatch((x,)) is None
    model.scale = 3.0
    assert program.call.mismatch((x,)) == "forward reads 'scale', which changed"


def test_a_size_in_an_attribute_cannot_be_a_tensor_and_is_baked_in() -> None:
    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.times = nn.Linear(4, 4), 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.times):
                x = self.linear(x)
            return x

    plain = Repeats()
    model, x = megafx.parallelize(copy.deepcopy(plain)), torch.randn(3, 4)
    for times in (1, 2, 3, 2):
        model.times = plain.times = times
        torch.testing.assert_close(model(x), plain(x))
    assert model.megafx.captures == 3
    assert any("baked into the graph" in note.message for note in model.megafx.notes)
