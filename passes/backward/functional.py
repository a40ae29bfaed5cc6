"""Part of `build_joint_graph`: writes into memory become values.

Before:  %b = new_empty(%x, [4, 12]); %v = slice(%b, 1, 2, 10); copy_(%v, %x); %y = mm(%b, %w)
After:   %b = new_empty(%x, [4, 12]); %c = slice_scatter(%b, %x, 1, 2, 10);    %y = mm(%c, %w)
Legal because: functionalization replays each write on the tensor whose memory it is, and on every view of it.

The canonical graph writes nothing, but composite ops (`F.pad(mode="circular")`) and formulas of gradients (`linalg.qr`,
`as_strided`) do. Later passes cut, order and drop nodes by what they read, and would lose a write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx

from megafx.errors import MegafxError
from megafx.ir.nodes import writes
from megafx.ir.program import PLACEMENT, VAL, located


def functional(gm: fx.GraphModule, args: Sequence[Any]) -> fx.GraphModule:
    """The same graph without writes; `gm` itself where it has none. args: fake inputs; the fake mode is on.

    Raises MegafxError at a write that has no functional form.
    """
    if not any(map(writes, gm.graph.nodes)):
        return gm
    replay = _Replay(gm)
    with torch.no_grad():
        try:
            made = make_fx(torch.func.functionalize(replay.run, remove="mutations"), tracing_mode="real")(*args)
        except (RuntimeError, NotImplementedError) as error:
            raise _refuse(replay.current, str(error)) from error
    for node in made.graph.nodes:
        if writes(node):
            raise _refuse(node, "it has no functional form")
    return made


def _refuse(node: fx.Node, why: str) -> MegafxError:
    return MegafxError(
        f"{node.target} writes into memory, which cannot be written as a value: {why}",
        fix="write this line with ops that give new tensors, or name the module in Config(eager_modules=...)",
        **located(node),
    )


class _Replay(fx.Interpreter):
    """Runs the graph node by node. What a node gives rise to has its line, module, maker and phase."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.current: fx.Node = next(iter(gm.graph.nodes))
        self.placed: list[tuple[Any, torch.Tensor]] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        mode = get_proxy_mode()
        assert mode is not None, "runs inside make_fx"
        self.tracer: Any = mode.tracer
        results = super().run(*args, **kwargs)
        for placement, value in self.placed:  # memory is placed as it is when the op that made it is through
            torch._sync(value)
            slot = get_proxy_slot(torch._from_functional_tensor(value), self.tracer, None)
            if slot is not None:
                slot.proxy.node.meta.setdefault(PLACEMENT, placement)
        return results

    def run_node(self, n: fx.Node) -> Any:
        self.current, nodes = n, self.tracer.graph.nodes
        before = len(nodes)
        result = super().run_node(n)
        fresh = [node for node, _ in zip(reversed(nodes), range(len(nodes) - before), strict=False)]
        for node in fresh if n.op == "call_function" else ():
            node.meta |= {key: value for key, value in n.meta.items() if key not in (VAL, PLACEMENT)}
        if PLACEMENT in n.meta and isinstance(result, torch.Tensor):
            self.placed.append((n.meta[PLACEMENT], result))
        return result
