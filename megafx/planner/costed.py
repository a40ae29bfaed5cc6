"""A planned program as plain data: its ops, collectives and layers with their times and bytes (analysis/costed_graph.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from megafx.placements.data_axis import TENSOR_AXIS
from megafx.placements.types import LOCAL
from megafx.planner.hardware import Hardware
from megafx.units import bytes_text


@dataclass(frozen=True)
class PricedTransition:
    """One transition: what it sends per rank (bytes) and its modelled time (microseconds), forward and backward."""

    src: str
    dst: str
    forward: str
    backward: str
    forward_bytes: int
    backward_bytes: int
    cost_us: float
    forward_us: float = 0.0
    axis: str = TENSOR_AXIS  # axis, ranks: of the mesh, and how many it has
    ranks: int = 0
    inner: int = 1  # ranks of the axes inside of it

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
    """A node: an op, or a transition that communicates (`move`)."""

    name: str
    region: int  # its index
    module: str  # path inside of the region
    out: str  # kind of the placement of its value (I, R, S, P)
    label: str
    placements: str = ""
    style: str = ""
    weight: str = ""
    value: str = ""
    us: float = 0.0  # of one forward pass
    back_us: float = 0.0  # back_us, weight_us: of its gradients, of operands and of a weight
    weight_us: float = 0.0
    flops: float = 0.0
    has_weight: bool = False
    kept: int = 0  # bytes held for backward at most
    bytes: int = 0  # of its value, whole on the axis
    move: PricedTransition | None = None
    inner: PricedTransition | None = None  # a collective that the op does itself
    source: str = ""
    why: list[str] = field(default_factory=list)
    alternatives: list[str] = field(default_factory=list)


@dataclass
class Region:
    """Layers that are alike, or another part of the model."""

    name: str
    times: int  # layers that it represents
    layer: bool  # whether it is one, and no part of the model before, between or after them
    nodes: list[int] = field(default_factory=list)
    held: float = 0.0  # bytes of a rank's parameters that one of them reads first


@dataclass
class CostedGraph:
    """The nodes of a program with their prices, by region."""

    regions: list[Region]
    nodes: list[CostedOp]
    edges: list[tuple[int, int]]  # pairs of indices of `nodes`
    memory: dict[str, int]  # bytes of one rank by kind
    gradients: PricedTransition | None  # all-reduces of gradients of parameters that ranks hold whole, together
    optimizer_us: float
    training: bool
    # (paths of its modules, index of its region) of every layer, and of every part before, between and after them
    order: list[tuple[tuple[str, ...], int]]
    hardware: Hardware
    ranks: int
    overlap: bool  # collectives run in pieces beside their products (tp_comm_overlap)
    experts: int = 0  # of the bytes of parameters, those of which data-parallel ranks have their experts alone
