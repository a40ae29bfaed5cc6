"""Covers: the advice of errors of checkpoints and files of weights: each is raised, and then followed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from advice import refused
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import megafx
from megafx.checkpoint.convert import convert
from megafx.checkpoint.state import merged
from megafx.config import Config
from megafx.weights.files import dtype_name

ONE = Config(tensor_model_parallel_size=1, cache=False)
X = torch.ones(2, 4)


def ours(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return megafx.parallelize(nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4)), ONE)


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    return optimizer


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_folders_of_files(tmp_path: Path) -> None:
    model, wanted = ours(), values(ours())
    for row, make in (
        ("there is no file or folder '<path>'", lambda folder: folder.rmdir()),
        ("'<path>' has no safetensors files", lambda folder: None),
        (
            "'<path>' has weights as pickles only",
            lambda folder: torch.save(ours().state_dict(), folder / "pytorch_model.bin"),
        ),
        (
            "<problem>: a save that was not finished",
            lambda folder: save_file(ours().state_dict(), folder / "model-00001-of-00002.safetensors"),
        ),
        (
            "'<index>' is no index of safetensors files",
            lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
        ),
        (
            "'<index>' names files outside of its folder",
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "/etc/passwd"}}'),
        ),
    ):
        folder = tmp_path / str(abs(hash(row)))
        folder.mkdir()
        make(folder)  # type: ignore[no-untyped-call]  # lambdas of a table
        with refused(row):
            megafx.load_safetensors(model, folder)
        if "pickles" in row:
            with refused("'<path>' is no safetensors file"):
                megafx.load_safetensors(model, folder / "pytorch_model.bin")
            tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
            save_file(tensors, folder / "model.safetensors")
        else:
            megafx.save_pretrained(ours(), folder)
        with torch.no_grad():
            model[0].weight.zero_()
        megafx.load_safetensors(model, folder)
        torch.testing.assert_close(values(model), wanted)


def test_dtypes_of_files() -> None:
    with refused("safetensors has no <dtype>"):
        dtype_name(torch.complex128)
    assert dtype_name(torch.ones(1, dtype=torch.complex128).to(torch.complex64).dtype) == "C64"


def test_roots(tmp_path: Path) -> None:
    model = ours()
    (tmp_path / "file").write_text("")
    with refused("'<root>' is a file"):
        megafx.load_checkpoint(tmp_path / "file", model)
    with refused("there is no checkpoint in <root>"):
        megafx.load_checkpoint(tmp_path / "other", model)
    megafx.save_checkpoint(tmp_path / "run", model, step=3)
    loaded = megafx.load_checkpoint(tmp_path / "run", model)
    assert loaded is not None and loaded.step == 3


def test_what_fits(tmp_path: Path) -> None:
    model = ours()
    optimizer = trained(model)
    megafx.save_checkpoint(tmp_path / "run", model, optimizer, step=3)
    for other in (ours(6), ours().double()):
        with refused("checkpoint <path> does not fit"):
            megafx.load_checkpoint(tmp_path / "run", other)
    right = ours().double().float()
    megafx.load_checkpoint(tmp_path / "run", right, torch.optim.AdamW(right.parameters()))
    torch.testing.assert_close(values(right), values(model))


def test_extra_state(tmp_path: Path) -> None:
    model, deep = ours(), []  # type: ignore[var-annotated]  # it holds itself
    deep.append(deep)
    with refused("<path>... is more than <DEEPEST> lists and dicts deep"):
        megafx.save_checkpoint(tmp_path, model, step=1, extra={"list": deep})
    with refused("<path> is a <__module__>.<__qualname__>, which a checkpoint cannot hold"):
        megafx.save_checkpoint(tmp_path, model, step=1, extra={"set": {1}})
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)
    extra: dict[str, Any] = {"list": [1, "a", None], "scheduler": scheduler}
    megafx.save_checkpoint(tmp_path, model, step=1, extra=extra)
    loaded = megafx.load_checkpoint(tmp_path, model, extra={"scheduler": scheduler})
    assert loaded is not None and loaded.extra == {"list": [1, "a", None]}


def test_checkpoints_of_torch(tmp_path: Path) -> None:
    model = ours()
    optimizer, weights = trained(model), {"model": model.state_dict()}
    dcp.save(weights, checkpoint_id=tmp_path / "none")
    with refused("checkpoint <folder> holds no optimizer"):
        megafx.load_checkpoint(tmp_path / "none", model, optimizer)
    megafx.load_checkpoint(tmp_path / "none", model)
    dcp.save(weights | {"a": optimizer.state_dict(), "b": optimizer.state_dict()}, checkpoint_id=tmp_path / "two")
    with refused("checkpoint <folder> holds several optimizers"):
        megafx.load_checkpoint(tmp_path / "two", model, optimizer)
    dcp.save(weights | {"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "numbers")
    with refused("the optimizer of checkpoint <folder> <what>"):
        megafx.load_checkpoint(tmp_path / "numbers", model, optimizer)
    state = get_optimizer_state_dict(model, [optimizer])
    dcp.save(weights | {"optimizer": state}, checkpoint_id=tmp_path / "right")
    megafx.load_checkpoint(tmp_path / "right", model, optimizer)
    with refused("the optimizer of checkpoint <folder> <what>"):
        megafx.load_checkpoint(tmp_path / "right", model, torch.optim.AdamW(model[0].parameters()))
    megafx.load_checkpoint(tmp_path / "right", model, torch.optim.AdamW(model.parameters()))


def test_conversions(tmp_path: Path) -> None:
    model = ours()
    path = megafx.save_checkpoint(tmp_path / "run", model, step=1)
    with refused("'<source>' is to be converted in place"):
        convert(tmp_path / "run", tmp_path / "run")
    with refused("'<target>' is a checkpoint itself"):
        convert(tmp_path / "run", path)
    with refused("there is no file or folder '<source>'"):
        convert(tmp_path / "rum", tmp_path / "files")
    convert(tmp_path / "run", tmp_path / "files")
    convert(tmp_path / "files", tmp_path / "again", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    other = ours()
    megafx.load_checkpoint(tmp_path / "again", other)
    torch.testing.assert_close(values(other), values(model))


def test_optimizers_of_stages() -> None:
    def part(*groups: list[str]) -> dict[str, Any]:
        optimizer = {"groups": [{"names": names, "lr": 0.1} for names in groups], "state": {}}
        return {"optimizers": [optimizer], "aliases": {}, "model": {}}

    with refused("optimizers of a pipeline's stages have different numbers"):
        merged([part(["a"], ["b"]), part(["c"])])
    (optimizer,) = merged([part(["a"], ["b"]), part(["c"], [])])["optimizers"]
    assert [group["names"] for group in optimizer["groups"]] == [["a", "c"], ["b"]]
