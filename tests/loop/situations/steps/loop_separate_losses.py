"""Several losses of one call, differentiated one after another, without `retain_graph` where eager mode needs none."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loop import Loop, situation
from torch import Tensor, nn


class Towers(nn.Module):
    """Two networks with nothing in common, and a frozen trunk before both."""

    def __init__(self, train_trunk: bool = False) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8).requires_grad_(train_trunk)
        self.actor, self.critic = nn.Linear(8, 5), nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 1))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.relu(self.trunk(x))
        value = self.critic(h).squeeze(-1)
        actor = (self.actor(h).logsumexp(-1) * (target - value.detach())).mean()
        return actor, F.mse_loss(value, target), value


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6), torch.randn(4)


@situation("https://github.com/pytorch/rl/issues/1187", like="gradients_of_one_head_and_then_a_backward_of_the_other")
def an_actor_and_a_critic_are_differentiated_one_after_another(loop: Loop) -> None:
    model = loop.model(Towers())
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in (model.actor, model.critic)]
    for step in range(4):
        actor, critic, _ = model(*batch())
        for loss, optimizer in [*zip((actor, critic), optimizers, strict=True)][:: 1 - 2 * (step % 2)]:
            optimizer.zero_grad()
            loss.backward()
            loop.see(loss=loss)
        loop.see_gradients(model)
        for optimizer in optimizers:
            optimizer.step()


@situation("https://github.com/pytorch/rl/issues/1187")
def gradients_of_one_head_and_then_a_backward_of_the_other(loop: Loop) -> None:
    """`autograd.grad` of one, then `.backward()` of the other; what was walked is not there again."""
    model = loop.model(Towers())
    for _ in range(2):
        actor, critic, value = model(*batch())
        loop.see(gradients=torch.autograd.grad(actor, [*model.actor.parameters()]))
        loop.see(refused=_refused(actor))
        critic.backward()
        loop.see(again=_refused(value.sum()))
        loop.see_gradients(model)
        model.zero_grad()


@situation("https://github.com/pytorch/rl/issues/1187")
def two_losses_behind_a_trained_trunk_want_retain_graph(loop: Loop) -> None:
    model = loop.model(Towers(train_trunk=True))
    actor, critic, _ = model(*batch())
    actor.backward(retain_graph=True)
    critic.backward()
    loop.see_gradients(model)
    actor, critic, _ = model(*batch())
    actor.backward()
    loop.see(refused=_refused(critic))


@situation("https://github.com/pytorch/rl/issues/1187", like="a_linear_under_no_grad_is_merged_with_another")
def losses_that_share_sums_alone(loop: Loop) -> None:
    """A shift that is added to the input of both: its backward needs no value."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(6))
            self.a, self.b = nn.Linear(6, 7), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            h = (x + self.shift).reshape(-1, 6)
            return self.a(h).square().mean(), self.b(h).tanh().mean(), h

    model = loop.model(Shifted())
    for _ in range(2):
        a, b, h = model(torch.randn(2, 3, 6))
        a.backward()
        h.sum().backward()
        b.backward()
        loop.see_gradients(model)


@situation("https://github.com/pytorch/rl/issues/1187", ranks=(1,))
def what_one_loss_keeps_goes_with_the_other(loop: Loop) -> None:
    import weakref

    model = loop.model(Towers())
    kept: list[weakref.ref[Tensor]] = []

    def pack(x: Tensor) -> Tensor:
        x = x.clone()
        kept.append(weakref.ref(x))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        actor, critic, value = model(*batch())
    del critic, value
    actor.backward()
    loop.see(left=sum(x() is not None for x in kept))


@situation("https://github.com/pytorch/rl/issues/1187")
def one_of_two_losses_comes_of_code_that_stays_eager(loop: Loop) -> None:
    class Decides(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y.sin() if y.sum() > 0 else y.cos()

    model = Towers()
    model.actor = Decides(8, 5)
    model = loop.model(model)
    for _ in range(2):
        actor, critic, _ = model(*batch())
        actor.backward()
        critic.backward()
        loop.see(again=_refused(actor))
        loop.see_gradients(model)


def _refused(loss: Tensor) -> bool:
    try:
        loss.backward()
    except Exception as error:
        return "retain_graph=True" in str(error)
    return False
