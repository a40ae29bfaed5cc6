"""Gradients in fp32 as users see them: `.grad` and `main_grad` over micro-batches, hooks, optimizers, copies.

Covers: held_gradients.HeldBack.accumulate, parameters.take_fp32_gradients, Config.gradient_accumulation_fusion and
accumulate_allreduce_grads_in_fp32.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megafx
from megafx.compiler.executable import Executable
from megafx.errors import UsageError

VOCAB, WIDTH = 13, 16
FUSED, CAST = "gradient_accumulation_fusion", "accumulate_allreduce_grads_in_fp32"


class Model(nn.Module):
    """Merged linears, a bias, a norm, and an embedding tied to the layer of a fused loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        h = self.norm(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def plain(dtype: torch.dtype = torch.bfloat16) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def parallel(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    return megafx.parallelize(plain(dtype), megafx.Config(**options))


def batches(count: int) -> list[Tensor]:
    return [torch.randint(0, VOCAB, (4, 6), generator=torch.Generator().manual_seed(k)) for k in range(count)]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def summed(model: nn.Module, count: int) -> dict[str, Tensor]:
    """Of one micro-batch at a time, summed in fp64."""
    total: dict[str, Tensor] = {}
    for ids in batches(count):
        model(ids).backward()
        for name, grad in gradients(model).items():
            total[name] = total.get(name, 0) + grad.double()
        model.zero_grad()
    return total


def test_micro_batches_add_up_in_fp32_where_the_gradient_is() -> None:
    model = parallel(**{FUSED: True})
    alone = summed(model, 4)
    places: set[int] = set()
    for ids in batches(4):
        model(ids).backward()
        places |= {p.grad.data_ptr() for p in model.parameters()}
    assert len(places) == len(list(model.parameters()))  # that of the first micro-batch
    for name, grad in gradients(model).items():
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad.double(), alone[name], rtol=2e-6, atol=1e-7)
    for p in model.parameters():
        assert p.main_grad is p.grad and isinstance(p, nn.Parameter)


@pytest.mark.parametrize("options", [{FUSED: True}, {CAST: True}, {FUSED: True, "compile": True}])
def test_sums_are_not_rounded_to_bf16(options: dict[str, Any]) -> None:
    """One batch 40 times: bf16 loses percents of the sum."""
    off: dict[str, float] = {}
    (ids,) = batches(1)
    for name, chosen in (("bf16", {}), ("fp32", options)):
        model = parallel(**chosen)
        model(ids).backward()
        once = {n: g.double() for n, g in gradients(model).items()}
        for _ in range(39):
            model(ids).backward()
        found = gradients(model)
        assert {g.dtype for g in found.values()} == {torch.bfloat16 if not chosen else torch.float32}
        off[name] = max(float((found[n].double() / 40 - g).norm() / g.norm()) for n, g in once.items())
    assert off["fp32"] < 1e-5 and off["bf16"] > 1e-2, off


def test_products_are_not_rounded_to_bf16() -> None:
    """Those of the last linear, whose operands are the same with and without the option."""
    found = {}
    for name in (None, CAST, FUSED):
        model = parallel(**({name: True} if name else {}))
        model(batches(1)[0]).backward()
        found[name] = model.down.weight.grad
    assert torch.equal(found[CAST].bfloat16().float(), found[CAST]) and torch.equal(found[CAST], found[None].float())
    assert not torch.equal(found[FUSED].bfloat16().float(), found[FUSED])
    assert torch.equal(found[FUSED].bfloat16(), found[None])


def test_autocast_has_no_bf16_gradient_of_a_weight() -> None:
    """Weights are fp32, products bf16: those of weights write fp32, and nothing casts."""
    model = parallel(torch.float32, **{FUSED: True})
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(batches(1)[0])
    loss.backward()
    (graph,) = (g for graphs in model.megafx.graphs.values() for g in graphs)
    program = graph.compiled.program
    made = dict(zip((o.name for o in program.outputs), program.results(), strict=True))
    for name in ("gate.weight", "down.weight"):
        node = made[name]
        while node.target is torch.ops.aten.slice.Tensor:  # of a merged product
            node = node.args[0]
        assert node.target is torch.ops.megafx.mm_fp32.default and node.args[0].meta["val"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_else_takes_gradients(dtype: torch.dtype) -> None:
    """torch.autograd.grad, hooks, `inputs=`, a term of the user's own, a second backward: as without the option."""
    close = {"rtol": 1e-12, "atol": 1e-14} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-3}
    model, other = parallel(dtype, **{FUSED: True}), parallel(dtype, **{CAST: True})
    first, second = batches(2)

    def same() -> None:
        found, wanted = gradients(model), gradients(other)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, **close)

    for m in (model, other):
        m(first).backward()
    kept = {n: g.clone() for n, g in gradients(model).items()}
    taken = [torch.autograd.grad(m(second), [*m.parameters()]) for m in (model, other)]
    for a, b in zip(*taken, strict=True):
        torch.testing.assert_close(a, b, **close)
    assert all(torch.equal(g, kept[n]) for n, g in gradients(model).items())

    seen: dict[int, list[Tensor]] = {}
    for m in (model, other):
        handles = [m.down.weight.register_hook(lambda g, m=m: seen.setdefault(id(m), []).append(g.clone()) or g * 2)]
        handles += [m.norm.weight.register_post_accumulate_grad_hook(lambda p, m=m: seen[id(m)].append(p.grad.clone()))]
        m(second).backward()
        for h in handles:
            h.remove()
    for a, b in zip(*seen.values(), strict=True):
        torch.testing.assert_close(a, b, **close)
    same()
    for m in (model, other):
        (m(first) + m.down.weight.float().square().sum()).backward()
        m(second).backward(inputs=[m.up.weight, m.embed.weight])
        loss = m(first)
        loss.backward(retain_graph=True)
        loss.backward()
    same()


def test_a_copy_and_loaded_weights_go_on() -> None:
    model = parallel(**{FUSED: True})
    for ids in batches(2):
        model(ids).backward()
    other = copy.deepcopy(model)
    other.zero_grad()
    untied = {n: v.clone() for n, v in model.state_dict().items() if "down" in n or "norm" in n}
    other.load_state_dict(untied, assign=True, strict=False)
    for ids in batches(2):
        other(ids).backward()
    for name, grad in gradients(other).items():
        assert torch.equal(grad, gradients(model)[name])
        assert other.get_parameter(name).main_grad is grad


def test_optimizers_read_either_name() -> None:
    """SGD as it is; AdamW on fp32 copies of the weights, which it takes gradients for from main_grad; clipping in fp32."""
    model = parallel(**{FUSED: True})
    for ids in batches(3):
        model(ids).backward()
    before = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(norm, before)
    clipped = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    torch.testing.assert_close(clipped, torch.tensor(0.1), rtol=1e-4, atol=0.0)
    masters = [p.detach().float() for p in model.parameters()]
    adam = torch.optim.AdamW(masters, lr=0.1)
    for master, p in zip(masters, model.parameters(), strict=True):
        master.grad = p.main_grad
    adam.step()
    before = [p.detach().clone() for p in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5).step()
    for old, p in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), (old.float() - p.grad).bfloat16())
    torch.optim.SGD(model.parameters()).zero_grad()
    assert all(p.grad is None and p.main_grad is None for p in model.parameters())
    model(batches(1)[0]).backward()
    assert all(p.main_grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("options", [{"lr": 0.1}, {"lr": 0.1, "fused": True}])
def test_an_optimizer_that_would_fail_midway_is_told_before(options: dict[str, Any]) -> None:
    model = parallel(**{FUSED: True})
    before = [p.detach().clone() for p in model.parameters()]
    model(batches(1)[0]).backward()
    adam = torch.optim.AdamW(model.parameters(), **options)
    with pytest.raises(UsageError, match=r"takes no fp32 gradients of torch.bfloat16 parameters"):
        adam.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    wide = parallel(torch.float32, **{FUSED: True})
    wide(batches(1)[0]).backward()
    torch.optim.AdamW(wide.parameters(), **options).step()


def test_the_sum_is_made_by_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """No full-size copy: backward of a later micro-batch gives the tensors that it was given."""
    model = parallel(torch.float32, **{FUSED: True})
    ran: list[list[int]] = []
    run = Executable.backward

    def backward(self: Any, kept: Any, tangents: Any, retain: bool = False, pending: Any = ()) -> Any:
        found = run(self, kept, tangents, retain, pending)
        ran.append([sum(g.data_ptr() == p.data_ptr() for p in pending) for g in found if g is not None])
        return found

    monkeypatch.setattr(Executable, "backward", backward)
    for ids in batches(2):
        model(ids).backward()
    count = len(list(model.parameters()))
    assert ran[0] == [0] * count and ran[1] == [1] * count
    for retain in (True, False):  # a backward that runs again writes into nothing, so its result is copied
        loss = model(batches(1)[0])
        loss.backward(retain_graph=retain)
    assert ran[2] == [0] * count and ran[3] == [1] * count


def test_options_go_together() -> None:
    for fused, cast in itertools.product((False, True), repeat=2):
        assert megafx.Config(**{FUSED: fused, CAST: cast}).gradients_in_fp32 == (fused or cast)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{FUSED: True}, {CAST: True}, {FUSED: True, "compile": True}])
def test_on_a_gpu(options: dict[str, Any]) -> None:
    """One batch 40 times in bf16, as above; the fused loss and the products are the kernels' here."""
    off: dict[str, float] = {}
    ids = batches(1)[0].cuda()
    for name, chosen in (("bf16", {}), ("fp32", options)):
        model = megafx.parallelize(plain().cuda(), megafx.Config(**chosen))
        model(ids).backward()
        once = {n: g.double() for n, g in gradients(model).items()}
        for _ in range(39):
            model(ids).backward()
        found = gradients(model)
        assert {g.dtype for g in found.values()} == {torch.float32 if chosen else torch.bfloat16}
        off[name] = max(float((found[n].double() / 40 - g).norm() / g.norm()) for n, g in once.items())
    assert off["fp32"] < 1e-5 and off["bf16"] > 1e-2, off
    if FUSED in options:
        assert all(p.main_grad is p.grad for p in model.parameters())
        torch.optim.SGD(model.parameters(), lr=0.1).step()
