"""Tokens travel to the ranks that have their experts, and results back (expert parallelism).

    tokens_to_ranks(ids [S], choices, experts, ranks) -> int64 [T, ranks]: the number of token t among those that go to that
                       rank, from 1 on; 2**62: it does not go there
    counts_sent(ends [E], numbers, experts) -> int64 [ranks, 2]: how many tokens go to each rank, and how many rows of them
    room_needed(counts, axis) -> int64 [ranks, ranks, 2]: those of each rank
    room(needed, mixture) -> int64 [2] on the CPU: for how many tokens from a rank to a rank there is room, and for how many
                       rows on a rank
    places_of(numbers, room) -> int64 [T, ranks]: the place of token t among all that this rank sends, those to rank 0 first;
                       -1: nowhere
    tokens_sent(places, size, room) -> int64 [A]: the token in each of these places; -1: none
    experts_received(ids, places, sent, choices, experts, axis) -> int32 [A, choices]: of each token that arrives the expert of
                       each choice, among those of this rank; from `experts` on: another rank has it
    received_rows(arrived [A, choices], size, room, experts) -> int64 [U]: q * choices + j for each row that is computed here,
                       in the order of experts: choice j of the q-th token that arrives; -1 after the last
    ends_received(arrived, rows, experts) -> int64 [experts]: the rows of expert e are rows[ends[e-1]:ends[e]]
    rows_of_tokens(rows, arrived) -> int64 [A, choices]: where `rows` has a token's choices; -1: elsewhere
    dispatch_rows(x, *way) -> [U, ..]: of x [T, ..] each row's token; with `entries`, of x [S, ..] each row's own
    combine_rows(y [U, ..], *way) -> [T, ..]: sums of each token's rows; with `entries`, [S, ..]

A way is (places, sent, rows, table, choices, entries, axis): what a mixture's exchanges have in common, computed once for all
of them, forward and backward. S = T * choices: a token has `choices` experts, and row t * choices + j is choice j of token t.
Rank r of the axis has the experts from r * experts on. `ends` are those of group_rows.py; rows after the last end travel
nowhere, and give zeros. A token goes to a rank once, however many of its experts are there, and comes back as one sum: with 8
choices over 8 ranks that is 5.25 rows in place of 8, over 2 ranks 2.

Each rank sends as many tokens to every rank, A / ranks, padded: so sizes are numbers that the host chooses. `room` gives it
what it chose before (ops/rooms.py), or waits for what is needed. U and A are `size` in the graph.

dispatch_rows and combine_rows are linear, and each is the other's gradient. Sums have a fixed order: first over a rank's
experts, in fp32 or wider, then over ranks. Where there is room, no row is dropped, whatever the router does; where there is
not, the call runs once more.
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
from megafx.kernels.experts.group_rows import group_ends
from megafx.kernels.experts.sum_rows import sum_of_rows as _sum
from megafx.ops.axes import axis_context
from megafx.ops.rooms import room

c10d = torch.ops._c10d_functional


_NOWHERE = 2**62
_BITS = 2**31 - 1  # of a number that is not negative


def tokens_to_ranks(ids: Tensor, choices: int, experts: int, ranks: int) -> Tensor:
    rank = (ids // experts).view(-1, choices)
    goes = (rank == torch.arange(ranks, device=ids.device)[:, None, None]).any(2)
    return torch.where(goes, goes.cumsum(1), _NOWHERE).t().contiguous()


def counts_sent(ends: Tensor, numbers: Tensor, experts: int) -> Tensor:
    ranks = numbers.shape[1]
    until = ends[experts - 1 :: experts]  # rows for a rank and those before
    if len(until) < ranks:  # the last expert's rank has fewer, and those after it have none
        until = torch.cat([until, ends[-1:].expand(ranks - len(until))])
    return torch.stack([(numbers < _NOWHERE).sum(0), until.diff(prepend=until.new_zeros(1))], 1)


def room_needed(counts: Tensor, axis: str) -> Tensor:
    return _gathered(counts, axis)


def places_of(numbers: Tensor, room: Tensor) -> Tensor:
    tokens = int(room[0])
    first = torch.arange(-1, numbers.shape[1] * tokens - 1, tokens, device=numbers.device) if tokens else -1
    return torch.where(numbers <= tokens, numbers + first, -1)


def tokens_sent(places: Tensor, size: str, room: Tensor) -> Tensor:
    token = torch.arange(places.shape[0], device=places.device)[:, None]
    found = places.new_full((places.shape[1] * int(room[0]) + 1,), -1)
    return found.index_put_((places,), token)[:-1]  # -1: the last entry


def experts_received(ids: Tensor, places: Tensor, sent: Tensor, choices: int, experts: int, axis: str) -> Tensor:
    ranks = places.shape[1]
    first = torch.arange(0, ranks * experts, experts, device=ids.device, dtype=torch.int32)[:, None]
    there = (ids.int().view(-1, 1, choices) - first).bitwise_and_(_BITS)  # those of ranks before become large
    found = there.new_full((len(sent) + 1, choices), experts)
    return _exchanged(found.index_put_((places,), there)[:-1], ranks, axis)


def received_rows(arrived: Tensor, size: str, room: Tensor, experts: int) -> Tensor:
    rows = int(room[1])
    expert, order = arrived.flatten().sort(stable=True)
    found = torch.where(expert[:rows] < experts, order[:rows], -1)
    return found if len(found) == rows else torch.nn.functional.pad(found, (0, rows - len(found)), value=-1)


def ends_received(arrived: Tensor, rows: Tensor, experts: int) -> Tensor:
    return group_ends(arrived.flatten(), experts).clamp(max=len(rows))


def rows_of_tokens(rows: Tensor, arrived: Tensor) -> Tensor:
    table = rows.new_full((arrived.numel() + 1,), -1)
    table.index_put_((rows,), torch.arange(len(rows), device=rows.device))  # -1: the last entry
    return table[:-1].view(arrived.shape)


class Way(NamedTuple):
    """Arguments of dispatch_rows and combine_rows after the first."""

    places: Tensor
    sent: Tensor
    rows: Tensor
    table: Tensor
    choices: int
    entries: bool
    axis: str


def begin_dispatch(x: Tensor, *way: Any) -> Tensor:
    """-> the tokens that arrive, on their way: for `end_dispatch` to wait for, with the same arguments."""
    of = Way(*way)
    tokens = x.view(-1, of.choices, *x.shape[1:]) if of.entries else x
    return _started(_rows(tokens, of.sent), of.places.shape[1], of.axis)


def end_dispatch(begun: Tensor, *way: Any) -> Tensor:
    of = Way(*way)
    arrived = _waited_for(begun, of.places.shape[1])
    if of.entries:
        return _alone(arrived.flatten(0, 1), of.rows)
    return _sum(arrived, torch.div(of.rows, of.choices, rounding_mode="floor")[:, None])


def dispatch_rows(x: Tensor, *way: Any) -> Tensor:
    return end_dispatch(begin_dispatch(x, *way), *way)


def begin_combine(y: Tensor, *way: Any) -> Tensor:
    """-> the sums that come home, on their way: for `end_combine` to wait for, with the same arguments."""
    of = Way(*way)
    back = _alone(y, of.table) if of.entries else _sum(y, of.table)
    return _started(back, of.places.shape[1], of.axis)


def end_combine(begun: Tensor, *way: Any) -> Tensor:
    of = Way(*way)
    home = _sum(_waited_for(begun, of.places.shape[1]), of.places)
    return home.flatten(0, 1) if of.entries else home


def combine_rows(y: Tensor, *way: Any) -> Tensor:
    return end_combine(begin_combine(y, *way), *way)


def _rows(x: Tensor, at: Tensor) -> Tensor:
    """x[at], of any row where `at` is negative."""
    return x[at] if len(x) else x.new_zeros(len(at), *x.shape[1:])


def _alone(x: Tensor, at: Tensor) -> Tensor:
    """x[at], zeros where `at` is negative: of short rows, for each of which `sum_rows` would start a program."""
    found = _rows(x, at.flatten()).view(*at.shape, *x.shape[1:])
    return found.masked_fill_((at < 0).view(*at.shape, *[1] * (x.dim() - 1)), 0)


def _started(x: Tensor, ranks: int, axis: str) -> Tensor:
    """As much goes to each rank as comes from it."""
    if ranks == 1:
        return x
    each = [len(x) // ranks] * ranks
    return c10d.all_to_all_single.default(x.contiguous(), each, each, axis_context(axis).group_name)


def _waited_for(x: Tensor, ranks: int) -> Tensor:
    return x if ranks == 1 else c10d.wait_tensor.default(x)


def _exchanged(x: Tensor, ranks: int, axis: str) -> Tensor:
    return _waited_for(_started(x, ranks, axis), ranks)


def _gathered(x: Tensor, axis: str) -> Tensor:
    """[ranks, ..]: what each rank has."""
    if len(x) == 1:
        return x[None]
    found = c10d.all_gather_into_tensor.default(x, len(x), axis_context(axis).group_name)
    return c10d.wait_tensor.default(found).view(len(x), *x.shape)


# A way on one rank: four tokens of one choice, of two experts.
_IDS, _ENDS, _PLACES = torch.tensor([1, 1, 0, 1]), torch.tensor([1, 4]), torch.arange(4)[:, None]
_NUMBERS, _COUNTS, _ROOM = _PLACES + 1, torch.tensor([[4, 4]]), torch.tensor([4, 4])
_SENT, _ARRIVED, _ORDER = torch.arange(4), _IDS[:, None].int(), torch.tensor([2, 0, 1, 3])
_WAY = (_PLACES, _SENT, _ORDER, torch.tensor([[1], [2], [0], [3]]), 1, False, "ep")
_MOVES = (
    "(Tensor {0}, Tensor places, Tensor sent, Tensor rows, Tensor table, int choices, bool entries, str axis) -> Tensor"
)

define_op(
    "tokens_to_ranks(Tensor ids, int choices, int experts, int ranks) -> Tensor",
    rule="nl: ~s! -> t! r!",
    samples=[(ids_of(4, 6), 2, 2, 2)],
    reference=tokens_to_ranks,
    fake=lambda ids, choices, experts, ranks: ids.new_empty(ids.shape[0] // choices, ranks),
)
define_op(
    "counts_sent(Tensor ends, Tensor numbers, int experts) -> Tensor",
    rule="nl: ~e!, ~t! r! -> r! f!",
    samples=[(_ENDS, _NUMBERS, 2)],
    reference=counts_sent,
    fake=lambda ends, numbers, experts: ends.new_empty(numbers.shape[1], 2),
)
define_op(
    "room_needed(Tensor counts, str axis) -> Tensor",
    rule="nl: ~r! f! -> q! r! f!",
    samples=[(_COUNTS, "ep")],
    reference=room_needed,
    fake=lambda counts, axis: counts.new_empty(counts.shape[0], *counts.shape),
)
ROOM = define_op(
    "room(Tensor needed, int mixture) -> Tensor",
    rule="nl: ~q! r! f! -> f!",
    samples=[(_COUNTS[None], 0)],
    reference=room,
    fake=lambda needed, mixture: torch.empty(2, dtype=torch.int64, device="cpu"),
)
define_op(
    "places_of(Tensor numbers, Tensor room) -> Tensor",
    rule="nl: ~t! r!, ~f! -> t! r!",
    samples=[(_NUMBERS, _ROOM)],
    reference=places_of,
    fake=lambda numbers, room: torch.empty_like(numbers),
)
define_op(
    "tokens_sent(Tensor places, str size, Tensor room) -> Tensor",
    rule="nl: ~t! r!, ~f! -> a!",
    samples=[(_PLACES, "a0", _ROOM)],
    reference=tokens_sent,
    fake=lambda places, size, room: places.new_empty(size_named(places, size)),
)
define_op(
    "experts_received(Tensor ids, Tensor places, Tensor sent, int choices, int experts, str axis) -> Tensor",
    rule="nl: ~s!, ~t! r!, ~a! -> a! c!",
    samples=[(_IDS, _PLACES, _SENT, 1, 2, "ep")],
    reference=experts_received,
    fake=lambda ids, places, sent, choices, experts, axis: sent.new_empty(sent.shape[0], choices, dtype=torch.int32),
)
define_op(
    "received_rows(Tensor arrived, str size, Tensor room, int experts) -> Tensor",
    rule="nl: ~a! c!, ~f! -> u!",
    samples=[(_ARRIVED, "u0", _ROOM, 2)],
    reference=received_rows,
    fake=lambda arrived, size, *_: arrived.new_empty(size_named(arrived, size)),
)
define_op(
    "ends_received(Tensor arrived, Tensor rows, int experts) -> Tensor",
    rule="nl: ~a! c!, ~u! -> e!",
    samples=[(_ARRIVED, _ORDER, 2)],
    reference=ends_received,
    fake=lambda arrived, rows, experts: rows.new_empty(experts),
)
define_op(
    "rows_of_tokens(Tensor rows, Tensor arrived) -> Tensor",
    rule="nl: ~u!, ~a! c! -> a! c!",
    samples=[(_ORDER, _ARRIVED)],
    reference=rows_of_tokens,
    fake=lambda rows, arrived: rows.new_empty(arrived.shape),
)
define_op(
    "dispatch_rows" + _MOVES.format("x"),
    rule="lin: s! ..., ~t! r!, ~a!, ~u!, ~a! c! -> u! ...",
    samples=[(real(4, 6), *_WAY)],
    reference=dispatch_rows,
    fake=lambda x, *way: x.new_empty(Way(*way).rows.shape[0], *x.shape[1:]),
)
define_op(
    "combine_rows" + _MOVES.format("y"),
    rule="lin: u! ..., ~t! r!, ~a!, ~u!, ~a! c! -> s! ...",
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
        return made, *[None] * 7

    return backward


define_gradient("dispatch_rows", _gradient("combine_rows"), slice(1, 5))
define_gradient("combine_rows", _gradient("dispatch_rows"), slice(1, 5))
# What starts each of them, and what waits for it (passes/lower/start_exchanges.py).
ENDS: dict[Any, tuple[Any, Any]] = {
    torch.ops.megafx.dispatch_rows.default: (begin_dispatch, end_dispatch),
    torch.ops.megafx.combine_rows.default: (begin_combine, end_combine),
}
