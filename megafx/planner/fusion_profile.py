"""`FusionProfile`: what fusions were measured to cost on one device, and which of them therefore pay. No torch import.

`benchmarks/profile_fusions.py` writes it as a YAML file. Those of known devices are in hardware/fusions/; each names the
hardware profiles that it goes with.

    device: NVIDIA H200
    hardware: [h200-nvlink]
    source: measured 2026-11-21, torch 2.11.0, bfloat16, benchmarks/profile_fusions.py --out h200.yaml
    fusions:
      glu:                              # what was measured: a chain of a model, fused and as it is
        patterns: [glu]                 # the patterns that it speaks for
        needs: []                       # patterns without which these find nothing
        sizes:                          # milliseconds, [fused, unfused]; elements: of the largest value of the chain
        - elements: 67108864
          eager training: [0.11, 0.19]      # forward and backward, called back to back, host time included
          eager inference: [0.04, 0.07]     # forward alone
          compiled training: [0.11, 0.11]   # under Inductor (compile=True): kernels alone, replayed from a CUDA graph
          compiled inference: [0.04, 0.04]

A fusion pays where fused is at most TIE times unfused, at the size nearest to the match's; at a tie it is made, since it
keeps less memory. A pattern that others need is also made where one of those pays. Linear + cross entropy is not here: it is
made for its memory, whatever it costs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megafx.config import MEASURE_NOTHING
from megafx.errors import ConfigError
from megafx.planner.hardware import PROFILES, profiles_in, read_profile

FOLDER = PROFILES / "fusions"
MODES = ("eager training", "eager inference", "compiled training", "compiled inference")
MERGE_LINEARS, MERGE_GATE_UP = "merge_linears", "merge_gate_up"  # pattern names of the pass merge_linears
TIE = 1.02  # medians of repeated runs differ by about this much
COMMAND = "python benchmarks/profile_fusions.py --out mine.yaml"


def mode_of(compiled: bool, training: bool) -> str:
    """One of MODES."""
    return f"{'compiled' if compiled else 'eager'} {'training' if training else 'inference'}"


@dataclass(frozen=True)
class Times:
    """Milliseconds at one size."""

    elements: int
    modes: Mapping[str, tuple[float, float]]  # mode -> (fused, unfused)


@dataclass(frozen=True)
class Measured:
    """One chain. patterns: what it speaks for; needs: patterns without which these find nothing; times: by elements."""

    patterns: tuple[str, ...]
    needs: tuple[str, ...]
    times: tuple[Times, ...]

    def at(self, elements: int, mode: str) -> tuple[float, float] | None:
        """(fused, unfused) at the size nearest to this one; None where this mode was not measured."""
        known = [t for t in self.times if mode in t.modes]
        if not known:
            return None
        far = math.log(max(elements, 1))
        return min(known, key=lambda t: abs(math.log(t.elements) - far)).modes[mode]

    def pays(self, elements: int, mode: str) -> bool:
        found = self.at(elements, mode)
        return found is None or found[0] <= TIE * found[1]


@dataclass(frozen=True)
class FusionProfile:
    """Measurements of one device. hardware: names of the hardware profiles that it goes with."""

    device: str
    hardware: tuple[str, ...]
    source: str
    fusions: Mapping[str, Measured]

    def measured(self, pattern: str) -> bool:
        return any(pattern in m.patterns for m in self.fusions.values())

    def needed_by(self, patterns: Iterable[str]) -> set[str]:
        """Patterns without which these find nothing."""
        wanted = {*patterns}
        return {n for m in self.fusions.values() if wanted & {*m.patterns} for n in m.needs}

    def slower(self, pattern: str, elements: int, mode: str) -> tuple[float, float] | None:
        """(fused, unfused) milliseconds where the pattern does not pay; None where it does, or was not measured."""
        own = [m for m in self.fusions.values() if pattern in m.patterns]
        if not own or any(m.pays(elements, mode) for m in own):
            return None
        if any(pattern in m.needs and m.pays(elements, mode) for m in self.fusions.values()):
            return None
        return own[0].at(elements, mode)

    @staticmethod
    def choose(wanted: str | None, hardware: str) -> FusionProfile | None:
        """wanted: `Config.fusion_profile`; hardware: name of the hardware profile. None: every fusion is made."""
        if wanted == MEASURE_NOTHING:
            return None
        if wanted is not None:
            return FusionProfile.load(wanted)
        return next((p for p in _shipped() if hardware in p.hardware), None)

    @staticmethod
    def load(name_or_path: str | Path) -> FusionProfile:
        """A profile by name ('h200') or the path of a YAML file."""
        return FusionProfile.from_dict(*read_profile("fusion", name_or_path, FOLDER, COMMAND))

    @staticmethod
    def from_dict(data: Any, where: str = "the fusion profile") -> FusionProfile:
        try:
            fusions = {name: _measured(entry) for name, entry in dict(data["fusions"]).items()}
            return FusionProfile(str(data["device"]), tuple(data["hardware"]), str(data["source"]), fusions)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"lacks '{error.args[0]}'" if isinstance(error, KeyError) else f"cannot be read: {error}"
            raise ConfigError(f"{where} {what}", fix=f"write it with '{COMMAND}'") from None

    def to_dict(self) -> dict[str, Any]:
        """`from_dict` is the inverse."""
        fusions = {}
        for name, m in self.fusions.items():
            sizes = [{"elements": t.elements} | {mode: list(ms) for mode, ms in t.modes.items()} for t in m.times]
            fusions[name] = {"patterns": list(m.patterns), "needs": list(m.needs), "sizes": sizes}
        return {"device": self.device, "hardware": list(self.hardware), "source": self.source, "fusions": fusions}

    def save(self, path: Path) -> None:
        path.write_text(yaml.safe_dump(self.to_dict(), sort_keys=False, width=200, default_flow_style=None))


@functools.cache
def _shipped() -> tuple[FusionProfile, ...]:
    """Those that come with megafx, read once."""
    return tuple(map(FusionProfile.load, profiles_in(FOLDER)))


def _measured(entry: Any) -> Measured:
    times = []
    for row in entry["sizes"]:
        modes = {}
        for mode, pair in row.items():
            if mode == "elements":
                continue
            if mode not in MODES:
                raise ValueError(f"'{mode}' is none of {', '.join(MODES)}")
            fused, unfused = (float(x) for x in pair)
            if not (fused > 0 and unfused > 0):
                raise ValueError(f"times are positive milliseconds, not {pair}")
            modes[mode] = (fused, unfused)
        if int(row["elements"]) < 1:
            raise ValueError(f"elements is {row['elements']}")
        times.append(Times(int(row["elements"]), modes))
    if not times:
        raise ValueError("a fusion without sizes")
    return Measured(tuple(entry["patterns"]), tuple(entry.get("needs", ())), tuple(times))
