"""A planned program as plain data: its ops, collectives and layers with their times and bytes (analysis/costed_graph.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from megafx.placements.data_axis import TENSOR_AXIS
from megafx.placements.types import LOCAL
from megafx.planner.hardware import Hardware
from megafx.units import bytes_text


@dataclass(frozen=True)
class PricedTransition:
    """One transition: what it sends per rank (bytes) and its modelled time (microseconds), forward and backward.

    axis, ranks: of the mesh, and how many it has; inner: ranks of the axes inside of it."""

    src: str
    dst: str
    forward: str
    backward: str
    forward_bytes: int
    backward_bytes: int
    cost_us: float
    forward_us: float = 0.0
    axis: str = TENSOR_AXIS
    ranks: int = 0
    inner: int = 1

    def __str__(self) -> str:
        outer = "" if self.axis == TENSOR_AXIS else f"@{self.axis}"
        parts = [f"{self.src}->{self.dst}{outer}"]
        if self.forward != LOCAL:
            parts.append(f"fwd {self.forward} {bytes_text(self.forward_bytes)}")
        if self.backward != LOCAL:
            parts.append(f"bwd {self.backward} {bytes_text(self.backward_bytes)}")
        return " ".join(parts)


@dataclass
class CostedOp:
    """A node: an op, or a transition that communicates (`move`). region: its index; module: path inside of the region.

    out: kind of the placement of its value (I, R, S, P); us: of one forward pass; back_us, weight_us: of its gradients, of
    operands and of a weight; kept: bytes held for backward at most; bytes: of its value, whole on the axis.
    """

    name: str
    region: int
    module: str
    out: str
    label: str
    placements: str = ""
    style: str = ""
    weight: str = ""
    value: str = ""
    us: float = 0.0
    back_us: float = 0.0
    weight_us: float = 0.0
    flops: float = 0.0
    has_weight: bool = False
    kept: int = 0
    bytes: int = 0
    move: PricedTransition | None = None
    inner: PricedTransition | None = None  # a collective that the op does itself
    source: str = ""
    why: list[str] = field(default_factory=list)
    alternatives: list[str] = field(default_factory=list)


@dataclass
class Region:
    """times: layers that it represents; layer: whether it is one, and no part of the model before, between or after them.

    held: bytes of a rank's parameters that one of them reads first."""

    name: str
    times: int
    layer: bool
    nodes: list[int] = field(default_factory=list)
    held: float = 0.0


@dataclass
class CostedGraph:
    """memory: bytes of one rank by kind. edges: pairs of indices of `nodes`. order: (paths of its modules, index of its
    region) of every layer, and of every part before, between and after them. experts: of the bytes of parameters,
    those of which data-parallel ranks have their experts alone."""

    regions: list[Region]
    nodes: list[CostedOp]
    edges: list[tuple[int, int]]
    memory: dict[str, int]
    gradients: PricedTransition | None  # all-reduces of gradients of parameters that ranks hold whole, together
    optimizer_us: float
    training: bool
    order: list[tuple[tuple[str, ...], int]]
    hardware: Hardware
    ranks: int
    overlap: bool  # collectives run in pieces beside their products (tp_comm_overlap)
    experts: int = 0
