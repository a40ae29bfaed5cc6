"""Experts of a list that are one rank's each, on real gloo ranks: memory, gradients, optimizers, state, a checkpoint that
goes from two ranks to three and to one; weights from files, initialization on meta, graphs under Inductor.

Run as a script, this file is one of the ranks.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import index_dispatch as moe
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_group
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

import megafx

RTOL = 1e-10
EXPERTS = 5
EXPERT_NUMEL = 3 * moe.HIDDEN * moe.FFN


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("jobs", [(2,), (2, 3, 1)])
def test_jobs_on_so_many_ranks(jobs: tuple[int, ...], tmp_path: Path) -> None:
    """Each trains from where the one before stopped, beside an eager model that goes on through all."""
    for ranks in jobs:
        if ranks == 1:
            train(tmp_path, 1)
            continue
        texts = run_ranks(__file__, tmp_path, ranks, timeout=900)
        held = [int(line.split()[-1]) for text in texts for line in text.splitlines() if "experts held" in line]
        assert sorted(held) == sorted([(EXPERTS + r) // ranks for r in range(ranks)]), texts


@pytest.mark.dist
@pytest.mark.slow
def test_from_meta_and_under_inductor(tmp_path: Path) -> None:
    run_ranks(__file__, tmp_path, 2, timeout=900, environment={"CASE": "meta"})


def build() -> nn.Module:
    moe.EXPERTS = EXPERTS
    return moe.Model(moe.where_add_in_place).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(3, 5 + step, moe.HIDDEN, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def parallel(model: nn.Module, ranks: int, **options: Any) -> Any:
    options |= {"overrides": {"moe.experts": "expert"}, "hardware": "h100-nvlink"}
    config = megafx.Config(tensor_model_parallel_size=ranks, **options)
    return megafx.parallelize(model, config, example_inputs=(batch(0),))


def step_of(model: nn.Module, optimizer: Any, step: int) -> tuple[float, float]:
    """(loss, norm of the gradients)."""
    loss = model(batch(step))["loss"]
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, float("inf") if step % 2 else 2.0)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach()), float(norm)


def close(found: float, wanted: float) -> None:
    assert math.isclose(found, wanted, rel_tol=RTOL), f"{found} is not {wanted}"


def assert_same_state(model: nn.Module, plain: nn.Module) -> None:
    whole = megafx.full_state_dict(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(
            whole[name], value, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


def train(folder: Path, ranks: int) -> None:
    """Two steps from the checkpoint of the run before (of none: from the model's own weights)."""
    start = {2: 0, 3: 2, 1: 4}[ranks]
    plain = build()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(start):
        step_of(plain, reference, step)
    model = build()
    if start:  # other weights, which the checkpoint is to replace
        for p in model.parameters():
            nn.init.normal_(p)
    model = parallel(model, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    if start:
        megafx.load_checkpoint(folder / "saved", model, optimizer)
    assert_same_state(model, plain)
    for step in (start, start + 1):
        model(batch(step))["loss"].backward()
        plain(batch(step))["loss"].backward()
        scale = max(float(p.grad.norm()) for p in plain.parameters())
        for name, gradient in megafx.full_gradients(model).items():
            wanted = plain.get_parameter(name).grad
            torch.testing.assert_close(gradient, wanted, rtol=RTOL, atol=RTOL * scale)
        model.zero_grad()
        plain.zero_grad()
        for found, wanted in zip(step_of(model, optimizer, step), step_of(plain, reference, step), strict=True):
            close(found, wanted)
        assert_same_state(model, plain)
    if ranks > 1:
        assert_held(model, optimizer)
    megafx.save_checkpoint(folder / "saved", model, optimizer, step=start + 2)


def from_meta_and_compiled(folder: Path, ranks: int) -> None:
    """A model on meta gets this rank's experts from files, or from its initializers; Inductor's graphs compute the same."""
    plain = build()
    if dist.get_rank() == 0:
        save_file(plain.state_dict(), folder / "model.safetensors")
    dist.barrier()
    for fill in (lambda m: megafx.load_safetensors(m, folder), lambda m: megafx.initialize(m, build)):
        with torch.device("meta"):
            model = build()
        fill(parallel(model, ranks))
        whole = megafx.full_state_dict(model)
        assert all(torch.equal(whole[name], value) for name, value in plain.state_dict().items())
        sizes = {p._local_tensor.numel() for n, p in model.named_parameters() if ".experts.4." in n}
        assert (sizes == {0}) == (dist.get_rank() == 0), sizes  # of five experts the last is rank 1's
    model = parallel(build(), ranks, compile=True)
    for step in (0, 1):
        losses = [m(batch(step))["loss"] for m in (model, plain)]
        for loss in losses:
            loss.backward()
        close(*(float(loss.detach()) for loss in losses))
    scale = max(float(p.grad.norm()) for p in plain.parameters())
    for name, gradient in megafx.full_gradients(model).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=RTOL, atol=RTOL * scale)


def assert_held(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """This rank's experts whole, and nothing of the others: parameters, gradients and optimizer state."""
    numel, memory = {e: 0 for e in range(EXPERTS)}, {}
    for name, p in model.named_parameters():
        if ".experts." not in name:
            continue
        local = p._local_tensor
        assert local.numel() in (0, p.shape.numel()), name
        for state in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[p][state]._local_tensor.numel() == local.numel(), name
        numel[int(name.split(".")[2])] += local.numel()
        memory[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    held = sum(n > 0 for n in numel.values())
    assert set(numel.values()) <= {0, EXPERT_NUMEL} and sum(memory.values()) == 8 * held * EXPERT_NUMEL, (numel, memory)
    assert len(memory) <= 2 * held + 1, "gate and up lie side by side, for their one product"
    print("experts held:", held)


if __name__ == "__main__":
    start_group(sys.argv[1], int(sys.argv[2]), seconds=600, name=f"store{os.environ['WORLD_SIZE']}")
    run = from_meta_and_compiled if os.environ.get("CASE") == "meta" else train
    run(Path(sys.argv[1]), dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()
