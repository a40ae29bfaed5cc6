"""Real values of integers in a trace: what code that stays eager is run on, to learn the sizes of its results.

Such code may need certain numbers (the grids of images, lengths that add up to the whole). Where these follow from the inputs
of the call alone, without parameters, they are computed from the trace so far, and floating tensors are made up around them.
So the code is run on the call itself, and on variants of it: the batch twice, and with other lengths of the sequence. A
variant on which the code fails is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from megafx.ir.program import VAL
from megafx.ops.eager_call import find_call


class _Unknown(Exception):
    """A value that follows from parameters, or from no input of the call."""


class Values:
    """What a trace's values are for certain inputs. leaves: these, in the order of `traced`, the fakes of the trace."""

    def __init__(self, leaves: Sequence[Tensor], traced: Sequence[Tensor]) -> None:
        self.leaves, self.traced = leaves, traced
        self.tracer: Any = None
        self.known: dict[fx.Node, Any] = {}
        self.sizes: dict[sympy.Symbol, int] = {}
        fixed = []
        for real, fake in zip(leaves, traced, strict=True):
            for size, of_fake in zip(real.shape, fake.shape, strict=True):
                if not isinstance(of_fake, torch.SymInt):
                    fixed.append(int(size))
                elif of_fake.node.expr.is_Symbol:
                    self.sizes.setdefault(of_fake.node.expr, int(size))
        self.fixed = tuple(fixed)

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Real tensors for those of the trace: integers as they are, floating ones made up; None where that is not known."""
        mode = get_proxy_mode()
        if mode is None:
            return None
        self.tracer = mode.tracer
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            return self._like(tensors)

    def _like(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        made = []
        generator = torch.Generator().manual_seed(0)
        try:
            for tensor in tensors:
                if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                    shape = [self.size(n) for n in tensor.shape]
                    made.append(torch.randn(shape, generator=generator).to(tensor.dtype).to(tensor.device))
                else:
                    made.append(self._value(self._node_of(tensor)).clone())
        except (_Unknown, RuntimeError, ValueError, IndexError):  # an op that does not take the variant
            return None
        return made

    def size(self, size: Any) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expr = size.node.expr
        for symbol in expr.free_symbols - self.sizes.keys():
            self.sizes[symbol] = self._size_of(symbol)
        return int(expr.xreplace({s: sympy.Integer(self.sizes[s]) for s in expr.free_symbols}))

    def _size_of(self, symbol: sympy.Symbol) -> int:
        """Of a size that data decides: that of the first value that has it."""
        for node in self.tracer.graph.nodes:
            value = node.meta.get(VAL)
            if isinstance(value, torch.SymInt) and value.node.expr == symbol:
                return int(self._value(node))
            if isinstance(value, Tensor):
                for d, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                        return int(self._value(node).shape[d])
        raise _Unknown

    def _value(self, node: fx.Node) -> Any:
        todo = [node]
        while todo:  # operands first, without recursion: a graph is deep
            each = todo[-1]
            missing = [x for x in each.all_input_nodes if x not in self.known]
            if each not in self.known and not missing:
                self.known[each] = self._computed(each)
            todo = todo[:-1] if not missing else [*todo, *missing]
        if isinstance(self.known[node], _Unknown):
            raise self.known[node]
        return self.known[node]

    def _computed(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            found = [r for r, t in zip(self.leaves, self.traced, strict=True) if self._node_of(t) is node]
            return found[0] if found else _Unknown()
        if node.op == "get_attr":
            value = getattr(self.tracer.root, str(node.target), None)
            return value if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else _Unknown()
        if node.op != "call_function" or any(isinstance(self.known[x], _Unknown) for x in node.all_input_nodes):
            return _Unknown()
        known: Any = fx.map_arg((node.args, node.kwargs), lambda n: self.known[n])
        args, kwargs = known
        target: Any = node.target
        if target is torch.ops.megafx.eager_call.default:
            call = find_call(args[4])
            if call.names or call.random:
                return _Unknown()
            found = [x for x in pytree.tree_leaves(call.run(args[0])) if isinstance(x, Tensor)]
            return [None, None, *found]
        return target(*args, **kwargs)

    def _node_of(self, tensor: Tensor) -> fx.Node:
        slot = get_proxy_slot(tensor, self.tracer, None)
        node = getattr(getattr(slot, "proxy", None), "node", None)
        if not isinstance(node, fx.Node):
            raise _Unknown
        return node


class CallValues:
    """The real inputs of a call, and variants of them (`Probes` of ops/eager_probes.py). dims: of each, the names of its dims
    (capture/dims.py)."""

    def __init__(self, leaves: Sequence[Tensor], dims: Sequence[Mapping[int, str]], scaled: bool = False) -> None:
        self.scaled = scaled
        self.variants = [list(leaves), *_variants(leaves, dims)] if _are_real(leaves) else []
        self.values: list[Values] = []

    def begin(self, traced: Sequence[Tensor]) -> None:
        """Of a trace. traced: its inputs."""
        self.values = [Values(leaves, traced) for leaves in self.variants]

    def runs(self, tensors: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], tuple[int, ...]]]:
        """Of each variant what a call gets; nothing where its integers are not known, or where it has none."""
        if all(x.dtype.is_floating_point or x.dtype.is_complex for x in tensors):
            return
        for number, each in enumerate(self.values):
            made = each.like(tensors)
            if made is not None:
                yield made, each.fixed
            elif number == 0:
                return


def _are_real(leaves: Sequence[Tensor]) -> bool:
    return bool(leaves) and not any(x.device.type == "meta" or isinstance(x, FakeTensor) for x in leaves)


def _longer(x: Tensor, dim: int) -> Tensor:
    """The last row of a dim twice."""
    return torch.cat([x, x.narrow(dim, x.shape[dim] - 1, 1)], dim)


def _shorter(x: Tensor, dim: int) -> Tensor:
    return x.narrow(dim, 0, x.shape[dim] - 1)


def _variants(leaves: Sequence[Tensor], dims: Sequence[Mapping[int, str]]) -> Iterator[list[Tensor]]:
    yield [torch.cat([x, x]) if x.dim() else x for x in leaves]
    names = {name for each in dims for d, name in each.items() if name != "batch"}
    for name in sorted(names):
        for change in (_longer, _shorter):
            made = []
            for leaf, each in zip(leaves, dims, strict=True):
                for d, theirs in each.items():
                    if theirs == name and leaf.shape[d] > 1:
                        leaf = change(leaf, d)
                made.append(leaf)
            yield made
