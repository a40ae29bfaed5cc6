"""How nodes are made while a model is traced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_slot, set_meta
from torch.fx.proxy import TracerBase

from megafx.ir.source_lines import trace_of_forward
from megafx.meanwhile import replacing


@replacing
def with_user_line(old: Callable[..., Node], /, self: TracerBase, *args: Any, **kwargs: Any) -> Node:
    """A `create_node` that writes down the one line of the stack that `source_of_trace` looks for."""
    records, self.record_stack_traces = self.record_stack_traces, False
    try:
        node = old(self, *args, **kwargs)
    finally:
        self.record_stack_traces = records
    if records and not node.stack_trace:
        node.stack_trace = trace_of_forward(sys._getframe(1))
    return node


@replacing
def made_where_it_was(old: Callable[..., Any], /, result: Any, proxy: Any, *, tracer: Any, **others: Any) -> Any:
    """A `track_tensor_tree` that lets a tensor be what it was before an op under no_grad that returns it as it is
    (`weight.to(x.dtype)` of a weight of that dtype, dropout that is off). Taken for the result of that op, it would have no
    gradient where code uses it later on."""
    if isinstance(proxy, Proxy) and isinstance(result, Tensor) and not torch.is_grad_enabled() and result.requires_grad:
        op, slot = proxy.node.target, get_proxy_slot(result, tracer, None)
        known = slot is not None and slot.proxy.node in proxy.node.all_input_nodes
        if known and isinstance(op, torch._ops.OpOverload) and not op._schema.is_mutable:
            set_meta(proxy, result)
            return result
    return old(result, proxy, tracer=tracer, **others)


@replacing
def of_wrapped(old: Callable[..., Any], /, value: Any, *more: Any, **options: Any) -> Any:
    """A function of a node's value that is given the tensor which a transform of torch.func has wrapped."""
    while isinstance(value, Tensor) and _functorch.is_gradtrackingtensor(value):
        value = _functorch.get_unwrapped(value)
    return old(value, *more, **options)
