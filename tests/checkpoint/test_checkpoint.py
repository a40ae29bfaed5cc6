"""Covers: checkpoint files of one process: what they hold, damage, crashes, misfits, plain data, pickles."""

from __future__ import annotations

import builtins
import json
import os
import pickle
import re
import shutil
import threading
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import megafx
from megafx.checkpoint import folder as checkpoint_folder
from megafx.checkpoint.state import decode, encode
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
