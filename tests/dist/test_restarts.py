"""Covers: torchrun's elastic restarts with checkpoints, several agents of which one is lost, and runs that go on
with fewer and with more ranks. dist/restarts.py is the run; its ranks, or an agent with its rank as when a host goes down, are
killed at random moments."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "dist" / "restarts.py"


def undisturbed(steps: int) -> list[float]:
    """The script's losses in this process, with no kills."""
    spec = importlib.util.spec_from_file_location("restarts", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.undisturbed(steps)


def run(folder: Path, kills: int, when: str, timeout: float) -> tuple[list[float], str]:
    """(losses of the steps, what was seen) of a run with so many kills."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(kills)]
    command = [sys.executable, *launch, str(SCRIPT), str(folder), "--kills", str(kills), "--when", when]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return reported(done.stdout)


def environment() -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    # else a start finds addresses of the one before in torchrun's store: https://github.com/pytorch/pytorch/issues/135712
    return plain | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def reported(text: str) -> tuple[list[float], str]:
    """(losses of the steps, what was seen) by what the run prints at its end."""
    losses, seen = re.search(r"^losses (.*)$", text, re.MULTILINE), re.search(r"^killed .*$", text, re.MULTILINE)
    assert losses is not None and seen is not None
    return [float(x) for x in losses[1].split()], seen[0]


@pytest.mark.dist
@pytest.mark.slow
def test_a_rank_is_killed_within_a_step(tmp_path: Path) -> None:
    losses, seen = run(tmp_path / "killed", 1, "step", 200)
    assert re.match(r"killed 1 times .*, started 2 times", seen), seen
    assert losses == pytest.approx(undisturbed(6), rel=1e-10) and len(set(losses)) == 6


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("when", ["step", "save"])
def test_twenty_kills(when: str, tmp_path: Path) -> None:
    """Every time the run stops soon, goes on, and ends with the losses of a run that nothing happened to."""
    losses, seen = run(tmp_path / "killed", 20, when, 1500)
    assert re.match(r"killed 20 times .*, started 21 times", seen), seen
    assert float(re.search(r"([\d.]+) s at most", seen)[1]) < 60
    assert losses == pytest.approx(undisturbed(44), rel=1e-10)


# -- two agents, as of two hosts


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def agent(folder: Path, node: int, kills: int, *where: str) -> subprocess.Popen[str]:
    """That of a node, with one rank; what they print goes to a file."""
    script = [str(SCRIPT), str(folder / "run"), "--kills", str(kills), "--when", "outside"]
    command = [sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node", "1", *script]
    out = (folder / f"out{node}").open("w")
    return subprocess.Popen(command, env=environment(), stdout=out, stderr=subprocess.STDOUT, text=True)


def agents(folder: Path, kills: int) -> list[subprocess.Popen[str]]:
    """One for each of two nodes."""
    where = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return [agent(folder, node, kills, *where, "--node-rank", str(node)) for node in range(2)]


def events(folder: Path, what: str) -> list[dict[str, Any]]:
    path = folder / "run" / "events"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [e for line in lines if line.endswith("\n") and (e := json.loads(line))["what"] == what]


def until(true: Any, seconds: float, running: list[subprocess.Popen[str]], folder: Path) -> None:
    end = time.monotonic() + seconds
    while not true():
        alive = all(one.poll() is None for one in running)
        assert alive and time.monotonic() < end, "".join(f.read_text()[-3000:] for f in sorted(folder.glob("out*")))
        time.sleep(0.02)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, 20])
def test_an_agent_is_lost_with_its_rank(kills: int, tmp_path: Path) -> None:
    """The other agent ends soon and with an error, whichever is lost, that of rank 0 and of the store included; both start
    again from the newest checkpoint, and the losses are those of a run that nothing happened to."""
    draw, saved, running = random.Random(kills), 0, list[subprocess.Popen[str]]()
    try:
        for kill in range(kills):
            running, begun, lost = agents(tmp_path, kills), len(events(tmp_path, "here")), kill % 2
            until(lambda at=saved: len(events(tmp_path, "saved")) > at, 120, running, tmp_path)
            time.sleep(0.4 * draw.random())  # within a step, or a save
            for rank in events(tmp_path, "here")[begun:]:
                if rank["rank"] == lost:
                    os.kill(running[lost].pid, signal.SIGKILL)  # no restart, and no word to the other
                    os.kill(rank["pid"], signal.SIGKILL)
            assert running[lost].wait(10) == -signal.SIGKILL
            assert running[1 - lost].wait(60) > 0, "the other agent goes on without its peer"
            saved = len(events(tmp_path, "saved"))
        running = agents(tmp_path, kills)
        assert [one.wait(180) for one in running] == [0, 0], (tmp_path / "out0").read_text()[-3000:]
    finally:
        for one in running:
            one.kill()
    losses, seen = reported((tmp_path / "out0").read_text())
    assert f"started {kills + 1} times" in seen
    assert losses == pytest.approx(undisturbed(2 * (kills + 2)), rel=1e-10) and len({*losses}) == len(losses)


# -- agents that come and go


@pytest.mark.dist
@pytest.mark.slow
def test_a_run_goes_on_with_the_agents_that_are_left_and_with_one_more(tmp_path: Path) -> None:
    """Elastic, by c10d's rendezvous: one of two agents is lost with its rank; the other goes on alone, from the last save.
    Another agent joins, and both go on. Losses are those of a run that nothing happened to."""
    conf = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    where = [
        "--nnodes",
        "1:2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{free_port()}",
        "--rdzv-id",
        "run",
    ]
    where += ["--rdzv-conf", conf, "--max-restarts", "3", "--local-addr", "127.0.0.1", "--monitor-interval", "0.2"]
    kills, running = 200, [agent(tmp_path, 0, 200, *where)]

    def saves(ranks: int, more: int, after: int) -> Callable[[], bool]:
        """Whether a start of so many ranks, of those after so many, has saved."""
        return lambda: (
            any(e["ranks"] == ranks for e in events(tmp_path, "started")[after:])
            and (len(events(tmp_path, "saved")) >= more)
        )

    try:
        until(lambda: len(events(tmp_path, "here")) >= 1, 120, running, tmp_path)  # it has the store
        running.append(agent(tmp_path, 1, kills, *where))
        until(saves(2, 1, 0), 120, running, tmp_path)
        until(saves(2, len(events(tmp_path, "saved")) + 2, 0), 120, running, tmp_path)
        begun = len(events(tmp_path, "started"))
        (lost,) = {e["pid"] for e in events(tmp_path, "here") if e["agent"] == running[1].pid}
        os.kill(running[1].pid, signal.SIGKILL)
        os.kill(lost, signal.SIGKILL)
        running.pop().wait(10)
        until(saves(1, len(events(tmp_path, "saved")) + 3, begun), 120, running, tmp_path)
        begun = len(events(tmp_path, "started"))
        running.append(agent(tmp_path, 2, kills, *where))
        until(saves(2, len(events(tmp_path, "saved")) + 2, begun), 120, running, tmp_path)
        steps = events(tmp_path, "saved")[-1]["step"] + 4
        (tmp_path / "run" / "new").write_text(str(steps))
        (tmp_path / "run" / "new").rename(tmp_path / "run" / "until")
        assert [one.wait(120) for one in running] == [0, 0], (tmp_path / "out0").read_text()[-3000:]
    finally:
        for one in running:
            one.kill()
    texts = [(tmp_path / f"out{node}").read_text() for node in (0, 2)]
    losses, _ = reported(next(text for text in texts if "losses" in text))
    assert {e["ranks"] for e in events(tmp_path, "started")} == {1, 2} and len(losses) == steps
    assert losses == pytest.approx(undisturbed(steps), rel=1e-10) and len({*losses}) == len(losses)
