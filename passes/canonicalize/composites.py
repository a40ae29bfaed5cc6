"""Ops that torch makes of others, and that no rule knows, are those others: cells of recurrent modules, losses, ...

Before:  %l = margin_ranking_loss(%x, %y, %z, 0.5)
After:   %d = sub(%x, %y); %n = neg(%z); %m = mul(%n, %d); %s = add(%m, 0.5); %c = clamp_min(%s, 0); %l = mean(%c)
Legal because: that is what torch runs, in eager mode too.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megafx.ir.nodes import aten_ops, replace
from megafx.ir.program import VAL
from megafx.passes.canonicalize.editor import Editor

_COMPOSITES = aten_ops(
    "adaptive_avg_pool3d adaptive_max_pool1d bilinear conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input cosine_embedding_loss cumulative_trapezoid.dx cumulative_trapezoid.x det diff "
    "grid_sampler gru_cell hinge_embedding_loss instance_norm linalg_cholesky linalg_det linalg_eigh "
    "linalg_eigvalsh linalg_inv linalg_matrix_norm linalg_matrix_norm.str_ord linalg_matrix_power linalg_slogdet "
    "linalg_solve linalg_svd linalg_svdvals logdet lstm_cell margin_ranking_loss matrix_exp nanmean nansum "
    "pairwise_distance poisson_nll_loss prelu rnn_relu_cell rnn_tanh_cell rot90 std_mean std_mean.dim tensordot "
    "trapezoid.dx trapezoid.x triplet_margin_loss var_mean var_mean.dim"
)


def made_of_others(editor: Editor) -> int:
    count = 0
    while nodes := [n for n in editor.graph.nodes if n.target in _COMPOSITES and not _is_kept(n)]:
        count += len(nodes)
        for node in nodes:
            _take_apart(editor, node)
    return count


def _is_kept(node: fx.Node) -> bool:
    """True for differences of position ids, where documents begin (analysis/masks.py)."""
    return node.target is torch.ops.aten.diff.default and not node.meta[VAL].is_floating_point()


class _Recorder(TorchDispatchMode):
    """Emits each op that runs within, before `node`. known: (tensor, its node)."""

    def __init__(self, editor: Editor, node: fx.Node) -> None:
        super().__init__()
        self.editor, self.emit = editor, editor.at(node)
        self.known: dict[int, tuple[Tensor, fx.Node]] = {}

    def node_of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.known[id(value)][1]
        return self.editor.arg(value) if isinstance(value, SymInt) else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        node = self.emit(func, *pytree.tree_map(self.node_of, args), **pytree.tree_map(self.node_of, kwargs or {}))
        if not torch.is_grad_enabled():
            self.editor.without_grad.add(node)
        for i, value in enumerate(result) if isinstance(result, (tuple, list)) else [(-1, result)]:
            if isinstance(value, Tensor) and id(value) not in self.known:  # else one that was written in place
                self.known[id(value)] = value, node if i < 0 else self.emit(operator.getitem, node, i)
        return result


def _take_apart(editor: Editor, node: fx.Node) -> None:
    recorder = _Recorder(editor, node)

    def value_of(x: Any) -> Any:
        if not isinstance(x, fx.Node):
            return x
        value = x.meta[VAL]
        if isinstance(value, Tensor):
            recorder.known[id(value)] = value, x
        return value

    args, kwargs = pytree.tree_map(value_of, (node.args, node.kwargs))
    with (
        editor.program.fake_mode,
        torch.set_grad_enabled(node not in editor.without_grad),
        enable_python_dispatcher(),
        recorder,
    ):
        result = (node.target.decompose if node.target._can_decompose() else decomposition_table[node.target])(
            *args, **kwargs
        )
    if isinstance(result, (tuple, list)):
        for user in list(node.users):
            assert user.target is operator.getitem
            replace(user, recorder.node_of(result[user.args[1]]))
        editor.graph.erase_node(node)
    else:
        replace(node, recorder.node_of(result))
