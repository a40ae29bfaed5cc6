"""A loop around a random model, in eager mode and parallelized: what a case's events do between calls, losses and gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from grammar import Case
from models import Model, build
from torch import Tensor

import megafx
from megafx.runtime.repeated_calls import Repeated, RepeatedCalls

RTOL = 1e-9


class Kept(RepeatedCalls):
    """The calls of the last `megafx.verify`, within `meanwhile(megafx.equivalence, RepeatedCalls=Kept)`."""

    last: ClassVar[RepeatedCalls]

    def run(self, random: bool, tolerance: float) -> Repeated:
        Kept.last = self
        return super().run(random, tolerance)


def difference(case: Case) -> str | None:
    """What differs in a loop of the case's events, on one rank; None where nothing does. Without dropout.

    It goes on with the model, and the graphs, of the calls that `megafx.verify` has made; with dropout in the case, it begins.
    """
    blocks = tuple(
        replace(
            b, dropout=0.0, mlp=replace(b.mlp, dropout=0.0), attention=b.attention and replace(b.attention, dropout=0.0)
        )
        for b in case.blocks
    )
    eager, call = build(replace(case, blocks=blocks))
    if blocks == case.blocks:
        ours, eager = Kept.last.model, Kept.last._plain()
    else:
        ours = megafx.parallelize(copy.deepcopy(eager), megafx.Config(tensor_model_parallel_size=1))
    for i, event in enumerate(("nothing", *case.events)):
        try:
            wanted = _step(eager, event, call)
        except Exception:  # the grammar's own limits
            return None
        found = _step(ours, event, call)
        for name in wanted.keys() | found.keys():
            where = f"{name} of call {i} ({event})"
            if (name in wanted) != (name in found):
                return f"{where} is in {'eager mode' if name in wanted else 'megafx'} alone"
            a, b = wanted[name], found[name]
            if not torch.allclose(
                a, b, rtol=RTOL, atol=RTOL * float(a.detach().nan_to_num().norm()) + 1e-14, equal_nan=True
            ):
                return f"{where} is off by {float((a - b).norm() / a.norm()):.1e}"
    return None


def _step(model: Model, event: str, call: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """One call after its event; what a user would see of it."""
    ids, labels = call
    model.train(event != "evaluation")
    if event == "another scale":
        model.scale *= 0.75
    elif event == "the flag":
        model.flag = not model.flag
    elif event == "one row":
        ids, labels = ids[:1], labels[:1]
    elif event == "one token":
        ids, labels = ids[:, :1], labels[:, :1]
    elif event == "freeze":
        for name, p in model.named_parameters():
            if "mlp" in name:
                p.requires_grad_(not p.requires_grad)
    elif event == "zero a row":
        with torch.no_grad():
            model.table.weight[1].zero_()
    elif event == "scale by data":
        for p in model.parameters():
            p.data = p.data * 1.01
    elif event == "new parameters":
        for module in (model.final_norm, *model.layers[0].mlp.modules()):
            for name, p in [*module.named_parameters(recurse=False)]:
                setattr(module, name, torch.nn.Parameter(p.detach() * 1.1, requires_grad=p.requires_grad))
    elif event == "a step":
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * (0.0 if p.grad is None else p.grad)
    elif event == "load a state":
        model.load_state_dict({n: x * 0.9 if x.is_floating_point() else x for n, x in model.state_dict().items()})
    elif event == "buffers":
        for module in model.modules():
            for name, b in [*module.named_buffers(recurse=False)]:
                if b.is_floating_point():
                    b.mul_(0.5)
                else:
                    setattr(module, name, b.flip(0))
    elif event == "a hook":
        model.layers[0].register_forward_hook(lambda module, args, out: out * 1.5)
    if event != "accumulate":
        model.zero_grad()
    if event == "without gradients":
        with torch.no_grad():
            return dict(_tensors(model(ids, labels)))
    out = dict(_tensors(model(ids, labels)))
    first = next(iter(out.values()))
    loss = first if first.dim() == 0 else first.square().mean()
    if event == "beside the loss":
        loss = loss + 0.1 * [*out.values()][-1].square().mean()
    if loss.requires_grad:
        loss.backward()
    grads = {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    buffers = {f"buffer {n}": b.to(loss.dtype) for n, b in model.named_buffers()}
    layers = [m for m in model.modules() if hasattr(m, "memory")]
    left = {f"memory {i}": m.memory for i, m in enumerate(layers) if m.memory is not None}
    left |= {f"counter {i}": torch.tensor(float(m.calls)) for i, m in enumerate(layers)}
    return {n: v.detach().clone() for n, v in (out | grads | buffers | left).items()}


def _tensors(out: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(out, Tensor):
        yield "loss", out
    elif isinstance(out, tuple):
        yield from zip(("loss", "value"), out, strict=True)
    else:
        yield from (out if isinstance(out, dict) else vars(out)).items()
