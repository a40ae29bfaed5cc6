"""Tokens travel to the ranks that have their experts, and results back (expert parallelism).

    places_of(ids [S], choices, experts, ranks) -> int64 [ranks, T]: token t is row places_(r, t) of those that go to rank r;
                       -1: it does not go there
    count_received(ends [E], places, experts, ranks, axis) -> int64 [ranks, experts + 1]: how many rows each rank has for each
                       expert here, and at last how many tokens it sends
    exchange_sizes(ends, places, received) -> int64 [4, ranks] on the CPU: rows and tokens that go to each rank, and that come
    received_rows(order [S], size, ends, places, received, sizes, choices, axis) -> int64 [U]: q * choices + j for each row that
                       is computed here, in the order of experts: choice j of the q-th token that arrives
    dispatch_rows(x, places, sizes, rows, choices, entries, axis) -> [U, ..]: of x [T, ..] each row's token; with `entries`, of
                       x [S, ..] each row's own entry
    combine_rows(y [U, ..], places, sizes, rows, choices, entries, axis) -> [T, ..]: sums of each token's rows, or [S, ..]

S = T * choices: a token has `choices` experts, and row t * choices + j is choice j of token t. Rank r of the axis has the
experts from r * experts on. `order` and `ends` are those of group_rows.py; rows after the last end travel nowhere, and give
zeros. A token goes to a rank once, however many of its experts are there, and comes back as one sum: with 8 choices over 8
ranks that is 5.25 rows in place of 8, over 2 ranks 2. The host waits once a mixture, for sizes. U is `size` in the graph.

dispatch_rows and combine_rows are linear, and each is the other's gradient. Sums have a fixed order: first over a rank's
experts, in fp32 or wider, then over ranks. No row is dropped, whatever the router does.
Source: Lepikhin et al. 2020 (2006.16668); tokens sent once to a rank: DeepSeek-AI 2024 (2412.19437), DeepEP.
"""

from __future__ import annotations

from typing import Any

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
    return torch.where(goes, goes.cumsum(1) - 1, -1)


def rows_of(ends: Tensor, experts: int, ranks: int) -> Tensor:
    """int64 [ranks, experts]: this rank's rows for each expert of each rank; none for those beyond the last expert."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    return torch.nn.functional.pad(counts, (0, ranks * experts - counts.shape[0])).view(ranks, experts)


def count_received(ends: Tensor, places: Tensor, experts: int, ranks: int, axis: str) -> Tensor:
    tokens = (places >= 0).sum(1, keepdim=True)
    sent = torch.cat([rows_of(ends, experts, ranks), tokens], 1)
    return _exchanged(sent, [1] * ranks, [1] * ranks, axis)


def exchange_sizes(ends: Tensor, places: Tensor, received: Tensor) -> Tensor:
    ranks, experts = received.shape[0], received.shape[1] - 1
    sent = rows_of(ends, experts, ranks).sum(1)
    tokens = (places >= 0).sum(1)
    return torch.stack([sent, tokens, received[:, :-1].sum(1), received[:, -1]]).cpu()


def received_rows(
    order: Tensor, size: str, ends: Tensor, places: Tensor, received: Tensor, sizes: Tensor, choices: int, axis: str
) -> Tensor:
    rows_sent, _, rows_received, _ = sizes.tolist()
    ranks, experts = received.shape[0], received.shape[1] - 1
    mine = order[: sum(rows_sent)]
    to = torch.searchsorted(
        rows_of(ends, experts, ranks).sum(1).cumsum(0), torch.arange(len(mine), device=order.device), right=True
    )
    sent = places[to, mine // choices] * choices + mine % choices
    arrived = _exchanged(sent, rows_received, rows_sent, axis)
    of_rank = torch.arange(ranks, device=order.device).repeat_interleave(
        received[:, :-1].sum(1), output_size=len(arrived)
    )
    before = received[:, -1].cumsum(0) - received[:, -1]  # tokens of the ranks before
    expert = torch.arange(experts, device=order.device).repeat(ranks)
    of_row = expert.repeat_interleave(received[:, :-1].flatten(), output_size=len(arrived))
    return (arrived + before[of_rank] * choices)[of_row.argsort(stable=True)]


def begin_dispatch(
    x: Tensor, places: Tensor, sizes: Tensor, rows: Tensor, choices: int, entries: bool, axis: str
) -> Tensor:
    """-> the tokens that arrive, on their way: for `end_dispatch` to wait for, with the same arguments."""
    _, sent, _, received = sizes.tolist()
    tokens = x.view(-1, choices, *x.shape[1:]) if entries else x
    return _started(tokens[_tokens_sent(places, sizes)], received, sent, axis)


def end_dispatch(
    begun: Tensor, places: Tensor, sizes: Tensor, rows: Tensor, choices: int, entries: bool, axis: str
) -> Tensor:
    arrived = _waited_for(begun, sizes)
    return arrived.flatten(0, 1)[rows] if entries else arrived[rows // choices]


def dispatch_rows(x: Tensor, *way: Any) -> Tensor:
    return end_dispatch(begin_dispatch(x, *way), *way)


def begin_combine(
    y: Tensor, places: Tensor, sizes: Tensor, rows: Tensor, choices: int, entries: bool, axis: str
) -> Tensor:
    """-> the sums that come home, on their way: for `end_combine` to wait for, with the same arguments."""
    _, sent, _, received = sizes.tolist()
    arrived = sum(received)
    if entries:
        back = y.new_zeros(arrived * choices, *y.shape[1:]).index_copy_(0, rows, y).view(arrived, choices, *y.shape[1:])
    else:
        table = rows.new_full((arrived * choices,), -1).scatter_(0, rows, torch.arange(len(rows), device=rows.device))
        back = _sum(y, table.view(arrived, choices))
    return _started(back, sent, received, axis)


def end_combine(
    begun: Tensor, places: Tensor, sizes: Tensor, rows: Tensor, choices: int, entries: bool, axis: str
) -> Tensor:
    home = _sum(_waited_for(begun, sizes), _there(places, sizes))
    return home.flatten(0, 1) if entries else home


def combine_rows(y: Tensor, *way: Any) -> Tensor:
    return end_combine(begin_combine(y, *way), *way)


def _there(places: Tensor, sizes: Tensor) -> Tensor:
    """int64 [T, ranks]: where each token is among all that this rank sends; -1 where it does not go."""
    sent = sizes[1].to(places.device, non_blocking=True)
    before = (sent.cumsum(0) - sent)[:, None]
    return torch.where(places < 0, -1, places + before).t().contiguous()


def _tokens_sent(places: Tensor, sizes: Tensor) -> Tensor:
    """int64 [N]: the tokens that this rank sends, those to rank 0 first."""
    there, count = _there(places, sizes), int(sizes[1].sum())
    token = torch.arange(places.shape[1], device=places.device)[:, None].expand_as(there)
    found = places.new_empty(count + 1)  # at last what does not go
    return found.scatter_(0, torch.where(there < 0, count, there).flatten(), token.flatten())[:count]


def _started(x: Tensor, received: list[int], sent: list[int], axis: str) -> Tensor:
    if len(sent) == 1:
        return x
    return c10d.all_to_all_single.default(x.contiguous(), received, sent, axis_context(axis).group_name)  # type: ignore[no-any-return]


def _waited_for(x: Tensor, sizes: Tensor) -> Tensor:
    return x if sizes.shape[1] == 1 else c10d.wait_tensor.default(x)


def _exchanged(x: Tensor, received: list[int], sent: list[int], axis: str) -> Tensor:
    found = _started(x, received, sent, axis)
    return found if len(sent) == 1 else c10d.wait_tensor.default(found)


# A way on one rank: four tokens of one choice, of two experts.
_ENDS, _PLACES, _SIZES = torch.tensor([1, 4]), torch.arange(4)[None], torch.full((4, 1), 4)
_RECEIVED, _ORDER = torch.tensor([[1, 3, 4]]), torch.tensor([2, 0, 1, 3])
_MOVES = "(Tensor {0}, Tensor places, Tensor sizes, Tensor rows, int choices, bool entries, str axis) -> Tensor"

define_op(
    "places_of(Tensor ids, int choices, int experts, int ranks) -> Tensor",
    rule="nl: ~s! -> r! t!",
    samples=[(ids_of(4, 6), 2, 2, 2)],
    reference=places_of,
    fake=lambda ids, choices, experts, ranks: ids.new_empty(ranks, ids.shape[0] // choices),
)
define_op(
    "count_received(Tensor ends, Tensor places, int experts, int ranks, str axis) -> Tensor",
    rule="nl: ~e!, ~r! t! -> r! x!",
    samples=[(_ENDS, _PLACES, 2, 1, "ep")],
    reference=count_received,
    fake=lambda ends, places, experts, ranks, axis: ends.new_empty(ranks, experts + 1),
)
define_op(
    "exchange_sizes(Tensor ends, Tensor places, Tensor received) -> Tensor",
    rule="nl: ~e!, ~r! t!, ~r! x! -> f! r!",
    samples=[(_ENDS, _PLACES, _RECEIVED)],
    reference=exchange_sizes,
    fake=lambda ends, places, received: torch.empty(4, received.shape[0], dtype=torch.int64, device="cpu"),
)
define_op(
    "received_rows(Tensor order, str size, Tensor ends, Tensor places, Tensor received, Tensor sizes, int choices, str axis) "
    "-> Tensor",
    rule="nl: ~s!, ~e!, ~r! t!, ~r! x!, ~f! r! -> ~u!",
    samples=[(_ORDER, "u0", _ENDS, _PLACES, _RECEIVED, _SIZES, 1, "ep")],
    reference=received_rows,
    fake=lambda order, size, *_: order.new_empty(size_named(order, size)),
)
define_op(
    "dispatch_rows" + _MOVES.format("x"),
    rule="lin: s! ..., ~r! t!, ~f! r!, ~u! -> u! ...",
    samples=[(real(4, 6), _PLACES, _SIZES, _ORDER, 1, False, "ep")],
    reference=dispatch_rows,
    fake=lambda x, places, sizes, rows, choices, entries, axis: x.new_empty(rows.shape[0], *x.shape[1:]),
)
define_op(
    "combine_rows" + _MOVES.format("y"),
    rule="lin: u! ..., ~r! t!, ~f! r!, ~u! -> s! ...",
    samples=[(real(4, 6), _PLACES, _SIZES, _ORDER, 1, False, "ep")],
    reference=combine_rows,
    fake=lambda y, places, sizes, rows, choices, entries, axis: y.new_empty(
        places.shape[1] * (choices if entries else 1), *y.shape[1:]
    ),
)


def _saves(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, places, sizes, rows, *ctx.how = inputs
    ctx.save_for_backward(places, sizes, rows)


def _gradient(of: str) -> Any:
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        made = getattr(torch.ops.megafx, of).default(grad, *ctx.saved_tensors, *ctx.how)
        return made, *[None] * 6

    return backward


define_gradient("dispatch_rows", _gradient("combine_rows"), _saves)
define_gradient("combine_rows", _gradient("dispatch_rows"), _saves)
# What starts each of them, and what waits for it (passes/lower/start_exchanges.py).
ENDS: dict[Any, tuple[Any, Any]] = {
    torch.ops.megafx.dispatch_rows.default: (begin_dispatch, end_dispatch),
    torch.ops.megafx.combine_rows.default: (begin_combine, end_combine),
}
