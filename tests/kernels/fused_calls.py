"""A call of each form of each op that launches kernels: what rules are tried on, in bf16."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from megafx.checks.rules import make_tensor
from megafx.ir.facts import SampleTensor, declared
from megafx.kernels.common import op as module
from megafx.kernels.common.replay import Replay

for path in Path(str(module.__file__)).parents[1].rglob("*.py"):  # ops are defined when their modules are imported
    if path.parent.name != "kernels" and not path.stem.endswith("_triton"):
        importlib.import_module(f"megafx.kernels.{path.parent.name}.{path.stem}")

BF16 = torch.bfloat16


def sample(args: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(0)

    def real(x: Any) -> Any:
        if isinstance(x, SampleTensor):
            x = make_tensor(x, generator)
            return x.to(BF16) if x.is_floating_point() else x
        return BF16 if x == torch.float64 else x

    return [real(x) for x in args]


def replay_of(call: Any) -> Replay | None:
    cells = getattr(module._implementations.get(call), "__closure__", None) or ()
    return next((c.cell_contents for c in cells if isinstance(c.cell_contents, Replay)), None)


def op_of(name: str) -> Any:
    namespace, packet, overload = name.split(".") if name.count(".") == 2 else ("", "", "")
    return getattr(getattr(torch.ops.megafx, packet), overload) if namespace == "megafx" else None


HEADS = [torch.zeros(2, n, 16, 32, dtype=BF16) for n in (4, 2, 2)]
WIDE = (
    "megafx.attention_forward.default",
    [*HEADS, None, None, None, None, torch.tensor(3), 0.2, True, 0, 0.0, 0, 0.1, 7, -1, [], ""],
)
OPS = [(name, facts) for name, facts in declared().items() if replay_of(op_of(name))]
CALLS = [(name, sample(args)) for name, facts in OPS for args in facts.samples] + [WIDE]
