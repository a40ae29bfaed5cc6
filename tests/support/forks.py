"""Scripts in processes of their own that begin with megafx imported, and with one model compiled: 5 s of CPU less for each.

Run as a script, this file is a server: it imports, then forks a process for each order that it reads. Servers of one kind
differ in what strings hash to, as processes do, so that ranks of different servers walk through sets in different orders.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDERS = [str(HERE), str(HERE / "small_models"), *(str(HERE.parent / name) for name in ("models", "kernels"))]


@dataclass(frozen=True)
class Order:
    """One process: `python <script> <arguments>`. log: the file that its two streams go to."""

    script: str
    arguments: list[str]
    environment: dict[str, str]
    log: str


def path_of(environment: dict[str, str]) -> str:
    """PYTHONPATH with what scripts of tests share."""
    return os.pathsep.join(filter(None, [*FOLDERS, environment.get("PYTHONPATH")]))


def run(
    orders: Sequence[Order], timeout: float, imports: tuple[str, ...], environment: dict[str, str], servers: int = 1
) -> list[int]:
    """Exit status of each, minus the signal that ended it; those that run longer than `timeout` seconds are killed.

    imports, environment: of the servers, which take the orders in turn.
    """
    same = {k: v for k, v in environment.items() if not k.startswith("PYTEST_")}  # which say what test runs
    kind = imports, tuple(sorted({**same, "PYTHONPATH": path_of(environment)}.items()))
    asked = []
    for number in range(min(servers, len(orders))):
        process = _server(*kind, number)
        line = json.dumps({"orders": [asdict(order) for order in orders[number::servers]], "timeout": timeout})
        print(line, file=process.stdin, flush=True)
        asked.append((number, process))
    codes = [0] * len(orders)
    for number, process in asked:
        codes[number::servers] = json.loads(process.stdout.readline())
    return codes


@functools.cache
def _server(imports: tuple[str, ...], environment: tuple[tuple[str, str], ...], number: int) -> Any:
    command = [sys.executable, __file__, *imports]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=dict(environment), **pipes)


# -- the server


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _compile_one_model() -> None:
    import torch

    import megafx

    with torch.random.fork_rng():
        model = megafx.parallelize(torch.nn.Linear(3, 5), megafx.Config(tensor_model_parallel_size=1))
        model(torch.ones(2, 3)).sum().backward()


def _serve() -> Order | None:
    """Answers orders until there are no more. In a process that runs one: that order."""
    for _ in range(50):  # a thread that was joined is one of the system's for a moment more
        if _is_alone():
            break
        time.sleep(0.02)
    for line in sys.stdin:
        asked = json.loads(line)
        end, codes, running = time.monotonic() + asked["timeout"], {}, {}
        for i, each in enumerate(asked["orders"]):
            order = Order(**each)
            if (pid := os.fork() if _is_alone() else _spawned(order)) == 0:
                return order
            running[pid] = i
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
                continue
            time.sleep(0.02)
            if time.monotonic() > end:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
        print(json.dumps([codes[i] for i in sorted(codes)]), flush=True)
    return None


def _is_alone() -> bool:
    """True if this process has one thread. A fork of more hangs in locks that the others hold; an image may start some."""
    return sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1


def _spawned(order: Order) -> int:
    """The process that runs it, with nothing of this one."""
    log = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    streams = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, order.log, log, 0o666),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    command = [sys.executable, order.script, *order.arguments]
    return os.posix_spawn(sys.executable, command, order.environment, file_actions=streams)


def _become(order: Order) -> None:
    """This process's streams, environment and arguments are those of the order, its draws its own."""
    _end_with_parent()
    log, nothing = os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), os.open(os.devnull, os.O_RDONLY)
    for stream, file in ((0, nothing), (1, log), (2, log)):
        os.dup2(file, stream)
    os.environ.clear()
    os.environ.update(order.environment)
    sys.argv = [order.script, *order.arguments]
    sys.path[:0] = [str(Path(order.script).parent), *order.environment.get("PYTHONPATH", "").split(os.pathsep)]
    random.seed()


def main() -> None:
    _end_with_parent()
    for name in sys.argv[1:]:
        importlib.import_module(name)
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # else CUDA would start, which cannot be forked
        _compile_one_model()
    order = _serve()
    if order is not None:
        _become(order)
        runpy.run_path(order.script, run_name="__main__")


if __name__ == "__main__":
    main()
