"""Parameters outside of the model under data parallelism that shards them, ranks that write different values, refusals."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import check, config, same_gradients, same_parameters
from torch import nn
from torch.nn.utils import prune

import megafx


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 13), nn.LayerNorm(13), nn.Linear(13, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.down(self.norm(torch.relu(self.up(x)))), y)


def penalty(model: nn.Module) -> torch.Tensor:
    w = model.up.weight
    total = sum((p.pow(2).sum() + p.norm() + p.abs().max() for p in model.parameters()), torch.zeros(()))
    return total + (w @ w.t() - torch.eye(13)).square().sum() + w.sum()


def noise_and_surgery(model: nn.Module) -> None:
    with torch.no_grad():
        nn.init.xavier_uniform_(model.up.weight)
        model.down.weight.add_(torch.randn_like(model.down.weight))
        model.up.weight[:, 2] = 1.0
        model.down.weight[0].zero_()
        model.norm.bias.data = torch.arange(13.0)
        with megafx.whole_parameters(model, gradients=True):
            nn.init.orthogonal_(model.down.weight, generator=torch.Generator().manual_seed(1))
            vector = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(vector * 1.5, model.parameters())
            for p in model.parameters():
                p.grad.mul_(2)


def trains(form: str, t: int, d: int) -> str:
    """A penalty, an optimizer's step, random numbers and surgery on sharded parameters, as in one process."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        plain = Mlp()
        model = copy.deepcopy(plain)
        rows, targets = torch.randn(2 * d, 8), torch.randn(2 * d, 8)
        here = slice(2 * (dist.get_rank() // t), 2 * (dist.get_rank() // t) + 2)
        options = {"data_parallel_size": d, "data_parallel": form} if d > 1 else {}
        megafx.parallelize(model, config(t=t, **options), example_inputs=(rows[here], targets[here]))
        mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
        for step in range(2):
            for m, x, y in ((model, rows[here], targets[here]), (plain, rows, targets)):
                m.zero_grad()
                (m(x, y) + 0.01 * penalty(m)).backward()
            seen = same_gradients(model, {n: p.grad for n, p in plain.named_parameters()})
            mine.step(), theirs.step()
            torch.manual_seed(step + 1 + 10 * dist.get_rank())  # ranks seeded apart draw what rank 0 draws
            noise_and_surgery(model)
            torch.manual_seed(step + 1)
            noise_and_surgery(plain)
            same_gradients(model, {n: p.grad for n, p in plain.named_parameters()})
            seen += "; " + same_parameters(model, plain)
        return seen
    finally:
        torch.set_default_dtype(torch.float32)


@check(2)
def penalties_and_surgery_with_fsdp() -> str:
    return trains("fsdp", 1, 2)


@check(2, slow=True)
def penalties_and_surgery_with_zero1() -> str:
    return trains("zero1", 1, 2)


@check(2, slow=True)
def penalties_and_surgery_with_ddp() -> str:
    return trains("ddp", 1, 2)


@check(4, slow=True)
def penalties_and_surgery_with_fsdp_of_shards() -> str:
    return trains("fsdp", 2, 2)


def goes_on_at_other_places(form: str) -> str:
    """torch prunes a weight (its parameter gets another name); two change places, of which ranks hold columns and rows."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        plain: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8))
        options = {"tensor_model_parallel_size": 2, "data_parallel_size": 2, "data_parallel": form}
        model, rows = megafx.parallelize(copy.deepcopy(plain), megafx.Config(**options)), torch.randn(4, 8)
        for step in range(3):
            for each, x in ((plain, rows), (model, rows.chunk(2)[dist.get_rank() // 2])):
                each(x).square().mean().backward()
                torch.optim.SGD(each.parameters(), lr=0.1).step()
            seen = same_gradients(model, {n: p.grad for n, p in plain.named_parameters()})
            for each in (plain, model):
                each.zero_grad()
                if step == 0:
                    prune.l1_unstructured(each[0], "weight", 0.3)
                else:
                    each[0].weight_orig, each[2].weight = each[2].weight, each[0].weight_orig
        return seen
    finally:
        torch.set_default_dtype(torch.float32)


@check(4, seed=0)
def parameters_go_on_at_other_places_with_fsdp_of_shards() -> str:
    return goes_on_at_other_places("fsdp")


@check(4, seed=0, slow=True)
def parameters_go_on_at_other_places_with_ddp_of_shards() -> str:
    return goes_on_at_other_places("ddp")


@check(2, seed=0)
def ranks_that_wrote_different_values_change_nothing() -> None:
    model = megafx.parallelize(Mlp(), config(), example_inputs=(torch.randn(2, 8), torch.randn(2, 8)))
    before = {n: v.clone() for n, v in megafx.full_state_dict(model).items()}
    shard = model.up.weight
    with (
        pytest.raises(megafx.MegafxError, match=r"different values into 'up.weight'.*\n.*broadcast"),
        megafx.whole_parameters(model),
        torch.no_grad(),
    ):
        model.up.weight.add_(dist.get_rank())
    with pytest.raises((megafx.MegafxError, ZeroDivisionError)), megafx.whole_parameters(model), torch.no_grad():
        model.down.weight.zero_()
        _ = 1 / dist.get_rank()  # rank 0 alone fails
    after = megafx.full_state_dict(model)
    assert shard is model.up.weight and all(torch.equal(after[n], v) for n, v in before.items())
    with megafx.whole_parameters(model), torch.no_grad():  # as the error advises
        model.up.weight.add_(dist.get_rank())
        dist.broadcast(model.up.weight.data, 0)
    assert torch.equal(megafx.full_state_dict(model)["up.weight"], before["up.weight"])


@check(2, seed=0)
def refusals_name_the_parameter_and_advice_that_works(folder: object) -> None:
    model = megafx.parallelize(Mlp(), config(), example_inputs=(torch.randn(2, 8), torch.randn(2, 8)))
    wanted = megafx.full_state_dict(model)["up.weight"].t()
    for refused in (lambda p: p.t_(), lambda p: p[1:].squeeze_(), lambda p: p.unsqueeze_(0)):
        with (
            torch.no_grad(),
            pytest.raises(
                megafx.MegafxError, match=r"aten\.\w+\.default .* parameter 'up.weight' .*\n.*whole_parameters"
            ),
        ):
            refused(model.up.weight)
    with pytest.raises(megafx.MegafxError, match=r"'up.weight' of shape \(13, 8\) is set to data of shape \(2,\)"):
        model.up.weight.data = torch.zeros(2)
    assert torch.equal(model.up.weight.detach().full_tensor().t_(), wanted)
    with torch.no_grad(), pytest.warns(UserWarning, match="call megafx.parallelize"), megafx.whole_parameters(model):
        model.up.weight.t_()
    assert torch.equal(model.up.weight, wanted) and type(model) is Mlp
    saved = megafx.save_checkpoint(folder, Mlp(), step=np.int64(3)) if dist.get_rank() == 0 else None
    assert saved is None or saved.name == "step_00000003"
