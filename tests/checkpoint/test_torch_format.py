"""Covers: checkpoint/torch_format.py: model and optimizer out of what torch.distributed.checkpoint itself wrote, bit-equal.
What FSDP ranks saved: dist/on_ranks/fsdp_checkpoint.py."""

from __future__ import annotations

import enum
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import megafx
from megafx.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Net(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 5)
        self.up = nn.Linear(5, width)
        self.norm = nn.BatchNorm1d(width)
        self.down = nn.Linear(width, 5)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(5, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.norm(self.up(self.embed(ids)))))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.randint(0, 19, (6,))).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def trained(seed: int, kind: Any = torch.optim.AdamW, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    """Two steps of a model in two groups."""
    torch.manual_seed(seed)
    model = Net()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() < 2]
    optimizer = kind([{"params": decayed, "lr": 0.02 + seed}, {"params": plain, "weight_decay": 0.0}], **options)
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return get_optimizer_state_dict(model, optimizer)


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))


def by_number(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return optimizer.state_dict()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize(
    "kind, options",
    [(torch.optim.AdamW, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adafactor, {})],
)
def test_the_run_goes_on(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """State, options of groups and the next steps are those of the run that was saved."""
    model, optimizer = trained(0, kind, **options)
    state = {"app": {"model": model.state_dict(), "optim": by_name(model, optimizer)}}
    dcp.save(state, checkpoint_id=tmp_path)
    other, theirs = trained(1, kind, **options)
    megafx.load_checkpoint(tmp_path, other, theirs)
    assert same(other.state_dict(), model.state_dict())
    assert same(theirs.state_dict(), optimizer.state_dict())
    losses = []
    for m, o in ((model, optimizer), (other, theirs)):
        torch.manual_seed(7)
        losses.append([step(m, o) for _ in range(3)])
    assert losses[0] == losses[1] and len({*losses[0]}) == 3


@pytest.mark.parametrize("key", [None, "model"])
def test_the_model_alone(key: str | None, tmp_path: Path) -> None:
    model, optimizer = trained(0)
    state = {key: model.state_dict(), "optim": optimizer.state_dict()} if key else model.state_dict()
    dcp.save(state, checkpoint_id=tmp_path)
    other, theirs = trained(1)
    megafx.load_checkpoint(tmp_path, other)
    assert same(other.state_dict(), model.state_dict())
    with pytest.raises(CheckpointError, match=r"\(7, 5\) torch.float32 there, \(6, 5\)"):
        megafx.load_checkpoint(tmp_path, Net(width=6))
    if key is None:
        with pytest.raises(CheckpointError, match="holds no optimizer"):
            megafx.load_checkpoint(tmp_path, other, theirs)


def test_two_optimizers_saved_as_one(tmp_path: Path) -> None:
    def both(seed: int) -> tuple[Net, list[torch.optim.Optimizer]]:
        model, _ = trained(seed)
        mine = [torch.optim.AdamW(model.up.parameters(), lr=0.1 + seed), torch.optim.AdamW(model.down.parameters())]
        for optimizer in mine:
            step(model, optimizer)
        return model, mine

    model, mine = both(0)
    dcp.save(
        {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, tuple(mine))}, checkpoint_id=tmp_path
    )
    other, theirs = both(1)
    megafx.load_checkpoint(tmp_path, other, theirs)
    assert same([o.state_dict() for o in theirs], [o.state_dict() for o in mine])


def test_other_groups_are_refused(tmp_path: Path) -> None:
    """Before anything is changed."""
    model, optimizer = trained(0)
    dcp.save({"model": model.state_dict(), "optim": by_name(model, optimizer)}, checkpoint_id=tmp_path)
    other, _ = trained(1)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match="does not fit: it has no group of"):
        megafx.load_checkpoint(tmp_path, other, torch.optim.AdamW(other.parameters()))
    assert same(other.state_dict(), before)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("given, form", [(flat, "is flattened"), (by_number, "keeps parameters by number")])
def test_other_forms_of_optimizer_state_are_refused(kind: Any, given: Any, form: str, tmp_path: Path) -> None:
    """Before anything is changed, and the error says what to save; the model alone loads."""
    model, optimizer = trained(0, kind)
    dcp.save({"model": model.state_dict(), "optim": given(model, optimizer)}, checkpoint_id=tmp_path)
    other, theirs = trained(1, kind)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"{form}(.|\n)*fix: save what get_optimizer_state_dict"):
        megafx.load_checkpoint(tmp_path, other, theirs)
    assert same(other.state_dict(), before)
    megafx.load_checkpoint(tmp_path, other)
    assert same(other.state_dict(), model.state_dict())


def test_shapes_and_roots_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    swapped = by_name(model, optimizer)
    state = swapped["state"]
    state["embed.weight"], state["up.weight"] = state["up.weight"], state["embed.weight"]
    dcp.save({"model": model.state_dict(), "optim": swapped}, checkpoint_id=tmp_path / "swapped")
    with pytest.raises(
        CheckpointError, match=r"'optim.state.embed.weight.exp_avg' is \(7, 5\) there, 'embed.weight' is \(19, 5\)"
    ):
        megafx.load_checkpoint(tmp_path / "swapped", model, optimizer)
    two = {"model": model.state_dict(), "a": by_name(model, optimizer), "b": by_name(model, optimizer)}
    dcp.save(two, checkpoint_id=tmp_path / "two")
    with pytest.raises(CheckpointError, match=r"holds several optimizers \(a, b\)"):
        megafx.load_checkpoint(tmp_path / "two", model, optimizer)


class Custom:
    """Would be a pickle that runs code of its writer."""


def test_an_option_that_is_no_plain_data_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    optimizer.param_groups[0]["schedule"] = Custom()
    dcp.save({"model": model.state_dict(), "optim": by_name(model, optimizer)}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match=r"'optim.param_groups.0.schedule' of a checkpoint is no plain data"):
        megafx.load_checkpoint(tmp_path, model, optimizer)


class _AsEarlier(pickle.Pickler):
    """Pickles members of enums as Python 3.11.2 does."""

    def reducer_override(self, made: Any) -> Any:
        return (getattr, (type(made), made.name)) if isinstance(made, enum.Enum) else NotImplemented


def test_members_of_enums_that_an_earlier_python_wrote(tmp_path: Path) -> None:
    model, _ = trained(0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    file, written = tmp_path / ".metadata", io.BytesIO()
    _AsEarlier(written, 4).dump(pickle.loads(file.read_bytes()))
    assert b"getattr" in written.getvalue()
    file.write_bytes(written.getvalue())
    other = Net()
    megafx.load_checkpoint(tmp_path, other)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
