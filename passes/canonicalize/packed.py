"""Attention that torch's variable-length ops compute is megafx.attention with `segments`, where that says the same.

Before:  %o = torch_attn._varlen_attn(%q, %k, %v, %ends, %ends, longest, longest, True)      # q [t, n, e], ends [documents + 1]
After:   %d = searchsorted(ends[1:], arange(t), right)                                       # [t], the document of each token
         %y = megafx.attention(%q, %k, %v [1, n, t, e], segments=%d [1, t], causal);  %o = %y as [t, n, e]
Legal because: tokens ends[i] to ends[i + 1] of queries and of keys are document i, which sees itself alone. Within it, the
places of query and key differ as they do in the row, so that causality and windows are the same.

Of `torch.nn.attention.varlen`, aten._flash_attention_forward and aten._efficient_attention_forward. Where it does not say the
same (keys of other lengths, a window that is not the same both ways) the op is megafx.flash_documents or efficient_documents,
which is sharded over heads; with log-sum-exps or paged keys it stays as it is, whole on every rank. So do log-sum-exps of the
efficient op, which pads them. Elsewhere they are a result of megafx.attention_forward. Dropout draws by position of the row, as
in other attention (`number_dropouts`); where the op is not attention with segments, it is refused.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

import megafx.kernels.attention.attention  # noqa: F401  registers the op
from megafx.ir.nodes import argument, replace
from megafx.ir.program import VAL
from megafx.kernels.attention.attention_documents import efficient_documents, flash_documents
from megafx.passes.canonicalize.editor import Editor, is_tensor

aten = torch.ops.aten
UNLIMITED, FROM_THE_TOP, FROM_THE_BOTTOM = -1, 1, 2  # torch's words: of windows; of custom_mask_type


class _Asked(NamedTuple):
    """ends: of queries and of keys. left, right: how many keys before and after its own a query sees; None: not known. p: of
    dropout."""

    ends: tuple[Any, Any]
    kept: tuple[Any, ...]  # an op that computes the same, and its arguments behind q, k, v
    left: int | None = UNLIMITED
    right: int | None = UNLIMITED
    bias: fx.Node | None = None
    p: Any = 0.0

    def flags(self) -> tuple[bool, int] | None:
        """Causal and window of megafx.attention; None where it has no such window, or queries and keys part differently."""
        if not _same(*self.ends) or self.left is None or self.right is None:
            return None
        if self.right == 0:
            return True, 0 if self.left == UNLIMITED else self.left + 1
        if self.left == self.right:
            return False, 0 if self.left == UNLIMITED else self.left + 1
        return None


def packed_attention(editor: Editor, node: fx.Node) -> bool:
    reader = _READ.get(str(node.target))
    read = {user.args[1]: user for user in node.users if user.target is operator.getitem and user.users}
    if reader is None or len(read) < sum(bool(user.users) for user in node.users) or not read.keys() <= {0, 1}:
        return False
    asked, operands = reader(node), node.args[:3]
    if 1 in read and reader is _efficient:  # whose log-sum-exps are padded
        return False
    if asked is None or not all(map(is_tensor, operands)):
        return False
    q, k, _ = (x.meta[VAL] for x in operands)
    flags, emit, tokens, lse = asked.flags(), editor.at(node), q.shape[-3], None
    if flags is None or not editor.same(tokens, k.shape[-3]) or (asked.bias is not None and asked.ends[0] is not None):
        if asked.p or 1 in read:  # its own kernel draws bits that depend on the process; the kept ops have one result
            return False
        op, *rest = asked.kept
        y = emit(op, *operands, *rest)
    else:
        rows = [x if q.dim() == 4 else emit(aten.unsqueeze.default, x, 0) for x in operands]
        heads = [emit(aten.transpose.int, x, 1, 2) for x in rows]
        segments = None if asked.ends[0] is None else _documents(editor, node, asked.ends[0], tokens)
        scale = argument(node, "scale")
        factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
        options: Any = (factor, *flags, 0.0, 0, asked.p, -1, -1, [], "tp")  # no soft-cap, hidden keys are left out
        operands = (*heads, asked.bias, None, segments, None, None, *options)
        if 1 in read:  # [n, t]; of rows [b, n, t]
            both = emit(torch.ops.megafx.attention_forward.default, *operands)
            y, lse = (emit(operator.getitem, both, i) for i in (0, 1))
            lse = emit(aten.to.dtype, lse if q.dim() == 4 else emit(aten.select.int, lse, 0, 0), torch.float32)
        else:
            y = emit(torch.ops.megafx.attention.default, *operands)
        y = emit(aten.transpose.int, y, 1, 2)
        y = y if q.dim() == 4 else emit(aten.select.int, y, 0, 0)
    for user in list(node.users):
        if user in read.values():
            replace(user, lse if user.args[1] else y)
        else:
            editor.graph.erase_node(user)
    editor.graph.erase_node(node)
    return True


def _documents(editor: Editor, node: fx.Node, ends: fx.Node, tokens: Any) -> fx.Node:
    """[1, t]: how many documents end at or before each token."""
    emit, device = editor.at(node), ends.meta[VAL].device
    behind = emit(aten.slice.Tensor, ends, 0, 1, editor.arg(ends.meta[VAL].shape[0]))
    behind = emit(aten.to.dtype, behind, torch.int64)
    places = emit(aten.arange.default, editor.arg(tokens), dtype=torch.int64, device=device)
    return emit(aten.unsqueeze.default, emit(aten.searchsorted.Tensor, behind, places, right=True), 0)


def _same(a: Any, b: Any) -> bool:
    """True if two values are one, or the same function of the same values."""
    if a is b:
        return True
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        return (
            a.op == b.op == "call_function" and a.target is b.target and _same(a.args, b.args) and a.kwargs == b.kwargs
        )
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)


def _window(value: Any) -> int | None:
    """A number of keys; None where it is not known."""
    if value is None:
        return UNLIMITED
    return value if isinstance(value, int) and value >= 0 else UNLIMITED if isinstance(value, int) else None


def _varlen(node: fx.Node) -> _Asked | None:
    left, right = argument(node, "window_size") or (UNLIMITED, UNLIMITED)
    return _of_flash(node, "cu_seq", left, right)


def _flash(node: fx.Node) -> _Asked | None:
    left, right = (argument(node, f"window_size_{side}") for side in ("left", "right"))
    asked = _of_flash(node, "cum_seq", left, right)
    return asked and asked._replace(p=argument(node, "dropout_p"))


def _of_flash(node: fx.Node, name: str, left: Any, right: Any) -> _Asked | None:
    """name: of the argument that says where documents end."""
    paged, slopes = ("seqused_k", "block_table"), argument(node, "alibi_slopes")
    if any(argument(node, each) is not None for each in paged):
        return None
    ends, longest = ((argument(node, f"{each}_q"), argument(node, f"{each}_k")) for each in (name, "max"))
    causal = bool(argument(node, "is_causal"))
    kept = (flash_documents, *ends, slopes, *longest, causal, argument(node, "scale"), left, right)
    if slopes is not None:
        return _Asked(ends, kept, None, None)
    return _Asked(ends, kept, _window(left), 0 if causal else _window(right))


def _efficient(node: fx.Node) -> _Asked | None:
    ends = argument(node, "cu_seqlens_q"), argument(node, "cu_seqlens_k")
    longest = argument(node, "max_seqlen_q"), argument(node, "max_seqlen_k")
    p = argument(node, "dropout_p")
    kind, bias, used, window = (argument(node, n) for n in ("custom_mask_type", "bias", "seqlen_k", "window_size"))
    kept = (efficient_documents, bias, *ends, used, *longest, kind, argument(node, "scale"), window)
    if used is not None or window or (bias is not None and bias.meta[VAL].dim() != 4):
        return _Asked(ends, kept, None, None, p=p)
    right = 0 if kind in (FROM_THE_TOP, FROM_THE_BOTTOM) else UNLIMITED
    return _Asked(ends, kept, UNLIMITED, right, bias, p)


_READ = {
    "torch_attn._varlen_attn.default": _varlen,
    "aten._flash_attention_forward.default": _flash,
    "aten._efficient_attention_forward.default": _efficient,
}
