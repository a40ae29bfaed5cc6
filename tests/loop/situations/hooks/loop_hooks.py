"""Hooks on modules: they see real, whole values, and what they return counts, whenever they are set."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from loop import Loop, situation
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook

HOOKS = "https://github.com/pytorch/pytorch/issues/117758"
RECORDING = "https://discuss.pytorch.org/t/how-can-l-load-my-best-model-as-a-feature-extractor-evaluator/17254"
GRAD_CAM = "https://discuss.pytorch.org/t/gradcam-hooks-with-inplace-relu/148116"
REMOVED = "https://discuss.pytorch.org/t/how-to-remove-multiple-hooks/23417"


class Block(nn.Module):
    """A residual block of two linears."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        return x + (y if scale is None else y * scale)


class Net(nn.Module):
    """Ids -> logits, through two blocks. 9 is no multiple of the ranks."""

    def __init__(self, width: int = 9) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, width), nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, scale=torch.ones((), dtype=x.dtype) * 0.5)
        return self.head(x)


def ids() -> Tensor:
    return torch.randint(11, (3, 5))


class Recorder:
    """Keeps what it sees."""

    def __init__(self, detach: bool = True) -> None:
        self.seen: list[Any] = []
        self.detach = detach

    def forward(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.seen.append(output.detach() if self.detach else output)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.seen.append(args[0].detach())

    def backward(self, module: nn.Module, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]) -> None:
        self.seen += [tuple(g if g is None else g.clone() for g in grad_input), grad_output[0].clone()]


@situation(RECORDING, like="a_loss_of_recorded_features")
def hooks_record_activations(loop: Loop) -> None:
    recorder, model = Recorder(), Net()
    model.blocks[0].register_forward_hook(recorder.forward)
    model = loop.model(model)
    model.head.register_forward_pre_hook(recorder.before)
    for _ in range(2):
        model(ids()).square().mean().backward()
    late = model.blocks[1].up.register_forward_hook(recorder.forward)
    model(ids()).square().mean().backward()
    late.remove()
    with torch.no_grad():
        model.eval()(ids())
    loop.see(recorded=recorder.seen)
    loop.see_gradients(model)


@situation(REMOVED)
def a_hook_of_before_is_removed_later(loop: Loop) -> None:
    recorder, model = Recorder(), Net()
    handle = model.blocks[0].register_forward_hook(recorder.forward)
    model = loop.model(model)
    model(ids())
    handle.remove()
    model(ids())
    model.blocks[0].register_forward_hook(recorder.forward)
    model(ids())
    for module in model.modules():
        module._forward_hooks = OrderedDict()
    model(ids())
    model.blocks[1].register_forward_hook(recorder.forward)
    model(ids())
    for module in model.modules():
        module._forward_hooks.clear()
    model(ids())
    loop.see(recorded=recorder.seen)


@situation("https://github.com/huggingface/transformers/issues/7024")
def a_loss_of_recorded_features(loop: Loop) -> None:
    """Feature distillation: the gradient of the second term goes through what a hook recorded."""
    model, teacher = Net(), Net()
    features: dict[str, Tensor] = {}
    model.blocks[0].register_forward_hook(lambda m, a, out: features.update(student=out))
    teacher.blocks[0].register_forward_hook(lambda m, a, out: features.update(teacher=out))
    model = loop.model(model)
    for _ in range(2):
        batch = ids()
        with torch.no_grad():
            teacher(batch)
        loss = model(batch).square().mean() + (features["student"] - features["teacher"]).square().mean()
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


@situation(GRAD_CAM)
def gradients_of_recorded_features(loop: Loop) -> None:
    """Grad-CAM: `retain_grad` on an activation, and a hook on the tensor, both set in a forward hook."""
    kept: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        output.retain_grad()
        output.register_hook(lambda grad: kept.update(grad=grad.clone()))
        kept["output"] = output

    model = loop.model(Net())
    model.blocks[1].register_forward_hook(keep)
    model(ids())[:, 0, 3].sum().backward()
    loop.see(retained=kept["output"].grad, hooked=kept["grad"], features=kept["output"])
    loop.see_gradients(model)


@situation(
    "https://discuss.pytorch.org/t/how-to-scale-gradient-of-a-module/81390",
    like="a_learned_vector_of_the_users_in_a_hook",
)
def a_hook_on_a_tensor_scales_its_gradient(loop: Loop) -> None:
    def halve(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        output.register_hook(lambda grad: grad * 0.5)

    model = loop.model(Net())
    model.blocks[0].register_forward_hook(halve)
    model(ids()).square().mean().backward()
    loop.see_gradients(model)


@situation("https://github.com/pytorch/pytorch/issues/35802")
def hooks_change_outputs(loop: Loop) -> None:
    """By a value of the user's that changes (activation steering), in place, and by a rule that branches."""
    steer, model = {"by": torch.linspace(0, 1, 9)}, Net()
    model.blocks[0].register_forward_hook(lambda m, a, out: out + steer["by"])
    model = loop.model(model)

    def zero(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        output[:, 0] = 0

    def clip(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output.clamp(-1, 1) if float(output.detach().abs().max()) > 1 else output

    model.blocks[1].register_forward_hook(zero)
    model.head.register_forward_hook(clip)
    for i in range(2):
        steer["by"] = torch.full((9,), 0.1 * i)
        out = model(ids())
        out.square().mean().backward()
        loop.see(out=out)
    loop.see_gradients(model)


@situation("https://github.com/pytorch/pytorch/issues/35643", like="hooks_change_outputs")
def hooks_take_keyword_arguments(loop: Loop) -> None:
    seen: list[Any] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args[0] * 2,), kwargs | {"scale": kwargs["scale"] * 3}

    def behind(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        seen.append(kwargs["scale"].detach())
        return output - args[0]

    model = loop.model(Net())
    model.blocks[0].register_forward_pre_hook(before, with_kwargs=True)
    model.blocks[1].register_forward_hook(behind, with_kwargs=True, always_call=True)
    model.blocks[1].register_forward_hook(lambda m, a, o: seen.append(o.detach()), prepend=True)
    out = model(ids())
    out.square().mean().backward()
    loop.see(out=out, seen=seen)
    loop.see_gradients(model)


@situation("https://github.com/pytorch/pytorch/issues/598")
def a_learned_vector_of_the_users_in_a_hook(loop: Loop) -> None:
    vector, model = torch.ones(9, requires_grad=True), Net()
    model.blocks[0].register_forward_hook(lambda m, a, out: out * vector)
    model = loop.model(model)
    for _ in range(2):
        model(ids()).square().mean().backward()
    assert vector.grad is not None
    loop.see(vector=vector.grad)
    loop.see_gradients(model)


@situation(HOOKS, like="backward_hooks_change_gradients")
def backward_hooks_see_gradients(loop: Loop) -> None:
    recorder, model = Recorder(), Net()
    model.blocks[0].register_full_backward_hook(recorder.backward)
    model = loop.model(model)
    model(ids()).square().mean().backward()
    handle = model.blocks[1].up.register_full_backward_hook(recorder.backward)
    model.embed.register_full_backward_hook(recorder.backward)
    loss = model(ids()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    handle.remove()
    model(ids()).square().mean().backward()
    loop.see(recorded=recorder.seen)
    loop.see_gradients(model)


@situation("https://github.com/pytorch/pytorch/issues/12331")
def backward_hooks_change_gradients(loop: Loop) -> None:
    model = Net()
    model.blocks[1].down.register_full_backward_hook(lambda m, grad_input, grad_output: (grad_input[0] * 3,))
    model = loop.model(model)
    model.blocks[1].register_full_backward_pre_hook(lambda m, grad_output: (grad_output[0].clamp(-1e-3, 1e-3),))
    for _ in range(2):
        model(ids()).square().mean().backward()
    loop.see_gradients(model)


@situation("https://github.com/pytorch/pytorch/issues/25723", like="gradients_of_recorded_features")
def hooks_on_all_modules(loop: Loop) -> None:
    norms: list[tuple[str, float]] = []
    model = loop.model(Net())
    model(ids())
    forward = register_module_forward_hook(lambda m, a, out: norms.append((type(m).__name__, float(out.norm()))))
    backward = register_module_full_backward_hook(
        lambda m, i, out: norms.append((type(m).__name__, float(out[0].norm())))
    )
    try:
        model(ids()).square().mean().backward()
    finally:
        forward.remove()
        backward.remove()
    model(ids())
    loop.see(norms=norms)


@situation("https://discuss.pytorch.org/t/gradient-with-respect-to-weights-using-register-hook/57604")
def hooks_on_parameters(loop: Loop) -> None:
    """Set before `parallelize`, and after it."""
    seen: list[float] = []
    model = Net()
    model.blocks[0].up.weight.register_hook(lambda grad: grad * 2)
    model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
    dropped = model.head.bias.register_hook(lambda grad: grad * 10)
    model = loop.model(model)
    model.blocks[1].up.weight.register_hook(lambda grad: grad * 3)
    model(ids()).square().mean().backward()
    dropped.remove()
    model(ids()).square().mean().backward()
    loop.see(seen=seen)
    loop.see_gradients(model)


@situation("https://github.com/pytorch/pytorch/issues/28594", like="an_adapter_is_added_later")
def hooks_that_make_weights(loop: Loop) -> None:
    """weight_norm and pruning set the weight in a pre-hook: it is part of the graph."""
    import torch.nn.utils.prune as prune

    model = Net()
    with torch.no_grad():
        nn.utils.weight_norm(model.blocks[0].up)  # type: ignore[no-untyped-call]
        prune.l1_unstructured(model.blocks[1].up, "weight", 0.3)  # type: ignore[no-untyped-call]
    model = loop.model(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        loss = model(ids()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.see(loss=loss)
