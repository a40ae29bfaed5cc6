"""A mixture whose experts are split over ranks trains as plain eager does: gloo in fp64, or GPUs (NCCL) in fp32.

On GPUs, where there are two:
PYTHONPATH=tests/support:tests/support/small_models torchrun --standalone --nproc-per-node 2 tests/dist/on_ranks/experts.py
"""

from __future__ import annotations

import copy
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import check, near
from torch import Tensor, nn
from torch.nn import functional as F

import megafx
from megafx.kernels.experts import grouped_mm as _defines_the_op  # noqa: F401

EXPERTS, TOP, HIDDEN, FFN = 5, 2, 16, 24
grouped_mm = torch.ops.megafx.grouped_mm


class Mixture(nn.Module):
    """Experts with biases, gate and up alternating and clamped, as GPT-OSS has them; the router's balancing loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.router = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, EXPERTS)
        self.up, self.up_bias = self._stack(HIDDEN, 2 * FFN), self._stack(2 * FFN)
        self.down, self.down_bias = self._stack(FFN, HIDDEN), self._stack(HIDDEN)

    def _stack(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(0.3 * torch.randn(EXPERTS, *shape))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.first(x).flatten(0, 1)
        probabilities = self.router(tokens).softmax(-1)
        top, chosen = probabilities.topk(TOP, dim=-1)
        ids, order = chosen.flatten().sort(stable=True)
        ends = F.one_hot(ids, EXPERTS).sum(0).cumsum(0)
        hidden = grouped_mm(tokens[order // TOP], self.up, ends) + self.up_bias[ids]
        gate, up = hidden[..., ::2].clamp(max=1.5), hidden[..., 1::2].clamp(-1.5, 1.5)
        y = grouped_mm((up + 1) * F.silu(gate), self.down, ends) + self.down_bias[ids]
        y = torch.zeros_like(tokens).index_add(0, order // TOP, y * top.flatten()[order, None])
        share = F.one_hot(chosen, EXPERTS).to(x.dtype).mean((0, 1))
        return (tokens + y).square().mean() + 0.1 * (share * probabilities.mean(0)).sum()


def experts_split_over_ranks(kind: str) -> str:
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    dtype, rtol = (torch.float32, 1e-4) if kind == "cuda" else (torch.float64, 1e-10)
    plain = Mixture().to(device, dtype)
    config = megafx.Config(overrides={"*up*": "expert", "*down*": "expert"})
    batches = [torch.randn(3, n, HIDDEN, dtype=dtype).to(device) for n in (9, 4, 13)]  # seeded by Mixture()
    model = megafx.parallelize(copy.deepcopy(plain), config, example_inputs=(batches[0],))
    assert model.megafx.settled.plan.params["up"].tag == "S0"
    rows = [len(p.to_local()) for n, p in model.named_parameters() if n in ("up", "up_bias", "down", "down_bias")]
    assert len({*rows}) == 1 and rows[0] < EXPERTS, rows
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (model, plain)]
    worst = 0.0
    for batch in batches:
        losses = [m(batch) for m in (model, plain)]
        for loss in losses:
            loss.backward()
        near(losses[0].detach(), losses[1].detach(), "the loss", rtol)
        found = megafx.full_gradients(model)
        for name, p in plain.named_parameters():
            worst = max(worst, near(found[name], p.grad, f"the gradient of {name}", rtol))
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step(), optimizer.zero_grad()
        state = megafx.full_state_dict(model)
        for name, p in plain.named_parameters():
            near(state[name], p.detach(), name, rtol)
    return f"{len(batches)} steps on {dist.get_world_size()} x {device.type}, worst {worst:.1e}"


def experts_shared_out(kind: str, dtype: torch.dtype, graphs: bool) -> str:
    """Two data-parallel ranks with half of the experts each; steps of one size, so that they are recorded where graphs are."""
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    rtol = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.02}[dtype]
    plain = Mixture().to(device)
    sizes = {"data_parallel_size": 2, "expert_model_parallel_size": 2, "tensor_model_parallel_size": 1}
    model = megafx.parallelize(copy.deepcopy(plain).to(dtype), megafx.Config(**sizes, cuda_graphs=graphs))
    plain.to(torch.float32 if dtype == torch.bfloat16 else dtype)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (model, plain)]
    for step in range(10):
        batch = torch.randn(4, 9, HIDDEN, dtype=torch.float64)  # seeded by Mixture()
        mine = batch.chunk(2)[dist.get_rank()].to(device, dtype)
        losses = [model(mine), plain(batch.to(device, plain.first.weight.dtype))]
        for loss in losses:
            loss.backward()
        near(losses[0].detach(), losses[1].detach(), f"the loss of step {step}", rtol)
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step(), optimizer.zero_grad()
    state = megafx.full_state_dict(model)
    for name, p in plain.named_parameters() if dtype != torch.bfloat16 else ():
        near(state[name], p.detach(), name, rtol)
    (graph,) = [g for found in model.megafx.graphs.values() for g in found]
    rooms, recorded = graph.executable.rooms, graph.executable.graphs
    assert rooms.given and not rooms.waits
    replayed = recorded is not None and any(s.forward and s.backward for s in recorded.sizes.values())
    assert not graphs or replayed, [s.refused for s in recorded.sizes.values()]
    return f"10 steps of {dtype} shared out over {dist.get_world_size()} x {device.type}{', replayed' * replayed}"


check(2, 3, slow=(3,), name="experts_split_over_ranks")(lambda: experts_split_over_ranks("cpu"))
check(2, name="experts_shared_out_in_steps_of_one_size")(lambda: experts_shared_out("cpu", torch.float64, False))


def main() -> None:
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=120))
    seen = [experts_split_over_ranks("cuda" if cuda else "cpu")]
    for dtype, graphs in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)) if cuda else ():
        seen.append(experts_shared_out("cuda", dtype, graphs))
    if dist.get_rank() == 0:
        print("same experts:", *seen, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
