"""`megafx.Meter`: tokens a second, model FLOPs utilization and memory of a loop of the user's own."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megafx.errors import UsageError


class Meter:
    """Counts the steps of a training loop; every few of them, `step` returns what a log wants.

        meter = megafx.Meter(model)
        for batch in loader:
            loss = model(**batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
            if values := meter.step(tokens=batch["input_ids"].numel(), loss=loss):
                log(values)

    model: what `parallelize` returned, before or after its first call. every: steps between two results; nothing waits for the
    device in others. Raises UsageError for a model that is not parallelized, and for `every` below 1.
    """

    def __init__(self, model: nn.Module, *, every: int = 10) -> None:
        self.runtime: Any = getattr(model, "megafx", None)
        if not hasattr(self.runtime, "meshes"):
            found = f"{type(model).__name__} is not parallelized"
            raise UsageError(
                found, fix="megafx.Meter(megafx.parallelize(model, ...)); stages of a pipeline have no meter"
            )
        if every < 1:
            raise UsageError(f"every={every} steps between two results of a meter", fix="every=1, or more")
        self.every = every
        self.start()

    def start(self) -> None:
        """Begin anew, at the end of what is no training: an evaluation, or a save."""
        self.steps = self.tokens = 0
        self.sums: dict[str, Any] = {}
        self.calls, self.began = self.runtime.state.step, time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def step(self, *, tokens: int, **values: Any) -> dict[str, float] | None:
        """Count one step of the optimizer; the results after every `every` of them, else None.

        tokens: of this rank's batches since the last step; those of all data-parallel ranks are reported. values: numbers and
        tensors of one element, whose means over the steps are reported. Where one is a sharded tensor, such as the norm of
        gradients, this is collective over its ranks. Results, by name: the means, "seconds" of a step, "tokens/s", "memory GiB"
        (the peak of a rank's allocated memory; of CUDA), and "MFU", model FLOPs utilization, where the hardware's profile has
        the datasheet's dense bf16 FLOP/s: the part of these that a rank uses for products and attention, each call counted
        with the sizes of the training call that was planned.
        """
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens
        for name, value in values.items():
            value = value.detach() if isinstance(value, torch.Tensor) else value
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        if self.steps < self.every:
            return None
        found = {name: _number(total) / self.steps for name, total in self.sums.items()}  # this waits for the device
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            found["memory GiB"] = torch.cuda.max_memory_allocated() / 2**30
        seconds, data = time.perf_counter() - self.began, self.runtime.meshes.data
        found["seconds"] = seconds / self.steps
        found["tokens/s"] = self.tokens * (1 if data is None else data.ranks) / seconds
        if peak := self.runtime.hardware.peak_flops_per_second.get("bfloat16"):
            flops = self.runtime.report().step.flops * (self.runtime.state.step - self.calls)
            found["MFU"] = flops / seconds / peak
        self.start()
        return found


def _number(value: Any) -> float:
    """A number, whole."""
    return float(value.full_tensor() if isinstance(value, DTensor) else value)
