"""Covers: progress.py."""

import io
import logging
import os
import re
import subprocess
import sys
import threading
import time

import pytest

from megafx import progress
from megafx.debugging import debug
from megafx.progress import remark, stage


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(params=[io.StringIO, Terminal])
def shown(request, monkeypatch):
    """stderr, of a terminal and of a pipe. Calls of a tenth of a second are long; logging has no handlers (pytest has some)."""
    monkeypatch.setattr(progress, "SHORT", 0.1)
    monkeypatch.setattr(progress, "PATIENCE", 0.2)
    monkeypatch.setattr(progress.logger, "hasHandlers", lambda: False)

    def start():  # in the test: pytest puts streams of its own in place before each
        monkeypatch.setattr(sys, "stderr", request.param())
        return sys.stderr

    return start


def test_what_takes_no_time_shows_nothing(shown, monkeypatch):
    monkeypatch.setattr(progress, "SHORT", 60.0)  # on a busy machine "no time" may take a second
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    out = shown()
    with stage("plan"), stage("capture"):
        pass
    assert out.getvalue() == ""


def test_what_runs_and_what_took_the_time(shown):
    out = shown()

    @stage("parallelize")
    def parallelize():
        with stage("capture"), stage("fuse"):
            time.sleep(1.7)

    parallelize()
    text = out.getvalue()
    assert text.count("megafx: parallelize: capture: fuse, ") >= (1 if out.isatty() else 3), "it is not silent for long"
    last = text.splitlines()[-1]
    assert re.search(r"megafx: parallelize took (\d+\.\d) s \(fuse \d+\.\d s", last), text


def test_an_error_is_not_summed_up_and_the_next_call_is_shown(shown):
    out = shown()
    with pytest.raises(ValueError), stage("plan"), stage("capture"):
        time.sleep(0.2)
        raise ValueError
    assert "took" not in out.getvalue()
    with stage("plan"), stage("fuse"):
        remark("kept for the next start")
        time.sleep(0.2)
    assert re.search(r"megafx: plan took \d+\.\d s( \(.*\))?\n(.*\n)?megafx: kept for the next start\n", out.getvalue())


def test_one_thread_is_shown(shown):
    out = shown()

    def other():
        with stage("save"):
            time.sleep(0.2)

    with stage("plan"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "plan took" in out.getvalue() and "save" not in out.getvalue()


def test_it_can_be_switched_off(shown, monkeypatch):
    out = shown()

    def slow():
        with stage("plan"):
            time.sleep(0.2)

    with debug(level=1):
        slow()
    monkeypatch.setenv("RANK", "1")
    slow()
    monkeypatch.delenv("RANK")
    progress.logger.setLevel(logging.WARNING)
    slow()
    progress.logger.setLevel(logging.INFO)
    assert out.getvalue() == ""


MODEL = """
import sys, time, torch, megafx
from megafx import progress
progress.SHORT = progress.PATIENCE = 0.1
class Slow(torch.nn.Linear):
    def forward(self, x):
        print("not seen: streams are muted while a model is traced", file=sys.stderr)
        for _ in range(40_000_000):  # longer than the display waits, on any machine
            pass
        return super().forward(x)
model = megafx.parallelize(Slow(4, 4), megafx.Config(tensor_model_parallel_size=1))
model(torch.ones(2, 4))
"""


def test_a_first_call_on_a_pipe():
    """The trace mutes stderr, and refuses the clock to the code of the model: not to the display."""
    done = subprocess.run(
        [sys.executable, "-c", MODEL], capture_output=True, text=True, timeout=200, env={**os.environ, "RANK": "0"}
    )
    assert done.returncode == 0, done.stderr
    assert "megafx: import megafx" in done.stderr  # one line, or more where it takes longer
    assert "megafx: compile a call: capture, " in done.stderr and "not seen" not in done.stderr, done.stderr
    assert "megafx: compile a call took " in done.stderr
