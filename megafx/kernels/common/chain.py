"""`Chain`: a few pointwise ops, reductions and copies as one function that Inductor compiles (passes/lower/compile_chains.py).

Compiled once for all that are alike: in like layers, in forward and backward, in all graphs of a process. Sizes that a graph
has as symbols are symbols to Inductor too, at least 2 as they are in a trace: a kernel's loops go over any number of elements,
so that a size of 1 runs as well. What else Inductor concludes (guards) is compared with each new set of sizes; where it does
not hold, the chain is compiled for those sizes too.

Inductor sees no collective, no product and no kernel of ours. So it can move none of them, and overlap is as without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

Size = int | str  # a number, or the name of a symbolic size
Stride = int | tuple[int, tuple[str, ...]]  # a number, or a number times sizes


class Operand(NamedTuple):
    """A tensor that a chain is called with."""

    sizes: tuple[Size, ...]
    strides: tuple[Stride, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass
class _Compiled:
    """guards: expressions in the symbols of `names`; fixed: sizes that it is for."""

    run: Callable[..., Any]
    names: Mapping[str, Any]
    fixed: Mapping[str, int]
    guards: Sequence[Any]

    def fits(self, sizes: Mapping[str, int]) -> bool:
        if any(sizes[name] != size for name, size in self.fixed.items()):
            return False
        values = {symbol: sizes[name] for name, symbol in self.names.items()}
        return all(bool(guard.xreplace(values)) for guard in self.guards)


_LOCK = threading.Lock()


class Chain:
    """operands: of the placeholders of `gm`; a name represents a size that is an argument. hints: typical sizes, 2 or more."""

    def __init__(self, gm: fx.GraphModule, operands: Sequence[Operand | str], hints: Mapping[str, int]) -> None:
        self.gm, self.operands, self.hints = gm, operands, dict(hints)
        self.compiled: list[_Compiled] = []
        self.known: dict[Hashable, Callable[..., Any]] = {}
        # A graph's code names what it calls.
        self.__name__ = self.__qualname__ = "chain"
        self.__module__ = __name__

    def __call__(self, *arguments: Any) -> Any:
        key = tuple([(x.shape, x.stride()) if isinstance(x, Tensor) else x for x in arguments])
        run = self.known.get(key)
        if run is None:
            with _LOCK:
                run = self.known[key] = self._for(arguments)
        return run(*arguments)

    def _for(self, arguments: Sequence[Any]) -> Callable[..., Any]:
        """What runs for arguments of these sizes."""
        sizes: dict[str, int] = {}
        for argument, operand in zip(arguments, self.operands, strict=True):
            found = (
                [(operand, argument)] if isinstance(operand, str) else zip(operand.sizes, argument.shape, strict=True)
            )
            sizes |= {name: int(n) for name, n in found if isinstance(name, str)}
        tensors = [(x, o) for x, o in zip(arguments, self.operands, strict=True) if isinstance(o, Operand)]
        if any(x.numel() == 0 for x, _ in tensors):
            return self.gm.forward
        made = next((c for c in self.compiled if c.fits(sizes)), None)
        if made is None:
            made = self._compile(sizes if self.compiled else sizes | self.hints)
            self.compiled.append(made)
        wanted = {
            i: [_value(s, sizes) for s in o.strides] for i, o in enumerate(self.operands) if isinstance(o, Operand)
        }
        others = [i for i, strides in wanted.items() if _differ(arguments[i], strides)]
        if not others:
            return made.run
        run = made.run

        def restrided(*given: Any) -> Any:
            """An op gave other strides than it had in the trace."""
            copies = [*given]
            for i in others:
                x = given[i]
                copies[i] = torch.empty_strided(x.shape, wanted[i], dtype=x.dtype, device=x.device).copy_(x)
            return run(*copies)

        return restrided

    def _compile(self, sizes: Mapping[str, int]) -> _Compiled:
        from torch._dynamo.source import ConstantSource  # half a second that eager runs need not pay
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        env = ShapeEnv(duck_shape=False)
        mode = FakeTensorMode(shape_env=env)
        names = [name for o in self.operands for name in ([o] if isinstance(o, str) else o.sizes)]
        values: dict[str, Any] = {}
        symbols: dict[str, Any] = {}
        fixed: dict[str, int] = {}
        for name in dict.fromkeys(n for n in names if isinstance(n, str)):
            source = ConstantSource(f"size{len(values)}")
            symbol = env.create_symbol(sizes[name], source, dynamic_dim=DimDynamic.DYNAMIC)
            values[name] = env.create_symintnode(symbol, hint=sizes[name], source=source)
            if symbol.is_Symbol:
                symbols[name] = symbol
            else:
                fixed[name] = sizes[name]
        fakes = [_fake(o, values, mode) for o in self.operands]
        run = inductor(self.gm, fakes, mode)
        return _Compiled(run, symbols, fixed, [guard.expr for guard in env.guards])


def inductor(gm: fx.GraphModule, fakes: list[Any], mode: Any) -> Callable[..., Any]:
    """The same function, compiled."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx

    graph = fx.Graph()  # theirs to change
    graph.output(graph.graph_copy(gm.graph, {}))
    with torch.no_grad(), tracing(TracingContext(mode)):
        found: Any = compile_fx(fx.GraphModule(gm, graph), fakes)
    return found


def _value(stride: Stride, sizes: Mapping[str, Any]) -> Any:
    if isinstance(stride, int):
        return stride
    product, names = stride
    for name in names:
        product = product * sizes[name]
    return product


def _differ(x: Tensor, strides: Sequence[int]) -> bool:
    return any(n > 1 and a != b for n, a, b in zip(x.shape, x.stride(), strides, strict=True))


def _fake(operand: Operand | str, values: Mapping[str, Any], mode: Any) -> Any:
    if isinstance(operand, str):
        return values[operand]
    sizes = [values[n] if isinstance(n, str) else n for n in operand.sizes]
    strides = [_value(s, values) for s in operand.strides]
    with mode:
        return torch.empty_strided(sizes, strides, dtype=operand.dtype, device=operand.device)
