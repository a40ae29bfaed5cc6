"""Parameters that a loss does not depend on: no gradient, and no step of an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from loop import Loop, situation
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

UNUSED = "https://github.com/pytorch/pytorch/issues/40566"  # ranks whose forward does not use parameters
DECAYED = "https://github.com/pytorch/pytorch/issues/150610"  # weight decay, and parameters without a gradient
FORMS = ("ddp", "zero1", "fsdp")


class Branches(nn.Module):
    """One of two experts, and with the second one the gate, by what the first token says."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, gate: Tensor, choice: Tensor) -> Tensor:
        if choice[0] > 0:
            return self.experts[1](x) * torch.sigmoid(self.gate(gate))
        return self.experts[0](x)


class Net(nn.Module):
    """`before` is captured, and feeds the gate alone."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.inner, self.again = Branches(), Branches()

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        gate = self.again(x, self.before(x), choice)
        x = self.inner(self.down(torch.relu(self.up(x))), gate, choice)
        return x.square().mean()


def _train(loop: Loop, choices: tuple[tuple[int, ...], ...], held: Callable[[Any, int, int], Any]) -> None:
    """One step for each tuple; a micro-batch for each choice in it. held(model, place, number): around a micro-batch."""
    model = loop.model(Net(), eager_modules=["inner", "again"], data_parallel_loss="average")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    for group in choices:
        for place, choice in enumerate(group):
            x = torch.randn(4, 3, 8)
            with held(model, place, len(group)):
                loss = model(loop.rows(x), loop.rows(torch.full((4,), choice)))
                loss.backward()
            loop.see(loss=loop.mean(loss))
        loop.see_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    loop.see_state(model)


@situation(DECAYED, data=FORMS)
def a_branch_of_an_eager_module_is_not_taken(loop: Loop) -> None:
    _train(loop, ((0,), (1,), (0,), (0, 0), (0, 1), (1, 0)), lambda model, place, count: nullcontext())


@situation(UNUSED, ranks=(), slow=("ddp", "zero1"), data=FORMS)
def branches_that_differ_between_held_micro_batches(loop: Loop) -> None:
    def held(model: Any, place: int, count: int) -> Any:
        return nullcontext() if loop.eager or place == count - 1 else model.no_sync()

    _train(loop, ((0, 0), (1, 0), (0, 1), (0,)), held)


@situation(UNUSED, ranks=(), slow=("zero1", "fsdp"), data=FORMS)
def ranks_take_different_branches(loop: Loop) -> None:
    """The first half of the batch takes one, the second half the other."""
    model = loop.model(Net(), eager_modules=["inner", "again"], data_parallel_loss="average")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    for choices in ((0, 1), (0, 0), (1, 1)):
        x = torch.randn(2, 4, 3, 8)
        halves = [(x[i], torch.full((4,), c)) for i, c in enumerate(choices)]
        if loop.eager:
            (sum(model(*half) for half in halves) / 2).backward()
        else:
            model(*halves[torch.distributed.get_rank()]).backward()
        loop.see_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    loop.see_state(model)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.body(x))
        return self.first(x), self.second(x)


@situation(DECAYED, slow=("zero1", "fsdp"), data=FORMS)
def a_head_is_not_in_the_loss(loop: Loop) -> None:
    model = loop.model(Heads())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    for chosen in ((0,), (1,), (0, 1), (0,)):
        outputs = model(loop.rows(torch.randn(4, 8)))
        sum(outputs[i].square().mean() for i in chosen).backward()
        loop.see_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    loop.see_state(model)


class Truncated(nn.Module):
    """A state of the call before, which forward detaches; another value goes on with it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out, self.mix = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 6)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        new = torch.tanh(self.up(x) + (0 if state is None else state.detach()))
        mixed = torch.tanh(self.mix(new) + (0 if state is None else state))
        return self.out(new).square().mean(), new, mixed


@situation(
    "https://discuss.pytorch.org/t/implementing-truncated-backpropagation-through-time/15500",
    data=("ddp",),
    like="a_linear_under_no_grad_is_merged_with_another",
)
def a_state_is_detached_in_forward(loop: Loop) -> None:
    """It has the history of an earlier call, whose backward has run: nothing of that is in the loss."""
    for which in (1, 2):
        model, state = loop.model(Truncated()), None
        for _ in range(3):
            out = model(loop.rows(torch.randn(4, 6)), state)
            state = out[which]
            out[0].backward()
            loop.see(loss=loop.mean(out[0]))
        loop.see_gradients(model)


class Teaching(nn.Module):
    """Two linears of one module read the same values; one of them under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.taught, self.teacher = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(8, 6)

    @torch.no_grad()
    def target(self, h: Tensor) -> Tensor:
        return self.teacher(h) * 2

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        return (self.taught(h) - self.target(h)).square().mean()


@situation(DECAYED, data=("fsdp",))
def a_linear_under_no_grad_is_merged_with_another(loop: Loop) -> None:
    model = loop.model(Teaching())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    for _ in range(2):
        model(loop.rows(torch.randn(4, 6))).backward()
        loop.see_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    loop.see_state(model)


@situation("https://github.com/pytorch/pytorch/issues/40566", data=("ddp",))
def hooks_of_parameters_and_inputs_that_have_no_gradient(loop: Loop) -> None:
    """`lambda g: g * 2` is not called with None, nor one for accumulated gradients, though earlier ones are there."""

    class Apart(Heads):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(torch.relu(self.body(x))), self.second(y)

    model, seen = loop.model(Apart()), []
    model(loop.rows(torch.randn(4, 8)), loop.rows(torch.randn(4, 16)))
    for name, p in model.named_parameters():
        p.register_hook(lambda g: g * 2)
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    for chosen in (0, 1, 1, 0):
        y = loop.rows(torch.randn(4, 16)).requires_grad_()
        given = y * 2
        given.register_hook(lambda g: (seen.append("y"), g * 3)[1])
        model(loop.rows(torch.randn(4, 8)), given)[chosen].square().mean().backward()
        loop.see(seen=sorted(seen))
        loop.see_gradients(model)


class Refined(nn.Module):
    """Gradients are on for a part of forward, whatever the call was made in (guided sampling, steps of energy models)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 8), nn.Linear(8, 7)

    @torch.enable_grad()
    def energy(self, h: Tensor) -> Tensor:
        return self.down(h.sin())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.up(x)
        with torch.no_grad():
            inner = self.energy(h)
            outer = self.down(h)
        return inner, outer, h


@situation("https://github.com/openai/guided-diffusion", slow=(2,), like="a_loss_of_returned_parameters_alone")
def forward_enters_enable_grad_in_calls_without_gradients(loop: Loop) -> None:
    model, x = loop.model(Refined()), torch.randn(4, 7)
    for around in (torch.no_grad(), nullcontext(), torch.no_grad(), torch.inference_mode()):
        with around:
            outputs = model(x)
        loop.see(needs=[y.requires_grad for y in outputs])
        with torch.inference_mode(outputs[0].is_inference()):
            loop.see(**{f"output {i}": y.detach() for i, y in enumerate(outputs)})
        if outputs[0].grad_fn is not None:
            sum(y.square().mean() for y in outputs if y.requires_grad).backward()
    loop.see_gradients(model)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:2]:
            x = torch.tanh(checkpoint(block, x, use_reentrant=True))
        return self.blocks[2](x)  # type: ignore[no-any-return]  # of a ModuleList


@situation("https://github.com/huggingface/transformers/issues/42947")
def regions_of_the_old_checkpointing_whose_inputs_need_no_gradient(loop: Loop) -> None:
    model = loop.model(Checkpointed())
    for needs in (False, True):
        model.zero_grad()
        with pytest.warns(UserWarning, match="None of the inputs") if not needs else nullcontext():
            loss = model(torch.randn(4, 8).requires_grad_(needs)).square().mean()
        loss.backward()
        loop.see(loss=loss, without=[n for n, p in model.named_parameters() if p.grad is None])
        loop.see_gradients(model)


class Returning(nn.Module):
    """Results of two linears, and parameters of theirs for terms of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor | None = None) -> tuple[Tensor, ...]:
        if x is None:
            return (self.a.weight,)
        return self.a(x), self.b(x), self.a.weight, self.b.bias


@situation(UNUSED)
def a_loss_of_returned_parameters_alone(loop: Loop) -> None:
    """A rank holds a part of each, and the graph gathers it: its gradient is there, and no other."""
    model = loop.model(Returning())
    for chosen in ((0,), (1,), (2,), (2, 3), (1, 2)):
        results = model(torch.randn(2, 3, 8))
        model.zero_grad()
        torch.stack([results[i].square().sum() for i in chosen]).sum().backward()
        loop.see_gradients(model)
    model.zero_grad()
    model()[0].square().sum().backward()
    loop.see_gradients(model)
