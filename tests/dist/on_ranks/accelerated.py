"""accelerate on data parallelism times tensor parallelism, four gloo ranks: the batches that its loaders give, losses, clipping
and steps as in one process on all rows, in fp64; a GradScaler there; what the Trainer may not be told."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import RTOL, check
from torch import nn

import megafx

ROWS, FEATURES = 36, 5


class Net(nn.Module):
    """Its first parameter, a norm's, is the same on all tensor-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 19), nn.Linear(19, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(self.up(self.norm(x)).tanh())).square().mean()


def rows() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(FEATURES, generator=draw, dtype=torch.float64)} for _ in range(ROWS)]


def steps_of_one_process_on_all_rows(form: str) -> None:
    """Three of the global batch's rows are each replica's, the same ones for its two ranks."""
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import set_seed
    from hf_trainer import allow_cpu

    from megafx.errors import UsageError
    from megafx.integrations.hf_trainer import attach

    allow_cpu()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, dp_shard_size=2))
    set_seed(0)
    eager = Net().double()
    config = megafx.Config(tensor_model_parallel_size=2, data_parallel_size=2, data_parallel=form)
    model = accelerator.prepare(megafx.parallelize(copy.deepcopy(eager), config))
    settings = SimpleNamespace(average_tokens_across_devices=False)
    with pytest.raises(UsageError, match="own rows: average_tokens_across_devices=False"):
        attach(SimpleNamespace(model=model, args=settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    plain = torch.optim.AdamW(eager.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(rows(), batch_size=3, shuffle=True)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    seen = []
    for step, batch in enumerate(loader):
        megafx.check_data(batch, mesh, step)
        everyone = [torch.empty_like(batch["x"]) for _ in range(4)]
        dist.all_gather(everyone, batch["x"])
        assert torch.equal(everyone[0], everyone[1]) and torch.equal(everyone[2], everyone[3])
        seen += [everyone[0], everyone[2]]
        loss = model(**batch)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step(), optimizer.zero_grad()
        wanted = eager(torch.cat([everyone[0], everyone[2]]))
        wanted.backward()
        wanted_norm = nn.utils.clip_grad_norm_(eager.parameters(), 0.1)
        plain.step(), plain.zero_grad()
        torch.testing.assert_close(loss.detach(), wanted.detach(), rtol=RTOL, atol=0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        torch.testing.assert_close(norm, wanted_norm, rtol=RTOL, atol=0)
    assert len(torch.cat(seen).unique(dim=0)) == ROWS == 6 * (step + 1), "each row once in an epoch"
    found = megafx.full_state_dict(model)
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-12)
    a_scaler_skips_on_all_ranks(model, form)


def a_scaler_skips_on_all_ranks(model: nn.Module, form: str) -> None:
    """What overflows in one shard: of one rank where data-parallel ranks hold shards, else of the ranks that hold the same."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x = torch.stack([row["x"] for row in rows()[:4]]).chunk(2)[dist.get_rank() // 2]
    for overflow in (False, True):
        before = {n: v.clone() for n, v in megafx.full_state_dict(model).items()}
        scaler.scale(model(x)).backward()
        if overflow and dist.get_rank() in ((3,) if form == "fsdp" else (1, 3)):
            model.up.weight.grad.to_local()[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update(), optimizer.zero_grad()
        after = megafx.full_state_dict(model)
        assert all(torch.equal(after[n], v) == overflow for n, v in before.items()), (form, overflow)
    assert scaler.get_scale() == 4.0, f"{form}: rank {dist.get_rank()}"


for form in ("ddp", "fsdp"):
    check(4, slow=True, name=f"accelerate_{form}")(partial(steps_of_one_process_on_all_rows, form))
