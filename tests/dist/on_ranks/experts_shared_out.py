"""Experts that data-parallel ranks share out, on real gloo ranks: steps with clipping are those of one process in fp64, beside
sharded parameters, context- and tensor-parallel ranks; own meshes, gradients held back, checkpoints that go on at other
degrees.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from listed_mixtures import Model as Listed
from ranks import check, near, raises, same_tensors
from sorted_mixtures import HIDDEN, Model, a_call, added_to_tokens, as_transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import megafx
from megafx.errors import AgreementError, PlanError

EP = {"data_parallel_size": 2, "expert_model_parallel_size": 2, "tensor_model_parallel_size": 1}


def start() -> nn.Module:
    return Model(as_transformers, added_to_tokens).double()


def part(call: tuple[Tensor, ...], ranks: int) -> list[Tensor]:
    """This rank's rows."""
    return [x.chunk(ranks)[dist.get_rank() * ranks // dist.get_world_size()] for x in call]  # of one: all rows


def stepped(model: nn.Module, ranks: int) -> list[Tensor]:
    """Losses and norms of three steps."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4), []
    for step in range(3):
        call = a_call(4 + 4 * step)
        loss = model(*part(call[:1] if "first" in dict(model.named_children()) else call, ranks))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found += [loss.detach(), norm.full_tensor() if hasattr(norm, "full_tensor") else norm]
        optimizer.step(), optimizer.zero_grad()
    return found


def trains_like_one_process(
    options: dict[str, Any], mesh: DeviceMesh | None = None, start: Callable[[], nn.Module] = start
) -> None:
    model = megafx.parallelize(start(), megafx.Config(**options), mesh=mesh)
    found, state = stepped(model, options["data_parallel_size"]), megafx.full_state_dict(model)
    one = start()
    for ours, theirs in zip(found, stepped(one, 1), strict=True):
        near(ours, theirs, "a loss or a norm")
    same_tensors(state, dict(one.state_dict()), "after three steps:")


@check(2)
def steps_with_experts_shared_out() -> None:
    trains_like_one_process(EP)
    trains_like_one_process(EP | {"data_parallel": "fsdp"})


@check(4, slow=True)
def experts_shared_out_beside_other_axes() -> None:
    four = EP | {"data_parallel_size": 4}
    trains_like_one_process(four | {"expert_model_parallel_size": 4})
    trains_like_one_process(
        four | {"data_parallel": "zero1"}, init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "ep", "tp"))
    )
    trains_like_one_process(EP | {"tensor_model_parallel_size": 2})
    trains_like_one_process(EP | {"context_parallel_size": 2})


@check(2)
def calls_have_room_for_other_numbers_of_rows() -> None:
    """The host waits for how many rows there are in the first call alone. A larger one runs forward once more; others have rows
    that nobody fills."""
    model, plain = megafx.parallelize(start(), megafx.Config(**EP)), start()
    for rows, runs in ((4, 1), (8, 2), (8, 1), (6, 1), (12, 2), (12, 1)):
        (graph,) = [g for graphs in model.megafx.graphs.values() for g in graphs] or [None]
        ran = [] if graph is None else watched(graph.executable.rooms)
        loss, wanted = model(*part(a_call(rows), 2)), plain(*a_call(rows))
        assert graph is None or len(ran) == runs, (rows, len(ran))
        loss.backward(), wanted.backward()
        near(loss.detach(), wanted.detach(), f"a loss of {rows} rows")
    same_tensors(megafx.full_gradients(model), {n: p.grad for n, p in plain.named_parameters()}, "gradient")
    assert "more tokens went to the experts of a rank than there was room for" in str(megafx.explain(model))


def watched(rooms: Any) -> list[int]:
    """Grows by one for each run of forward."""
    ran: list[int] = []
    room = type(rooms).room

    def counted(needed: Tensor, mixture: int) -> Tensor:
        ran.extend([0] * (mixture == 0))
        return room(rooms, needed, mixture)

    rooms.room = counted
    return ran


FOUR = EP | {"data_parallel_size": 4, "data_parallel": "fsdp"}


@check(4)
def ranks_that_have_the_same_experts_hold_shards_of_them() -> None:
    """Two groups of two: of the three experts (the second rank's are two and a pad) each rank stores a shard of two rows."""
    model, plain = megafx.parallelize(start(), megafx.Config(**FOUR)), start()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4)
    with model.megafx.no_sync():
        model(*part(a_call(4), 4)).backward()
    model(*part(a_call(8), 4)).backward()
    for rows in (4, 8):
        plain(*a_call(rows)).backward()
    same_tensors(megafx.full_gradients(model), {n: p.grad for n, p in plain.named_parameters()}, "gradient")
    optimizer.step(), optimizer.zero_grad()
    up = dict(model.named_parameters())["layers.0.up"]
    group, own = (
        dist.get_rank() // 2,
        dist.get_rank() % 2,
    )  # which of those that have the same experts, and which experts
    whole = F.pad(up.full_tensor(), (0, 0, 0, 0, 0, 1))[3 * own :][:3]
    mine = F.pad(whole, (0, 0, 0, 0, 0, 1))[2 * group :][:2]
    assert torch.equal(up.to_local(), mine) and optimizer.state[up]["exp_avg"].to_local().shape == mine.shape
    plain.load_state_dict(megafx.full_state_dict(model)), plain.zero_grad()
    for each in (model, plain):  # stacks that change places stay cut as they are
        first, second = each.layers[0], each.layers[1]
        first.up, second.up = second.up, first.up
    model(*part(a_call(8), 4)).backward(), plain(*a_call(8)).backward()
    same_tensors(megafx.full_gradients(model), {n: p.grad for n, p in plain.named_parameters()}, "gradient")
    assert set(map(str, model.megafx.params.values())) == {"I"}, model.megafx.params


@check(4, slow=True)
def shards_of_the_same_experts_go_on_elsewhere(folder: Path) -> None:
    """A checkpoint goes on where experts are shared out otherwise."""
    trains_like_one_process(FOUR)
    model = megafx.parallelize(start(), megafx.Config(**FOUR))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4)
    model(*part(a_call(4), 4)).backward()
    optimizer.step(), optimizer.zero_grad()
    megafx.save_checkpoint(folder, model, optimizer, step=1)
    wanted = stepped(model, 4), megafx.full_state_dict(model)
    for options in (
        FOUR | {"expert_model_parallel_size": 4},
        FOUR | {"data_parallel": "ddp"},
        FOUR | {"expert_model_parallel_size": 1},
    ):
        again = megafx.parallelize(start(), megafx.Config(**options))
        assert megafx.load_checkpoint(folder, again, torch.optim.AdamW(again.parameters())).step == 1
        for ours, theirs in zip(stepped(again, 4), wanted[0], strict=True):
            near(ours, theirs, f"a loss or a norm with {options}")
        same_tensors(megafx.full_state_dict(again), wanted[1], f"with {options}:")


def start_list() -> nn.Module:
    return Listed("one_hot_of_hugging_face").double()


@check(2)
def experts_of_a_list_are_held_whole_by_their_rank(folder: Path) -> None:
    """Two of four a rank: nothing of the others is there, nor in the optimizer. Gradients are held back; a checkpoint goes on
    without such ranks."""
    list_is_held_whole(folder, EP | {"expert_model_parallel_size": 1})


@check(2)
def weights_change_places_between_experts_of_one_rank() -> None:
    """Between experts of two ranks is an error: a graph has no rows of those that the other rank holds."""
    model, plain = megafx.parallelize(start_list(), megafx.Config(**EP, data_parallel="fsdp")), start_list()
    model(*part(a_call(4)[:1], 2))

    def swap(of: nn.Module, one: int, other: int) -> None:
        a, b = (of.layers[0].experts[e].up for e in (one, other))
        a.weight, b.weight = b.weight, a.weight

    for each in (model, plain):
        swap(each, 0, 1)
    model(*part(a_call(8)[:1], 2)).backward(), plain(*a_call(8)[:1]).backward()
    same_tensors(megafx.full_gradients(model), {n: p.grad for n, p in plain.named_parameters()}, "gradient")
    swap(model, 0, 2)
    with pytest.raises(megafx.MegafxError, match="2 parameters .* have taken the places of others"):
        model(*part(a_call(8)[:1], 2))


@check(2, slow=True)
def experts_of_a_list_come_back_to_their_rank(folder: Path) -> None:
    list_is_held_whole(folder, EP | {"expert_model_parallel_size": 1}, EP)


def list_is_held_whole(folder: Path, *others: dict[str, Any]) -> None:
    """others: what a checkpoint goes on with, one after the other."""
    model, plain = megafx.parallelize(start_list(), megafx.Config(**EP, data_parallel="fsdp")), start_list()
    optimizer, its = (torch.optim.AdamW(m.parameters(), lr=0.02, eps=1e-4) for m in (model, plain))
    with model.megafx.no_sync():
        model(*part(a_call(4)[:1], 2)).backward()
    model(*part(a_call(8)[:1], 2)).backward()
    for rows in (4, 8):
        plain(*a_call(rows)[:1]).backward()
    same_tensors(megafx.full_gradients(model), {n: p.grad for n, p in plain.named_parameters()}, "gradient")
    for each in (optimizer, its):
        each.step(), each.zero_grad()
    for e in range(4):
        weight = dict(model.named_parameters())[f"layers.0.experts.{e}.up.weight"]
        rows = weight.shape[0] if e // 2 == dist.get_rank() else 0
        assert weight.to_local().shape[0] == optimizer.state[weight]["exp_avg"].to_local().shape[0] == rows
    megafx.save_checkpoint(folder / "a", model, optimizer, step=1)
    wanted = stepped(plain, 1), dict(plain.state_dict())
    for ours, theirs in zip(stepped(model, 2), wanted[0], strict=True):
        near(ours, theirs, "a loss or a norm of shards")
    path = folder / "a"
    for options in others:
        again = megafx.parallelize(start_list(), megafx.Config(**options))
        other = torch.optim.AdamW(again.parameters(), lr=0.02, eps=1e-4)
        assert megafx.load_checkpoint(path, again, other).step == 1
        path = folder / "b"
        megafx.save_checkpoint(path, again, other, step=1)
        for ours, theirs in zip(stepped(again, 2), wanted[0], strict=True):
            near(ours, theirs, f"a loss or a norm with {options}")
        same_tensors(megafx.full_state_dict(again), wanted[1], f"with {options}:")


class Alternating(Listed):
    """Of whose second layer a call may compute the first expert for all tokens."""

    def forward(self, x: Tensor, dense: bool = False) -> Tensor:
        if not dense:
            return super().forward(x)
        y, loss = self.layers[0](self.first(x))
        return loss + self.layers[1].experts[0](y).square().mean()


@check(2)
def calls_that_read_experts_of_other_ranks_are_refused() -> None:
    model, (x,) = Alternating("above", "above").double(), part(a_call(4)[:1], 2)
    megafx.parallelize(model, megafx.Config(**EP))
    model(x).backward()
    raises(
        PlanError,
        "is held by the rank of its expert alone, and this call reads it in another way",
        lambda: model(x, dense=True),
    )


@check(2, slow=True)
def calls_that_read_any_expert_work_where_ranks_have_all() -> None:
    plain, (x,) = Alternating("one_hot_of_hugging_face", "above").double(), part(a_call(4)[:1], 2)
    model = megafx.parallelize(copy.deepcopy(plain), megafx.Config(**EP | {"expert_model_parallel_size": 1}))
    model(x).backward()
    near(model(x, dense=True), plain(*a_call(4)[:1], dense=True), "a loss")


@check(4, slow=True)
def experts_of_a_list_beside_tensor_parallel_ranks(folder: Path) -> None:
    """An expert is cut over the two of its rank; files have whole weights, and are read by the ranks that need them."""
    both = EP | {"tensor_model_parallel_size": 2}
    trains_like_one_process(both, start=start_list)
    model = megafx.parallelize(start_list(), megafx.Config(**both), example_inputs=tuple(a_call(4)[:1]))
    model(*part(a_call(4)[:1], 2)).backward()
    before = megafx.full_state_dict(model)
    megafx.save_checkpoint(folder, model, step=1)
    again = megafx.parallelize(
        start_list(), megafx.Config(**EP | {"expert_model_parallel_size": 1, "tensor_model_parallel_size": 2})
    )
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    megafx.load_checkpoint(folder, again)
    same_tensors(megafx.full_state_dict(again), before, "after a load")


@check(2)
def experts_shared_out_with_losses_of_each_rank() -> None:
    """As by DistributedDataParallel, whose gradients are means."""
    model = megafx.parallelize(start(), megafx.Config(**EP, data_parallel_loss="average"))
    model(*part(a_call(4), 2)).backward()
    one = start()
    for rows in zip(*(x.chunk(2) for x in a_call(4)), strict=True):
        (one(*rows) / 2).backward()
    same_tensors(megafx.full_gradients(model), {n: p.grad for n, p in one.named_parameters()}, "gradient")


@check(2, slow=True)
def experts_shared_out_with_held_gradients_and_checkpoints(folder: Path) -> None:
    plain = start()
    model = megafx.parallelize(copy.deepcopy(plain), megafx.Config(**EP))
    with model.megafx.no_sync():
        model(*part(a_call(4), 2)).backward()
    model(*part(a_call(8), 2)).backward()
    for rows in (4, 8):
        plain(*a_call(rows)).backward()
    same_tensors(megafx.full_gradients(model), {n: p.grad for n, p in plain.named_parameters()}, "gradient")
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    others: tuple[dict[str, Any], ...] = (EP | {"data_parallel": "fsdp"}, {"tensor_model_parallel_size": 2}, EP)
    before: dict[str, Any] = EP
    for number, options in enumerate(others):
        megafx.save_checkpoint(folder / str(number), model, optimizer, step=1)
        again = megafx.parallelize(start(), megafx.Config(**options))
        steps = torch.optim.AdamW(again.parameters())
        assert megafx.load_checkpoint(folder / str(number), again, steps).step == 1
        for each, stepping, of in ((model, optimizer, before), (again, steps, options)):
            stepping.zero_grad()
            each(*part(a_call(8), of.get("data_parallel_size", 1))).backward()
            stepping.step()
        same_tensors(megafx.full_state_dict(again), megafx.full_state_dict(model), f"with {options}:")
        model, optimizer, before = again, steps, options


@check(2, slow=True)
def a_rank_holds_its_experts_and_moments_of_them() -> None:
    model = megafx.parallelize(start(), megafx.Config(**EP))
    model(*part(a_call(4), 2)).backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    up = dict(model.named_parameters())["layers.0.up"]
    assert up.shape == (5, HIDDEN, 14) and up.to_local().shape == (3, HIDDEN, 14)
    assert optimizer.state[up]["exp_avg"].to_local().shape == (3, HIDDEN, 14)
    with torch.no_grad():  # the second rank has two experts and a pad
        whole = F.pad(up.full_tensor(), (0, 0, 0, 0, 0, 1))
        assert torch.equal(up.to_local(), whole[3 * dist.get_rank() :][:3])


@check(2)
def rows_of_experts_are_counted_over_all_ranks() -> None:
    plain, call = start(), a_call(4)
    ids = [layer.router(call[0].flatten(0, 1)).softmax(-1).topk(2)[1].flatten() for layer in plain.layers[:1]]
    model = megafx.parallelize(start(), megafx.Config(**EP, profiler_ranges=True), example_inputs=call)
    found = megafx.profile(model, tuple(part(call, 2)), steps=1).experts
    assert [b.module for b in found] == ["layers.0", "layers.1"] and [len(b.rows) for b in found] == [5, 5]
    assert [*found[0].rows] == torch.bincount(ids[0], minlength=5).tolist() and sum(found[1].rows) == sum(found[0].rows)


@check(2, slow=True)
def files_have_whole_experts(folder: Path) -> None:
    """Stacks and a list, on meta: each rank reads its own experts, and files that ranks write are those of one process."""
    call = a_call(4)
    for name, make, given in (("stacks", start, call), ("list", start_list, call[:1])):
        plain = make()
        with torch.no_grad():  # not what the constructor draws
            [p.add_(0.01 * i) for i, p in enumerate(plain.parameters())]
        megafx.save_pretrained(plain, folder / name) if dist.get_rank() == 0 else None
        dist.barrier()
        with torch.device("meta"):
            model = make()
        model = megafx.parallelize(model, megafx.Config(**EP), example_inputs=tuple(given))
        megafx.load_safetensors(model, folder / name, factory=make)
        same_tensors(megafx.full_state_dict(model), dict(plain.state_dict()), f"{name} loaded:")
        near(model(*part(given, 2)).detach(), plain(*given).detach(), "a loss")
        megafx.save_pretrained(model, folder / f"{name} again")
        again = megafx.load_safetensors(make(), folder / f"{name} again")
        same_tensors(dict(again.state_dict()), dict(plain.state_dict()), f"{name} saved:")


@check(2)
def experts_shared_out_need_a_dim_of_the_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(AgreementError, match="but the mesh has 1 ranks that share out experts"):
        megafx.parallelize(start(), megafx.Config(**EP), mesh=mesh)
