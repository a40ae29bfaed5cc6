"""Covers: checkpoint files of one process: what they hold, damage, crashes, misfits, plain data, pickles."""

from __future__ import annotations

import builtins
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import megafx
from megafx.checkpoint import folder as checkpoint_folder
from megafx.checkpoint.state import decode, encode, generators_of
from megafx.checkpoint.storage import FolderReader
from megafx.errors import CheckpointError, UsageError
from megafx.weights import files as safetensors_writer


class Net(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 5)
        self.up = nn.Linear(5, width)
        self.norm = nn.BatchNorm1d(width)
        self.down = nn.Linear(width, 5)
        self.head = nn.Linear(5, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.norm(self.up(self.embed(ids)))))


def trained(seed: int = 0, steps: int = 2, **options) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    for _ in range(steps):
        model(torch.randint(0, 19, (6,))).square().mean().backward()
        optimizer.step()
    return model, optimizer


def listed(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if name != checkpoint_folder.OWNER)


def same(a: nn.Module, b: nn.Module) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return list(mine) == list(theirs) and all(torch.equal(mine[n], theirs[n]) for n in mine)


# -- what is saved


def test_a_run_goes_on(tmp_path: Path) -> None:
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    torch.manual_seed(5)
    path = megafx.save_checkpoint(
        tmp_path,
        model,
        optimizer,
        step=7,
        extra={"scheduler": scheduler, "data": {"epoch": 1, "order": torch.arange(4)}},
    )
    drawn = torch.rand(3)
    assert path == tmp_path / "step_00000007" and sorted(os.listdir(path)) == [
        "metadata.json",
        "rank_00000.safetensors",
    ]
    other, theirs = trained(seed=1, steps=0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(theirs, 0.2, total_steps=20)
    loaded = megafx.load_checkpoint(tmp_path, other, theirs, extra={"scheduler": schedule})
    assert loaded.path == path and loaded.step == 7 and not loaded.skipped
    assert loaded.extra.keys() == {"data"} and loaded.extra["data"]["epoch"] == 1
    assert torch.equal(loaded.extra["data"]["order"], torch.arange(4))
    assert same(model, other) and other.head.weight is other.embed.weight
    assert torch.equal(torch.rand(3), drawn), "torch's generator"
    assert schedule.state_dict() == scheduler.state_dict()
    mine, state = optimizer.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == state["param_groups"]
    for index, kept in mine["state"].items():
        assert all(torch.equal(v, state["state"][index][k]) for k, v in kept.items())


@pytest.mark.parametrize(
    "kind, options",
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_optimizers_and_groups(kind, options, tmp_path: Path) -> None:
    def make(model: Net) -> torch.optim.Optimizer:
        groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.2}]
        return kind([*groups, {"params": [p for p in model.parameters() if p.dim() < 2]}], lr=0.01, **options)

    def step(model: Net, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.arange(6)).square().mean().backward()
        optimizer.step()

    model, other = Net(), Net()
    optimizer, theirs = make(model), make(other)
    step(model, optimizer)
    megafx.save_checkpoint(tmp_path, model, optimizer, step=1)
    megafx.load_checkpoint(tmp_path, other, theirs)
    for _ in range(3):
        step(model, optimizer)
        step(other, theirs)
    assert same(model, other)
    assert theirs.param_groups[0]["weight_decay"] == 0.2 and len(theirs.param_groups[0]["params"]) == 3


def test_several_optimizers_and_dtypes(tmp_path: Path) -> None:
    model = Net().to(torch.bfloat16)
    halves = [list(model.up.parameters()), list(model.down.parameters())]
    optimizers = [torch.optim.SGD(p, lr=0.1, momentum=0.9) for p in halves]
    model(torch.arange(6)).float().square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    megafx.save_checkpoint(tmp_path, model, optimizers, step=0)
    other = Net().to(torch.bfloat16)
    theirs = [torch.optim.SGD(p, lr=1.0, momentum=0.9) for p in (other.up.parameters(), other.down.parameters())]
    megafx.load_checkpoint(tmp_path, other, theirs)
    assert same(model, other) and theirs[1].param_groups[0]["lr"] == 0.1
    for a, b in zip(optimizers, theirs, strict=True):
        mine, found = a.state_dict()["state"], b.state_dict()["state"]
        assert mine.keys() == found.keys() and mine
        assert all(torch.equal(mine[i]["momentum_buffer"], found[i]["momentum_buffer"]) for i in mine)


def test_a_model_on_the_meta_device_is_filled(tmp_path: Path) -> None:
    model, optimizer = trained()
    megafx.save_checkpoint(tmp_path, model, optimizer, step=1)
    with torch.device("meta"):
        other = Net()
        other.head.weight = other.embed.weight
    theirs = torch.optim.AdamW(other.parameters())
    with pytest.raises(UsageError, match="is on the meta device: it has no values to save"):
        megafx.save_checkpoint(tmp_path / "none", other, step=1)
    megafx.load_checkpoint(tmp_path, other, theirs)
    assert same(model, other) and other.head.weight is other.embed.weight
    assert {id(p) for p in theirs.state} == {id(p) for p in other.parameters()}
    assert torch.equal(theirs.state[other.up.weight]["exp_avg"], optimizer.state[model.up.weight]["exp_avg"])


def test_data_are_safetensors_and_metadata_json(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = megafx.save_checkpoint(tmp_path, model, optimizer, step=1)
    tensors = load_file(path / "rank_00000.safetensors")
    assert torch.equal(tensors["model.up.weight"], model.up.weight)
    assert "model.head.weight" not in tensors, "tied tensors are there once"
    assert torch.equal(tensors["optimizer.state.up.bias.exp_avg"], optimizer.state[model.up.bias]["exp_avg"])
    content = json.loads((path / "metadata.json").read_text())["content"]
    assert content["step"] == 1 and content["tensors"]["model.up.weight"]["shape"] == [7, 5]
    assert content["files"]["rank_00000.safetensors"][0] == (path / "rank_00000.safetensors").stat().st_size


@pytest.mark.parametrize("dtype", safetensors_writer.DTYPES)
def test_every_dtype_is_written_as_the_library_reads_it(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.arange(12).reshape(3, 4).to(dtype)
    values = {"a": value, "b": value[0, 0], "none": value[:0], "turned": value.t()}
    entries = [(name, v.dtype, v.shape) for name, v in values.items()]
    written = safetensors_writer.write(tmp_path / "f", entries, values.values())
    found = load_file(tmp_path / "f")
    assert all(
        found[n].dtype == dtype
        and torch.equal(
            found[n].view(torch.uint8) if v.dim() else found[n], v.contiguous().view(torch.uint8) if v.dim() else v
        )
        for n, v in values.items()
    )
    assert written.bytes == (tmp_path / "f").stat().st_size
    assert written.digest == safetensors_writer.digest_of(tmp_path / "f")


def test_plain_data() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {
        "a": (1, 2.5, [True, None, "x"]),
        3: float("inf"),
        "$odd": torch.bfloat16,
        "counts": Counter({4: 2}),
        "order": OrderedDict(b=1, a=2),
        "t": {"a.b": torch.zeros(1), "a": {"b": torch.ones(2)}},
    }
    data = json.loads(json.dumps(encode(value, "x", tensors)))
    assert len(tensors) == 2
    found = decode(data, tensors.__getitem__)
    assert found.pop("t")["a"]["b"].shape == (2,) and value.pop("t")
    assert found == value and type(found["counts"]) is Counter and type(found["order"]) is OrderedDict
    with pytest.raises(CheckpointError, match=r"x\.f\.0 is a builtins.builtin_function_or_method"):
        encode({"f": [print]}, "x", {})


# -- which checkpoint


def test_the_newest_valid_one_is_loaded_and_damaged_ones_are_named(tmp_path: Path) -> None:
    models = {}
    for step in (1, 2, 3, 4, 5):
        models[step], optimizer = trained(seed=step)
        megafx.save_checkpoint(tmp_path, models[step], optimizer, step=step)
    assert megafx.latest_checkpoint(tmp_path) == tmp_path / "step_00000005"
    file = tmp_path / "step_00000005" / "rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4  # one bit
    file.write_bytes(data)
    cut = tmp_path / "step_00000004" / "rank_00000.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    text = tmp_path / "step_00000003" / "metadata.json"
    text.write_text(text.read_text().replace("0.01", "0.02"))
    (tmp_path / "step_00000002" / "metadata.json").unlink()
    model, optimizer = trained(seed=9)
    with pytest.warns(UserWarning, match="step_00000005 is damaged: rank_00000.safetensors does not hold"):
        loaded = megafx.load_checkpoint(tmp_path, model, optimizer)
    assert loaded.step == 1 and same(model, models[1])
    reasons = [loaded.skipped[tmp_path / f"step_0000000{n}"] for n in (5, 4, 3, 2)]
    wanted = ["digest is another", r"has \d+ bytes, \d+ were written", "not as it was written", "save was not finished"]
    assert all(re.search(text, reason) for text, reason in zip(wanted, reasons, strict=True)), reasons
    with pytest.raises(
        CheckpointError, match=r"no valid checkpoint in .*step_00000005: .* does not hold what was written"
    ):
        megafx.load_checkpoint(tmp_path / "step_00000005", model, optimizer)
    shutil.rmtree(tmp_path / "step_00000001")
    with pytest.raises(CheckpointError, match="no valid checkpoint in"):
        megafx.load_checkpoint(tmp_path, model, optimizer)
    assert megafx.latest_checkpoint(tmp_path) is None


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    model, optimizer = trained()
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        megafx.load_checkpoint(tmp_path / "none", model, optimizer)
    assert megafx.load_checkpoint(tmp_path / "none", model, optimizer, missing_ok=True) is None
    assert megafx.latest_checkpoint(tmp_path / "none") is None


def test_keep_and_saving_a_step_again(tmp_path: Path) -> None:
    model, optimizer = trained()
    for step in (1, 2, 3, 4):
        megafx.save_checkpoint(tmp_path, model, optimizer, step=step, keep=2)
    assert listed(tmp_path) == ["step_00000003", "step_00000004"]
    other, theirs = trained(seed=3)
    path = megafx.save_checkpoint(tmp_path, other, theirs, step=4)
    assert path.name == "step_00000004-1" and listed(tmp_path) == ["step_00000003", "step_00000004-1"]
    assert megafx.load_checkpoint(tmp_path, model, optimizer).path == path and same(model, other)


def test_going_back_is_gone_on_with(tmp_path: Path) -> None:
    """A load of an older step, by name: what is saved then is newer than all that the run had before."""
    for step in (10, 20, 30):
        megafx.save_checkpoint(tmp_path, filled(step), step=step)
    model = filled(0)
    assert megafx.load_checkpoint(tmp_path / "step_00000010", model).step == 10
    for step in (15, 18):
        megafx.save_checkpoint(tmp_path, filled(step), step=step, keep=3)
    assert listed(tmp_path) == ["step_00000015-1", "step_00000018-1", "step_00000030"]
    assert megafx.load_checkpoint(tmp_path, model).step == 18 and same(model, filled(18))
    assert megafx.save_checkpoint(tmp_path, model, step=12, keep=1).name == "step_00000012-2"
    assert listed(tmp_path) == ["step_00000012-2"]


def filled(value: float) -> Net:
    model = Net()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    return model


def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = megafx.save_checkpoint(tmp_path / "run", Net(), step=1)
    for wrong in ({"step": 10**200}, {"step": -1}, {"step": True}, {"step": 1.0}, {"step": 2, "keep": 1.5}):
        with pytest.raises(UsageError, match="step is an int of 0 to"):
            megafx.save_checkpoint(tmp_path / "run", Net(), **wrong)
    for keep in (0, "2", True):
        with pytest.raises(UsageError, match="keep an int of at least 1 or None"):
            megafx.save_checkpoint(tmp_path / "run", Net(), step=2, keep=keep)
    monkeypatch.chdir(path)
    for inside in (path, tmp_path / "step_00000007", "."):
        with pytest.raises(UsageError, match="is a checkpoint itself"):
            megafx.save_checkpoint(inside, Net(), step=2)
    assert listed(tmp_path / "run") == ["step_00000001"] and listed(tmp_path) == ["run"]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        megafx.load_checkpoint(tmp_path / "file", Net(), missing_ok=True)


def test_a_save_that_is_overtaken_as_it_begins_leaves_the_others_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, other = checkpoint_folder._claim, tmp_path / ".step_00000001.other-0.partial"

    def overtaken(root: Path) -> None:
        claim(root)
        (root / checkpoint_folder.OWNER).write_text(json.dumps({"host": "there", "process": 1, "id": "other"}))
        other.mkdir()

    monkeypatch.setattr(checkpoint_folder, "_claim", overtaken)
    checkpoint_folder.begin(tmp_path, 1)
    assert other.is_dir() and "taken over" in str(checkpoint_folder.taken_over(tmp_path))


def test_data_within_data_have_a_bound(tmp_path: Path) -> None:
    held: object = 1
    for _ in range(99):
        held = [held]
    path = megafx.save_checkpoint(tmp_path, Net(), step=1, extra={"deep": held})
    assert megafx.load_checkpoint(path, Net()).extra == {"deep": held}
    assert isinstance(held, list)
    held.append(held)
    with pytest.raises(CheckpointError, match=r"extra\.deep\.1\.0.* is more than 100 lists and dicts deep"):
        megafx.save_checkpoint(tmp_path, Net(), step=2, extra={"deep": held})
    assert listed(tmp_path) == ["step_00000001"]


def test_links_among_the_steps(tmp_path: Path) -> None:
    """A link that is pruned goes; what it points to stays; a link in the way of a save does not stop it."""
    elsewhere = megafx.save_checkpoint(tmp_path / "other", Net(), step=1)
    root = tmp_path / "run"
    root.mkdir()
    (root / "step_00000001").symlink_to(elsewhere)
    (root / ".step_00000002.partial").symlink_to(tmp_path)
    assert megafx.load_checkpoint(root, Net()).step == 1
    megafx.save_checkpoint(root, Net(), step=2, keep=1)
    assert listed(root) == ["step_00000002"] and elsewhere.is_dir() and (tmp_path / "other").is_dir()


def test_generators_of_other_numbers_of_replicas() -> None:
    """Each goes on with its own; where there are more or fewer, all but the first draw apart, as rank 0's state says."""
    cpu = torch.device("cpu")
    states = [torch.Generator().manual_seed(i).get_state() for i in range(3)]
    saved = {"cpu": states[0], "replicas": [{"cpu": s} for s in states[1:]]}
    assert all(torch.equal(generators_of(saved, i, 3, cpu)["cpu"], states[i]) for i in range(3))
    more = [generators_of(saved, i, 4, cpu)["cpu"] for i in range(4)]
    assert torch.equal(more[0], states[0]) and len({bytes(x.numpy()) for x in more}) == 4
    assert all(torch.equal(generators_of(saved, i, 4, cpu)["cpu"], more[i]) for i in range(4))
    assert all(torch.equal(generators_of({"cpu": states[0]}, i, 2, cpu)["cpu"], states[0]) for i in range(2))


def test_another_job_takes_the_folder_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last that came saves; the other is refused, removes nothing, and can take over by a load."""

    def other_job(step: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_folder, "_me", lambda process: {"host": "h2", "process": 77, "id": "b"})
            patch.setattr(checkpoint_folder, "_claimed", {})
            megafx.save_checkpoint(tmp_path, filled(step), step=step)

    megafx.save_checkpoint(tmp_path, filled(1), step=1)
    other_job(2)
    with pytest.raises(CheckpointError, match="has been taken over: process 77 on h2 saves there now"):
        megafx.save_checkpoint(tmp_path, filled(3), step=3, keep=1)
    assert listed(tmp_path) == ["step_00000001", "step_00000002"]
    model = Net()
    megafx.load_checkpoint(tmp_path, model)
    assert same(model, filled(2))
    megafx.save_checkpoint(tmp_path, filled(3), step=3, keep=1)
    assert listed(tmp_path) == ["step_00000003"]


def test_a_folder_that_is_taken_over_during_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the new owner's is removed, and the text says who it is."""
    write = safetensors_writer.write

    def slow(path, *rest):
        written = write(path, *rest)
        (tmp_path / checkpoint_folder.OWNER).write_text('{"host": "h2", "process": 77, "id": "b"}')
        return written

    megafx.save_checkpoint(tmp_path, filled(1), step=1)
    monkeypatch.setattr(safetensors_writer, "write", slow)
    with pytest.raises(CheckpointError, match="process 77 on h2 saves there now"):
        megafx.save_checkpoint(tmp_path, filled(2), step=2, keep=1)
    assert listed(tmp_path) == ["step_00000001"]


def test_a_checkpoint_that_goes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer with keep=1 removes it: the load takes the newer one; a failure changes nothing."""
    for step in (1, 2):
        megafx.save_checkpoint(tmp_path / str(step), filled(step), step=step)
    (tmp_path / "run").mkdir()
    os.rename(tmp_path / "1" / "step_00000001", tmp_path / "run" / "step_00000001")
    read, reads = FolderReader.read_data, []

    def goes(self, *rest):
        if not reads:
            os.rename(tmp_path / "2" / "step_00000002", tmp_path / "run" / "step_00000002")
            shutil.rmtree(self.folder)
        reads.append(self.folder.name)
        return read(self, *rest)

    monkeypatch.setattr(FolderReader, "read_data", goes)
    model = filled(9)
    assert megafx.load_checkpoint(tmp_path / "run", model).step == 2 and same(model, filled(2))
    assert reads == ["step_00000001", "step_00000002"]
    reads.clear()
    monkeypatch.setattr(FolderReader, "read_data", lambda self, *rest: shutil.rmtree(self.folder) or read(self, *rest))
    model = filled(9)
    with pytest.raises(CheckpointError, match="step_00000002 could not be loaded: .*No such file"):
        megafx.load_checkpoint(tmp_path / "run" / "step_00000002", model)
    assert same(model, filled(9))


class Crash(BaseException):
    """Stands for the end of the process."""


def crashing(monkeypatch: pytest.MonkeyPatch, at: int) -> list[str]:
    """Every call that changes the disk is counted; number `at` ends the process instead. Returns the calls so far."""
    calls: list[str] = []

    def wrap(name: str, function):
        def call(*args, **kwargs):
            if name == "open" and (len(args) < 2 or "w" not in args[1]):
                return function(*args, **kwargs)
            if len(calls) >= at:
                raise Crash(name)  # later calls too: nothing runs after the end
            calls.append(name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(builtins, "open", wrap("open", open))
    for module, name in (
        (os, "rename"),
        (os, "fsync"),
        (os, "mkdir"),
        (os, "rmdir"),
        (os, "unlink"),
        (os, "replace"),
        (shutil, "rmtree"),
    ):
        monkeypatch.setattr(module, name, wrap(name, getattr(module, name)))
    monkeypatch.setattr(safetensors_writer, "_put", wrap("_put", safetensors_writer._put))
    return calls


def test_a_crash_anywhere_in_a_save_loses_no_checkpoint(tmp_path: Path) -> None:
    """Step 3 is saved twice and two are kept, so that every kind of removal is among the places."""
    first, optimizer = trained(seed=1, steps=1)
    second, _ = trained(seed=2, steps=1)
    seen, at = set(), 0
    for step in (1, 2, 3):
        megafx.save_checkpoint(tmp_path / "start", first, optimizer, step=step)
    while True:
        root = shutil.copytree(tmp_path / "start", tmp_path / str(at))
        with pytest.MonkeyPatch.context() as patch:
            calls = crashing(patch, at)
            try:
                megafx.save_checkpoint(root, second, optimizer_of(second), step=3, keep=2)
                finished = True
            except Crash:
                finished = False
        if finished:
            break
        loaded, _ = trained(seed=4)
        found = megafx.load_checkpoint(root, loaded)
        assert found.step == 3 and not found.skipped, f"crash at {at}: {calls}"
        assert same(loaded, first) or same(loaded, second)
        seen.add(same(loaded, second))
        megafx.save_checkpoint(root, second, step=4)  # and the next save finds nothing in its way
        assert not [p for p in os.listdir(root) if p.startswith(".step")]
        at += 1
    assert seen == {False, True} and at > 20, "the crashes were before and after the rename"


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# -- what does not fit


def test_what_does_not_fit_is_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    model, optimizer = trained()
    megafx.save_checkpoint(tmp_path, model, optimizer, step=1)
    other = Net(width=6)
    other.more = nn.Linear(2, 2)
    del other.norm
    before = {n: v.clone() for n, v in other.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        megafx.load_checkpoint(tmp_path, other)
    text = str(error.value)
    for line in (
        "'up.weight' is (7, 5) torch.float32 there, (6, 5) torch.float32 in the model",
        "'more.bias' is not in checkpoint",
        "'norm.running_mean' is not in the model",
    ):
        assert line in text, text
    assert all(torch.equal(v, before[n]) for n, v in other.state_dict().items())
    with pytest.raises(CheckpointError, match=r"torch.float32 there, \(19, 5\) torch.float64"):
        megafx.load_checkpoint(tmp_path, Net().double())
    untied = Net()
    untied.head.weight = nn.Parameter(torch.zeros(19, 5))
    with pytest.raises(
        CheckpointError, match="'head.weight' and 'embed.weight' are one tensor there, and two in the model"
    ):
        megafx.load_checkpoint(tmp_path, untied)
    megafx.save_checkpoint(tmp_path / "untied", untied, step=1)
    with pytest.raises(CheckpointError, match="are two tensors there, and one in the model"):
        megafx.load_checkpoint(tmp_path / "untied", Net())


def test_other_optimizers_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    megafx.save_checkpoint(tmp_path, model, optimizer, step=1)
    with pytest.raises(CheckpointError, match="that this one has not, and lacks"):
        megafx.load_checkpoint(tmp_path, model, torch.optim.AdamW(model.up.parameters()))
    with pytest.raises(CheckpointError, match="otherwise grouped"):
        groups = [{"params": list(model.up.parameters())}]
        rest = [p for n, p in model.named_parameters() if not n.startswith("up.")]
        megafx.load_checkpoint(tmp_path, model, torch.optim.AdamW([*groups, {"params": rest}]))
    with pytest.raises(CheckpointError, match="it has 1 optimizers, 2 are to be loaded"):
        megafx.load_checkpoint(tmp_path, model, [optimizer, optimizer])
    with pytest.raises(CheckpointError, match="it has no extra 'scheduler'"):
        megafx.load_checkpoint(tmp_path, model, extra={"scheduler": optimizer})
    with pytest.raises(UsageError, match="holds 2 parameters that the model does not have"):
        megafx.save_checkpoint(tmp_path, model, torch.optim.AdamW(nn.Linear(2, 2).parameters()), step=2)


# -- in the background


def test_an_asynchronous_save_holds_the_values_of_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    wanted = {n: v.clone() for n, v in model.state_dict().items()}
    go = threading.Event()
    put = safetensors_writer._put
    monkeypatch.setattr(safetensors_writer, "_put", lambda *args: go.wait(20) and put(*args))
    saving = megafx.save_checkpoint(tmp_path, model, optimizer, step=1, asynchronous=True)
    assert not saving.done()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    go.set()
    assert saving.result(20) == tmp_path / "step_00000001"
    megafx.load_checkpoint(tmp_path, model)
    assert all(torch.equal(v, wanted[n]) for n, v in model.state_dict().items())


def test_an_asynchronous_save_that_failed_is_raised_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "commit", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        megafx.save_checkpoint(tmp_path, model, optimizer, step=1, asynchronous=True)
        with pytest.raises(CheckpointError, match=f"step 1 could not be saved in '{tmp_path}': OSError: disk full"):
            megafx.save_checkpoint(tmp_path, model, optimizer, step=2)
    assert megafx.save_checkpoint(tmp_path, model, optimizer, step=2).name == "step_00000002"


@pytest.mark.parametrize("how", ["result", "exception"])
def test_a_failed_save_whose_error_was_taken_is_not_raised_again(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "commit", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        saving = megafx.save_checkpoint(tmp_path, model, optimizer, step=1, asynchronous=True)
        if how == "exception":
            assert isinstance(saving.exception(20), CheckpointError)
        else:
            with pytest.raises(CheckpointError, match="disk full"):
                saving.result(20)
    assert megafx.save_checkpoint(tmp_path, model, optimizer, step=2).name == "step_00000002"


def test_a_background_save_goes_where_its_call_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    put = safetensors_writer._put
    monkeypatch.setattr(safetensors_writer, "_put", lambda *args: go.wait(20) and put(*args))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    saving = megafx.save_checkpoint("run", Net(), step=1, asynchronous=True)
    monkeypatch.chdir(tmp_path / "other")
    go.set()
    assert saving.result(20) == tmp_path / "run" / "step_00000001"


@pytest.mark.dist
@pytest.mark.parametrize("ending, code", [("", 1), ("sys.exit(0)", 1), ("print(saving.exception())", 0)])
def test_a_background_save_that_failed_is_told_at_the_end(ending: str, code: int, tmp_path: Path) -> None:
    """Unless somebody asked for its result."""
    script = f"""
import sys, torch, megafx
saving = megafx.save_checkpoint("/proc/none", torch.nn.Linear(2, 2), step=5, asynchronous=True)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == code, done
    told = "megafx: the checkpoint of step 5 was not saved" in done.stderr and "/proc/none" in done.stderr
    assert told == (code == 1)


# -- pickles (tests/checkpoint/test_torch_format.py reads those of torch)


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def test_pickles_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / ".metadata").write_bytes(pickle.dumps({"state": Bomb()}))
    with pytest.raises(CheckpointError, match=r"asks for (posix|nt)\.system, which metadata has no need of"):
        megafx.load_checkpoint(tmp_path / "bad", Net())
    assert not (tmp_path / "exploded").exists()
    (tmp_path / "bad" / ".metadata").write_bytes(pickle.dumps({"state": 1}))
    with pytest.raises(CheckpointError, match="is not the metadata of a checkpoint"):
        megafx.load_checkpoint(tmp_path / "bad", Net())
    (tmp_path / "bad" / ".metadata").write_bytes(b"\x80\x04nonsense")
    with pytest.raises(CheckpointError, match="is damaged"):
        megafx.load_checkpoint(tmp_path / "bad", Net())


def test_complex_parameters(tmp_path: Path) -> None:
    """safetensors has complex64; complex128 is refused by name."""

    class Filter(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, dtype=dtype))

    model = Filter(torch.complex64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.weight.abs().sum().backward()
    optimizer.step()
    wanted = model.weight.detach().clone()
    megafx.save_checkpoint(tmp_path, model, optimizer, step=1)
    with torch.no_grad():
        model.weight.zero_()
    megafx.load_checkpoint(tmp_path, model, optimizer)
    assert torch.equal(model.weight, wanted)
    with pytest.raises(CheckpointError, match="safetensors has no torch.complex128"):
        megafx.save_checkpoint(tmp_path / "other", Filter(torch.complex128), step=1)
