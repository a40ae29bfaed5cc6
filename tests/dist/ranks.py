"""What the scripts in this folder share: a model beside its eager twin, comparing them, running checks on every rank.

Rank 0 prints one line a check: `PASS <name>: <what was seen>` or `FAIL <name>: <error>`; tests/dist/test_training.py asserts
the lines. A check fails where it fails on any rank. Models that cast to fp32 inside run with these casts promoted to fp64, on
our side by a pass of the pipeline, in eager by a function mode.
"""

from __future__ import annotations

import copy
import re
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
import zoo

import megafx
from megafx.errors import MegafxError
from megafx.ir.program import Program, recompute_val

RTOL = 1e-10
GRADIENT_FLOOR = 1e-6  # of the norm of all gradients: below it a gradient is zero but for rounding
Check = tuple[tuple[int, ...], Callable[[], str]]  # (numbers of ranks that it is for, function that says what it saw)
CHECKS: dict[str, Check] = {}  # of the script that runs


def check(*worlds: int) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register a check for these numbers of ranks."""

    def register(function: Callable[[], str]) -> Callable[[], str]:
        CHECKS[function.__name__] = (worlds, function)
        return function

    return register


# -- fp64 throughout


def promote_casts(program: Program, planner: Planner) -> int:
    """Casts to fp32 inside a model become casts to fp64."""
    changed = 0
    for node in program.graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), _promoted)
            changed += (args, kwargs) != (node.args, dict(node.kwargs))
            node.args, node.kwargs = args, kwargs
            recompute_val(program, node)
    return changed


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


def same_gradients(model: nn.Module, wanted: dict[str, Tensor], rtol: float = RTOL) -> str:
    found = megafx.full_gradients(model)
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    scale = sum(float(g.norm()) ** 2 for g in wanted.values()) ** 0.5
    errors = {n: relative_error(found[n], g, scale) for n, g in wanted.items()}
    worst = max(errors, key=lambda n: errors[n])
    assert errors[worst] <= rtol, f"gradient of {worst} is off by {errors[worst]:.1e}"
    return f"{len(errors)} gradients within {errors[worst]:.0e}"


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def same_parameters(model: nn.Module, wanted: nn.Module) -> str:
    found, state = megafx.full_state_dict(model), wanted.state_dict()
    assert list(found) == list(state)
    errors = {n: relative_error(found[n], v) for n, v in state.items() if v.is_floating_point()}
    worst = max(errors, key=lambda n: errors[n])
    assert errors[worst] <= RTOL, f"{worst} is off by {errors[worst]:.1e}"
    return f"{len(errors)} parameters within {errors[worst]:.0e}"


def near(found: Any, wanted: Any, what: str, rtol: float = RTOL) -> None:
    error = relative_error(torch.as_tensor(found), torch.as_tensor(wanted))
    assert error <= rtol, f"{what} is off by {error:.1e}"


def raises(kind: type[MegafxError], text: str, function: Callable[[], Any]) -> None:
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


def run(function: Callable[[], str]) -> tuple[str | None, str]:
    """(error, what was seen)"""
    torch.manual_seed(dist.get_rank())
    try:
        return None, function()
    except Exception as error:
        traceback.print_exc()
        return f"rank {dist.get_rank()}: {type(error).__name__}: {error}", ""


def main() -> None:
    """Run the registered checks, or those named on the command line."""
    torch.set_num_threads(1)
    only = sys.argv[1:]
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    for name, (worlds, function) in CHECKS.items():
        if dist.get_world_size() not in worlds or (only and name not in only):
            continue
        error, seen = run(function)
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        failed = [e.replace("\n", " | ") for e in errors if e]
        if dist.get_rank() == 0:
            print(f"FAIL {name}: {failed[0]}" if failed else f"PASS {name}: {seen}", flush=True)
    dist.destroy_process_group()
