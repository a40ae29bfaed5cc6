"""Tokens travel to the ranks that have their experts, and results back (expert parallelism).

    places_of(ids [S], choices, experts, ranks) -> int64 [T, ranks]: the row of token t among all rows that this rank sends,
                       those to rank 0 first; -1: it does not go to that rank
    tokens_sent(places) -> int64 [T * ranks]: the token of each row that is sent; zeros after the last
    counts_sent(ends [E], places, experts) -> int64 [ranks, experts + 1]: how many rows there are for each expert of each rank,
                       and at last how many tokens go there
    count_received(counts, axis) -> the same of what comes from each rank
    exchange_sizes(counts, received) -> int64 [4, ranks] on the CPU: rows and tokens that go to each rank, and that come
    received_rows(order [S], size, ids, places, counts, received, sizes, choices, axis) -> int64 [U]: q * choices + j for each
                       row that is computed here, in the order of experts: choice j of the q-th token that arrives
    rows_of_tokens(rows, size, sizes, choices) -> int64 [A, choices]: where `rows` has a token's choices; -1: elsewhere
    dispatch_rows(x, way, entries, axis) -> [U, ..]: of x [T, ..] each row's token; with `entries`, of x [S, ..] each row's own
    combine_rows(y [U, ..], way, entries, axis) -> [T, ..]: sums of each token's rows, or [S, ..]

A way is (places, sent, sizes, rows, table, choices): what a mixture's exchanges have in common, computed once for all of them,
forward and backward. S = T * choices: a token has `choices` experts, and row t * choices + j is choice j of token t. Rank r of
the axis has the experts from r * experts on. `order` and `ends` are those of group_rows.py; rows after the last end travel
nowhere, and give zeros. A token goes to a rank once, however many of its experts are there, and comes back as one sum: with 8
choices over 8 ranks that is 5.25 rows in place of 8, over 2 ranks 2. The host waits once a mixture, for sizes. U is `size` in
the graph, as is A, the number of tokens that arrive.

dispatch_rows and combine_rows are linear, and each is the other's gradient. Sums have a fixed order: first over a rank's
experts, in fp32 or wider, then over ranks. No row is dropped, whatever the router does.
Source: Lepikhin et al. 2020 (2006.16668); tokens sent once to a rank: DeepSeek-AI 2024 (2412.19437), DeepEP.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafx.ir.data_sizes import size_named
from megafx.ir.facts import ids as ids_of
from megafx.ir.facts import real
from megafx.kernels.common.op import define_gradient, define_op
from megafx.kernels.experts.sum_rows import sum_of_rows as _sum
from megafx.ops.axes import axis_context

c10d = torch.ops._c10d_functional


def places_of(ids: Tensor, choices: int, experts: int, ranks: int) -> Tensor:
    rank = (ids // experts).view(-1, choices)
    goes = (rank == torch.arange(ranks, device=ids.device)[:, None, None]).any(2)
    at = goes.flatten().cumsum(0).view(goes.shape) - 1
    return torch.where(goes, at, -1).t().contiguous()


def tokens_sent(places: Tensor) -> Tensor:
    token = torch.arange(places.shape[0], device=places.device)[:, None]
    return places.new_zeros(places.numel() + 1).index_put_((places,), token)[:-1]  # -1: the last entry


def counts_sent(ends: Tensor, places: Tensor, experts: int) -> Tensor:
    ranks = places.shape[1]
    rows = ends.new_zeros(ranks * experts)  # none for those beyond the last expert
    rows[: len(ends)] = ends
    rows[1 : len(ends)].sub_(ends[:-1])
    return torch.cat([rows.view(ranks, experts), (places >= 0).sum(0)[:, None]], 1)


def count_received(counts: Tensor, axis: str) -> Tensor:
    each = [1] * len(counts)
    return _exchanged(counts, each, each, axis)


def exchange_sizes(counts: Tensor, received: Tensor) -> Tensor:
    both = torch.stack([counts, received])
    return torch.stack([both[..., :-1].sum(2), both[..., -1]], 1).flatten(0, 1).cpu()


def received_rows(
    order: Tensor,
    size: str,
    ids: Tensor,
    places: Tensor,
    counts: Tensor,
    received: Tensor,
    sizes: Tensor,
    choices: int,
    axis: str,
) -> Tensor:
    rows_sent, _, rows_received, tokens_received = sizes.tolist()
    experts = received.shape[1] - 1
    mine = order[: sum(rows_sent)]
    token, there = mine // choices, ids[mine] // experts
    among = (places - _before(counts))[token, there]  # tokens that go to that rank
    sent = torch.add(mine, among - token, alpha=choices)
    arrived = _exchanged(sent, rows_received, rows_sent, axis)
    apart = max(sum(tokens_received) * choices, 1)  # above every number of a row
    first = torch.arange(0, experts * apart, apart, device=order.device)  # of an expert
    first = torch.add(first, _before(received)[:, None], alpha=choices).flatten()  # from each rank
    of_row = first.repeat_interleave(received[:, :-1].flatten(), output_size=len(arrived))
    return (arrived + of_row).sort().values % apart


def _before(counts: Tensor) -> Tensor:
    """Tokens of the ranks before."""
    return counts[:, -1].cumsum(0) - counts[:, -1]


def rows_of_tokens(rows: Tensor, size: str, sizes: Tensor, choices: int) -> Tensor:
    table = rows.new_full((sum(sizes[3].tolist()) * choices,), -1)
    return table.scatter_(0, rows, torch.arange(len(rows), device=rows.device)).view(-1, choices)


class Way(NamedTuple):
    """Arguments of dispatch_rows and combine_rows after the first."""

    places: Tensor
    sent: Tensor
    sizes: Tensor
    rows: Tensor
    table: Tensor
    choices: int
    entries: bool
    axis: str


def begin_dispatch(x: Tensor, *way: Any) -> Tensor:
    """-> the tokens that arrive, on their way: for `end_dispatch` to wait for, with the same arguments."""
    of = Way(*way)
    _, sent, _, received = of.sizes.tolist()
    tokens = x.view(-1, of.choices, *x.shape[1:]) if of.entries else x
    return _started(tokens[of.sent[: sum(sent)]], received, sent, of.axis)


def end_dispatch(begun: Tensor, *way: Any) -> Tensor:
    of = Way(*way)
    arrived = _waited_for(begun, of.sizes)
    return arrived.flatten(0, 1)[of.rows] if of.entries else arrived[of.rows // of.choices]


def dispatch_rows(x: Tensor, *way: Any) -> Tensor:
    return end_dispatch(begin_dispatch(x, *way), *way)


def begin_combine(y: Tensor, *way: Any) -> Tensor:
    """-> the sums that come home, on their way: for `end_combine` to wait for, with the same arguments."""
    of = Way(*way)
    _, sent, _, received = of.sizes.tolist()
    if of.entries:  # each alone: sum_rows would start a program for every one
        back = y.new_zeros(of.table.numel(), *y.shape[1:]).index_copy_(0, of.rows, y)
        back = back.view(-1, of.choices, *y.shape[1:])
    else:
        back = _sum(y, of.table)
    return _started(back, sent, received, of.axis)


def end_combine(begun: Tensor, *way: Any) -> Tensor:
    of = Way(*way)
    home = _sum(_waited_for(begun, of.sizes), of.places)
    return home.flatten(0, 1) if of.entries else home


def combine_rows(y: Tensor, *way: Any) -> Tensor:
    return end_combine(begin_combine(y, *way), *way)


def _started(x: Tensor, received: list[int], sent: list[int], axis: str) -> Tensor:
    if len(sent) == 1:
        return x
    return c10d.all_to_all_single.default(x.contiguous(), received, sent, axis_context(axis).group_name)


def _waited_for(x: Tensor, sizes: Tensor) -> Tensor:
    return x if sizes.shape[1] == 1 else c10d.wait_tensor.default(x)


def _exchanged(x: Tensor, received: list[int], sent: list[int], axis: str) -> Tensor:
    found = _started(x, received, sent, axis)
    return found if len(sent) == 1 else c10d.wait_tensor.default(found)


# A way on one rank: four tokens of one choice, of two experts.
_IDS, _ENDS, _PLACES = torch.tensor([1, 1, 0, 1]), torch.tensor([1, 4]), torch.arange(4)[:, None]
_COUNTS, _SIZES, _ORDER = torch.tensor([[1, 3, 4]]), torch.full((4, 1), 4), torch.tensor([2, 0, 1, 3])
_WAY = (_PLACES, torch.arange(4), _SIZES, _ORDER, torch.tensor([[1], [2], [0], [3]]), 1, False, "ep")
_MOVES = (
    "(Tensor {0}, Tensor places, Tensor sent, Tensor sizes, Tensor rows, Tensor table, int choices, bool entries, str axis) "
    "-> Tensor"
)

define_op(
    "places_of(Tensor ids, int choices, int experts, int ranks) -> Tensor",
    rule="nl: ~s! -> t! r!",
    samples=[(ids_of(4, 6), 2, 2, 2)],
    reference=places_of,
    fake=lambda ids, choices, experts, ranks: ids.new_empty(ids.shape[0] // choices, ranks),
)
define_op(
    "tokens_sent(Tensor places) -> Tensor",
    rule="nl: ~t! r! -> n!",
    samples=[(_PLACES,)],
    reference=tokens_sent,
    fake=lambda places: places.new_empty(places.shape[0] * places.shape[1]),
)
define_op(
    "counts_sent(Tensor ends, Tensor places, int experts) -> Tensor",
    rule="nl: ~e!, ~t! r! -> r! x!",
    samples=[(_ENDS, _PLACES, 2)],
    reference=counts_sent,
    fake=lambda ends, places, experts: ends.new_empty(places.shape[1], experts + 1),
)
define_op(
    "count_received(Tensor counts, str axis) -> Tensor",
    rule="nl: ~r! x! -> r! x!",
    samples=[(_COUNTS, "ep")],
    reference=count_received,
    fake=lambda counts, axis: torch.empty_like(counts),
)
define_op(
    "exchange_sizes(Tensor counts, Tensor received) -> Tensor",
    rule="nl: ~r! x!, ~r! x! -> f! r!",
    samples=[(_COUNTS, _COUNTS)],
    reference=exchange_sizes,
    fake=lambda counts, received: torch.empty(4, received.shape[0], dtype=torch.int64, device="cpu"),
)
define_op(
    "received_rows(Tensor order, str size, Tensor ids, Tensor places, Tensor counts, Tensor received, Tensor sizes, "
    "int choices, str axis) -> Tensor",
    rule="nl: ~s!, ~s!, ~t! r!, ~r! x!, ~r! x!, ~f! r! -> ~u!",
    samples=[(_ORDER, "u0", _IDS, _PLACES, _COUNTS, _COUNTS, _SIZES, 1, "ep")],
    reference=received_rows,
    fake=lambda order, size, *_: order.new_empty(size_named(order, size)),
)
define_op(
    "rows_of_tokens(Tensor rows, str size, Tensor sizes, int choices) -> Tensor",
    rule="nl: ~u!, ~f! r! -> ~a! c!",
    samples=[(_ORDER, "a0", _SIZES, 1)],
    reference=rows_of_tokens,
    fake=lambda rows, size, sizes, choices: rows.new_empty(size_named(rows, size), choices),
)
define_op(
    "dispatch_rows" + _MOVES.format("x"),
    rule="lin: s! ..., ~t! r!, ~n!, ~f! r!, ~u!, ~a! c! -> u! ...",
    samples=[(real(4, 6), *_WAY)],
    reference=dispatch_rows,
    fake=lambda x, *way: x.new_empty(Way(*way).rows.shape[0], *x.shape[1:]),
)
define_op(
    "combine_rows" + _MOVES.format("y"),
    rule="lin: u! ..., ~t! r!, ~n!, ~f! r!, ~u!, ~a! c! -> s! ...",
    samples=[(real(4, 6), *_WAY)],
    reference=combine_rows,
    fake=lambda y, *way: y.new_empty(_home(Way(*way)), *y.shape[1:]),
)


def _home(way: Way) -> Any:
    """How many rows come home."""
    return way.places.shape[0] * (way.choices if way.entries else 1)


def _gradient(of: str) -> Any:
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        made = getattr(torch.ops.megafx, of).default(grad, *ctx.saved_tensors, *ctx.rest)
        return made, *[None] * 8

    return backward


define_gradient("dispatch_rows", _gradient("combine_rows"), slice(1, 6))
define_gradient("combine_rows", _gradient("dispatch_rows"), slice(1, 6))
# What starts each of them, and what waits for it (passes/lower/start_exchanges.py).
ENDS: dict[Any, tuple[Any, Any]] = {
    torch.ops.megafx.dispatch_rows.default: (begin_dispatch, end_dispatch),
    torch.ops.megafx.combine_rows.default: (begin_combine, end_combine),
}
