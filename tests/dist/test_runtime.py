"""The parallelized object on real gloo ranks: training as in one process, agreement between ranks, refusals.

Run as a script, this file is one of the ranks.
"""

from __future__ import annotations

import copy
import sys
from datetime import timedelta
from pathlib import Path

import processes
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

T = 2


@pytest.mark.dist
def test_on_two_processes(tmp_path: Path) -> None:
    processes.run_ranks(__file__, tmp_path, T, timeout=240)


class Model(nn.Module):
    """Vocabulary and width of the ffn divide by no number of ranks; the head is tied."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6)
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels=None):
        x = self.embed(ids)
        x = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


IDS = torch.arange(15).view(3, 5) % 11
LABELS = IDS.roll(1)


def parallel(model: nn.Module, t: int = T, **options) -> nn.Module:
    from megafx.api import parallelize
    from megafx.config import Config

    return parallelize(model, Config(tensor_model_parallel_size=t), **options)


def made_at_the_first_call_it_trains_like_one_process() -> None:
    from torch.distributed.tensor import DTensor

    from megafx.runtime.outputs import LazyTensor
    from megafx.weights.state import full_gradients, full_state_dict

    reference = Model().double()
    model = parallel(copy.deepcopy(reference))
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference))
    seen = []
    model.up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(type(p.grad)))
    for step in range(3):
        a, b = model(IDS, LABELS), reference(IDS, LABELS)
        torch.testing.assert_close(a["loss"], b["loss"], rtol=1e-12, atol=0)
        assert isinstance(a["logits"], LazyTensor) and a["logits"].shape == b["logits"].shape
        if step != 1:
            torch.testing.assert_close(a["logits"] + 0, b["logits"].detach())
        a["loss"].backward()
        b["loss"].backward()
        for name, value in full_gradients(model).items():
            torch.testing.assert_close(value, reference.get_parameter(name).grad, rtol=1e-10, atol=1e-12)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, reference)]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])
        mine.step()
        theirs.step()
        mine.zero_grad()
        theirs.zero_grad()
    assert len(seen) == 3 and model.megafx.captures == 1
    assert isinstance(model.up.weight, DTensor) and model.up.weight.to_local().shape[0] == 5
    assert model.head.weight is model.embed.weight
    assert model.tp_size == T
    for name, value in full_state_dict(model).items():
        torch.testing.assert_close(value, reference.state_dict()[name])
    with torch.no_grad():
        torch.testing.assert_close(model(IDS[:2, :3])["logits"], reference(IDS[:2, :3])["logits"])
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(IDS, LABELS)["loss"], reference(IDS, LABELS)["loss"])
    model.float()
    torch.testing.assert_close(model(IDS, LABELS)["loss"], reference.float()(IDS, LABELS)["loss"])
    other = Model()
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(IDS, LABELS)["loss"], other(IDS, LABELS)["loss"])


def outputs_can_stay_sharded() -> None:
    from megafx.api import parallelize
    from megafx.config import Config
    from megafx.weights.state import full_gradients
    from megafx.distributed.tensor import TPTensor

    reference = Model().double()
    model = parallelize(copy.deepcopy(reference), Config(tensor_model_parallel_size=T, gather_outputs=False))
    expected = reference(IDS)["logits"]
    (expected.exp()).sum().backward()
    for loss_of in (lambda x: x.full_tensor().exp().sum(), lambda x: x.exp().sum().full_tensor()):
        logits = model(IDS)["logits"]
        assert isinstance(logits, TPTensor) and logits.shape == expected.shape and logits.to_local().shape[-1] == 6
        torch.testing.assert_close(logits.full_tensor(), expected)
        model.zero_grad()
        loss = loss_of(logits)
        torch.testing.assert_close(loss, expected.exp().sum(), rtol=1e-12, atol=0)
        loss.backward()
        for name, value in full_gradients(model).items():
            torch.testing.assert_close(value, reference.get_parameter(name).grad, rtol=1e-10, atol=1e-12)


def gradients_by_autograd_grad() -> None:
    from megafx.distributed.tensor import TPTensor

    reference = Model().double()
    model = parallel(copy.deepcopy(reference), T)
    wanted = torch.autograd.grad(reference(IDS, LABELS)["loss"], list(reference.parameters()))
    seen = []
    model.up.weight.register_hook(lambda gradient: seen.append(type(gradient)))
    found = torch.autograd.grad(model(IDS, LABELS)["loss"], list(model.parameters()))
    assert seen == [TPTensor] and all(p.grad is None for p in model.parameters())
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.full_tensor(), b, rtol=1e-10, atol=1e-12)


def dropout_is_that_of_one_process() -> None:
    whole = Model(p=0.5)
    losses = []
    for t in (1, T):
        model = parallel(copy.deepcopy(whole), t)
        torch.manual_seed(7 if t == 1 else 7 + 100 * dist.get_rank())  # rank 0's generator counts
        losses.append([model(IDS, LABELS)["loss"].item() for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len(set(losses[0])) == 3


def weights_that_differ_are_rank_0s_with_a_note() -> None:
    reference = Model()
    mine = copy.deepcopy(reference)
    if dist.get_rank() == 1:
        with torch.no_grad():
            mine.up.weight.add_(1)
    model = parallel(mine, example_inputs=(IDS, LABELS))
    notes = [n.message for n in model.megafx.notes if n.topic == "agreement"]
    assert notes == ["'up.weight' differed between ranks: rank 0's value is used"], notes
    torch.testing.assert_close(model(IDS, LABELS)["loss"], reference(IDS, LABELS)["loss"])


def what_differs_is_stopped_on_every_rank() -> None:
    from megafx.errors import AgreementError

    rank = dist.get_rank()
    model = parallel(Model(), example_inputs=(IDS, LABELS))
    with pytest.raises(AgreementError, match="input ids is not the same on all tensor-parallel ranks"):
        model(IDS.roll(rank), LABELS)
    with pytest.raises(AgreementError, match="differ in the call of step 0"):
        model(IDS[: 2 + rank], LABELS[: 2 + rank])
    with (
        pytest.raises(AgreementError, match="differ in the call of step 0: .*grad mode"),
        torch.set_grad_enabled(rank == 0),
    ):
        model(IDS, LABELS)
    other = Model()
    if rank == 1:
        other.up = nn.Linear(6, 10)
    with pytest.raises(AgreementError, match="differ in the model: 'up.weight"):
        parallel(other)
    with pytest.raises(AgreementError, match="tensor_model_parallel_size=3, but the world has 2 ranks"):
        parallel(Model(), 3)


def misuse_is_refused() -> None:
    from torch.distributed.fsdp import fully_shard

    from megafx.errors import UsageError

    model = parallel(Model(), example_inputs=(IDS, LABELS))
    with pytest.raises(UsageError, match=r"a call of a copy of 'up'"):
        copy.deepcopy(model.up)(torch.ones(2, 6))
    with pytest.raises(UsageError, match="DistributedDataParallel around a model"):
        nn.parallel.DistributedDataParallel(model)
    with pytest.raises(UsageError, match="fully_shard around a model"):
        fully_shard(model.up)
    with pytest.raises(UsageError, match="fully_shard around a model"):
        fully_shard(model)
    model = parallel(Model(), example_inputs=(IDS, LABELS))
    model.up.weight = nn.Parameter(torch.ones(9, 6))
    with pytest.raises(UsageError, match="parameter 'up.weight' was replaced after megafx.parallelize"):
        model(IDS, LABELS)
    whole = Model()
    stale = torch.optim.SGD(whole.parameters(), lr=0.1)
    with pytest.raises(
        UsageError, match=r"an optimizer \(SGD\) was made of this model's parameters before megafx.parallelize"
    ):
        parallel(whole)
    del stale


def a_meta_model_is_sharded_and_filled_later() -> None:
    reference = Model()
    with torch.device("meta"):
        model = Model()
    model = parallel(model, example_inputs=(IDS, LABELS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert model.up.weight.is_meta and model.up.weight.to_local().shape == (5, 6)
    model.load_state_dict(reference.state_dict())
    loss = model(IDS, LABELS)["loss"]
    torch.testing.assert_close(loss, reference(IDS, LABELS)["loss"])
    loss.backward()
    before = model.up.weight.full_tensor().clone()
    optimizer.step()
    assert not torch.equal(model.up.weight.full_tensor(), before)


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), T)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=T, timeout=timedelta(seconds=120))
    for check in (
        made_at_the_first_call_it_trains_like_one_process,
        outputs_can_stay_sharded,
        gradients_by_autograd_grad,
        dropout_is_that_of_one_process,
        weights_that_differ_are_rank_0s_with_a_note,
        what_differs_is_stopped_on_every_rank,
        misuse_is_refused,
        a_meta_model_is_sharded_and_filled_later,
    ):
        torch.manual_seed(0)
        check()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
