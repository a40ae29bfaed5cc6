"""What a function computes with tensors, as a graph of the ATen ops that it calls; composite ops (linear, softmax) stay whole.

What make_fx(pre_dispatch=True) gives, in half its time, for functions of fake tensors whose sizes are known: no symbols, no
metadata of the call, no Python code. A process traces hundreds of patterns.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megafx.ir.holders import own_functional
from megafx.ir.program import VAL, erase_unused


def record(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> fx.Graph:
    """The graph of `function(*tensors)`. tensors: fake ones, whose mode is on. Every node has its value in meta[VAL]."""
    recorder = _Recorder()
    for i, tensor in enumerate(tensors):
        recorder.know(recorder.graph.placeholder(f"arg{i}"), tensor)
    with own_functional(), enable_python_dispatcher(), recorder:
        result = function(*tensors)
    recorder.graph.output(recorder.nodes(result))
    erase_unused(recorder.graph)
    return recorder.graph


class _Recorder(ProxyTorchDispatchMode):
    """torch lets no other class see ops before autograd takes composite ones apart."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self.enter_stack: list[ProxyTorchDispatchMode | None] = []
        self.graph = fx.Graph()
        self._node_of: dict[int, fx.Node] = {}
        # The same by memory: what `torch.arange` returns is a detached copy of what it calls.
        self._node_at: dict[Any, fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # so that an id stays that of its tensor

    def know(self, node: fx.Node, value: Any) -> None:
        """node gives `value`, a tensor or several."""
        node.meta[VAL] = value
        if isinstance(value, torch.Tensor):
            self._node_of[id(value)] = self._node_at[_memory(value)] = node
            self._alive.append(value)
        elif isinstance(value, (list, tuple)):
            for i, part in enumerate(value):
                self.know(self.graph.call_function(operator.getitem, (node, i)), part)

    def nodes(self, tree: Any) -> Any:
        """The same tree with the node of each tensor. KeyError for a tensor that comes from elsewhere."""
        return pytree.tree_map(lambda x: self._node(x) if isinstance(x, torch.Tensor) else x, tree)

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        return self._node_of.get(id(tensor)) or self._node_at[_memory(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        value = func(*args, **kwargs)
        if func is not torch.ops.prim.device.default:
            self.know(self.graph.call_function(func, self.nodes(args), self.nodes(kwargs)), value)
        return value


def _memory(x: torch.Tensor) -> Any:
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype
