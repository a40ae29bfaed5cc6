"""Room for tokens and rows: chosen after the first call, grown where it is too little, given up where it is too much.

Covers: ops/rooms.py. Ranks that train with it: tests/dist/on_ranks/experts_shared_out.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafx.kernels.experts import dispatch_rows as _defines_the_ops  # noqa: F401
from megafx.ops.rooms import GREW, MARGIN, WAITS, WASTED, Rooms, most

ops = torch.ops.megafx
NEEDED = torch.tensor([[[3, 5], [4, 6]], [[1, 2], [8, 8]]])  # from two ranks to two: tokens, rows


def test_what_is_needed_is_the_most_of_any_rank() -> None:
    assert most(NEEDED).tolist() == [8, 14]
    assert ops.room(NEEDED, 0).tolist() == [8, 14]  # outside of a forward: as much as is needed


class Forward:
    """Two mixtures, which need a number of tokens and rows each. runs: the rooms that each run got."""

    def __init__(self) -> None:
        self.rooms, self.runs, self.needs = Rooms(), list[Any](), [[8, 16], [16, 32]]
        self.changes, self.said = 0, list[str]()
        self.rooms.changed, self.rooms.say = self.change, self.said.append

    def change(self) -> None:
        self.changes += 1

    def run(self, x: str) -> list[str]:
        self.runs.append([ops.room(torch.tensor(n)[None, None], i).tolist() for i, n in enumerate(self.needs)])
        return [x]

    def __call__(self, needs: list[list[int]]) -> list[Any]:
        """-> the rooms of the runs that one call takes."""
        self.needs, self.runs = needs, []
        assert self.rooms.run(self.rooms.watching(self.run), ["x"]) == ["x"]
        return self.runs


def more(needs: list[list[int]]) -> list[list[int]]:
    return [[n + n // MARGIN for n in each] for each in needs]


def test_room_grows_where_it_is_too_little() -> None:
    forward, first = Forward(), [[8, 16], [16, 32]]
    assert forward(first) == [first] and forward.changes == 1  # the host waited
    assert forward(first) == [more(first)] and forward([[9, 18], [18, 36]]) == [more(first)] and forward.changes == 1
    assert not forward.said
    larger = [[9, 18], [40, 36]]
    assert (
        forward(larger) == [more(first), [[9, 18], more(larger)[1]]] and forward.changes == 2 and forward.said == [GREW]
    )
    assert forward(first) == [[[9, 18], more(larger)[1]]] and forward.changes == 2


def test_room_that_is_twice_too_large_again_and_again_is_given_up() -> None:
    forward, large, small = Forward(), [[80, 160], [160, 320]], [[8, 160], [16, 320]]
    forward(large)
    for _ in range(WASTED):
        assert forward(large) == [more(large)] and forward(small) == [more(large)]
    assert forward.rooms.waits and forward(small) == [small] and forward(large) == [large] and forward.changes == 2
    assert forward.said == [WAITS]


def test_ranks_run_once_more_together() -> None:
    forward, needs = Forward(), [[8, 16], [16, 32]]
    forward(needs)
    forward.rooms.agree = lambda here: torch.maximum(here, torch.tensor([[20, 0], [0, 0]]))  # another rank needs more
    assert forward(needs) == [more(needs), [[22, 18], more(needs)[1]]]


def test_a_forward_that_fails_leaves_no_room_behind() -> None:
    def fails(*inputs: Any) -> list[Any]:
        raise ValueError("of the user")

    rooms = Rooms()
    with pytest.raises(ValueError, match="of the user"):
        rooms.run(rooms.watching(fails), [])
    assert ops.room(NEEDED, 0).tolist() == [8, 14]
