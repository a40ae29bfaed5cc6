"""Every optimizer of torch.optim, and transformers' Adafactor, on sharded parameters: in each of its forms, made before and
after parameters are cut, five steps are those of one process. Widths divide by the ranks and do not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parameters import Model
from ranks import check
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.optimization import Adafactor

import megafx
from megafx.distributed import muon
from megafx.distributed.mesh import Meshes
from megafx.distributed.parameters import replicate_parameters, shard_like, shard_parameters
from megafx.distributed.tensor import TPTensor
from megafx.placements.types import I, Layout, S, owned
from megafx.weights.state import full_state_dict

FORMS: tuple[dict[str, bool], ...] = ({"foreach": False}, {"foreach": True})
FUSED: tuple[dict[str, bool], ...] = (*FORMS, {"fused": True})
Make = Callable[[Any], optim.Optimizer]


def kinds() -> Iterator[tuple[str, Make]]:
    """(what it is, parameters -> optimizer)"""
    rows: list[tuple[Any, tuple[dict[str, bool], ...], dict[str, Any]]] = [
        (optim.Adam, FUSED, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
        (optim.Adam, FORMS[:1], {"lr": torch.tensor(0.01)}),
        (optim.AdamW, FUSED, {"lr": 0.01, "maximize": True, "weight_decay": 0.1}),
        (optim.SGD, FUSED, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (optim.SGD, FUSED, {"lr": 0.1, "momentum": 0.5, "dampening": 0.1, "maximize": True}),
        (optim.Adagrad, FUSED, {"lr": 0.1, "initial_accumulator_value": 0.1, "lr_decay": 0.01}),
        (optim.Adadelta, FORMS, {"lr": 0.5, "weight_decay": 0.1}),
        (optim.Adamax, FORMS, {"lr": 0.01, "weight_decay": 0.1}),
        (optim.ASGD, FORMS, {"lr": 0.1, "weight_decay": 0.1}),
        (optim.NAdam, FORMS, {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
        (optim.RAdam, FORMS, {"lr": 0.01, "weight_decay": 0.1}),
        (optim.RMSprop, FORMS, {"lr": 0.01, "momentum": 0.9, "centered": True}),
        (optim.Rprop, FORMS, {"lr": 0.01}),
        (optim.Rprop, FORMS, {"lr": 0.01, "maximize": True}),
        (optim.Adafactor, FORMS, {"lr": 0.1, "weight_decay": 0.1}),
        (Adafactor, ({},), {"weight_decay": 0.1}),
        (Adafactor, ({},), {"lr": 0.01, "relative_step": False, "scale_parameter": False, "beta1": 0.9}),
        (optim.LBFGS, ({},), {"lr": 0.1, "max_iter": 4}),
        (optim.LBFGS, ({},), {"line_search_fn": "strong_wolfe", "max_iter": 4, "history_size": 2}),
    ]
    for kind, forms, options in rows:
        for form in forms:
            yield (
                f"{kind.__module__.split('.')[0]}'s {kind.__name__} {form} {options}",
                partial(kind, **form, **options),
            )


@cache
def meshes() -> tuple[DeviceMesh, DeviceMesh | None, int]:
    """Of the tensor-parallel ranks, of all that share one copy (None: no data parallelism), and how many the first are."""
    world = dist.get_world_size()
    if world < 4:
        return init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)), None, world
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return both["tp"], both[("dp", "tp")]._flatten("all"), 2


def placements(t: int) -> dict[str, Any]:
    def both(name: str, layout: Layout) -> dict[str, Any]:
        return {f"{name}.weight": S(0, layout), f"{name}.bias": S(0, layout)}

    found: dict[str, Any] = {
        **both("uneven", Layout.contiguous(7, t)),
        **both("blocked", Layout.of([(4, 1)], t, rep=3)),
        "even.weight": S(1, Layout.contiguous(6, t)),
        "even.bias": I,
        **both("empty", Layout.contiguous(4, t)),
    }
    return found if dist.get_world_size() == 4 else found | {"owned.weight": owned(5, 1), "owned.bias": owned(5, 1)}


def cut(model: nn.Module, data: bool = True) -> None:
    """data: on four ranks over data-parallel ranks too, as zero1 and fsdp keep parameters; else as ddp keeps them."""
    tensor, shards, t = meshes()
    shard_parameters(model, placements(t), Meshes(tensor, shards=shards) if data else None)


def gradients(model: nn.Module, step: int, quadratic: bool = False) -> None:
    """Of a linear loss; quadratic: of one that depends on where the parameters are."""
    draw = torch.Generator().manual_seed(step)
    for p in model.parameters():
        grad = torch.randn(p.shape, generator=draw, dtype=p.dtype)
        if quadratic:
            grad = 0.1 * grad + (p.full_tensor() if isinstance(p, TPTensor) else p).detach()
        p.grad = shard_like(grad, p) if isinstance(p, TPTensor) else grad


def closure(model: nn.Module, step: int) -> Tensor:
    gradients(model, step, quadratic=True)
    whole = [p.full_tensor() if isinstance(p, TPTensor) else p for p in model.parameters()]
    return sum((0.5 * p.square().sum() for p in whole), torch.zeros(())).detach()


def groups(model: nn.Module, make: Make) -> optim.Optimizer:
    """Two groups, of another learning rate where an optimizer has one and takes groups."""
    parameters = list(model.parameters())
    made = make(parameters)
    lr = made.param_groups[0].get("lr")
    if isinstance(made, optim.LBFGS) or not isinstance(lr, float):
        return made
    return make([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": lr / 2}])


def train(model: nn.Module, optimizer: optim.Optimizer, make: Make, steps: int = 4) -> nn.Module:
    rate = isinstance(optimizer.param_groups[0].get("lr"), float)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if rate else None
    for step in range(steps):
        if isinstance(optimizer, optim.LBFGS):
            optimizer.step(lambda step=step: closure(model, step))  # type: ignore[arg-type]
            continue
        gradients(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        nn.utils.clip_grad_value_(model.parameters(), 0.3)
        if step == 2:  # state saved and loaded, into an optimizer made anew
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = groups(model, make)
            optimizer.load_state_dict(state)
            if schedule is not None:
                schedule.optimizer = optimizer
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if schedule is not None:
            schedule.step()
    return model


def same(model: nn.Module, wanted: nn.Module, what: str) -> None:
    found = full_state_dict(model)
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{what}, {n}: {m}"
        )


def trained_as_one_process(what: str, make: Make, made: tuple[bool, ...]) -> None:
    """made: whether the optimizer is there before parameters are cut."""
    torch.manual_seed(0)
    start = Model().double()
    wanted = copy.deepcopy(start)
    train(wanted, groups(wanted, make), make)
    for before in made:
        model = copy.deepcopy(start)
        replicate_parameters(model, meshes()[0])
        optimizer = groups(model, make) if before else None
        cut(model, data=before)
        train(model, optimizer or groups(model, make), make)
        same(model, wanted, f"{what}, made {'before' if before else 'after'} parameters were cut")


@check(2, 3, 4, slow=(2, 4), seed=0)
def all_optimizers_step_as_in_one_process() -> str:
    wrong = []
    quick = dist.get_world_size() == 3  # which runs by default: without loops over tensors, one of both in turn
    for number, (what, make) in enumerate(each for each in kinds() if not quick or "'foreach': False" not in each[0]):
        try:
            trained_as_one_process(what, make, (number % 2 == 0,) if quick else (True, False))
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__} {str(error)[:500]}")
    assert not wrong, "\n".join(wrong)
    return f"{len(list(kinds()))} forms"


class Matrices(nn.Module):
    """The weights of Model alone: Muon takes matrices."""

    def __init__(self) -> None:
        super().__init__()
        for name, p in Model().named_parameters():
            if p.dim() == 2:
                self.register_module(name.split(".")[0], nn.Linear(*reversed(p.shape), bias=False))


def sharded_matrices(start: nn.Module, make: Make | None = None) -> tuple[nn.Module, Any]:
    model = copy.deepcopy(start)
    replicate_parameters(model, meshes()[0])
    optimizer = make(list(model.parameters())) if make else None
    cut(model)
    return model, optimizer


@check(2, 3, 4, slow=(2, 4), seed=0)
def muon_has_the_bits_of_one_process() -> str:
    """Each matrix is orthogonalized whole, by one rank."""
    counted = []
    iterate = optim._muon._zeropower_via_newtonschulz

    def count(x: Tensor, *options: Any) -> Tensor:
        counted.extend([tuple(x.shape)] if options[1] > 1 else [])
        return iterate(x, *options)

    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for options in ({}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "lr": torch.tensor(0.02)}):
            make = partial(optim.Muon, **({"lr": 0.02, "weight_decay": 0.1} | options))
            torch.manual_seed(0)
            start = Matrices().to(dtype)
            wanted, (model, optimizer) = copy.deepcopy(start), sharded_matrices(start, make)
            plain = make(wanted.parameters())
            counted.clear()
            optim._muon._zeropower_via_newtonschulz = count
            for step in range(3):
                gradients(model, step)
                optimizer.step()
            optim._muon._zeropower_via_newtonschulz = iterate
            for step in range(3):
                gradients(wanted, step)
                plain.step()
            found = full_state_dict(model)
            for name, value in wanted.state_dict().items():
                assert torch.equal(found[name], value), f"{name} in {dtype}, {options}"
            everywhere: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, counted)
            shapes = sorted(shape for one in everywhere for shape in one)
            assert shapes == sorted([tuple(p.shape) for p in wanted.parameters()] * 3), shapes
    costs = [sum(map(muon.flops, one)) for one in everywhere]
    return f"5 matrices on {len(costs)} ranks, FLOPs of each in proportion: {costs}"


def newton_schulz(grad: Tensor, steps: int) -> Tensor:
    """As Keller Jordan's own optimizer has it, in the gradient's dtype."""
    a, b, c = (3.4445, -4.7750, 2.0315)
    x = grad.clone()
    if grad.size(-2) > grad.size(-1):
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if grad.size(-2) > grad.size(-1) else x


class OwnMuon(optim.Optimizer):
    """A user's own."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                    state["rows"] = p.new_zeros(p.shape[0])
                state["momentum"].lerp_(p.grad, 0.05)
                update = newton_schulz(p.grad.lerp(state["momentum"], 0.95), 5)
                state["rows"].lerp_(update.square().mean(-1), 0.1)
                update = update / (state["rows"][:, None].sqrt() + 1e-3)
                p.data.view(-1).add_(update.reshape(-1), alpha=-group["lr"])  # through a view
                p[0].mul_(0.5)
                p.T[-1].fill_(0.25)


@check(2, 3, 4, slow=(2, 4), seed=0)
def optimizers_of_users_see_whole_values() -> str:
    torch.manual_seed(0)
    start = Matrices().double()
    wanted, (model, _) = copy.deepcopy(start), sharded_matrices(start)
    plain, optimizer = OwnMuon(wanted.parameters()), OwnMuon(model.parameters())
    for step in range(3):
        for each, own in ((wanted, plain), (model, optimizer)):
            gradients(each, step)
            own.step()
        same(model, wanted, f"step {step}")
    return "3 steps"


@check(3, seed=0)
def state_of_whole_parameters_follows_them() -> str:
    """State of another run is loaded whole; averages were made before parameters were cut."""
    for kind, form in (
        (optim.AdamW, {"fused": True}),
        (optim.AdamW, {"foreach": True}),
        (optim.SGD, {"momentum": 0.9}),
    ):
        torch.manual_seed(0)
        start = Model().double()
        wanted, make = copy.deepcopy(start), partial(kind, lr=0.1, **form)
        plain = make(wanted.parameters())
        gradients(wanted, 0)
        plain.step()
        model = copy.deepcopy(wanted)
        for p in model.parameters():
            p.grad = None
        replicate_parameters(model, meshes()[0])
        averages = [[p.detach().clone() for p in each.parameters()] for each in (wanted, model)]
        rows = [p.full_tensor().clone() for p in averages[1]]
        cut(model)
        optimizer = make(model.parameters())
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        for step in range(1, 3):
            for each, own, mean in ((wanted, plain, averages[0]), (model, optimizer, averages[1])):
                gradients(each, step)
                own.step()
                with torch.no_grad():
                    for average, p in zip(mean, each.parameters(), strict=True):
                        average.lerp_(p, 0.1)
            with torch.no_grad():
                torch._foreach_lerp_(rows, list(model.parameters()), 0.1)
        same(model, wanted, f"{kind.__name__} {form}")
        for theirs, mine, row in zip(*averages, rows, strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(row, theirs, rtol=1e-12, atol=1e-14)
        state = next(iter(optimizer.state.values()))
        assert all(x.dim() == 0 or isinstance(x, TPTensor) for x in state.values()), state
    return "AdamW and SGD"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(self.up(x).relu())).square().mean()


def stepped(model: nn.Module, optimizers: list[optim.Optimizer], steps: range) -> nn.Module:
    for step in steps:
        x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))

        def closure(x: Tensor = x) -> Tensor:
            model.zero_grad()
            loss = model(x)
            loss.backward()
            return loss

        closure()
        for optimizer in optimizers:
            optimizer.step(closure if isinstance(optimizer, optim.LBFGS) else None)
    return model


def weights_and_rest(model: nn.Module) -> list[optim.Optimizer]:
    named = list(model.named_parameters())
    weights, rest = [[p for n, p in named if n.endswith("weight") == w] for w in (True, False)]
    return [optim.Muon(weights, lr=0.02), optim.AdamW(rest, lr=0.02)]


@check(2, seed=0)
def optimizers_go_on_from_checkpoints(folder: Path) -> str:
    """On these ranks, and in one process."""
    makes: dict[str, Callable[[nn.Module], list[optim.Optimizer]]] = {
        "Adagrad": lambda m: [optim.Adagrad(m.parameters(), lr=0.1, fused=True)],
        "Rprop": lambda m: [optim.Rprop(m.parameters(), lr=0.01)],
        "Adafactor": lambda m: [optim.Adafactor(m.parameters(), lr=0.1)],
        "transformers": lambda m: [Adafactor(m.parameters(), beta1=0.9)],
        "LBFGS": lambda m: [optim.LBFGS(m.parameters(), lr=0.1, max_iter=3)],
        "Muon": weights_and_rest,
    }
    torch.manual_seed(0)
    start = Net().double()
    config = megafx.Config(tensor_model_parallel_size=2, hardware="h100-nvlink")
    model = megafx.parallelize(copy.deepcopy(start), config)
    for name, make in makes.items():
        optimizers = make(model)
        stepped(model, optimizers, range(2))
        megafx.save_checkpoint(folder / name, model, optimizers, step=1)
        stepped(model, optimizers, range(2, 4))
        wanted = megafx.full_state_dict(model)
        plain = copy.deepcopy(start)
        for each in (model, plain):
            again = make(each)
            megafx.load_checkpoint(folder / name, each, again)
            stepped(each, again, range(2, 4))
            found = megafx.full_state_dict(each) if each is model else each.state_dict()
            for key, value in wanted.items():
                torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    return ", ".join(makes)


class Widths(nn.Module):
    """Linears of these widths."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x).square().mean()
        return found


@check(2, 3, slow=(3,), seed=0)
def gradients_of_a_second_model_are_clipped_as_in_one_process() -> None:
    """Some of its parameters have forms that the first model's have, whose mesh is another object."""
    x = torch.randn(6, 5, dtype=torch.float64)
    for widths in ((5, 19, 5), (5, 19, 7, 5)):
        eager = Widths(*widths).double()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        model = megafx.parallelize(copy.deepcopy(eager), mesh=mesh)
        for each in (model, eager):
            each(x).backward()
        for foreach in (True, False):
            found, wanted = (nn.utils.clip_grad_norm_(m.parameters(), 0.5, foreach=foreach) for m in (model, eager))
            assert abs(float(found) / float(wanted) - 1) < 1e-12, (widths, foreach, float(found), float(wanted))
        meshes = {id(p.device_mesh) for p in model.parameters() if isinstance(p, TPTensor)}
        assert len(meshes) == 1, "a parameter is on the mesh of another model"
