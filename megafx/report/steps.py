"""When each op and collective of one training step runs on a rank, by the cost model: a schedule of two lanes.

The device computes in the order of the graph, and waits for a value that is still on its way. Collectives run beside it, one
after another, from the moment at which their operand is there. Backward runs in the opposite order; the product that gives the
gradient of a weight comes after the one that gives the gradient of the input, and hides the collective of the latter. Layers
that are alike are scheduled once. Backward takes twice the time of forward, as in cost.py.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from megafx.placements.types import LOCAL
from megafx.report.picture import Picture

COMPUTE, WAIT, SEND = "compute", "wait", "send"


@dataclass(frozen=True)
class Segment:
    """What runs from `start` on for `us` microseconds. node: index of the picture's nodes; -1: gradients of parameters, -2: the
    optimizer."""

    lane: str
    node: int
    start: float
    us: float


@dataclass
class Part:
    """One region, forward or backward; `times` layers do the same one after another."""

    region: int
    direction: str
    times: int
    start: float
    us: float = 0.0
    segments: list[Segment] = field(default_factory=list)


@dataclass
class Step:
    """Times of the whole step, all layers: computing, collectives, and waiting for them (`exposed_us`)."""

    parts: list[Part]
    total_us: float = 0.0
    compute_us: float = 0.0
    send_us: float = 0.0
    exposed_us: float = 0.0
    flops: float = 0.0  # of one rank: products and attention, forward and backward


def schedule(picture: Picture) -> Step:
    """The step of a picture."""
    made = _Schedule(picture)
    step = Step([*made.forward(), *(made.backward() if picture.training else ())])
    for part in step.parts:
        step.total_us += part.times * part.us
        for segment in part.segments:
            us = part.times * segment.us
            step.compute_us += us if segment.lane == COMPUTE else 0.0
            step.send_us += us if segment.lane == SEND else 0.0
            step.exposed_us += us if segment.lane == WAIT else 0.0
    passes = 3 if picture.training else 1
    step.flops = passes * sum(picture.regions[n.region].times * n.flops for n in picture.nodes)
    return step


class _Schedule:
    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self.device = self.link = 0.0  # when each is free
        self.ready: dict[int, float] = {}
        self.sent: dict[int, float] = {}
        self.sources: dict[int, list[int]] = defaultdict(list)
        self.users: dict[int, list[int]] = defaultdict(list)
        for a, b in picture.edges:
            self.sources[b].append(a)
            self.users[a].append(b)

    def forward(self) -> list[Part]:
        parts = []
        for number, region in enumerate(self.picture.regions):
            part = self._begin(number, "forward", region.times)
            for i in region.nodes:
                node = self.picture.nodes[i]
                at = max((self.ready.get(s, 0.0) for s in self.sources[i]), default=0.0)
                move = node.move or node.inner
                if node.move is None:
                    at = self._compute(part, i, at, node.us)
                if move is not None and move.forward != LOCAL:
                    at = self._send(part, i, at, move.forward_us)
                self.ready[i] = at
            parts.append(self._end(part))
        return parts

    def backward(self) -> list[Part]:
        """`ready`: when the gradient of a node's value has come through it, to those that it reads."""
        parts, self.ready = [], {}
        for number in range(len(self.picture.regions))[::-1]:
            region = self.picture.regions[number]
            part = self._begin(number, "backward", region.times)
            for i in region.nodes[::-1]:
                node = self.picture.nodes[i]
                at = max((self.ready.get(u, 0.0) for u in self.users[i]), default=0.0)
                if node.move is not None:
                    self._start(part, i)
                    self.ready[i] = self.sent.get(i, at)
                    continue
                at = self._compute(part, i, at, node.us if node.has_weight else 2 * node.us)
                self.ready[i] = at
                if node.has_weight:
                    for source in self.sources[i]:  # those whose users are all done may start beside the next product
                        self._start(part, source)
                    self._compute(part, i, at, node.us)
            parts.append(self._end(part))
        part = self._begin(-1, "backward", 1)
        if self.picture.gradients is not None:
            self._wait(part, -1, self._send(part, -1, self.device, self.picture.gradients.cost_us))
        self._compute(part, -2, 0.0, self.picture.optimizer_us)
        return [*parts, self._end(part)]

    def _start(self, part: Part, i: int) -> None:
        """Start the backward collective of a transition once the gradients of all that read it are there."""
        node = self.picture.nodes[i]
        late = [u for u in self.users[i] if u not in self.ready]
        if node.move is None or node.move.backward == LOCAL or late or i in self.sent:
            return
        at = max((self.ready[u] for u in self.users[i]), default=self.device)
        self.sent[i] = self._send(part, i, at, node.move.cost_us - node.move.forward_us)

    def _begin(self, region: int, direction: str, times: int) -> Part:
        return Part(region, direction, times, self.device)

    def _end(self, part: Part) -> Part:
        """Regions do not overlap: one layer hands its values over when they are there."""
        sent = [s.node for s in part.segments if s.lane == SEND]
        self._wait(part, sent[-1] if sent else -1, self.link)
        part.us = round(self.device - part.start, 3)
        return part

    def _wait(self, part: Part, i: int, until: float) -> None:
        if until > self.device:
            part.segments.append(Segment(WAIT, i, round(self.device, 3), round(until - self.device, 3)))
            self.device = until

    def _compute(self, part: Part, i: int, at: float, us: float) -> float:
        self._wait(part, i, at)
        if us > 0:
            part.segments.append(Segment(COMPUTE, i, round(self.device, 3), us))
            self.device += us
        return self.device

    def _send(self, part: Part, i: int, at: float, us: float) -> float:
        start = max(at, self.link)
        part.segments.append(Segment(SEND, i, round(start, 3), round(us, 3)))
        self.link = start + us
        return self.link
