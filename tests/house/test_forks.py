"""Covers: support/forks.py. Processes of a server end, print and see what those of `python SCRIPT` would."""

from __future__ import annotations

import os
from pathlib import Path

import forks
import pytest

THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""
SCRIPT = """
import os, pickle, signal, sys, time
class Own: pass
print(*sys.argv[1:], os.environ["MINE"], __name__, type(pickle.loads(pickle.dumps(Own()))).__name__, hash("a name"), flush=True)
if sys.argv[1] == "raises":
    raise ValueError("so it is")
if sys.argv[1] == "exits":
    sys.exit(3)
if sys.argv[1] == "dies":
    os.kill(os.getpid(), signal.SIGTERM)
if sys.argv[1] == "waits":
    time.sleep(60)
"""


@pytest.mark.parametrize("module", ["json", "starts_a_thread"], ids=["forked", "spawned"])
def test_statuses_streams_and_environments(tmp_path: Path, module: str) -> None:
    """A server that has threads starts processes that share nothing with it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "starts_a_thread.py").write_text(THREAD)
    names = ["ends", "raises", "exits", "dies", "waits", "ends"]
    logs = [tmp_path / f"{i}.log" for i in range(len(names))]
    orders = [
        forks.Order(str(tmp_path / "script.py"), [name], {"MINE": f"own{i}"}, str(logs[i]))
        for i, name in enumerate(names)
    ]
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    plain["PYTHONPATH"] = str(tmp_path)
    assert forks.run(orders, 2, (module,), plain, servers=2) == [0, 1, 3, -15, -9, 0]
    texts = [log.read_text() for log in logs]
    assert [text.split()[:4] for text in texts[:4]] == [
        [n, f"own{i}", "__main__", "Own"] for i, n in enumerate(names[:4])
    ]
    assert "ValueError: so it is" in texts[1] and "Traceback" in texts[1]
    assert len({text.split()[4] for text in (texts[0], texts[5])}) == 2, "servers have one hash seed"
