"""megafx::attention in plain torch: the CPU path, and the oracle of the Triton kernels. attention.py has the formula.

Also the mask's random bits: for a query and a key of one head

    key     = first two words of Philox4x32-7 at counter (op id, 0, 0, 0), keyed by the 64-bit seed
    counter = (group, query, head, batch), all global; group g holds the 8 keys 64 (g >> 3) + 8 j + (g & 7), j = 0..7
    draw j  = half (j & 1) of output word (j >> 1); keep where draw >= round(p * 65536)

A stride of 8 between the keys of a group, because these are the columns that one thread owns in an accumulator row of the
tensor core: a kernel that needs a tile of decisions moves nothing between threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from megafx.kernels.attention.masked_softmax import HARD_FILL, mask_floor
from megafx.kernels.common import philox
from megafx.kernels.common.draw import Draw, draws, factor_of
from megafx.kernels.common.op import wide
from megafx.ops import axes
from megafx.placements.types import Layout

# What a hidden score becomes, and so what rows become that see no key (attention.py).
ZEROS, ADDED, FILLED, ADDED_NAN, FILLED_NAN = range(5)
FILL = -1e30  # of FILLED; every number far below the scores gives the same weights


class Inputs(NamedTuple):
    """The arguments of the op; attention.py says what they mean."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    key_mask: Tensor | None
    segments: Tensor | None
    sink: Tensor | None
    scale: float
    causal: bool
    window: int
    softcap: float
    hidden: int
    draw: Draw

    @staticmethod
    def of(operands: Sequence[Any], options: Sequence[Any]) -> Inputs:
        """operands: q, k, v, mask, key_mask, segments, sink, seed; options: from scale to axis, as in the schema."""
        q, k, v, mask, key_mask, segments, sink, seed = operands
        scale, causal, window, softcap, hidden, p, op_id, shard_dim, layout, axis = options
        draw = Draw(seed, p, op_id, shard_dim, tuple(layout), axis)
        return Inputs(q, k, v, mask, key_mask, segments, sink, scale, causal, window, softcap, hidden, draw)


def subkey(seed: Tensor, op_id: int) -> tuple[int, int]:
    """0-d int64 -> the key of one op's draws."""
    first, second, *_ = philox.philox4x32((op_id, 0, 0, 0), philox.key_of(seed))
    return int(first), int(second)


def positions(size: int, dim: int, draw: Draw, device: torch.device) -> Tensor | None:
    """Global indices [size] of this rank's elements of result dim `dim`; None where they are 0, 1, 2, ..."""
    found = where_is(size, dim, draw)
    return None if found is None else places_of(*found, str(device))


Where = tuple[int, tuple[int, ...], int, int, int]  # size, layout, rank, ranks, elements before


def where_is(size: int, dim: int, draw: Draw) -> Where | None:
    """What `positions` follow from; None where they are 0, 1, 2, ..."""
    here = draw.shard_dim == dim
    whole = Layout.from_flat(draw.layout).size if here else size
    before = axes.batch_rank(draw.axis) * whole if dim == 0 and draw.p else 0
    if not here:
        return (size, (1, size, 1), 0, 1, before) if before else None
    return size, tuple(draw.layout), axes.axis_rank(draw.axis), axes.axis_size(draw.axis), before


def table(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, whose results are kept: they are real where launches are foreseen on fake tensors (ahead.py), too."""

    @lru_cache(maxsize=256)
    def made(*args: Any) -> Tensor:
        with unset_fake_temporarily():
            return make(*args)

    return made


@table
def places_of(size: int, layout: tuple[int, ...], rank: int, t: int, before: int, device: str) -> Tensor:
    cut = Layout.from_flat(layout)
    if cut.local_size(t) != size:
        raise ValueError(f"a dim of {size} elements is no shard of layout {cut} on {t} ranks")
    found = torch.zeros(size, dtype=torch.int32)  # pads: position 0
    for start, local, length in cut.pieces(rank, t):
        found[local : local + length] = torch.arange(before + start, before + start + length)
    return found.to(device)


def keep_mask(where: tuple[Tensor, ...], keys: int, key: tuple[int, int], p: float) -> Tensor:
    """where: global indices [b], [h], [s]; and a number of keys -> bool [b, h, s, keys], True where the weight is kept."""
    batch, heads, queries = where
    blocks = -(-keys // 64)
    group = torch.arange(blocks * 8, device=queries.device)
    shape = (len(batch), len(heads), len(queries), blocks * 8)
    views = [x.view([-1 if d == dim else 1 for d in range(4)]) for dim, x in enumerate((batch, heads, queries, group))]
    b, h, s, g = (x.expand(shape).contiguous() for x in views)
    halves = [torch.as_tensor(half) for w in philox.philox4x32((g, s, h, b), key) for half in (w & 0xFFFF, w >> 16)]
    draws = torch.stack(halves, -1)  # [b, h, s, group, j]
    draws = draws.view(*shape[:3], blocks, 8, 8).transpose(-1, -2).reshape(*shape[:3], blocks * 64)
    return draws[..., :keys] >= philox.threshold(p)


class _Part(NamedTuple):
    """One batch element with everything that forward and backward share. [n, g, s, t]: KV heads, their queries' heads."""

    q: Tensor  # [n, g, s, e]
    k: Tensor  # [n, 1, t, e]
    v: Tensor  # [n, 1, t, f]
    slope: Tensor | None  # of the soft-cap
    filled: Tensor | None  # bool, True where a fill is in place of the score
    weights: Tensor  # softmax
    kept: Tensor | None  # weights' factor: 0 or 1 / (1 - p)
    lse: Tensor  # [n, g, s]


def _parts(x: Inputs) -> Iterator[tuple[int, _Part]]:
    """For each batch element: its index, and what forward and backward share."""
    batch, heads, s, _ = x.q.shape
    where = []
    for dim, size in enumerate((batch, heads, s)):
        found = positions(size, dim, x.draw, x.q.device)
        where.append(torch.arange(size, device=x.q.device) if found is None else found.long())
    masks = [m[:, None, None] if m.dim() == 2 else m for m in (x.mask, x.key_mask) if m is not None]
    masks = [m.expand(batch, *m.shape[1:]) for m in masks]
    for i in range(batch):
        yield i, _part(x, i, [m[i] for m in masks], (where[0][i : i + 1], where[1], where[2]))


def _part(x: Inputs, i: int, masks: list[Tensor], where: tuple[Tensor, Tensor, Tensor]) -> _Part:
    """Batch element i. masks: broadcastable to [nq, s, t]; where: global index of the element [1], of heads, of queries."""
    q, k, v = x.q[i], x.k[i], x.v[i]
    (heads, s, _), (n, t, _) = q.shape, k.shape
    dtype = wide(q.dtype)
    split = (n, heads // n, s)
    q, k, v = q.to(dtype).view(*split, -1), k.to(dtype).unsqueeze(1), v.to(dtype).unsqueeze(1)
    scores, slope = (q * x.scale) @ k.transpose(-1, -2), None
    if x.softcap:
        tanh = (scores / x.softcap).tanh()
        scores, slope = tanh * x.softcap, 1 - tanh * tanh
    filled: Tensor | None = None
    for mask in masks:
        mask = mask.expand(heads, s, t).view(*split, t)
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, FILL if x.hidden == FILLED else -math.inf)
        else:
            scores = _added(scores, mask)
        if x.hidden in (FILLED, FILLED_NAN):
            gone = ~mask if mask.dtype == torch.bool else mask <= mask_floor(mask.dtype)
            filled = gone if filled is None else filled | gone
    distance = where[2][:, None] - torch.arange(t, device=q.device)
    if x.causal:
        scores = scores.masked_fill(distance < 0, -math.inf)
    if x.window:
        scores = scores.masked_fill(distance.abs() >= x.window, -math.inf)
    if x.segments is not None:
        ids = x.segments[i % x.segments.shape[0]]
        scores = scores.masked_fill(ids[where[2], None] != ids, -math.inf)
    high = scores.amax(-1, keepdim=True) if t else scores.new_full((*split, 1), -math.inf)
    sink = scores.new_tensor(-math.inf) if x.sink is None else x.sink.to(dtype).view(n, -1, 1, 1)
    high = torch.maximum(high, sink)
    base = high.masked_fill(high == -math.inf, 0)
    powers = (scores - base).exp()
    total = powers.sum(-1, keepdim=True) + (sink - base).exp()
    weights = powers / (total.masked_fill(total == 0, 1) if x.hidden == ZEROS else total)
    lse = (high + total.log()).masked_fill(total == 0, math.inf).squeeze(-1)
    kept = None
    if draws(p := x.draw.p):
        keep = keep_mask(where, t, subkey(x.draw.seed, x.draw.op_id), p).view(*split, t)
        kept = keep.to(dtype) * factor_of(p)
    return _Part(q, k, v, slope, filled, weights, kept, lse)


def _added(scores: Tensor, mask: Tensor) -> Tensor:
    """scores + mask. A mask of half precision absorbs scores as the sum in its own dtype does."""
    z = scores + mask.to(scores.dtype)
    if mask.dtype not in (torch.bfloat16, torch.float16):
        return z
    return torch.where(mask <= HARD_FILL, z.to(mask.dtype).to(z.dtype), z)


def forward(x: Inputs) -> tuple[Tensor, Tensor]:
    """-> (out [b, nq, s, f], lse [b, nq, s]: log sum exp of each row's scores and its sink, infinite where there are none)."""
    out, lse = empty_results(x.q, x.v)
    for i, part in _parts(x):
        weights = part.weights if part.kept is None else part.weights * part.kept
        out[i] = (weights @ part.v).flatten(0, 1)
        lse[i] = part.lse.flatten(0, 1)
    return out, lse


def backward(grad: Tensor, x: Inputs, into: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """-> gradients of q, k, v; into: memory for them."""
    dq, dk, dv = into or (heads_inside(x.q), heads_inside(x.k), heads_inside(x.v))
    for i, part in _parts(x):
        ds, weights, d = _scores_gradient(part, grad[i])
        ds = ds if part.slope is None else ds * part.slope
        dv[i] = (weights.transpose(-1, -2) @ d).sum(1)
        dq[i] = (ds @ part.k * x.scale).flatten(0, 1)
        dk[i] = (ds.transpose(-1, -2) @ part.q * x.scale).sum(1)
    return dq, dk, dv


def mask_backward(grad: Tensor, x: Inputs) -> Tensor:
    """-> gradient of an additive mask, summed over the dims along which it is broadcast."""
    assert x.mask is not None
    whole = x.mask[:, None, None] if x.mask.dim() == 2 else x.mask
    total = torch.zeros(whole.shape, dtype=wide(x.q.dtype), device=whole.device)
    for i, part in _parts(x):
        ds, *_ = _scores_gradient(part, grad[i])
        total[i if whole.shape[0] > 1 else 0] += ds.flatten(0, 1).sum_to_size(whole.shape[1:])
    return total.view(x.mask.shape).to(x.mask.dtype)


def sink_backward(grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """-> gradient of the sink [nq]: a row's sink has the weight that its keys lack, and the value 0."""
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    weights = (sink.to(lse.dtype)[:, None] - lse).exp()
    return -(weights * delta).sum((0, 2)).to(sink.dtype)


def _scores_gradient(part: _Part, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-> (gradient of the scores after the soft-cap, the weights that met v, the gradient [n, g, s, f])."""
    d = grad.to(part.q.dtype).reshape(*part.q.shape[:3], -1)
    dp = d @ part.v.transpose(-1, -2)
    weights = part.weights
    if part.kept is not None:
        dp, weights = dp * part.kept, weights * part.kept
    ds = part.weights * (dp - (part.weights * dp).sum(-1, keepdim=True))
    return ds if part.filled is None else ds.masked_fill(part.filled, 0), weights, d


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out [b, nq, s, f] in q's dtype, lse [b, nq, s]."""
    batch, heads, s, _ = q.shape
    out = q.new_empty(batch, s, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, s, dtype=wide(q.dtype))


def heads_inside(x: Tensor) -> Tensor:
    """An empty [b, h, s, d] that lies in memory as [b, s, h, d]: what projections read and write."""
    batch, heads, length, width = x.shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


WORKSPACE = 2**29  # bytes that the Triton backward has for the dropout's bits at a time


def kept_at_once(q: Sequence[int], k: Sequence[int], workspace: int = WORKSPACE) -> tuple[int, int]:
    """Shapes -> (heads of k and v whose dropout's bits fit, weights of these heads in whole tiles)."""
    kv_heads = k[0] * k[1]
    weights = -(-q[2] // 64) * 64 * -(-k[2] // 64) * 64 * (q[1] // k[1])  # of the heads that share k and v
    step = min(kv_heads, max(1, workspace // (weights // 8)))
    return step, step * weights


def cudnn_backward_bytes(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> int:
    """What cuDNN's backward takes for operands of two bytes: dq in fp32, and dk and dv of every query head where they share
    keys (measured, H100: within 1%)."""
    groups = q[1] // k[1]
    return 4 * math.prod(q) + (2 * groups * (math.prod(k) + math.prod(v)) if groups > 1 else 0)


def bytes_of_pieces(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> int:
    """Of the backward of attention_pieces.py: that of its largest call, half of the queries with nearly all keys, and the
    gradients that it gives."""
    half = (*q[:2], -(-q[2] // 2), q[3])
    return cudnn_backward_bytes(half, k, v) + 2 * (math.prod(half) + math.prod(k) + math.prod(v))
