"""Weights that are changed by hand: `megafx.whole_parameters`, adapters that are merged, states that are saved and loaded."""

from __future__ import annotations

import torch
from loop import Loop, situation
from loop_parameters import BOTH, Mlp, started
from torch import nn

import megafx

VECTOR = "https://github.com/pytorch/pytorch/issues/144289"
MERGE = "https://github.com/huggingface/peft/issues/2394"


@situation("https://github.com/huggingface/trl/issues/2698", slow=(1,))
def weights_are_changed_while_they_are_whole(loop: Loop) -> None:
    for hidden in BOTH:
        model, x = started(loop, hidden), torch.randn(3, 8)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model(x).backward()
        optimizer.step()
        held = model.up.weight
        with megafx.whole_parameters(model) as same, torch.no_grad():
            assert same is model and held is model.up.weight and isinstance(held, nn.Parameter)
            assert type(held * 2) is torch.Tensor and type(held[0]) is torch.Tensor
            loop.see(norm=held.norm(), loss=model(x))
            u, s, v = torch.linalg.svd(model.up.weight, full_matrices=False)
            model.up.weight.copy_(u[:, :3] @ torch.diag(s[:3]) @ v[:3])
            nn.init.orthogonal_(model.down.weight)
            model.norm.weight[:2] = 0.5
            vector = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(vector * 1.5, model.parameters())
            model.up.bias.data = torch.arange(float(hidden))
            model.norm.bias.requires_grad_(False)
        loop.see_state(model)
        loop.see_gradients(model)
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        loop.see(loss=loss, needs=[p.requires_grad for p in model.parameters()])
        loop.see_gradients(model)
        loop.see_state(model)


@situation(VECTOR, like="a_penalty_before_the_first_call")
def gradients_are_changed_while_they_are_whole(loop: Loop) -> None:
    for hidden in BOTH:
        model = started(loop, hidden)
        model(torch.randn(3, 8)).backward()
        with megafx.whole_parameters(model, gradients=True):
            for p in model.parameters():
                assert p.grad is not None and type(p.grad) is torch.Tensor
                p.grad = torch.sign(p.grad) * p.grad.flatten().cumsum(0).view_as(p)
            model.norm.bias.grad = None
        loop.see_gradients(model)
        with megafx.whole_parameters(model):
            model.up.bias.grad = torch.ones(hidden)
        loop.see_gradients(model)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        loop.see_state(model)


@situation(VECTOR, ranks=(2,))  # one rank has nothing to take back: what was written stays, as in eager mode
def an_error_while_weights_are_whole_changes_nothing(loop: Loop) -> None:
    model = started(loop, 13)

    def fails() -> None:
        with megafx.whole_parameters(model), torch.no_grad():
            model.up.weight.zero_()
            raise ValueError("the user's")

    before = model.up.weight.detach().clone() if loop.eager else None
    loop.see_error(fails)
    if before is not None:  # eager mode keeps what was written
        with torch.no_grad():
            model.up.weight.copy_(before)
    loop.see_state(model)
    loop.see(loss=model(torch.randn(3, 8)))


@situation("https://github.com/pytorch/pytorch/issues/144109", slow=(1,))
def a_state_is_loaded_into_another_model(loop: Loop) -> None:
    """Whole states of plain models into a parallelized one, and between two parallelized ones."""
    for hidden in BOTH:
        model, plain = started(loop, hidden), Mlp(hidden)
        model.load_state_dict(plain.state_dict())
        other = started(loop, hidden)
        other.load_state_dict({n: 2 * v for n, v in model.state_dict().items()})
        loop.see_state(other)
        with torch.no_grad():
            for name, value in model.state_dict().items():  # shares memory with the parameters
                value.mul_(3) if name.startswith("up") else None
        loop.see_state(model)


def adapted(loop: Loop, hidden: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import PretrainedConfig

    plain = Mlp(hidden)
    plain.config = PretrainedConfig()
    model = get_peft_model(plain, LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False))
    return loop.model(model, example_inputs=(torch.randn(3, 8),))


@situation(MERGE, like="adapters_are_merged_and_unloaded")
def adapters_are_merged(loop: Loop) -> None:
    for hidden in BOTH:
        model = adapted(loop, hidden)
        model.merge_adapter()
        loop.see_state(model)
        model.unmerge_adapter()
        with megafx.whole_parameters(model):
            model.merge_adapter()
        loop.see_state(model)


@situation(MERGE)
def adapters_are_merged_and_unloaded(loop: Loop) -> None:
    for hidden in BOTH:
        model, x = adapted(loop, hidden), torch.randn(3, 8)
        with megafx.whole_parameters(model):
            merged = model.merge_and_unload()
        assert type(merged) is Mlp and not any(hasattr(p, "full_tensor") for p in merged.parameters())
        loop.see(merged=merged.state_dict(), loss=merged(x))
        again = loop.model(merged.requires_grad_())
        loss = again(x)
        loss.backward()
        loop.see(loss=loss)
        loop.see_gradients(again)


@situation(MERGE)
def an_adapter_is_added_later(loop: Loop) -> None:
    from peft import LoraConfig

    model, x = adapted(loop, 16), torch.randn(3, 8)
    model(x)
    with megafx.whole_parameters(model):
        model.add_adapter("second", LoraConfig(r=2, target_modules=["up"], init_lora_weights=False))
        model.set_adapter("second")
    model = loop.model(model)
    loss = model(x)
    loss.backward()
    loop.see(loss=loss)
    loop.see_gradients(model)


@situation(VECTOR, slow=(1,))
def blocks_are_split_and_written(loop: Loop) -> None:
    """By views whose ops' schemas do not say that they are views; a loss of them, too."""
    model = loop.model(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6)))
    for _ in range(2):
        loss = model(torch.randn(3, 5)).square().mean()
        (loss + sum(p.unsafe_chunk(2)[1].square().mean() for p in model.parameters())).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.unsafe_chunk(2)[0].zero_()
                p.unsafe_split(3)[1].mul_(2)
                p.unsafe_split_with_sizes([2, len(p) - 2])[1][1:].add_(0.1)
                (p if p.dim() == 1 else p.T).unsafe_chunk(2)[1].sub_(0.5)
    loop.see_state(model)
    loop.see_gradients(model)
