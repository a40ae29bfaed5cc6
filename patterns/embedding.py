"""Sums of embeddings and their dropout: word + position (GPT-2, OPT, nanoGPT), word + type + position (BERT), x + position.

On one rank's shapes, after planning, where tables are whole or cut on the hidden dim. A lookup in a vocabulary-parallel table
is no plain embedding there (ids of this rank's rows, zeros elsewhere), and stays: kernels/embedding_sum.py says why.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import megafx.kernels.dropout.embedding_sum  # noqa: F401  registers the op
from megafx.rewrite.pattern import Pattern, register

aten, ops = torch.ops.aten, torch.ops.megafx
_IDS = {"table": "i64[1|b s]", "flat table": "i64[s]"}
_TENSORS = {"tensor": "D[1|b s h]", "flat tensor": "D[s h]"}
_ROWS = {"a": "u", "b": "v", "c": "w"}


class _Sum(Pattern):
    knob = "embedding_fusion"
    local = True
    scalars = {"a_padding": int, "b_padding": int, "c_padding": int, "p": float}


def _summand(name: str, kind: str) -> dict[str, str]:
    """What stands for one summand."""
    if kind in _IDS:
        return {name: f"D[{_ROWS[name]} h]", f"{name}_ids": _IDS[kind]}
    return {name: _TENSORS[kind]}


def _value(x: Tensor, ids: Tensor | None, padding: int) -> Tensor:
    return x if ids is None else aten.embedding(x, ids, padding)


def _three(x: Tensor | None, ids: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """With a batch dim: tensors [s, h] and ids [s] have none."""
    if ids is not None:
        return x, ids[None] if ids.dim() == 1 else ids
    return (x[None] if x is not None and x.dim() == 2 else x), None


def _padding(value: int | None) -> int:
    return -1 if value is None else value


@register
class EmbeddingSum(_Sum):
    """dropout(a[ids] + b[ids] + c[ids]), any of a, b, c a tensor that is there already -> embedding_sum."""

    name = "embedding_sum"
    variants = {
        "a_is": ("table", "tensor"),
        "b_is": ("table", "flat table", "tensor", "flat tensor"),
        "c_is": ("none", "table", "flat table", "tensor"),
        "dropped": (True, False),
    }

    def tensors(a_is, b_is, c_is, dropped):
        found = {"a": "D[u h]", "a_ids": "i64[b s]"} if a_is == "table" else {"a": "D[b s h]"}
        return found | _summand("b", b_is) | ({} if c_is == "none" else _summand("c", c_is))

    def needs(a_is, b_is, c_is, dropped):
        tables = "table" in a_is or "table" in b_is or "table" in c_is
        return ("add", *(("embedding",) if tables else ()), *(("dropout",) if dropped or not tables else ()))

    def match(a, b, *, a_ids=None, b_ids=None, c=None, c_ids=None, dropped, a_padding, b_padding, c_padding, p):
        total = _value(a, a_ids, a_padding) + _value(b, b_ids, b_padding)
        total = total if c is None else total + _value(c, c_ids, c_padding)
        return F.dropout(total, p, True) if dropped else total

    def where(m):
        """One pass saved, at least: a table that is read, or a dropout; sums of activations are the residual stream's."""
        tables = [n for n in ("a", "b", "c") if m[f"{n}_ids"] is not None]
        shared = [n for n in ("b", "c") if m[n] is not None and _is_shared(m, n)]
        if not tables and not (m["dropped"] and shared):
            return ""
        if not m["dropped"] and m["a_ids"] is None and m["c"] is None:
            return ""  # x + positions: reads and writes what the sum does
        return None

    def make(a, b, *, a_ids=None, b_ids=None, c=None, c_ids=None, a_padding, b_padding, c_padding, drop):
        operands = [*_three(a, a_ids), *_three(b, b_ids), *_three(c, c_ids)]
        padding = [_padding(a_padding), _padding(b_padding), _padding(c_padding)]
        return ops.embedding_sum(*operands, padding, *drop.args)


def _is_shared(m, name: str) -> bool:
    """Whether all of the batch have the same of a summand: it is read once for each of them."""
    value = m[name] if m[f"{name}_ids"] is None else m[f"{name}_ids"]
    lead = value.dim() - (1 if m[f"{name}_ids"] is None else 0)
    return lead == 1 or value.shape[0] == 1
