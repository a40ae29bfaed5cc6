"""Covers: weights/files.py, weights/names.py, weights/load.py, weights/state.py, in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import zoo
from safetensors.torch import save_file
from torch import nn
from weight_models import FACTORIES, on_meta, parts_of, tensors

import megafx
from megafx.errors import CheckpointError, UsageError
from megafx.placements.tensors import shard_tensor
from megafx.placements.types import I
from megafx.weights import files as safetensors_files
from megafx.weights.files import INDEX, SafetensorsFiles
from megafx.weights.load import _read, check_fit, load_safetensors
from megafx.weights.names import find_sources

HUGGING_FACE = ("gpt2", "llama", "bert", "t5", "neox", "mixtral")


def saved(name: str, folder: Path) -> nn.Module:
    """A model whose weights (several files and an index) are in `folder`, as transformers writes them."""
    torch.manual_seed(1)
    model = FACTORIES[name]()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.3)
    model.save_pretrained(folder, max_shard_size="10KB")
    assert (folder / INDEX).is_file()
    return model


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_meta_model_becomes_the_saved_one(name: str, tmp_path: Path) -> None:
    wanted = saved(name, tmp_path)
    model = on_meta(FACTORIES[name])
    parameters = list(model.parameters())
    drawn = torch.get_rng_state()
    assert load_safetensors(model, tmp_path) is model
    assert torch.equal(torch.get_rng_state(), drawn)
    for key, value in tensors(wanted).items():  # buffers that no file has (inverse frequencies, positions) too
        assert torch.equal(tensors(model)[key], value), key
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


@pytest.mark.parametrize(
    "name, t", [("gpt2", 3), ("mixtral", 2), ("llama", 4), pytest.param("t5", 3, marks=pytest.mark.slow)]
)
def test_every_rank_reads_its_slices(name: str, t: int, tmp_path: Path) -> None:
    wanted = tensors(saved(name, tmp_path))
    model = on_meta(FACTORIES[name])
    inputs = {} if name not in zoo.ZOO else {"example_inputs": zoo.ZOO[name]()[1](2, 16)}
    planned = megafx.plan(model, megafx.Config(tensor_model_parallel_size=t, hardware="h100-nvlink"), **inputs).params
    assert sum(p.is_shard for p in planned.values()) > 3
    for rank in range(t):
        files = SafetensorsFiles(tmp_path)
        parts = [p for p in parts_of(model, planned, rank, t) if p.name in model.state_dict()]
        sources = find_sources(model, [n for p in parts for n in p.names], files.entries)
        assert check_fit(parts, sources, files) == set()
        _read(parts, sources, files)
        for part in parts:
            placement = next((planned[n] for n in part.names if n in planned), I)
            assert torch.equal(part.local, shard_tensor(wanted[part.name].detach(), placement, rank, t)), part.name


def test_blocks_of_a_tensor_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(37, 11, 3)
    save_file({"x": tensor, "scalar": torch.tensor(2.5), "none": torch.zeros(0, 3)}, tmp_path / "a.safetensors")
    monkeypatch.setattr(safetensors_files, "MAPPED", 500)
    files = SafetensorsFiles(tmp_path)
    for box in ((slice(0, 37), slice(0, 11), slice(0, 3)), (slice(5, 30), slice(2, 9), slice(1, 3))):
        made = torch.zeros([s.stop - s.start for s in box])
        pieces = 0
        for where, values in files.blocks("x", box):
            assert values.nbytes <= 500
            made[where], pieces = values, pieces + 1
        assert torch.equal(made, tensor[box]) and pieces >= 8
    assert files.whole("scalar") == 2.5 and files.whole("none").shape == (0, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 5)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("angles", torch.arange(3.0) / 7, persistent=False)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Without the tied tensor's other name, which safetensors would refuse."""
    return {n: x.clone() for n, x in model.state_dict().items() if n != "head.weight"}


def test_dtypes_are_converted_and_tied_tensors_need_one_name(tmp_path: Path) -> None:
    wanted = Net()
    wanted.steps += 3
    values = {n: x.double() if x.is_floating_point() else x.int() for n, x in state(wanted).items()}
    values["head.weight"] = values.pop("table.weight")
    save_file(values, tmp_path / "weights.safetensors")
    for make in (Net, lambda: on_meta(Net)):
        model = load_safetensors(make(), tmp_path / "weights.safetensors", factory=Net)
        assert all(
            torch.equal(x, tensors(wanted)[n]) and x.dtype == tensors(wanted)[n].dtype
            for n, x in tensors(model).items()
        )
        assert model.head.weight is model.table.weight
    half = load_safetensors(on_meta(lambda: Net().bfloat16()), tmp_path, factory=Net)
    assert torch.equal(half.inner.weight, wanted.inner.weight.double().bfloat16())


def test_all_that_does_not_fit_is_one_error_and_nothing_changes(tmp_path: Path) -> None:
    wrong = state(Net())
    wrong["inner.weight"] = torch.zeros(5, 3)
    wrong["stray"] = torch.zeros(2)
    wrong["steps"] = torch.zeros(())
    del wrong["inner.bias"]
    wrong["head.weight"] = wrong["table.weight"] + 1
    save_file(wrong, tmp_path / "weights.safetensors")
    for model in (Net(), on_meta(Net)):
        before = {n: x if x.is_meta else x.clone() for n, x in tensors(model).items()}
        with pytest.raises(CheckpointError) as error:
            load_safetensors(model, tmp_path, factory=Net)
        text = str(error.value)
        for line in (
            "misshapen: inner.weight, (5, 3), is (5, 4) in the model",
            "unexpected: stray, (2,)",
            "missing: inner.bias, (5,)",
            "of another kind: steps, F32, is torch.int64 in the model",
        ):
            assert line in text
        for name, value in tensors(model).items():
            assert value.is_meta == before[name].is_meta and (value.is_meta or torch.equal(value, before[name]))
    save_file(state(Net()), tmp_path / "weights.safetensors")
    with pytest.raises(UsageError, match="no file has angles(.|\n)*how a Net is built"):
        load_safetensors(on_meta(Net), tmp_path)


def test_tied_tensors_that_differ_in_the_file_are_refused(tmp_path: Path) -> None:
    values = state(Net())
    values["head.weight"] = values["table.weight"].clone()
    save_file(values, tmp_path / "weights.safetensors")
    load_safetensors(Net(), tmp_path)
    values["head.weight"][6, 3] += 1
    save_file(values, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="tied in the model, and not equal: table.weight, head.weight"):
        load_safetensors(Net(), tmp_path)


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    values = state(Net())
    names = list(values)
    files = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for file, held in files.items():
        save_file({n: values[n] for n in held}, tmp_path / file)
    places = {n: file for file, held in files.items() for n in held}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    load_safetensors(Net(), tmp_path)
    whole = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(whole[:-8])
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {**places, "ghost": "b.safetensors", "lost": "c.safetensors"}})
    )
    with pytest.raises(CheckpointError) as error:
        load_safetensors(Net(), tmp_path)
    text = str(error.value)
    assert "a.safetensors: Error while deserializing header" in text
    assert "b.safetensors: 'ghost' is not in the file" in text and "c.safetensors: No such file" in text
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match="is no index of safetensors files"):
        load_safetensors(Net(), tmp_path)


def test_pickles_are_never_read(tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "pytorch_model.bin")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(CheckpointError, match="safetensors.torch.save_file"):
            load_safetensors(Net(), path)
    with pytest.raises(CheckpointError, match="there is no file or folder"):
        load_safetensors(Net(), tmp_path / "nowhere")


def test_hugging_face_names(tmp_path: Path) -> None:
    """A base model's file in a model with a head, the reverse, and names of old files."""
    from transformers import GPT2Model

    wanted = FACTORIES["gpt2"]()
    base = {n: x.clone() for n, x in wanted.transformer.state_dict().items()}
    save_file(base, tmp_path / "model.safetensors")
    model = load_safetensors(on_meta(FACTORIES["gpt2"]), tmp_path)
    assert torch.equal(model.transformer.h[0].attn.c_attn.weight, wanted.transformer.h[0].attn.c_attn.weight)
    save_file({f"transformer.{n}": x for n, x in base.items()}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        bare = GPT2Model(wanted.config)
    load_safetensors(bare, tmp_path)
    assert torch.equal(bare.wte.weight, wanted.transformer.wte.weight)
    old = FACTORIES["bert"]()
    renamed = {n.replace("LayerNorm.weight", "LayerNorm.gamma"): x.clone() for n, x in old.state_dict().items()}
    renamed = {n: x for n, x in renamed.items() if not n.startswith("cls.predictions.decoder")}
    renamed["bert.embeddings.position_ids"] = torch.arange(64)
    save_file(renamed, tmp_path / "model.safetensors")
    new = load_safetensors(on_meta(FACTORIES["bert"]), tmp_path)
    assert all(torch.equal(x, tensors(old)[n]) for n, x in tensors(new).items())
