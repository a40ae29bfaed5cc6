"""Room for the tokens and rows of experts that ranks share out: chosen by the host, so that it need not wait for their numbers.

How many tokens travel, and how many rows a rank's experts compute, is known on the device. On the first call the host waits for
these numbers (`megafx.room`). From then on each mixture has room for an eighth more than it needed at most, and the numbers are
looked at once a call, after forward: where there was too little room, it grows, and forward runs once more. So nothing is lost,
and where a router's choices are steady the host waits once a call, for numbers that are there before forward ends.

Where calls need less than half of the room again and again (sequences of other lengths), the host waits as in the first call.

All ranks of an exchange choose by the same numbers, so that they have the same room.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megafx.meanwhile import meanwhile

MARGIN = 8  # of n that were needed, n // MARGIN more have room
WASTED = 4  # calls that need less than half of the room, after which the host waits
GREW = (
    "more tokens went to the experts of a rank than there was room for: forward ran once more, with room for an eighth more "
    "than was needed, as it does wherever a call needs still more"
)
WAITS = (
    f"{WASTED} calls needed less than half of the room that others need for tokens of experts, as with sequences of other "
    "lengths: from now on the host waits in each call for how many there are, and calls are not recorded as CUDA graphs"
)


class _Here(threading.local):
    """Of the forward that runs on this thread."""

    rooms: Rooms | None = None


_here = _Here()


class Rooms:
    """Of the mixtures of one graph.

    given: mixture -> int64 [2] on the CPU, tokens and rows. waits: the host waits for what is needed. changed: called when
    rooms have changed. say: takes a note. agree: int64 [mixtures, 2], what is needed here -> on all ranks that run forward once
    more together.
    """

    def __init__(self) -> None:
        self.given: dict[int, Tensor] = {}
        self.waits, self.wasted = False, 0
        self.agree: Callable[[Tensor], Tensor] = lambda needs: needs
        self.changed: Callable[[], None] = lambda: None
        self.say: Callable[[str], None] = lambda note: None
        self._needs: dict[int, Tensor] = {}

    def watching(self, forward: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
        """forward(*inputs) -> results: a function that gives what each mixture needed, too."""

        def run(*inputs: Any) -> list[Any]:
            self._needs = {}
            with meanwhile(_here, rooms=self):
                results = forward(*inputs)
            needs, self._needs = torch.stack([self._needs[i] for i in sorted(self._needs)]), {}
            return [*results, needs]

        return run

    def run(self, watched: Callable[..., Sequence[Any]], inputs: Sequence[Any]) -> list[Any]:
        """forward's results. watched: what `watching` gave, or what replays it."""
        while True:
            *results, needs = watched(*inputs)
            if self.waits or self._sufficed(self.agree(most(needs)).tolist()):
                return results

    def room(self, needed: Tensor, mixture: int) -> Tensor:
        self._needs[mixture] = needed
        return exact(needed) if self.waits or not self.given else self.given[mixture]

    def _sufficed(self, needs: list[list[int]]) -> bool:
        """False where forward has to run once more. Chooses the rooms of the next run."""
        first, given = not self.given, {i: room.tolist() for i, room in self.given.items()}
        small = [i for i, need in enumerate(needs) if first or _less(given[i], need)]
        self.given |= {i: torch.tensor([n + n // MARGIN for n in needs[i]]) for i in small}
        self.wasted += not first and all(_less([2 * n for n in need], given[i]) for i, need in enumerate(needs))
        self.waits = self.wasted == WASTED
        if small and not first:
            self.say(GREW)
        if self.waits:
            self.say(WAITS)
        if small or self.waits:
            self.changed()
        return first or not small


def _less(a: Sequence[int], b: Sequence[int]) -> bool:
    return any(x < y for x, y in zip(a, b, strict=True))


def exact(needed: Tensor) -> Tensor:
    """As much as is needed; the host waits for it."""
    return most(needed).cpu()


def most(needed: Tensor) -> Tensor:
    """[.., ranks, ranks, 2], tokens and rows from each rank to each -> [.., 2]: the most tokens between two ranks, and the most
    rows of a rank."""
    return torch.stack([needed[..., 0].amax((-2, -1)), needed[..., 1].sum(-2).amax(-1)], -1)


def room(needed: Tensor, mixture: int) -> Tensor:
    return exact(needed) if _here.rooms is None else _here.rooms.room(needed, mixture)
