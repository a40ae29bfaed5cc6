"""The layers of a model. No torch import.

Layers: the outermost group of sibling modules with matching parameter names and shapes. Two siblings match if both have modules
of their own, and at least half of the parameters of one have a namesake of the same shape in the other. A list of modules goes
before other siblings (the experts of a layer are part of it); a list of one module that has modules of its own is one layer.

Parameters that are not in layers are grouped by their place: before the first layer, between two stacks of layers, after the
last layer. Without layers, each module is a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any


@dataclass(frozen=True)
class Layers:
    """paths: of the modules that are layers."""

    paths: frozenset[str]

    @staticmethod
    def of(shapes: Mapping[str, Sequence[Any]]) -> Layers:
        """The layers of a model whose parameters have these shapes, by FQN."""
        tree: dict[str, Any] = {}
        for fqn, shape in shapes.items():
            *path, name = fqn.split(".")
            module = tree
            for part in path:
                module = module.setdefault(part, {})
            module[name] = tuple(shape)
        return Layers(frozenset(_find("", tree)))

    def layer_of(self, fqn: str) -> str:
        """The layer that a module or parameter is in, or ''."""
        parts = fqn.split(".")
        paths = (".".join(parts[: i + 1]) for i in range(len(parts)))
        return next((p for p in paths if p in self.paths), "")

    def regions(self, fqns: Iterable[str]) -> Iterator[str]:
        """The layer of each of `fqns`, which come in the order of use; outside of layers, its place among them."""
        begun: dict[str, None] = {}
        for fqn in fqns:
            layer = self.layer_of(fqn)
            if layer:
                begun[layer] = None
                yield layer
            elif self.paths:
                yield f"after {[*begun][-1]}" if begun else "before the layers"
            else:
                yield fqn


def _find(path: str, module: dict[str, Any]) -> list[str]:
    parts = {name: part for name, part in module.items() if isinstance(part, dict)}
    blocks = [name for name, part in parts.items() if any(isinstance(x, dict) for x in part.values())]
    contents = [dict(_parameters(parts[name])) for name in blocks]
    alike = any(_alike(a, b) for a, b in combinations(contents, 2))
    mine = [f"{path}{name}" for name in blocks]
    if blocks and all(name.isdigit() for name in parts) and (alike or len(parts) == 1):
        return mine
    inside = [layer for name in blocks for layer in _find(f"{path}{name}.", parts[name])]
    return mine if alike and not inside else inside


def _parameters(module: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, part in module.items():
        if isinstance(part, dict):
            yield from _parameters(part, f"{prefix}{name}.")
        else:
            yield prefix + name, part


def _alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    common = sum(name in b and b[name] == shape for name, shape in a.items())
    return common > 0 and 2 * common >= min(len(a), len(b))
