"""Covers: megafx/distributed/mesh.py. Scripts that make no process group, as README's quick start, under torchrun."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megafx.planner.cost import library_seconds
from megafx.planner.hardware import Hardware

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
import torch, megafx
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
model = megafx.parallelize(model, {config}example_inputs=(torch.randn(2, 8),))
print("ranks", model.megafx.t, "of", 1 if model.megafx.everyone is None else model.megafx.everyone.size(), flush=True)
"""


def torchrun(tmp_path: Path, script: str) -> str:
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    plain = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(tmp_path / "script.py")], env=plain, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.dist
def test_the_quick_start_of_the_readme_trains_one_model(tmp_path: Path) -> None:
    script = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    # One write: what a buffer of several KB holds, ranks write in pieces, between which come those of others.
    script += '\nimport os, sys\nsys.stdout.flush()\nos.write(1, f"ranks {model.megafx.t}\\n".encode())\n'
    text = torchrun(tmp_path, script)
    assert text.count("ranks 2") == 2
    assert text.count("megafx: made the process group of 2 ranks (gloo)") == 1


TWO_HOSTS = """
import os, socket
socket.gethostname = lambda: "host" + os.environ["GROUP_RANK"]  # what megafx knows of hosts
import torch, torch.nn.functional as F, megafx
rank, t = int(os.environ["RANK"]), int(os.environ["TP"])
def made():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.GELU(), torch.nn.Linear(24, 4)).double()
x, y = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).double(), torch.arange(8) % 4
config = megafx.Config(tensor_model_parallel_size=t, data_parallel_size=4 // t, data_parallel="fsdp")
eager, model = made(), megafx.parallelize(made(), config)
rows = slice(8 // (4 // t) * (rank // t), 8 // (4 // t) * (rank // t + 1))
for net, part in ((eager, slice(0, 8)), (model, rows)):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        F.cross_entropy(net(x[part]), y[part]).backward()
        optimizer.step(), optimizer.zero_grad()
found = megafx.full_state_dict(model)
assert all(torch.allclose(found[n], p, rtol=1e-10, atol=1e-12) for n, p in eager.state_dict().items())
megafx.save_checkpoint("saved", model, optimizer, step=2)
print(f"rank {rank} on {socket.gethostname()}: equal", flush=True)
"""


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("t", [2, 4])
def test_two_hosts(tmp_path: Path, t: int) -> None:
    """docs/clusters.md: an agent for each host. t=2: tensor-parallel ranks on one host; t=4: on both."""
    texts = two_agents(tmp_path, TWO_HOSTS, TP=str(t))
    for host in (0, 1):
        assert "".join(texts).count(f"on host{host}: equal") == 2


def two_agents(
    tmp_path: Path, script: str, each: tuple[int, int] = (2, 2), code: int = 0, **variables: str
) -> list[str]:
    """What two torchrun agents with so many ranks print, each a host."""
    (tmp_path / "script.py").write_text(script)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job"]
    launch = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node"]
    plain = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agents = [subprocess.Popen([*launch, str(n), "script.py"], cwd=tmp_path, env=plain, **pipes) for n in each]
    texts = [agent.communicate(timeout=280)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [code, code], "".join(texts)
    return texts


PROFILE = """
import megafx, megafx.measure as measure
measure.MATMUL = measure.COPY_BYTES = {"cpu": 64}
measure.REDUCE_BYTES, measure.REPEATS = {"cpu": 2**16}, 3
print(megafx.profile_hardware("mine.yaml", dtypes=["float32"]), flush=True)
"""


@pytest.mark.dist
@pytest.mark.slow
def test_hosts_measure_the_link_inside_of_them_and_the_network_between_them(tmp_path: Path) -> None:
    two_agents(tmp_path, PROFILE)
    found = Hardware.load(tmp_path / "mine.yaml")
    assert (found.gpus_per_host, {*found.collectives["all_gather"]}) == (2, {2}), "of the two ranks of one host"
    assert found.network_bytes_per_second > 0 and found.network_seconds >= 0
    assert found.source.startswith("measured on 4x CPU of 2 hosts")
    assert found.hosts(4) == 2 and library_seconds("all_gather", 1e9, found, 4) > 0


@pytest.mark.dist
@pytest.mark.slow
def test_hosts_of_different_sizes_are_not_measured(tmp_path: Path) -> None:
    texts = two_agents(tmp_path, PROFILE, (2, 1), code=1)
    assert "UsageError: the 3 ranks are not shared evenly by their hosts, which have" in "".join(texts)


@pytest.mark.dist
@pytest.mark.slow
def test_the_loop_of_the_docs_resumes_exactly_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "loop.md").read_text()
    script = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    torchrun(tmp_path, script)
    assert (tmp_path / "runs" / "net" / "step_00000008").is_dir()
