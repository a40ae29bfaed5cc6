"""Torch's flash and memory-efficient attention, which have no kernel for CPUs: the same in plain torch, for tests.

    with on_cpu(): model(...)     # _flash_attention_forward, _efficient_attention_forward and their gradients

Documents are computed one by one, so that nothing is shared with how megafx reads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


def _documents(x: Tensor, ends: Tensor | None) -> list[Tensor]:
    """[t, n, e] of each document as [n, s, e]; of [b, s, n, e] its rows."""
    if ends is None:
        return [row.transpose(0, 1) for row in x]
    flat = x if x.dim() == 3 else x[0]
    sizes = (ends[1:] - ends[:-1]).tolist()
    return [part.transpose(0, 1) for part in flat[: int(ends[-1])].split(sizes)]


class _Call(NamedTuple):
    """How queries see keys. left, right: -1 for all of them. from_the_top: whether the first causal row sees one key."""

    ends: tuple[Any, Any]
    scale: float | None
    causal: bool
    left: int = -1
    right: int = -1
    bias: Tensor | None = None
    from_the_top: bool = False

    def documents(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """q, k, v of all query heads [n, s, e], and the scores."""
        parts = zip(_documents(q, self.ends[0]), _documents(k, self.ends[1]), _documents(v, self.ends[1]), strict=True)
        for i, (a, b, c) in enumerate(parts):
            b, c = (x.repeat_interleave(a.shape[0] // x.shape[0], 0) for x in (b, c))
            scores = a @ b.transpose(-1, -2) * self.factor(q)
            shift = 0 if self.from_the_top else b.shape[1] - a.shape[1]
            apart = torch.arange(b.shape[1])[None] - torch.arange(a.shape[1])[:, None] - shift
            right = 0 if self.causal else self.right
            hidden = ((apart > right) & (right >= 0)) | ((apart < -self.left) & (self.left >= 0))
            scores = scores if self.bias is None else scores + self.bias[i]
            yield a, b, c, scores.masked_fill(hidden, -torch.inf)

    def factor(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def joined(self, parts: list[Tensor], like: Tensor) -> Tensor:
        """[n, s, e] of each document as `like` is."""
        turned = [x.transpose(0, 1) for x in parts]
        if self.ends[0] is None:
            return torch.stack(turned)
        whole = torch.cat(turned)
        return (whole if like.dim() == 3 else whole[None]).contiguous()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """-> out as q, lse [n, t] (of rows: [b, n, s])."""
        outs, statistics = [], []
        for _, _, c, scores in self.documents(q, k, v):
            outs.append(scores.softmax(-1) @ c)
            statistics.append(scores.logsumexp(-1))
        lse = torch.stack(statistics) if self.ends[0] is None else torch.cat(statistics, -1)
        return self.joined(outs, q), lse.float()

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Gradients of q, k, v and the bias."""
        found: tuple[list[Tensor], ...] = ([], [], [], [])
        for g, (a, b, c, scores) in zip(_documents(grad, self.ends[0]), self.documents(q, k, v), strict=True):
            weights, of_weights = scores.softmax(-1), g @ c.transpose(-1, -2)
            of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
            groups = a.shape[0] // k.shape[-2]
            of_keys = [of_scores.transpose(-1, -2) @ a * self.factor(q), weights.transpose(-1, -2) @ g]
            of_keys = [x.unflatten(0, (-1, groups)).sum(1) for x in of_keys]
            for total, part in zip(found, (of_scores @ b * self.factor(q), *of_keys, of_scores), strict=True):
                total.append(part)
        of_bias = torch.stack(found[3]) if self.bias is not None else torch.empty(0)
        return (*(self.joined(x, y) for x, y in zip(found, (q, k, v), strict=False)), of_bias)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Any, ends_k: Any, max_q: int, max_k: int, p: float, causal: bool,
    debug: bool = False, *, scale: Any = None, window_size_left: Any = None, window_size_right: Any = None, **more: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert not any(x is not None for x in more.values()), more  # p: nothing is dropped, and nothing compared with it
    windows = (-1 if w is None else w for w in (window_size_left, window_size_right))
    out, lse = _Call((ends_q, ends_k), scale, causal, *windows).forward(q, k, v)
    state = torch.zeros(2, dtype=torch.uint64)
    return out, lse, state, state.clone(), torch.empty(0, dtype=q.dtype)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends_q: Any, ends_k: Any, max_q: int,
    max_k: int, p: float, causal: bool, state: Tensor, unused: Tensor, *, scale: Any = None,
    window_size_left: Any = None, window_size_right: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    windows = [-1 if w is None else w for w in (window_size_left, window_size_right)]
    return _Call((ends_q, ends_k), scale, causal, *windows).backward(grad, q, k, v)[:3]


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, ends_q: Any, ends_k: Any, max_q: Any, max_k: Any, p: float, kind: int,
    compute_log_sumexp: bool = False, *, scale: Any = None, seqlen_k: Any = None, window_size: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    assert p == 0 and seqlen_k is None and window_size is None
    out, lse = _Call((ends_q, ends_k), scale, kind > 0, -1, -1, bias, kind == 1).forward(q, k, v)
    state = torch.zeros((), dtype=torch.int64)
    return out, (lse if ends_q is None else lse[None]), state, state.clone(), q.shape[1], k.shape[1]


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, ends_q: Any, ends_k: Any, max_q: int,
    max_k: int, lse: Tensor, p: float, seed: Tensor, offset: Tensor, kind: int, bias_requires_grad: bool, *,
    scale: Any = None, num_splits_key: Any = None, window_size: Any = None, shared_storage_dqdkdv: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _Call((ends_q, ends_k), scale, kind > 0, -1, -1, bias, kind == 1).backward(grad, q, k, v)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    kernels = {
        "_flash_attention_forward": _flash,
        "_flash_attention_backward": _flash_backward,
        "_efficient_attention_forward": _efficient,
        "_efficient_attention_backward": _efficient_backward,
    }
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU")
        yield
    finally:
        library._destroy()
