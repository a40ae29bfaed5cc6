"""What stands between backward and the next step: clipping, scaling, schedules, freezing, several models and optimizers."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from loop import Loop, situation
from loop_models import Classifier, Language, tokens
from torch import Tensor, nn

FORMS = ("ddp", "zero1", "fsdp")


def batch(loop: Loop, rows: int = 6) -> tuple[Tensor, Tensor]:
    return loop.rows(torch.randn(rows, 7)), loop.rows(torch.randint(0, 5, (rows,)))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@situation("https://github.com/pytorch/pytorch/issues/121020", slow=(1, "ddp", "zero1"), data=FORMS)
def gradients_are_clipped_by_norms_and_by_value(loop: Loop) -> None:
    model = loop.model(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for kind in (2.0, 1.0, float("inf"), None):
        loss = loss_of(model, *batch(loop))
        loss.backward()
        if kind is None:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=kind)
            loop.see(norm=norm)
        optimizer.step()
        optimizer.zero_grad()
        loop.see(loss=loop.mean(loss))
    loop.see_state(model)


@situation("https://discuss.pytorch.org/t/gradscaler-and-clip-grad-norm/107813", slow=(1, "ddp"), data=("ddp", "fsdp"))
def a_scaler_with_clipping_and_an_overflow(loop: Loop) -> None:
    model = loop.model(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(5):
        loss = loss_of(model, *batch(loop))
        scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        loop.see(loss=loop.mean(loss), scale=scaler.get_scale())
    loop.see_state(model)


@situation(
    "https://discuss.pytorch.org/t/weight-decay-only-for-weights-of-nn-linear/114348",
    slow=(1, "ddp", "fsdp"),
    data=FORMS,
)
def groups_of_parameters_with_schedules_of_their_own(loop: Loop) -> None:
    model = loop.model(Classifier())
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 0.1 * (s + 1), lambda s: 1.0])
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], [2])
    for _ in range(4):
        loss_of(model, *batch(loop)).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loop.see(rates=schedule.get_last_lr())
    loop.see_state(model)


@situation("https://discuss.pytorch.org/t/how-to-freeze-and-unfreeze-layers/7088", slow=(1,), data=("fsdp",))
def layers_are_frozen_and_freed_between_steps(loop: Loop) -> None:
    model = loop.model(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for frozen in ((), ("up",), ("up", "norm"), ("down",), ()):
        for name, p in model.named_parameters():
            p.requires_grad_(name.partition(".")[0] not in frozen)
        loss = loss_of(model, *batch(loop))
        loss.backward()
        loop.see(loss=loop.mean(loss))
        loop.see(without=[name for name, p in model.named_parameters() if p.grad is None])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    loop.see_state(model)


@situation("https://github.com/Lightning-AI/pytorch-lightning/issues/5814", slow=(1,))
def an_optimizer_gets_parameters_later(loop: Loop) -> None:
    """Gradual unfreezing: the head first, the rest by `add_param_group`."""
    model = loop.model(Classifier())
    model.requires_grad_(False)
    model.down.requires_grad_(True)
    optimizer = torch.optim.Adam(model.down.parameters(), lr=1e-2)
    for step in range(4):
        if step == 2:
            model.requires_grad_(True)
            rest = [p for name, p in model.named_parameters() if not name.startswith("down")]
            optimizer.add_param_group({"params": rest, "lr": 1e-3})
        loss = loss_of(model, *batch(loop))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.see(loss=loss)
    loop.see_state(model)


@situation("https://github.com/davda54/sam/issues/7", slow=(1, 2), data=("ddp",))
def sharpness_aware_minimization(loop: Loop) -> None:
    model = loop.model(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x, y = batch(loop)
        loss_of(model, x, y).backward()
        grads = [p.grad for p in model.parameters()]
        norm = torch.stack([g.norm() for g in grads if g is not None]).norm()
        with torch.no_grad():
            steps = [0.05 * g / (norm + 1e-12) for g in grads if g is not None]
            for p, step in zip(model.parameters(), steps, strict=True):
                p.add_(step)
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        with torch.no_grad():
            for p, step in zip(model.parameters(), steps, strict=True):
                p.sub_(step)
        optimizer.step()
        optimizer.zero_grad()
        loop.see(loss=loop.mean(loss), norm=norm)
    loop.see_state(model)


@situation("https://github.com/pytorch/pytorch/issues/51126", data=("fsdp",), like="a_copy_goes_its_own_way")
def a_mean_teacher_made_by_deepcopy(loop: Loop) -> None:
    """An average of the weights, which computes the targets of the next step."""
    model = loop.model(Classifier())
    loss_of(model, *batch(loop))
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(3):
        x, y = batch(loop)
        with torch.no_grad():
            wanted = teacher(x)
        found = model(x)
        loss = F.cross_entropy(found, y) + F.mse_loss(found, wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.2)
        loop.see(loss=loop.mean(loss))
    loop.see_state(teacher)


@situation("https://github.com/pytorch/pytorch/issues/117742", like="a_copy_goes_its_own_way")
def averaged_model_of_torch(loop: Loop) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = loop.model(Classifier())
    loss_of(model, *batch(loop))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(3):
        loss_of(model, *batch(loop)).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
    with torch.no_grad():
        loop.see(out=averaged(torch.randn(3, 7)))


@situation("https://github.com/pytorch/examples/issues/116", slow=(1, "ddp"), data=("ddp", "fsdp"))
def a_generator_against_a_discriminator(loop: Loop) -> None:
    """Two models, two optimizers; the generator's gradient goes through the discriminator, which keeps its own."""
    makes, judges = loop.model(Classifier()), loop.model(nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 1)))
    first, second = torch.optim.Adam(makes.parameters(), 1e-2), torch.optim.Adam(judges.parameters(), 2e-2)
    for _ in range(2):
        real, noise = loop.rows(torch.randn(6, 5)), loop.rows(torch.randn(6, 7))
        made = makes(noise)
        judged = F.softplus(-judges(real)).mean() + F.softplus(judges(made.detach())).mean()
        second.zero_grad()
        judged.backward()
        second.step()
        fooled = F.softplus(-judges(made)).mean()
        first.zero_grad()
        fooled.backward()
        first.step()
        loop.see(judged=loop.mean(judged), fooled=loop.mean(fooled))
    loop.see_state(makes)
    loop.see_state(judges)


@situation("https://discuss.pytorch.org/t/evaluating-inside-of-the-training-loop/65432", data=("fsdp",))
def evaluation_between_micro_batches(loop: Loop) -> None:
    """`no_grad`, `inference_mode` and `eval()` in the middle of an accumulation leave its gradients alone."""
    model = loop.model(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        for mode in (torch.no_grad, torch.inference_mode):
            (loss_of(model, *batch(loop)) / 2).backward()
            model.eval()
            with mode():
                loop.see(evaluated=loop.mean(loss_of(model, *batch(loop, 4)).clone()))
            model.train()
        optimizer.step()
        optimizer.zero_grad()
    loop.see_state(model)


@situation(
    "https://github.com/microsoft/DeepSpeed/issues/2637", data=("ddp",), like="a_batch_is_cut_to_its_longest_sequence"
)
def sequences_grow_and_shrink(loop: Loop) -> None:
    model = loop.model(Language())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for count in (2, 3, 5, 8, 3, 2):
        ids = loop.rows(tokens(4, count))
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.see(loss=loop.mean(loss))
    loop.see_state(model)


@situation("https://github.com/huggingface/transformers/issues/24225#issuecomment-1592386326")
def batches_of_one_row_and_of_none(loop: Loop) -> None:
    model = loop.model(Classifier())
    for rows in (4, 1, 0, 3, 1):
        out = model(torch.randn(rows, 7))
        out.sum().backward()
        loop.see(out=out)
    loop.see_gradients(model)


@situation("https://discuss.pytorch.org/t/two-losses-two-backwards/85433", slow=(2,))
def one_graph_is_differentiated_twice(loop: Loop) -> None:
    """`retain_graph`, then a second loss; `autograd.grad` beside them, of parameters and of the input."""
    model = loop.model(Classifier())
    x = torch.randn(6, 7, requires_grad=True)
    out = model(x)
    a, b = out[:, :2].square().mean(), out[:, 2:].abs().mean()
    of_a = torch.autograd.grad(a, [x, *model.parameters()], retain_graph=True)
    a.backward(retain_graph=True)
    b.backward()
    loop.see(of_a=of_a, gradient=x.grad)
    loop.see_gradients(model)


@situation("https://github.com/pytorch/pytorch/issues/104684", slow=(1, 2))
def gradients_are_checked_by_differences(loop: Loop) -> None:
    """The derivative along the gradient, by a central difference of the parameters."""
    model = loop.model(Classifier())
    x, y = batch(loop)
    loss_of(model, x, y).backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    sizes = [g.square().sum() for g in grads]
    wanted = sum(float(s.full_tensor() if hasattr(s, "full_tensor") else s) for s in sizes)
    losses = []
    with torch.no_grad():
        for step in (1e-4, -2e-4):
            for p, g in zip(model.parameters(), grads, strict=True):
                p.add_(g, alpha=step)
            losses.append(float(loss_of(model, x, y)))
    found = (losses[0] - losses[1]) / 2e-4
    loop.see(agrees=abs(found - wanted) < 1e-6 * wanted, wanted=wanted)


@situation("https://github.com/pytorch/pytorch/issues/67978", slow=(1,))
def a_copy_goes_its_own_way(loop: Loop) -> None:
    model = loop.model(Classifier())
    loss_of(model, *batch(loop)).backward()
    other = copy.deepcopy(model)
    for each, rate in ((model, 0.1), (other, 0.2)):
        torch.optim.SGD(each.parameters(), lr=rate).step()
        each.zero_grad()
        loss_of(each, *batch(loop)).backward()
        loop.see_gradients(each)
        loop.see_state(each)


@situation("https://github.com/pytorch/pytorch/issues/98414", data=("zero1",), like="training_goes_on_from_state_dicts")
def the_best_weights_come_back(loop: Loop) -> None:
    """Early stopping: `state_dict` is copied at the best step and loaded at the end."""
    model = loop.model(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    x, y = batch(loop)
    best, kept = float("inf"), None
    for _ in range(4):
        loss = loss_of(model, x, y)
        loss.backward()
        mean = float(loop.mean(loss))
        if mean < best:
            best, kept = mean, copy.deepcopy(model.state_dict())
        optimizer.step()
        optimizer.zero_grad()
    assert kept is not None
    model.load_state_dict(kept)
    loop.see(best=best, again=loop.mean(loss_of(model, x, y)))
    loop.see_state(model)


@situation("https://discuss.pytorch.org/t/resuming-training-gives-a-different-loss/21337", slow=(1,))
def training_goes_on_from_state_dicts(loop: Loop) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        model = loop.model(Classifier())
        loss_of(model, torch.zeros(2, 7), torch.zeros(2, dtype=torch.long))  # its layout is known from here on
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    model, optimizer, schedule = made()
    for step in range(6):
        if step == 3:
            states = [copy.deepcopy(x.state_dict()) for x in (model, optimizer, schedule)]
            model, optimizer, schedule = made()
            for x, state in zip((model, optimizer, schedule), states, strict=True):
                x.load_state_dict(state)
        torch.manual_seed(step)
        loss = loss_of(model, *batch(loop))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loop.see(loss=loss)
    loop.see_state(model)


@situation("https://github.com/pytorch/pytorch/issues/125096", slow=(1, 2), data=("fsdp",))
def torch_saves_and_loads_a_distributed_checkpoint(loop: Loop) -> None:
    import tempfile

    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    model = loop.model(Classifier())
    loss_of(model, *batch(loop))
    folders: list[str | None] = [tempfile.mkdtemp()]
    alone = not dist.is_initialized() or loop.eager
    if not alone:
        dist.broadcast_object_list(folders)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    dcp.save({"model": before}, checkpoint_id=folders[0], no_dist=alone)
    torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folders[0], no_dist=alone)
    model.load_state_dict(state["model"])
    loop.see(loss=loop.mean(loss_of(model, *batch(loop))))
    loop.see_state(model)


@situation("https://discuss.pytorch.org/t/zero-grad-set-to-none-false/155123", slow=(1, 2), data=("fsdp",))
def gradients_are_set_to_zero_scaled_and_read(loop: Loop) -> None:
    model = loop.model(Classifier())
    for _ in range(3):
        loss_of(model, *batch(loop)).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5).nan_to_num_(0.0)
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        loop.see(norms=[float(n.full_tensor() if hasattr(n, "full_tensor") else n) for n in norms])
    loop.see_gradients(model)
    model.zero_grad(set_to_none=False)
    loop.see_gradients(model)


@situation("https://github.com/openai/supervised-reptile/issues/9", slow=(2,))
def steps_away_and_half_of_the_way_back(loop: Loop) -> None:
    """Reptile and Lookahead: weights are remembered, trained, and interpolated."""
    model = loop.model(Classifier())
    loss_of(model, *batch(loop))
    for _ in range(2):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(2):
            loss = loss_of(model, *batch(loop))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for p, old in zip(model.parameters(), before, strict=True):
                p.copy_(old + 0.5 * (p - old))
        loop.see(loss=loss)
    loop.see_state(model)
