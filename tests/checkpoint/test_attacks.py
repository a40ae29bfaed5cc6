"""Covers: what hostile files, kills and a second job in the folder do. attacks.py has more of each, as a command."""

from __future__ import annotations

from pathlib import Path

import attacks
import pytest
import torch
from hostile_files import METADATA, PICKLES, WEIGHTS

from megafx.checkpoint.content import uncovered


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name: str, tmp_path: Path) -> None:
    assert attacks.weights(name, tmp_path / "files") == (name not in attacks.LOADS)


@pytest.mark.parametrize("name", METADATA)
def test_metadata(name: str, tmp_path: Path) -> None:
    assert attacks.metadata(name, tmp_path / "files")


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_pickles(name: str, tmp_path: Path) -> None:
    assert attacks.pickles(name, tmp_path / "files")


@pytest.fixture
def _one_thread() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads do not survive a fork
    yield
    torch.set_num_threads(threads)


@pytest.mark.dist
@pytest.mark.usefixtures("_one_thread")
def test_a_killed_save_leaves_one_model(tmp_path: Path) -> None:
    assert attacks.kills(18, tmp_path).total() == 18


@pytest.mark.dist
@pytest.mark.usefixtures("_one_thread")
def test_two_jobs_in_one_folder(tmp_path: Path) -> None:
    assert attacks.jobs(8, tmp_path)["valid"] > 0


@pytest.mark.dist
@pytest.mark.usefixtures("_one_thread")
def test_a_reader_beside_a_trainer(tmp_path: Path) -> None:
    assert attacks.reader(tmp_path / "reader", 1.5)["loads"] > 0


def test_boxes_that_are_no_partition_are_found() -> None:
    halves = [((0, 0), (2, 4)), ((2, 0), (2, 4))]
    assert uncovered((4, 4), halves) is None
    assert uncovered((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 3)), ((2, 3), (2, 1))]) is None
    assert uncovered((), [((), ())]) is None and uncovered((0, 3), []) is None
    for boxes in (
        halves[:1],
        [halves[0]] * 2,
        [*halves, ((1, 1), (1, 1))],
        [((0, 0), (2, 4)), ((1, 0), (2, 4))],
        [((0, 0), (2, 2)), ((0, 0), (2, 2)), ((2, 2), (2, 2)), ((2, 2), (2, 2))],
        [],
    ):
        assert uncovered((4, 4), boxes) == "its slices overlap, or leave a part out"
    assert uncovered((), []) is not None and uncovered((), [((), ())] * 2) is not None
    assert "is not within (4,)" in str(uncovered((4,), [((2,), (3,))]))
    assert "of 2 dims is in a tensor of 1" in str(uncovered((4,), [((0, 0), (4, 1))]))
