"""Covers: weights/save.py and the saving half of weights/names.py, in one process."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from weight_models import FACTORIES, Net, on_meta, tensors

import megafx
from megafx.errors import CheckpointError, UsageError
from megafx.units import bytes_of
from megafx.weights import save as save_weights
from megafx.weights.files import INDEX, SafetensorsFiles


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "neox", "mixtral"])
def test_from_pretrained_loads_what_was_saved(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FACTORIES[name]().to(torch.bfloat16)
    megafx.save_pretrained(model, tmp_path / "ours", max_shard_size="10KB")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    ours, theirs = (SafetensorsFiles(tmp_path / folder) for folder in ("ours", "theirs"))
    assert {n: (e.shape, e.dtype) for n, e in ours.entries.items()} == {
        n: (e.shape, e.dtype) for n, e in theirs.entries.items()
    }
    assert all(torch.equal(ours.whole(n), theirs.whole(n)) for n in ours.entries)
    again, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("ours", "theirs")]
    assert configs[0] == configs[1] and again.dtype == torch.bfloat16
    for key, value in tensors(model).items():
        assert torch.equal(tensors(again)[key].to(value.dtype), value), key
    index = json.loads((tmp_path / "ours" / INDEX).read_text())
    sizes = [sum(x.nbytes for x in load_file(f).values()) for f in (tmp_path / "ours").glob("*.safetensors")]
    assert index["metadata"]["total_size"] == sum(sizes)
    largest = max(x.nbytes for x in tensors(model).values())
    assert len(sizes) >= 2 and max(sizes) <= max(10_000, largest)


def test_any_model_is_read_back(tmp_path: Path) -> None:
    model = Net()
    megafx.save_pretrained(model, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors"]
    assert {*load_file(tmp_path / "model.safetensors")} == {"table.weight", "odd", "flag", "steps"}
    again = megafx.load_safetensors(on_meta(Net), tmp_path, factory=Net)
    assert all(torch.equal(x, tensors(again)[n]) for n, x in tensors(model).items())


def test_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    model = Net()
    megafx.save_pretrained(model, tmp_path, max_shard_size=40)
    assert (tmp_path / INDEX).exists() and len([*tmp_path.glob("model-*-of-00003.safetensors")]) == 3
    with torch.no_grad():
        model.odd.add_(1)
    megafx.save_pretrained(model, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors"]
    assert torch.equal(load_file(tmp_path / "model.safetensors")["odd"], model.odd)


def test_a_save_that_fails_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    megafx.save_pretrained(model, tmp_path, max_shard_size=40)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    write, calls = save_weights.safetensors_writer.write, []

    def full(path, entries, values, metadata):
        calls.append(path)
        if len(calls) == 2:
            next(values)
            raise OSError("no space left on device")
        return write(path, entries, values, metadata)

    monkeypatch.setattr(save_weights.safetensors_writer, "write", full)
    with torch.no_grad():
        model.table.weight.add_(1)
    with pytest.raises(CheckpointError, match="model-00002-of-00003.safetensors' cannot be written: no space left"):
        megafx.save_pretrained(model, tmp_path, max_shard_size=40)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


class Crash(BaseException):
    """Stands for the end of the process."""


def crashing(patch: pytest.MonkeyPatch, at: int) -> None:
    """Call number `at` that changes the disk, and all later ones, end the process instead."""
    calls: list[str] = []

    def wrap(name: str, function):
        def call(*args, **kwargs):
            if len(calls) >= at:
                raise Crash(name)
            calls.append(name)
            return function(*args, **kwargs)

        return call

    for place, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (save_weights.safetensors_writer, "write")):
        patch.setattr(place, name, wrap(name, getattr(place, name)))


@pytest.mark.parametrize("after", [40, "5GB"])
@pytest.mark.parametrize("before", [40, 100, "5GB"])
def test_a_crash_anywhere_in_a_save_leaves_one_model(before: int | str, after: int | str, tmp_path: Path) -> None:
    """The earlier one or the new one, for megafx and for transformers, which takes the single file, else the index."""
    first, second = Net(), Net()
    with torch.no_grad():
        for x in (*second.parameters(), second.odd):
            x.add_(1)
    wanted = [tensors(model) for model in (first, second)]
    megafx.save_pretrained(first, tmp_path / "start", max_shard_size=before)
    seen, at = set(), 0
    while True:
        folder = shutil.copytree(tmp_path / "start", tmp_path / str(at))
        with pytest.MonkeyPatch.context() as patch:
            crashing(patch, at)
            try:
                megafx.save_pretrained(second, folder, max_shard_size=after)
                break
            except Crash:
                pass
        assert (folder / "model.safetensors").exists() or (folder / INDEX).exists()
        found = tensors(megafx.load_safetensors(on_meta(Net), folder, factory=Net))
        same = [all(torch.equal(x, values[name]) for name, x in found.items()) for values in wanted]
        assert sum(same) == 1, f"crash at {at}: {sorted(p.name for p in folder.iterdir())}"
        seen.add(same.index(True))
        at += 1
    assert seen == {0, 1} and at > 5, "crashes were before and after the rename"


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="table.weight(.|\n)*have no values"):
        megafx.save_pretrained(on_meta(Net), tmp_path / "a")
    for wrong in ("5 parsecs", 0, "0GB", -3):
        with pytest.raises(UsageError, match="is no size"):
            megafx.save_pretrained(Net(), tmp_path / "a", max_shard_size=wrong)
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be made"):
        megafx.save_pretrained(Net(), tmp_path / "file")
    assert [bytes_of(size, "") for size in ("5GB", "2 MiB", 7, "12")] == [5 * 10**9, 2 * 2**20, 7, 12]


def test_files_that_were_loaded_keep_their_names(tmp_path: Path) -> None:
    """A base model's files load into a model with a head; what was renamed on the way goes back."""
    wanted = FACTORIES["mixtral"]()
    wanted.save_pretrained(tmp_path / "a")
    model = megafx.load_safetensors(on_meta(FACTORIES["mixtral"]), tmp_path / "a")
    megafx.save_pretrained(model, tmp_path / "b")
    a, b = (SafetensorsFiles(tmp_path / folder) for folder in ("a", "b"))
    assert a.entries.keys() == b.entries.keys() and "model.layers.0.block_sparse_moe.experts.0.w1.weight" in b.entries
    assert all(torch.equal(a.whole(n), b.whole(n)) for n in a.entries)
