"""Attacks on files: kills in the middle of saves, two jobs in one folder, hostile files.

tests/checkpoint/test_attacks.py runs a few kills and trials, and all files. More of them, with figures:

    python tests/checkpoint/attacks.py --kills 100 --jobs 80 --files

Processes are forked from this one, which has torch loaded, so a trial takes as long as the saves in it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile_files
import torch
from hostile_files import LOADS, METADATA, PICKLES, WEIGHTS, Run, limited, net, same
from torch import nn

import megafx
from megafx.checkpoint.folder import OWNER
from megafx.errors import CheckpointError, MegafxError
from megafx.weights.files import INDEX, SINGLE


class Weights(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.full((64, 32), float(value)) for _ in range(8))

    def value(self) -> float | None:
        """What all elements are; None where they differ."""
        found = torch.cat([p.detach().flatten() for p in self.parts]).unique()
        return found.item() if len(found) == 1 else None


def forked(work: Callable[[], None]) -> int:
    """The process that does it and ends; what it raises makes its exit code 1."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


# -- a killed save_pretrained

FORMS = {"one file": "5GB", "8 files": 9_000, "4 files": 18_000}  # max_shard_size


def kill_a_save(folder: Path, before: str, after: str, delay: float) -> str:
    """Weights of 1 are there, a save of weights of 2 is killed after `delay` seconds: 'old' or 'new'."""
    model = Weights(1.0)
    megafx.save_pretrained(model, folder, max_shard_size=FORMS[before])
    second = Weights(2.0)
    process = forked(lambda: megafx.save_pretrained(second, folder, max_shard_size=FORMS[after]))
    time.sleep(delay)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    found = Weights(3.0)
    with limited():
        megafx.load_safetensors(found, folder)
    assert found.value() in (1.0, 2.0), f"mixed: {sorted(os.listdir(folder))}"
    # transformers takes the single file, else the index and nothing else
    assert (folder / SINGLE).exists() or (folder / INDEX).exists(), sorted(os.listdir(folder))
    result = "old" if found.value() == 1.0 else "new"
    megafx.save_pretrained(Weights(4.0), folder, max_shard_size=FORMS[after])
    megafx.load_safetensors(found, folder)
    assert found.value() == 4.0
    left = {name for name in os.listdir(folder) if name.startswith(".")}
    assert not left and len(os.listdir(folder)) == {"one file": 1, "8 files": 9, "4 files": 5}[after], os.listdir(
        folder
    )
    return result


def kills(count: int, root: Path, seed: int = 0) -> Counter[str]:
    draw, results, pairs = random.Random(seed), Counter[str](), [(a, b) for a in FORMS for b in FORMS]
    for i in range(count):
        before, after = pairs[i % len(pairs)]
        begin = time.monotonic()
        megafx.save_pretrained(Weights(0.0), root / "timed", max_shard_size=FORMS[after])
        longest = 1.5 * (time.monotonic() - begin) + 0.005  # a fork and a save
        results[kill_a_save(root / str(i), before, after, draw.uniform(0, longest))] += 1
    return results


# -- two jobs in one folder

MANY = 10**6  # steps of one job are fewer


def job(number: int, root: Path, returned: Path, steps: Callable[[], int]) -> None:
    """Save values MANY * number + step until it is killed or refused; each save that returned is a line of `returned`."""
    with open(returned, "a", buffering=1) as file:
        while True:
            step = steps()
            model = Weights(MANY * number + step)
            try:
                megafx.save_checkpoint(root, model, step=step, keep=1)
            except CheckpointError as error:
                file.write(f"refused: {error.found}\n")
                return
            file.write(f"saved {MANY * number + step}\n")


def two_jobs(root: Path, same_steps: bool, seconds: float) -> Counter[str]:
    """Two jobs save, both are killed: a valid checkpoint is there, whole and of one job, if any save has returned."""
    root.mkdir()
    processes = []
    for number in (1, 2):
        counter = iter(range(1, 10**6))
        steps = counter.__next__ if same_steps else (lambda c=counter, n=number: 2 * next(c) + n)
        processes.append(forked(lambda n=number, s=steps: job(n, root / "run", root / f"job{n}", s)))
    time.sleep(seconds)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        status = os.waitpid(process, 0)[1]
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    texts = [(root / f"job{n}").read_text() if (root / f"job{n}").exists() else "" for n in (1, 2)]
    saved = [line for text in texts for line in text.splitlines() if line.startswith("saved")]
    refused = [line for text in texts for line in text.splitlines() if line.startswith("refused")]
    assert all("taken over" in line or "another job saves" in line for line in refused), refused
    result = Counter(saves=len(saved), refused=len(refused))
    if saved:
        found = Weights(0.0)
        with limited(), warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is damaged either
            loaded = megafx.load_checkpoint(root / "run", found)
        value = found.value()
        assert loaded is not None and value is not None and value % MANY == loaded.step
        megafx.save_checkpoint(root / "run", found, step=loaded.step + 1, keep=1)
        listed = sorted(os.listdir(root / "run"))
        assert len(listed) == 2 and listed[0] == OWNER, listed
        result["valid"] = 1
    return result


def jobs(count: int, root: Path, seed: int = 0) -> Counter[str]:
    draw, results = random.Random(seed), Counter[str]()
    for i in range(count):
        results += two_jobs(root / str(i), i % 2 == 0, draw.uniform(0.05, 0.4))
    return results


def reader(root: Path, seconds: float) -> Counter[str]:
    """Loads while a trainer saves as fast as it can with keep=1: each is whole, or raises and changes nothing."""
    root.mkdir()
    counter = iter(range(1, MANY))
    process = forked(lambda: job(0, root / "run", root / "job", counter.__next__))
    results, model, end = Counter[str](), Weights(-1), time.monotonic() + seconds
    while time.monotonic() < end:
        before = model.value()
        try:
            with limited():
                loaded = megafx.load_checkpoint(root / "run", model, missing_ok=True)
            assert loaded is None or model.value() == loaded.step
            results["loads"] += loaded is not None
        except CheckpointError:
            assert model.value() == before
            results["refused"] += 1
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return results


# -- hostile files


def refused(load: Callable[[], Any], state: Callable[[], Any]) -> bool:
    """Whether it raises an error of megafx, in time and without a change. Nothing runs: no file 'ran' appears."""
    before = state()
    try:
        with limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load()
        return False
    except MegafxError:
        assert same(state(), before), "half-loaded"
        return True
    finally:
        assert not Path("ran").exists(), "code ran"


def weights(name: str, folder: Path) -> bool:
    WEIGHTS[name](folder)
    model = net(2)
    found = refused(
        lambda: megafx.load_safetensors(model, folder), lambda: {n: x.clone() for n, x in model.state_dict().items()}
    )
    assert found == (name not in LOADS), f"{name}: refused {found}"
    assert found or same(dict(model.state_dict()), dict(net(1).state_dict())), name
    return found


def metadata(name: str, folder: Path) -> bool:
    METADATA[name](Run(1).save(folder))
    run = Run(2)
    return refused(lambda: run.load(folder), run.state)


def pickles(name: str, folder: Path) -> bool:
    hostile_files.good_torch(Run(1), folder)
    PICKLES[name](folder)
    run = Run(2)
    exists = Path.exists
    try:
        return refused(lambda: megafx.load_checkpoint(folder, run.model, run.optimizer), run.state)
    finally:
        assert Path.exists is exists and Path("/").exists() is True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=0, help="of save_pretrained")
    parser.add_argument("--jobs", type=int, default=0, help="trials of two jobs in one folder, with keep=1")
    parser.add_argument("--files", action="store_true", help="all hostile files")
    parser.add_argument("--reader", type=float, default=0, help="seconds of loads beside saves with keep=1")
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads do not survive a fork
    warnings.filterwarnings("ignore", "torch.distributed is")
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        os.chdir(root)
        (root / "jobs").mkdir()
        if options.kills:
            print(
                f"{options.kills} kills of save_pretrained: {dict(kills(options.kills, root / 'kills'))}, mixed 0, lost 0"
            )
        if options.jobs:
            print(f"{options.jobs} trials of two jobs: {dict(jobs(options.jobs, root / 'jobs'))}, lost 0")
        if options.reader:
            print(f"loads beside saves: {dict(reader(root / 'reader', options.reader))}, half-loaded 0")
        kinds = {
            "safetensors": (WEIGHTS, weights),
            "metadata.json": (METADATA, metadata),
            ".metadata": (PICKLES, pickles),
        }
        for kind, (cases, attack) in kinds.items() if options.files else ():
            ends = collections.Counter(
                "refused" if attack(name, root / f"{kind}{i}") else "loaded rightly" for i, name in enumerate(cases)
            )
            print(f"{len(cases)} hostile files of {kind}: {dict(ends)}, half-loaded 0, hung 0, code run 0")


if __name__ == "__main__":
    main()
