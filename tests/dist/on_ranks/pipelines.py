"""megafx.pipeline on 4 ranks in fp64 against one process: loss, gradients, clipping and two optimizer steps; and what ranks
send each other against megafx.rehearse."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import check
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.nn import functional as F

import megafx
from megafx.errors import UsageError
from megafx.example_call import ExampleCall
from megafx.rehearsal_of_stages import proposed, stages_of
from megafx.stage_orders import Batch

VOCAB, WIDTH, LENGTH, ROWS = 29, 12, 6, 8


class Block(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.mix, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Dropout(drop)
        self.up, self.down, self.p = nn.Linear(WIDTH, 19), nn.Linear(19, WIDTH), drop

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, dropout_p=self.p if self.training else 0.0)
        x = x + self.drop(y.transpose(1, 2).reshape(x.shape))
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Net(nn.Module):
    """A tied head; a mask that all layers read; what the first layer reads is read again at the end."""

    def __init__(self, layers: int, drop: float) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Block(drop) for _ in range(layers))
        self.norm, self.head, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False), nn.Dropout(drop)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        first = x = self.drop(self.embed(ids))
        keep = real[:, None, None, :] & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        for layer in self.layers:
            x = layer(x, keep)
        logits = self.head(self.norm(x + 0.5 * first))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1), logits


def batch(rows: int = ROWS) -> dict[str, Tensor]:
    """Labels that count lie unevenly over the rows."""
    draw = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(0, VOCAB, (rows, LENGTH), generator=draw) for _ in range(2))
    labels[0, 1:], labels[3] = -1, -1
    real = torch.ones(rows, LENGTH, dtype=torch.bool)
    real[2, 4:] = False
    return {"ids": ids, "labels": labels, "real": real}


@cache
def one_process(layers: int, drop: float) -> tuple[Net, list[Any]]:
    """A model, and what one process computes with it: (loss, gradients, their norm) of two steps, then all parameters, and the
    loss of an evaluation. Rank 0 computes it; each rank copies the model before it takes it."""
    torch.manual_seed(0)
    model, given = Net(layers, drop).double(), [[]]
    if dist.get_rank() == 0:
        one = megafx.Config(tensor_model_parallel_size=1, data_parallel_size=1)
        alone, found = megafx.parallelize(copy.deepcopy(model), one), list[Any]()
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
        for number in range(2):
            torch.manual_seed(number)
            loss = alone(**batch())[0]
            loss.backward()
            wanted = {n: p.grad.clone() for n, p in alone.named_parameters(remove_duplicate=False)}
            found.append((loss.detach(), wanted, torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.3)))
            optimizer.step(), optimizer.zero_grad()
        found.append({n: p.detach() for n, p in alone.named_parameters(remove_duplicate=False)})
        alone.eval()
        with torch.no_grad():
            given = [[*found, alone(**batch())[0].clone()]]
    dist.broadcast_object_list(given)
    return model, given[0]


def against_one_process(layers: int, drop: float, schedule: str, stages: Any, microbatches: int, **sizes: int) -> Any:
    start, (*steps, trained, evaluated) = one_process(layers, drop)
    model, count = copy.deepcopy(start), sum(1 for _ in start.parameters())
    config = megafx.Config(hardware="h100-nvlink", **sizes)
    wanted_messages = rehearsed_messages(model, config, schedule, stages, microbatches)
    if config.context_parallel_size > 1:  # ranks of a sequence send their own tokens
        assert not any(f" {LENGTH} " in what for messages in wanted_messages for *_, what in messages)
    pipe = megafx.pipeline(
        model, config, stages=stages, microbatches=microbatches, schedule=schedule, example_inputs=batch()
    )
    assert all(p.is_meta for p in model.parameters())
    assert sum(1 for _ in pipe.parameters()) < count
    t, d = sizes.get("tensor_model_parallel_size", 1), sizes.get("data_parallel_size", 1)
    alike = t * sizes.get("context_parallel_size", 1)
    rows = {n: x.chunk(d)[dist.get_rank() // alike % d] for n, x in batch().items()}
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
    for number, (loss, wanted, norm) in enumerate(steps):
        torch.manual_seed(number)
        with sent_messages() as messages:
            close(pipe.step(**rows), loss)
        assert messages == wanted_messages
        assert all(buffer is None or buffer.is_meta for buffer in received(pipe))
        for name, value in megafx.full_gradients(pipe).items():
            close(value, wanted[name], name)
        close(pipe.clip_grad_norm_(0.3), norm)
        optimizer.step(), optimizer.zero_grad()
    for name, value in megafx.full_state_dict(pipe).items():
        close(value, trained[name], name)
    pipe.eval()
    with torch.no_grad():
        close(pipe.step(**rows), evaluated)
    return pipe


def received(pipe: Any) -> Iterator[Any]:
    """Where stages receive into."""
    (schedule,) = pipe._pipe.schedules.values()
    for part in getattr(schedule, "_stages", None) or [schedule._stage]:
        for infos in (*part.args_recv_info.values(), *part.grad_recv_info.values()):
            yield from (getattr(info, "buffer", None) for info in infos)


Messages = list[list[tuple[bool, int, str]]]  # batches of (whether it is sent, the other end, dtype and shape)


def rehearsed_messages(
    model: nn.Module, config: megafx.Config, schedule: str, stages: Any, microbatches: int
) -> Messages:
    """What megafx.rehearse says that this rank starts in a step."""
    given: list[Any] = [None]
    config, asked, world = proposed(config, dist.get_world_size(), stages, microbatches, schedule)
    if dist.get_rank() == 0:
        t, d = config.tensor_model_parallel_size or 1, config.data_parallel_size or 1
        rows = {n: x.chunk(d)[0].to("meta") for n, x in batch().items()}
        made = stages_of(ExampleCall.of(copy.deepcopy(model).to("meta"), config, rows, None, runs=False), asked)
        given = [[made.orders(asked, place) for place in range(t * d * config.context_parallel_size)]]
    dist.broadcast_object_list(given)
    inner = world // asked.ranks
    order = given[0][dist.get_rank() % inner][dist.get_rank() // inner]
    return [[(m.sends, m.peer, m.what) for m in act.messages] for act in order if isinstance(act, Batch)]


@contextlib.contextmanager
def sent_messages() -> Iterator[Messages]:
    """What the schedule of torch.distributed.pipelining starts within."""
    found: Messages = []
    before = schedules._batch_p2p

    def started(ops: Any, desc: Any = None) -> Any:
        if ops:
            texts = [f"{str(op.tensor.dtype)[6:]}[{' '.join(map(str, op.tensor.shape))}]" for op in ops]
            found.append([(op.op is dist.isend, op.group_peer, text) for op, text in zip(ops, texts, strict=True)])
        return before(ops, desc)

    schedules._batch_p2p = started
    try:
        yield found
    finally:
        schedules._batch_p2p = before


def close(found: Tensor, wanted: Any, what: str = "the loss") -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12, msg=lambda text: f"{what}: {text}")


@check(4, seed=0)
def pipeline_of_four_stages() -> None:
    pipe = against_one_process(4, 0.2, "1F1B", 4, 4)
    with pytest.raises(UsageError, match="4 micro-batches do not divide the rows"):
        pipe.step(**batch(6))
    with pytest.raises(UsageError, match="within no_sync"), pipe.no_sync():
        pipe.step(**batch())
    with pytest.raises(UsageError, match="a stage of a pipeline is called"):
        pipe(**batch())
    assert pipe.step(**batch(12)).isfinite()


@check(4, seed=0, slow=True)
def pipeline_beside_tensor_parallel() -> None:
    against_one_process(2, 0.2, "GPipe", ["layers.1"], 2, tensor_model_parallel_size=2)


@check(4, seed=0, slow=True)
def pipeline_beside_data_parallel() -> None:
    against_one_process(2, 0.2, "1F1B", 2, 2, data_parallel_size=2)


@check(4, seed=0, slow=True)
def pipeline_beside_context_parallel() -> None:
    against_one_process(2, 0.2, "1F1B", 2, 2, context_parallel_size=2)


@check(8, seed=0, slow=True)
def pipeline_beside_both() -> None:
    against_one_process(2, 0.2, "1F1B", 2, 2, data_parallel_size=2, tensor_model_parallel_size=2)


@check(8, seed=0, slow=True)
def pipeline_beside_context_and_tensor_parallel() -> None:
    against_one_process(2, 0.2, "1F1B", 2, 2, context_parallel_size=2, tensor_model_parallel_size=2)


@check(4, seed=0, slow=True)
def interleaved_pipeline() -> None:
    against_one_process(8, 0.2, "Interleaved1F1B", 8, 4)
