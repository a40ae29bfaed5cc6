"""Checks on real gloo ranks: how they are registered, started and run, and what most of them compare.

A module of tests/dist/on_ranks registers functions with `@check(2)`; tests/dist/test_on_ranks.py starts one process group for
each number of ranks, which runs all checks of this number. A check fails where it fails on any rank. Models that cast to fp32
inside run with these casts promoted to fp64, on our side by a pass of the pipeline, in eager by a mode.
"""

from __future__ import annotations

import copy
import gc
import inspect
import os
import re
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import torch.distributed as dist
import zoo
from harness import promote_casts
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

import megafx
from megafx.checks.simulate import GRADIENT_FLOOR
from megafx.distributed.failures import wait_at_exit

RTOL = 1e-10
Function = Callable[..., Any]


# -- registering and running checks


@dataclass(frozen=True)
class Check:
    """function(): what it saw, in words; function(folder): the same, with a folder of its own that all ranks share."""

    function: Function
    worlds: tuple[int, ...]
    slow: tuple[int, ...]
    seed: int | None


CHECKS: dict[str, Check] = {}


def check(
    *worlds: int, slow: bool | tuple[int, ...] = False, seed: int | None = None, name: str = ""
) -> Callable[[Function], Function]:
    """Register a check for these numbers of ranks. slow: at these numbers only in the slow tests.

    seed: of torch's generator, the same on all ranks; None: ranks are seeded apart.
    """

    def register(function: Function) -> Function:
        named = name or function.__name__
        assert named not in CHECKS, f"two checks are called {named}"
        CHECKS[named] = Check(function, worlds, worlds if slow is True else slow or (), seed)
        return function

    return register


def run_ranks(
    script: str, folder: Path, ranks: int, *arguments: str, timeout: float, environment: Mapping[str, str] | None = None,
    ends: tuple[int | tuple[int, ...], ...] = (),
) -> list[str]:  # fmt: skip
    """What each of `python <script> <folder> <rank> <arguments>` printed; fails with all of it if any of them fails.

    The usual variables RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are set beside `environment`. ends: the exit status of
    each rank, or those that it may have; 0 unless given.
    """
    plain = {k: v for k, v in os.environ.items() if not k.startswith("MEGAFX_")} | {"MEGAFX_CACHE": "off"}
    plain |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": forks.path_of(plain), "CUDA_VISIBLE_DEVICES": ""}  # gloo
    plain |= {k: v for k, v in (environment or {}).items() if k == "CUDA_VISIBLE_DEVICES"}
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    logs = [folder / f"rank{rank}of{ranks}.log" for rank in range(ranks)]
    orders = [
        forks.Order(
            str(script),
            [str(folder), str(rank), *arguments],
            {**plain, **world, **(environment or {}), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            str(logs[rank]),
        )
        for rank in range(ranks)
    ]
    codes = forks.run(orders, timeout, ("ranks", "transformers.optimization"), plain, servers=2)
    texts = [log.read_text(errors="replace") for log in logs]
    allowed = [end if isinstance(end, tuple) else (end,) for end in ends or [0] * ranks]
    assert all(code in end for code, end in zip(codes, allowed, strict=True)), "\n".join(texts)
    return texts


def verdicts(script: str, folder: Path, world: int, *names: str) -> dict[str, tuple[str, str]]:
    """Check -> (PASS or FAIL, text), of one launch on so many ranks. Where that ends early, checks without a verdict fail."""
    try:
        printed, rest = run_ranks(script, folder, world, *names, timeout=1700)[0], "it was not run"
    except AssertionError as error:  # all that was printed
        printed = rest = str(error)
    lines = re.findall(r"^(PASS|FAIL) ([\w:]+): (.*)$", printed, re.MULTILINE)
    found = {name: (verdict, text.replace(" | ", "\n")) for verdict, name, text in lines}
    return {name: found.get(name, ("FAIL", rest)) for name in names}


def start_group(folder: Path | str, rank: int, *, seconds: float = 120, name: str = "store") -> None:
    """Make this process a rank of a gloo group whose ranks meet in a file of this folder."""
    torch.set_num_threads(1)
    gc.freeze(), gc.set_threshold(10_000)  # as in conftest.py
    wait_at_exit()
    world = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{folder}/{name}", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=seconds))


def run_checks(folder: Path, rank: int, names: list[str]) -> None:
    """Run checks on this rank. Rank 0 prints a line for each: `PASS <name>: <what was seen>` or `FAIL <name>: <error>`."""
    start_group(folder, rank)
    run_all(names, folder)
    dist.destroy_process_group()


def run_all(names: list[str], folder: Path) -> None:
    for name in names:
        begin = time.perf_counter()
        error, seen = _run(CHECKS[name], folder / f"{name}_{dist.get_world_size()}")
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        failed = [e.replace("\n", " | ") for e in errors if e]
        if dist.get_rank() == 0:
            print(
                f"FAIL {name}: {failed[0]}" if failed else f"PASS {name}: {seen}, {time.perf_counter() - begin:.1f} s",
                flush=True,
            )


def _run(check: Check, folder: Path) -> tuple[str | None, str]:
    """(error, what was seen)"""
    torch.manual_seed(dist.get_rank() if check.seed is None else check.seed)
    try:
        if inspect.signature(check.function).parameters:
            folder.mkdir(exist_ok=True)
            return None, str(check.function(folder))
        return None, str(check.function())
    except (Exception, pytest.fail.Exception):
        return f"rank {dist.get_rank()}: {traceback.format_exc()}", ""


# -- fp64 throughout


def _promoted(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class PromoteCasts(TorchFunctionMode):
    """The same for eager code."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch.utils._pytree.tree_map(_promoted, (tuple(args), kwargs or {}))
        return torch.Tensor.double(*args) if func is torch.Tensor.float else func(*args, **kwargs)


def config(**options: Any) -> megafx.Config:
    return megafx.Config(
        tensor_model_parallel_size=options.pop("t", dist.get_world_size()),
        hardware="h100-nvlink",
        passes=(("after canonicalize", promote_casts),),
        **options,
    )


# -- comparing


def relative_error(found: Tensor, wanted: Tensor, scale: float = 0.0) -> float:
    """||a - b|| / max(||b||, eps * scale)."""
    return float((found - wanted).norm()) / max(float(wanted.norm()), GRADIENT_FLOOR * scale, 1e-300)


def same_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str, rtol: float = RTOL) -> str:
    """Each relative to its own norm, or where this is rounding to that of all together."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    scale = sum(float(v.norm()) ** 2 for v in wanted.values()) ** 0.5
    errors = {n: relative_error(found[n], v, scale) for n, v in wanted.items()}
    worst = max(errors, key=lambda n: errors[n])
    assert errors[worst] <= rtol, f"{what} {worst} is off by {errors[worst]:.1e}"
    return f"{len(errors)} {what}s within {errors[worst]:.0e}"


def same_gradients(model: nn.Module, wanted: Mapping[str, Tensor], rtol: float = RTOL) -> str:
    return same_tensors(megafx.full_gradients(model), wanted, "gradient", rtol)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def same_parameters(model: nn.Module, wanted: nn.Module) -> str:
    found, state = megafx.full_state_dict(model), wanted.state_dict()
    assert list(found) == list(state)
    errors = {n: relative_error(found[n], v) for n, v in state.items() if v.is_floating_point()}
    worst = max(errors, key=lambda n: errors[n])
    assert errors[worst] <= RTOL, f"{worst} is off by {errors[worst]:.1e}"
    return f"{len(errors)} parameters within {errors[worst]:.0e}"


def near(found: Any, wanted: Any, what: str, rtol: float = RTOL) -> float:
    error = relative_error(torch.as_tensor(found), torch.as_tensor(wanted))
    assert error <= rtol, f"{what} is off by {error:.1e}"
    return error


def raises(kind: type[Exception], text: str, function: Callable[[], Any]) -> None:
    try:
        function()
    except kind as error:
        assert re.search(text, str(error)), f"the text is {error}"
        return
    raise AssertionError(f"no {kind.__name__} that says '{text}'")


def loss_of(output: Any) -> Tensor:
    return output[1] if isinstance(output, tuple) else output.loss


def logits_of(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output.logits


# -- a model beside its eager twin


class Pair:
    """A parallelized model and the plain one with the same weights."""

    def __init__(
        self, name: str, *, example: bool = False, model: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.plain, self.inputs = zoo.build(name, **(model or {}))
        self.model = copy.deepcopy(self.plain)
        self.options, self.example = options, example

    def parallelize(self) -> Pair:
        example = {"example_inputs": self.inputs(2, 16)} if self.example else {}
        megafx.parallelize(self.model, config(**self.options), **example)
        return self

    def step(self, batch: int, seq: int) -> tuple[Tensor, Tensor]:
        """Loss and backward of both; (ours, eager's)."""
        inputs = self.inputs(batch, seq)
        mine = loss_of(self.model(**inputs))
        with PromoteCasts():
            theirs = loss_of(self.plain(**inputs))
            theirs.backward()
        mine.backward()
        near(mine.detach(), theirs.detach(), f"the loss of {batch}x{seq}")
        return mine, theirs

    def zero(self) -> None:
        self.model.zero_grad()
        self.plain.zero_grad()

    def train(self, kind: type[torch.optim.Optimizer], optimizers: Any = None, **options: Any) -> str:
        """3 steps with clipping on batches of several sizes, all parameters compared after each."""
        mine, theirs = optimizers or [kind(m.parameters(), **options) for m in (self.model, self.plain)]
        seen = ""
        for batch, seq in ((2, 16), (3, 13), (1, 7)):
            self.zero()
            self.step(batch, seq)
            seen = same_gradients(self.model, gradients(self.plain))
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (self.model, self.plain)]
            whole = norms[0].full_tensor() if isinstance(norms[0], DTensor) else norms[0]
            near(whole, norms[1], "the gradient norm")
            assert float(norms[1]) > 0.1, "nothing was clipped"
            same_gradients(self.model, gradients(self.plain))
            mine.step()
            theirs.step()
            parameters = same_parameters(self.model, self.plain)
        return f"{seen}; after 3 steps {parameters}"
