"""When each op and collective of one training step runs on a rank, by the cost model: a schedule of the device and a link.

The device computes in the order of the graph, and no op before the host has launched it; it waits for a value that is still on
its way. Collectives run beside it, one after another, from the moment at which their operand is there:

    of the library   while the device computes they advance slowly (`Hardware.hidden`): products leave them few multiprocessors.
                     A group of ranks that spans hosts sends by the network (planner/cost.py)
    in pieces        (tp_comm_overlap) copies, at their own speed. A product that reads a gather begins with this rank's rows;
                     rows of one whose result is scattered leave as they are made; then what came is summed

Backward runs in the opposite order; the product that gives the gradient of a weight comes after the one that gives the gradient
of the input, and hides the collective of the latter. What was gathered is gathered again for it. Layers that are alike are
scheduled once, each from when the one before it is done.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from megafx.placements.data_axis import TENSOR_AXIS
from megafx.placements.types import ALL_GATHER, ALL_REDUCE, LOCAL, REDUCE_SCATTER
from megafx.planner.cost import library_seconds, memory_seconds, sum_seconds
from megafx.planner.costed import CostedGraph, CostedOp
from megafx.planner.hardware import Hardware

COMPUTE, WAIT, SEND = "compute", "wait", "send"
# Bytes of the whole tensor below which a collective of the library is as fast (a transfer has a latency of about 16 us).
LEAST_BYTES = 2**20
# Of a step: what another choice than the usual one (the solver's layout, kernels launched one by one) has to save.
LEAST_GAIN = 0.02


@dataclass(frozen=True)
class Segment:
    """What runs from `start` on for `us` microseconds."""

    lane: str
    node: int  # index in the costed graph; -1: gradients of parameters, -2: the optimizer
    start: float
    us: float
    collective: str = ""  # the one that is sent or waited for
    sent: int = 0  # bytes that a rank sends in it


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
class StepTimes:
    """Times of the whole step, all layers: computing, collectives, waiting for them (`exposed_us`), and for the host.

    graphs_us: the whole step with CUDA graphs.
    """

    parts: list[Part]
    total_us: float = 0.0
    compute_us: float = 0.0
    send_us: float = 0.0
    exposed_us: float = 0.0
    host_us: float = 0.0
    graphs_us: float = 0.0
    flops: float = 0.0  # of one rank: products and attention, forward and backward
    exposed_by_axis: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One layer, or what is before, between or after them, in one direction. start: within the step, every layer counted."""

    name: str
    part: Part
    start: float


def runs(costed: CostedGraph, step: StepTimes) -> list[Run]:
    """The whole step in its order: what `Part.times` folds, and where kinds of layers alternate, one by one."""
    parts = {(part.region, part.direction): part for part in step.parts}
    forward = [
        (modules[0] if (region := costed.regions[number]).layer else region.name, parts[number, "forward"])
        for modules, number in costed.order
    ]
    found, start = [], 0.0
    backward = [(name, parts[part.region, "backward"]) for name, part in forward[::-1]] if costed.training else []
    last = [("gradients of whole parameters, optimizer", part) for part in step.parts if part.region < 0]
    for name, part in (*forward, *backward, *last):
        found.append(Run(name, part, start))
        start += part.us
    return found


@dataclass
class _Sent:
    """A collective under way. copies: in pieces; sums: what the device computes once it is there; sent: bytes."""

    node: int
    start: float
    us: float
    copies: bool = False
    sums: float = 0.0
    collective: str = ""
    sent: int = 0


def timeline(costed: CostedGraph) -> StepTimes:
    """The step of a costed graph. A replayed CUDA graph waits for no launch; its gradients are copied out of its memory."""
    step, hardware = _step(costed), replace(costed.hardware, launch_seconds=0.0)
    replayed = _step(replace(costed, hardware=hardware)) if costed.hardware.launch_seconds else step
    step.graphs_us = replayed.total_us + 1e6 * memory_seconds(2 * costed.memory.get("gradients", 0), hardware)
    return step


def graphs_pay(step: StepTimes, hardware: Hardware) -> tuple[bool, str]:
    """(whether CUDA graphs are modelled to save enough of a step, the reason)."""
    if not hardware.launch_seconds:
        return False, f"the hardware profile '{hardware.name}' does not say how long a launch takes"
    waits = f"a step of {step.total_us:.0f} us waits {step.host_us:.0f} us for launches"
    return step.graphs_us < (1 - LEAST_GAIN) * step.total_us, f"{waits}; replayed it takes {step.graphs_us:.0f} us"


def _step(costed: CostedGraph) -> StepTimes:
    made = _Schedule(costed)
    step = StepTimes([*made.forward(), *(made.backward() if costed.training else ())])
    for part in step.parts:
        step.total_us += part.times * part.us
        for segment in part.segments:
            us = part.times * segment.us
            step.compute_us += us if segment.lane == COMPUTE else 0.0
            step.send_us += us if segment.lane == SEND else 0.0
            if segment.lane == WAIT:
                step.exposed_us += us
                move = costed.nodes[segment.node].move if segment.node >= 0 else None
                axis = TENSOR_AXIS if move is None else move.axis
                step.exposed_by_axis[axis] = step.exposed_by_axis.get(axis, 0.0) + us
    step.host_us = max(step.total_us - step.compute_us - step.exposed_us, 0.0)
    passes = 3 if costed.training else 1
    step.flops = passes * sum(costed.regions[n.region].times * n.flops for n in costed.nodes)
    return step


class _Schedule:
    def __init__(self, costed: CostedGraph) -> None:
        self.costed, self.hardware, self.t = costed, costed.hardware, costed.ranks  # of the axis that is planned
        self.device = self.link = self.host = 0.0  # when each is free
        self.ready: dict[int, float | _Sent] = {}
        self.sent: dict[int, _Sent] = {}  # backward collectives of transitions
        self.again: dict[int, _Sent] = {}  # gathers of forward that backward repeats
        self.last = (0.0, 0.0)  # when the last op began and ended
        self.slower = 0.0  # how much longer products take beside what is on the link
        self.sources: dict[int, list[int]] = defaultdict(list)
        self.users: dict[int, list[int]] = defaultdict(list)
        for a, b in costed.edges:
            self.sources[b].append(a)
            self.users[a].append(b)

    def forward(self) -> list[Part]:
        parts = []
        for number, region in enumerate(self.costed.regions):
            part = self._begin(number, "forward", region.times)
            for i in region.nodes:
                node, before = self.costed.nodes[i], self.sources[i]
                if node.move is not None:
                    made = self._made(before)
                    at = made.start if isinstance(made, _Sent) else made
                    sent = node.move.forward_bytes
                    found = self._send(
                        part, i, at, node.move.forward, sent, self._copied(node), self._by_product(before)
                    )
                    self.ready[i] = found if found is not None else made
                    continue
                for source in before:
                    self._arrive(
                        part, source, [u for u in self.users[source] if self.costed.nodes[u].has_weight], False
                    )
                self._compute(part, i, node.us)
                self.ready[i] = self.device
                if node.inner is not None and node.inner.forward != LOCAL:
                    found = self._send(part, i, self.device, node.inner.forward, node.inner.forward_bytes, 0.0, False)
                    self.ready[i] = found if found is not None else self.device
            parts.append(self._end(part))
        return parts

    def backward(self) -> list[Part]:
        """`ready`: when the gradient of a node's value has come through it, to those that it reads."""
        parts, self.ready = [], {}
        for number in range(len(self.costed.regions))[::-1]:
            region = self.costed.regions[number]
            part = self._begin(number, "backward", region.times)
            self.sent, self.again = {}, {}
            for i in region.nodes[::-1]:
                node = self.costed.nodes[i]
                if node.move is not None:
                    self._start(part, i, False)
                    self.ready[i] = self.sent.get(i, self._made(self.users[i]))
                    continue
                if node.has_weight:
                    self._gather_again(part, i)
                for user in self.users[i]:
                    self._arrive(part, user, [i], True)
                self._compute(part, i, node.back_us)
                self.ready[i] = self.device
                for source in self.sources[i]:  # those whose users are all done may start beside the next product
                    self._start(part, source, node.has_weight)
                if node.weight_us:
                    for source in self.sources[i]:
                        if source in self.again:
                            self._until(part, self.again[source])
                    self._compute(part, i, node.weight_us)
            parts.append(self._end(part))
        part = self._begin(-1, "backward", 1)
        if self.costed.gradients is not None:
            found = self.costed.gradients
            us = 1e6 * library_seconds(found.backward, found.backward_bytes, self.hardware, self.t)
            gradients = _Sent(-1, self.device, us, collective=found.backward, sent=found.backward_bytes)
            self._until(part, self._under_way(part, gradients))
        self._compute(part, -2, self.costed.optimizer_us)
        return [*parts, self._end(part)]

    # -- collectives

    def _start(self, part: Part, i: int, by_product: bool) -> None:
        """Start the backward collective of a transition once the gradients of all that read it are there."""
        node = self.costed.nodes[i]
        late = [u for u in self.users[i] if u not in self.ready]
        if node.move is None or node.move.backward == LOCAL or late or i in self.sent:
            return
        made = self._made(self.users[i])
        at = made.start if isinstance(made, _Sent) else made
        found = self._send(part, i, at, node.move.backward, node.move.backward_bytes, 0.0, by_product)
        assert found is not None
        self.sent[i] = found

    def _gather_again(self, part: Part, i: int) -> None:
        """A product's gathered operand is not kept for the gradient of its weight: its shards are gathered beside products."""
        for source in self.sources[i]:
            move = self.costed.nodes[source].move
            # others are kept, except those that a budget recomputes
            inner = move is not None and move.axis == TENSOR_AXIS
            if move is not None and inner and move.forward == ALL_GATHER and source not in self.again:
                found = self._send(part, source, self.device, ALL_GATHER, move.forward_bytes, 0.0, False)
                assert found is not None
                self.again[source] = found

    def _send(
        self, part: Part, i: int, at: float, collective: str, sent: int, copied: float, by_product: bool
    ) -> _Sent | None:
        """Put a collective on the link. sent: bytes; copied: microseconds of additional copies; by_product: the op that ended
        last is a product, which makes its operand."""
        if collective == LOCAL:
            return None
        move = self.costed.nodes[i].move
        inner = move is None or move.axis == TENSOR_AXIS
        group = (self.t, 1) if move is None or inner else (move.ranks, move.inner)
        us = 1e6 * library_seconds(collective, sent, self.hardware, *group) + copied
        found = self._in_pieces(i, at, collective, sent, by_product) if inner else None
        if found is None or (collective == ALL_REDUCE and found.start + found.us + found.sums > at + us):
            found = _Sent(i, at, us)
        found.collective, found.sent = collective, sent
        return self._under_way(part, found)

    def _under_way(self, part: Part, found: _Sent) -> _Sent:
        found.start = max(found.start, self.link)
        times = round(found.start, 3), round(found.us, 3)
        part.segments.append(Segment(SEND, found.node, *times, found.collective, found.sent))
        self.link = found.start + found.us
        self.slower = self.hardware.beside.get("copies" if found.copies else "library", 1.0) - 1.0
        return found

    def _in_pieces(self, i: int, at: float, collective: str, sent: int, by_product: bool) -> _Sent | None:
        rate, t = self.hardware.transfer_bytes_per_second, self.t
        once = sent / 2 if collective == ALL_REDUCE else float(sent)  # bytes to the other ranks, each way
        whole = once * t / (t - 1) if t > 1 else 0.0
        pieces = collective in (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
        if not (self.costed.overlap and pieces and rate) or whole < LEAST_BYTES:
            return None
        fixed, copies = 1e6 * self.hardware.transfer_seconds, 1e6 * once / rate
        if collective == ALL_GATHER:
            return _Sent(i, at, fixed + copies, copies=True)
        sums = 1e6 * sum_seconds(whole, self.hardware, t)
        begun = at
        if by_product:  # the rows of other ranks are made first, and each piece leaves when it is made
            start, end = self.last
            first, rest = start + (end - start) / t, end - (end - start) / t
            begun = max(first, self.link)
            end = max(begun + copies, rest + copies / (t - 1))
            copies = end - begun
        if collective == REDUCE_SCATTER:
            return _Sent(i, begun, fixed + copies, copies=True, sums=sums)
        summed = max(begun + fixed + copies, at) + sums  # then the sums are gathered
        return _Sent(i, begun, summed + fixed + 1e6 * once / rate - begun, copies=True)

    def _copied(self, node: CostedOp) -> float:
        """Microseconds of copies of a transition whose shards are several ranges of memory."""
        move = node.move
        assert move is not None
        plain = 1e6 * (self.hardware.alpha_seconds + move.forward_bytes / self.hardware.link_bytes_per_second)
        return max(move.forward_us - plain, 0.0) if move.forward != LOCAL else 0.0

    def _by_product(self, before: list[int]) -> bool:
        return len(before) == 1 and self.costed.nodes[before[0]].has_weight

    def _made(self, nodes: list[int]) -> float | _Sent:
        """When all of these are there; a collective that is under way, where they wait for one."""
        under_way = [r for i in nodes if isinstance(r := self.ready.get(i, 0.0), _Sent)]
        done = max((r for i in nodes if not isinstance(r := self.ready.get(i, 0.0), _Sent)), default=0.0)
        return under_way[-1] if under_way else done

    def _arrive(self, part: Part, i: int, readers: list[int], back: bool) -> None:
        """Wait for a value. readers: products that read it: of a gather in pieces they begin with their own rows."""
        sent = self.ready.get(i)
        if not isinstance(sent, _Sent):
            return
        node = self.costed.nodes[i].move
        gathered = node is not None and (node.backward if back else node.forward) in (ALL_GATHER, ALL_REDUCE)
        own = 0.0
        if sent.copies and gathered and not sent.sums:
            ops = [self.costed.nodes[r] for r in readers]
            own = sum(op.back_us if back else op.us for op in ops if op.has_weight) / self.t
        self._until(part, sent, own)
        self.ready[i] = self.device

    # -- the device

    def _begin(self, region: int, direction: str, times: int) -> Part:
        self.host = self.device
        return Part(region, direction, times, self.device)

    def _end(self, part: Part) -> Part:
        """Regions do not overlap: one layer hands its values over when they are there."""
        for sent in [*self.ready.values(), *self.sent.values(), *self.again.values()]:
            if isinstance(sent, _Sent):
                self._until(part, sent)
        self.ready = {i: self.device if isinstance(r, _Sent) else r for i, r in self.ready.items()}
        self.link = min(self.link, self.device)
        part.us = round(self.device - part.start, 3)
        return part

    def _until(self, part: Part, sent: _Sent, less: float = 0.0) -> None:
        """Wait for a collective; less: what is computed before all of it is needed."""
        beside = max(self.device - sent.start, 0.0)
        if sent.copies:
            until = sent.start + sent.us - less
        else:
            until = max(self.device, sent.start) + max(sent.us - self.hardware.hidden * beside, 0.0)
        if until > self.device + 1e-3:
            times = round(self.device, 3), round(until - self.device, 3)
            part.segments.append(Segment(WAIT, sent.node, *times, sent.collective, sent.sent))
            self.device = until
        if not sent.copies:
            self.link = max(self.link, until)
        sums, sent.sums, sent.us = sent.sums, 0.0, 0.0  # it is there
        self._compute(part, sent.node, sums)

    def _compute(self, part: Part, i: int, us: float) -> None:
        if us > 0:
            self.host += 1e6 * self.hardware.launch_seconds
            self.device = max(self.device, self.host)
            if i >= 0 and self.costed.nodes[i].flops:
                us = round(us + self.slower * min(max(self.link - self.device, 0.0), us), 3)
            part.segments.append(Segment(COMPUTE, i, round(self.device, 3), us))
            self.last = (self.device, self.device + us)
            self.device += us
