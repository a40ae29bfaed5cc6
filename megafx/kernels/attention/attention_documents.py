"""megafx::flash_documents, megafx::efficient_documents: torch's attention of packed rows, for what `attention` has no words.

q, k, v [t, n, e] ([b, t, n, e] for rows), ends_q, ends_k [documents + 1]: document i is queries ends_q[i] to ends_q[i + 1]
and keys ends_k[i] to ends_k[i + 1]. Keys of other lengths, windows that are not the same both ways, slopes of ALiBi.

Nothing is computed here: each is ATen's op of the same name, without its statistics, so that the planner sees one result and
shards it over heads. The joint graph has ATen's ops and their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megafx.ir.facts import real
from megafx.kernels.common.op import define_composite
from megafx.rules.families import Arg, OpCall, RuleText
from megafx.rules.families_math import WHOLE_DOCUMENTS

aten = torch.ops.aten
_OPERANDS = "Tensor query, Tensor key, Tensor value"


def _flash(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Any, ends_k: Any, slopes: Any, max_q: int, max_k: int, causal: bool,
    scale: Any, left: Any, right: Any,
) -> Tensor:  # fmt: skip
    windows = {"window_size_left": left, "window_size_right": right, "alibi_slopes": slopes}
    found: Tensor = aten._flash_attention_forward(
        q, k, v, ends_q, ends_k, max_q, max_k, 0.0, causal, False, scale=scale, **windows
    )[0]
    return found


def _flash_rule(call: OpCall) -> RuleText:
    rows = "b " if len(call.get("query").shape) == 4 else ""
    q, k, slopes = f"{rows}s! (n g) e!", f"{rows}c! n e!", call.get("alibi_slopes")
    of_heads = "~b (n g)" if isinstance(slopes, Arg) and len(slopes.shape) == 2 else "~(n g)"
    return RuleText(f"nl[2]: {q}, {k}, {k}, ~d!, ~d!, {of_heads} -> {q}", WHOLE_DOCUMENTS)


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, ends_q: Any, ends_k: Any, seqlen_k: Any, max_q: Any, max_k: Any,
    kind: int, scale: Any, window: Any,
) -> Tensor:  # fmt: skip
    found: Tensor = aten._efficient_attention_forward(
        q, k, v, bias, ends_q, ends_k, max_q, max_k, 0.0, kind, True, scale=scale, seqlen_k=seqlen_k, window_size=window
    )[0]
    return found


_ROWS, _KEYS = real(2, 4, 24, 2), real(2, 4, 6, 2)
flash_documents = define_composite(
    f"flash_documents({_OPERANDS}, Tensor? ends_q, Tensor? ends_k, Tensor? alibi_slopes, SymInt max_q, SymInt max_k, "
    "bool causal, float? scale, SymInt? left, SymInt? right) -> Tensor",
    rule=_flash_rule,
    samples=[(_ROWS, _KEYS, _KEYS, None, None, None, 4, 4, True, None, None, None)],
    body=_flash,
)
efficient_documents = define_composite(
    f"efficient_documents({_OPERANDS}, Tensor? bias, Tensor? ends_q, Tensor? ends_k, Tensor? seqlen_k, SymInt? max_q, "
    "SymInt? max_k, int kind, float? scale, int? window) -> Tensor",
    rule="nl[2]: b s! h e!, b t! h e!, b t! h f!, b h s! t!, ~d!, ~d!, ~u! -> b s! h f!",
    why=WHOLE_DOCUMENTS,
    samples=[(*[real(2, 4, 6, 4)] * 3, real(2, 6, 4, 4), None, None, None, 4, 4, 2, None, None)],
    body=_efficient,
)
