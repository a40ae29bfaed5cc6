"""`Hardware`: the rates that the planner prices a machine by, from the YAML profiles beside this file. No torch import.

A profile says of each number whether it was measured (device, date) or comes from a datasheet. Rates are *achieved*
rates: what a large matmul, copy or collective reaches, not the peak of the silicon.
"""

from __future__ import annotations

import copy
import difflib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from megafx.errors import ConfigError

PROFILES = Path(__file__).parent
COMMAND = "megafx profile-hardware mine.yaml"
FLOAT8 = "float8"  # dtype name of e4m3 and e5m2
# of products of FP8 over bfloat16's; measured: H100, Llama-8B's shapes, 1.6 to 1.9 (RESULTS.md), 2026-11-26
FP8_GAIN = 1.8


def profiles_in(folder: Path) -> list[str]:
    return sorted(p.stem for p in folder.glob("*.yaml"))


_parsed = functools.lru_cache(16)(yaml.safe_load)  # text -> data: parsing takes 10 ms


def read_profile(kind: str, name_or_path: str | Path, folder: Path, writer: str) -> tuple[Any, str]:
    """(data, name of the file) of a profile that comes with megafx, in `folder`, or of a YAML file.

    writer: the command that writes such a file. Raises ConfigError."""
    names = profiles_in(folder)
    path, shipped = Path(name_or_path), ", ".join(names) or "none"
    if str(name_or_path) in names:
        path = folder / f"{name_or_path}.yaml"
    elif path.suffix not in (".yaml", ".yml"):
        near = difflib.get_close_matches(str(name_or_path), names, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        fix = f"{hint}profiles: {shipped}; or give the path of a .yaml file that '{writer}' wrote"
        raise ConfigError(f"no {kind} profile '{name_or_path}'", fix=fix)
    if not path.is_file():
        raise ConfigError(f"no such {kind} profile: {path}", fix=f"profiles: {shipped}; '{writer}' makes one")
    try:
        return copy.deepcopy(_parsed(path.read_text())), path.name
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None


@dataclass(frozen=True)
class Hardware:
    """One rank's device, its link to others of its host, and that to ranks of other hosts (the network).

    flops_per_second         large matmul, by dtype name ('bfloat16', 'float16', 'float32', 'float64', 'float8')
    memory_bytes_per_second  device memory, read plus written
    link_bytes_per_second    bytes that one rank sends per second inside a large collective (NCCL's bus bandwidth)
    alpha_seconds            time of a collective on a tiny tensor, launch included
    memory_bytes             device memory that a process can have; None: not known
    host_bytes_per_second    bytes copied to pinned memory of the host, or back, in a second; None: not known
    source                   where the numbers are from: measured (device, date) or datasheet
    peak_flops_per_second    of the datasheet, dense, by dtype name: what MFU is measured against; empty: not known
    gpus_per_host            ranks that the link connects; more are connected by the network
    network_bytes_per_second  bytes that one GPU sends to other hosts in a second; None: not known
    network_seconds          what a collective takes more for each step from one host to the next

    The rest prices schedules (planner/cost.py, planner/timeline.py); a profile may omit it.

    launch_seconds           time of the host to launch one op
    kernel_seconds           fixed time of a kernel
    products                 (m, n, k, seconds) of products in bfloat16: seconds by CUDA events
    attention                FLOP/s, of what is not masked: 'forward', 'backward' (2,048 keys), 'long forward', 'long backward'
                             (32,768 keys), and all with 'dropout ' before them
    collectives              collective -> ranks -> (seconds of a tiny one, bytes that a rank sends per second)
    hidden                   part of a collective's time that a product beside it hides: its kernel gets multiprocessors late
    beside                   slowdown factor of a product beside 'copies' between ranks, or a collective of the 'library'
    transfer_seconds         latency of a copy from another rank's memory, a barrier included
    transfer_bytes_per_second  of such copies, in one direction; None: ranks do not reach each other's memory
    """

    name: str
    flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float
    link_bytes_per_second: float
    alpha_seconds: float
    source: str
    memory_bytes: int | None = None
    host_bytes_per_second: float | None = None
    peak_flops_per_second: Mapping[str, float] = field(default_factory=dict)
    gpus_per_host: int = 8
    network_bytes_per_second: float | None = None
    network_seconds: float = 0.0
    launch_seconds: float = 0.0
    kernel_seconds: float = 0.0
    products: Sequence[Sequence[float]] = ()
    attention: Mapping[str, float] = field(default_factory=dict)
    collectives: Mapping[str, Mapping[int, Sequence[float]]] = field(default_factory=dict)
    hidden: float = 0.5
    beside: Mapping[str, float] = field(default_factory=dict)
    transfer_seconds: float = 0.0
    transfer_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.flops_per_second, Mapping) or not self.flops_per_second:
            raise self._bad("flops_per_second", self.flops_per_second, "a mapping of dtype names to FLOP/s")
        for name in ("flops_per_second", "peak_flops_per_second", "attention", "beside"):
            for key, number in getattr(self, name).items():
                self._positive(f"{name}[{key}]", number)
        for name in ("memory_bytes_per_second", "link_bytes_per_second", "gpus_per_host"):
            self._positive(name, getattr(self, name))
        for name in ("hidden", *(f"{what}_seconds" for what in ("alpha", "launch", "kernel", "transfer", "network"))):
            self._positive(name, getattr(self, name), zero=True)
        for row in self.products:
            for number in row:
                self._positive(f"products {list(row)}", number)
        for name, by_ranks in self.collectives.items():
            for ranks, pair in by_ranks.items():
                for number in pair:
                    self._positive(f"collectives[{name}][{ranks}]", number)
        optional = ("transfer_bytes_per_second", "memory_bytes", "host_bytes_per_second", "network_bytes_per_second")
        for name in optional:
            if getattr(self, name) is not None:
                self._positive(name, getattr(self, name))
        if not isinstance(self.source, str) or not self.source.strip():
            raise self._bad("source", self.source, "text that says where the numbers are from")

    def _positive(self, name: str, value: Any, zero: bool = False) -> None:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not (value > 0 or (zero and value == 0)):
            raise self._bad(name, value, "a positive number" + (" (YAML needs 1.0e+12 or 1000: with dot and sign)"))

    def _bad(self, name: str, value: Any, want: str) -> ConfigError:
        return ConfigError(f"hardware profile '{self.name}': {name} is {value!r}", fix=f"write {want}")

    def flops(self, dtype: str) -> float:
        """FLOP/s of a matmul in this dtype; a dtype that the profile does not list runs at the slowest listed rate, FP8 at
        FP8_GAIN times that of bfloat16."""
        if dtype == FLOAT8 and dtype not in self.flops_per_second:
            return FP8_GAIN * self.flops("bfloat16")
        return self.flops_per_second.get(dtype, min(self.flops_per_second.values()))

    @functools.cached_property
    def one_host(self) -> Hardware:
        """The same with all GPUs as if on one host."""
        return replace(self, network_bytes_per_second=None)

    def hosts(self, ranks: int, inner: int = 1) -> int:
        """Hosts that a group of an axis is on. inner: ranks of the axes inside of it, by which its neighbours are apart."""
        return min(ranks, -(-ranks * inner // self.gpus_per_host))

    @staticmethod
    def names() -> list[str]:
        """Profiles that come with megafx."""
        return profiles_in(PROFILES)

    @staticmethod
    def load(name_or_path: str | Path) -> Hardware:
        """A profile by name ('h200-nvlink') or the path of a YAML file with the same fields."""
        return Hardware.from_dict(*read_profile("hardware", name_or_path, PROFILES, COMMAND))

    @staticmethod
    def from_dict(data: Any, where: str = "the profile") -> Hardware:
        known = [f.name for f in fields(Hardware)]
        if not isinstance(data, dict):
            raise ConfigError(f"{where} is no mapping of fields", fix=f"fields: {', '.join(known)}")
        for wrong in [k for k in data if k not in known]:
            raise ConfigError(f"{where} has an unknown field '{wrong}'", fix=f"fields: {', '.join(known)}")
        needed = {f.name for f in fields(Hardware) if f.default is MISSING and f.default_factory is MISSING}
        missing = [k for k in known if k not in data and k in needed]
        if missing:
            raise ConfigError(f"{where} lacks {', '.join(missing)}", fix="see megafx/planner/hardware/h200-nvlink.yaml")
        return Hardware(**data)
