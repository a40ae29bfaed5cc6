"""Covers: checkpoint/convert.py and `megafx convert`: checkpoints as Hugging Face files and back, one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from weight_models import FACTORIES, Net, on_meta, tensors

import megafx
from megafx.checkpoint.convert import convert
from megafx.cli import main
from megafx.errors import CheckpointError, UsageError
from megafx.weights.files import INDEX, SafetensorsFiles


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "mixtral"])
def test_there_and_back(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(3)
    model = FACTORIES[name]().to(torch.bfloat16)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path / "config")
    optimizer = torch.optim.AdamW(model.parameters())
    megafx.save_checkpoint(tmp_path / "runs", model, optimizer, step=7)
    arguments = ["--model", str(tmp_path / "config"), "--max-shard-size", "10KB"]
    assert main(["convert", str(tmp_path / "runs"), str(tmp_path / "hf"), *arguments]) == 0
    assert (tmp_path / "hf" / INDEX).exists() and "wrote" in capsys.readouterr().out
    again, info = type(model).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values()) and again.dtype == torch.bfloat16
    assert all(torch.equal(again.state_dict()[n], x) for n, x in model.state_dict().items())
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "back")]) == 0  # its config.json says the model
    other = FACTORIES[name]().to(torch.bfloat16)
    before = torch.get_rng_state()
    assert megafx.load_checkpoint(tmp_path / "back", other).step == 0
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(other.state_dict()[n], x) for n, x in model.state_dict().items())


def test_a_checkpoint_fills_a_model_on_meta(tmp_path: Path) -> None:
    for make, factory in ((FACTORIES["llama"], None), (Net, Net)):
        model = make()
        megafx.save_checkpoint(tmp_path / make.__name__, model, step=1)
        other = on_meta(make)
        if factory is not None:
            with pytest.raises(UsageError, match="no file has scratch(.|\n)*how a Net is built"):
                megafx.load_checkpoint(tmp_path / make.__name__, other)
            assert all(p.is_meta for p in other.parameters())
        megafx.load_checkpoint(tmp_path / make.__name__, other, factory=factory)
        assert all(torch.equal(tensors(other)[n], x) for n, x in tensors(model).items())


def test_models_that_are_not_of_hugging_face_and_checkpoints_of_torch(tmp_path: Path) -> None:
    model = Net()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "stock")
    megafx.save_checkpoint(tmp_path / "runs", model, step=1)
    assert convert(tmp_path / "runs", tmp_path / "plain") == tmp_path / "plain"
    convert(tmp_path / "stock", tmp_path / "from_stock", on_meta(Net))
    for folder in ("plain", "from_stock"):
        again = megafx.load_safetensors(on_meta(Net), tmp_path / folder, factory=Net)
        assert all(torch.equal(tensors(again)[n], x) for n, x in tensors(model).items())
    back = convert(tmp_path / "plain", tmp_path / "back")
    other = Net()
    megafx.load_checkpoint(back, other)
    assert all(torch.equal(tensors(other)[n], x) for n, x in model.state_dict().items())


def test_what_does_not_fit_is_listed_and_nothing_is_written(tmp_path: Path) -> None:
    megafx.save_checkpoint(tmp_path / "runs", Net(), step=1)
    other = on_meta(Net)
    other.extra = torch.nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(CheckpointError, match="'extra' is not in"):
        convert(tmp_path / "runs", tmp_path / "hf", other)
    megafx.save_pretrained(Net(), tmp_path / "files")
    with pytest.raises(CheckpointError, match=r"missing: extra, \(3,\)"):
        convert(tmp_path / "files", tmp_path / "hf", other)
    with pytest.raises(UsageError, match="in place"):
        convert(tmp_path / "runs", tmp_path / "runs")
    with pytest.raises(UsageError, match="there is no file or folder"):
        convert(tmp_path / "nowhere", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_damaged_checkpoint_is_not_converted(tmp_path: Path) -> None:
    path = megafx.save_checkpoint(tmp_path / "runs", Net(), step=1)
    file = path / "rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        convert(tmp_path / "runs", tmp_path / "hf")


def test_only_one_tensor_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    model = FACTORIES["gpt2"]()
    model.save_pretrained(tmp_path / "hf")
    alive: list[weakref.ref] = []
    whole = SafetensorsFiles.whole

    def counted(self: SafetensorsFiles, name: str) -> torch.Tensor:
        assert not any(r() is not None for r in alive), "an earlier tensor is still held"
        value = whole(self, name)
        alive.append(weakref.ref(value))
        return value

    monkeypatch.setattr(SafetensorsFiles, "whole", counted)
    convert(tmp_path / "hf", tmp_path / "back", on_meta(FACTORIES["gpt2"]))
    assert len(alive) > 10
