"""What a model returns: values beside the same values detached, views, inputs and buffers; writes hidden from autograd."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from loop import Loop, situation
from torch import Tensor, nn

DETACHED = "https://discuss.pytorch.org/t/returning-detached-loss-for-logging/158934"
HIDDEN = "https://discuss.pytorch.org/t/updating-a-buffer-under-no-grad/38153"


class Net(nn.Module):
    """Two linears and buffers; subclasses say what is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 6)
        self.register_buffer("rows", torch.zeros(5, 6))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.tensor(0.0))


class LossAndLog(Net):
    def forward(self, x: Tensor) -> Any:
        loss = self.down(self.up(x).relu()).square().mean()
        return loss, {"log": {"loss": loss.detach(), "item": (2 * loss).detach()}}


class LogFirst(Net):
    def forward(self, x: Tensor) -> Any:
        out = self.down(self.up(x).relu())
        return {"metrics": {"loss": out.square().mean().detach()}, "loss": out.square().mean()}


class ValueAndDetached(Net):
    def forward(self, x: Tensor) -> Any:
        out = self.down(self.up(x).relu())
        return out.detach(), out, out.detach()[0], {"same": out, "data": out.data, "rows": out[1:]}


class ScalarForTheLog(Net):
    def forward(self, x: Tensor) -> Any:
        out = self.down(self.up(x).relu())
        return out, out.norm().detach()


class Others(Net):
    def forward(self, x: Tensor) -> Any:
        out = self.down(self.up(x))
        with torch.no_grad():
            target = out.softmax(-1)
        return out, out.clone(), torch.zeros_like(out), (out > 0).to(out.dtype), target, x, x.clone(), self.down.bias


def trains(loop: Loop, model: nn.Module, inputs_require_grad: bool = False) -> None:
    """Two calls: everything that requires a gradient is differentiated."""
    model = loop.model(model)
    for _ in range(2):
        x = torch.randn(5, 8, requires_grad=inputs_require_grad)
        outputs = model(x)
        leaves = [o for o in torch.utils._pytree.tree_leaves(outputs) if isinstance(o, Tensor)]
        loop.see(outputs=outputs, same=[[a is b for b in leaves] for a in leaves])
        torch.stack([(k + 1) * o.sin().sum() for k, o in enumerate(leaves) if o.requires_grad]).sum().backward()
        loop.see_gradients(model)
        loop.see(gradient_of_x=x.grad)
        loop.see_state(model)


@situation(DETACHED, like="values_are_returned_with_and_without_gradient")
def a_loss_is_returned_beside_itself_detached(loop: Loop) -> None:
    trains(loop, LossAndLog())


@situation(DETACHED)
def the_detached_loss_is_returned_first(loop: Loop) -> None:
    trains(loop, LogFirst())


@situation(DETACHED)
def values_are_returned_with_and_without_gradient(loop: Loop) -> None:
    trains(loop, ValueAndDetached())


@situation(DETACHED, like="values_are_returned_with_and_without_gradient")
def a_scalar_without_gradient_is_returned_for_the_log(loop: Loop) -> None:
    trains(loop, ScalarForTheLog())


@situation("https://github.com/pytorch/pytorch/issues/109053", like="batches_are_dicts_with_defaults_and_deques")
def inputs_parameters_and_constants_are_returned(loop: Loop) -> None:
    trains(loop, Others(), inputs_require_grad=True)


@situation("https://discuss.pytorch.org/t/encounter-the-runtimeerror-one-of-the-variables-needed-for-gradient/836")
def outputs_are_changed_in_place(loop: Loop) -> None:
    model = loop.model(ScalarForTheLog())
    out, _ = model(torch.randn(5, 8))
    out.mul_(2)
    out[0] = 0
    out.square().sum().backward()
    loop.see(out=out)
    loop.see_gradients(model)


class RowOfBuffer(Net):
    def forward(self, x: Tensor) -> Any:
        out = self.down(self.up(x).relu())
        with torch.no_grad():
            self.rows[0] = out.mean(0)
            self.rows[1:3] += out[:2]
            self.mean.mul_(0.9).add_(out.mean(0), alpha=0.1)
            self.count += 1
        return (out * self.rows[:1] + self.rows[2] - self.mean / self.count).square().mean()


class ThroughData(Net):
    def forward(self, x: Tensor) -> Any:
        out = self.down(self.up(x).relu())
        self.rows.data[0] = out.data.mean(0)
        self.rows.detach()[1:3].add_(out[:2])
        self.mean.data.copy_(out.data.amax(0))
        return (out * self.rows[:1] + self.rows[2] - self.mean).square().mean()


class OverwrittenUnderNoGrad(Net):
    def forward(self, x: Tensor) -> Any:
        out = self.down(self.up(x).relu())
        with torch.no_grad():
            self.mean.copy_(out.mean(0))
            self.rows.index_copy_(0, torch.tensor([1]), out[:1])
            self.rows.transpose(0, 1)[0, 2:] = out[2:, 1]
            scratch = torch.zeros_like(out)
            scratch[1] = out[1]
        return (out * self.mean + self.rows.sum(0) + scratch).square().mean(), self.rows.clone()


@situation(HIDDEN, like="a_buffer_is_overwritten_under_no_grad")
def a_part_of_a_buffer_is_written_under_no_grad(loop: Loop) -> None:
    trains(loop, RowOfBuffer())


@situation(HIDDEN)
def a_part_of_a_buffer_is_written_through_data(loop: Loop) -> None:
    trains(loop, ThroughData())


@situation(HIDDEN)
def a_buffer_is_overwritten_under_no_grad(loop: Loop) -> None:
    trains(loop, OverwrittenUnderNoGrad())


class Result:
    """A result of the user's own class."""

    def __init__(self, loss: Tensor, parts: dict[str, Any]) -> None:
        self.loss, self.parts, self.name = loss, parts, "result"

    def total(self) -> Tensor:
        return self.loss + self.parts["out"].square().mean()


class Actor(Net):
    """Returns distributions, as actors and variational encoders do, a SimpleNamespace and an object."""

    def forward(self, x: Tensor) -> Any:
        h = self.up(x).relu()
        out = self.down(h)
        actions = torch.distributions.Normal(out, torch.nn.functional.softplus(self.down.bias).expand_as(out))
        result = Result(out.square().sum(), {"out": out, "rows": len(x), "inner": SimpleNamespace(h=h, dtype=h.dtype)})
        return SimpleNamespace(actions=actions, choice=torch.distributions.Categorical(logits=out)), result


@situation("https://github.com/pytorch/rl/issues/785")
def objects_and_distributions_are_returned(loop: Loop) -> None:
    model = loop.model(Actor())
    for rows in (4, 3):
        out, result = model(torch.randn(rows, 8))
        loop.see(
            kinds=[type(x).__name__ for x in (out, out.actions, out.choice, result, result.parts["inner"])],
            values=(
                result.parts["rows"],
                result.name,
                result.parts["inner"].dtype,
                out.choice.logits,
                out.actions.mean,
            ),
        )
        loss = result.total() - out.actions.log_prob(torch.ones(rows, 6)).mean() + result.parts["inner"].h.mean()
        (loss - out.choice.entropy().mean() + out.choice.log_prob(torch.arange(rows)).sum()).backward()
        loop.see_gradients(model)
