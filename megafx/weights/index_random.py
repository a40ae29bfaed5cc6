"""Random initial values by element index: they do not depend on the number of ranks, nor on which of them draws a slice.

For a `normal_` or `uniform_`, step number `op` of a constructor's log, at row-major element index i:

    counter = (g & 0xffffffff, g >> 32, op, 1) with g = i >> 2        key = low and high 32 bits of the seed
    word(i) = output word i & 3 of Philox4x32-7 (kernels/common/philox.py)
    uniform(i) = low + (high - low) * (word(i) >> 8) / 2**24     (word(i) / 2**32 for fp64 tensors)
    normal(i)  = mean + std * sqrt(-2 log u0) * (cos if i is even else sin)(2 pi u1)     u: (word + 0.5) / 2**32 of i's pair

computed in fp32 (in fp64 for fp64 tensors) and rounded to the tensor's dtype. The last counter word keeps these draws apart
from those of dropout masks. Normal numbers: Box and Muller, "A note on the generation of random normal deviates", 1958.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megafx.kernels.common.philox import KEY_STEPS, MASK, philox4x32
from megafx.placements.slices import ShardSlice
from megafx.weights.constructor_log import Log, LogEntry, Ref, Storage, schedule
from megafx.weights.state import Stored

aten = torch.ops.aten
_BLOCK = 1 << 16  # elements drawn at a time: intermediate values stay in the cache


class IndexRandom:
    """Draws under one seed."""

    def __init__(self, seed: int) -> None:
        self.key = (seed & MASK, (seed >> 32) & MASK)

    def run(self, step: LogEntry, args: Any, kwargs: Any) -> Any:
        """Run a step of the log: `normal_` and `uniform_` by index, other draws with the generator seeded for the step."""
        if (generator := step.generator) is None:
            return step.func(*args, **kwargs)
        if step.func in _FILLS:
            box = ShardSlice((0,) * args[0].dim(), (0,) * args[0].dim(), tuple(args[0].shape))
            self._fill(args[0], box, step, tuple(args[0].shape))
            return args[0]
        before = generator.get_state()
        try:
            generator.manual_seed(self.key[0] ^ (self.key[1] << 32) ^ (step.number * KEY_STEPS[0]))
            return step.func(*args, **kwargs)
        finally:
            generator.set_state(before)

    def fill_slices(self, log: Log, by_memory: Mapping[Storage, list[tuple[Stored, Ref]]]) -> set[Storage]:
        """Draw this rank's slices of tensors that one draw fills; return the numbers of their storages."""
        done = set()
        for memory, users in by_memory.items():
            step = schedule(log.steps, {memory}, keep=lambda step: False).order[-1]
            drawn = step.args[0] if step.func in _FILLS else None
            if step.overwrites != {memory} or any(ref != drawn or not ref.row_major for _, ref in users):
                continue
            for tensor, ref in users:
                for box in tensor.slices:
                    self._fill(tensor.local, box, step, ref.size)
            done.add(memory)
        return done

    @torch.no_grad()
    def _fill(self, out: torch.Tensor, box: ShardSlice, step: LogEntry, shape: Sequence[int]) -> None:
        """Draw the box of a tensor of `shape` into its place in `out`."""
        first, second = (*step.args[1:], *_FILLS[step.func][len(step.args) - 1 :])[:2]
        target = out[box.local]
        starts, run = rows_of(box, shape)
        values = torch.empty(len(starts), run, dtype=out.dtype, device=out.device)
        step_rows = max(1, _BLOCK // max(run, 1))
        for row in range(0, len(starts), step_rows):
            for at in range(0, run, _BLOCK):
                length = min(_BLOCK, run - at)
                index = torch.tensor(starts[row : row + step_rows], device=out.device) + at
                drawn = self._draw(index, length, step, first, second, out.dtype)
                values[row : row + step_rows, at : at + length] = drawn
        target.copy_(values.view(box.sizes))

    def _draw(
        self, starts: torch.Tensor, length: int, step: LogEntry, first: float, second: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """[rows] first indices -> [rows, length] values, in fp64 for an fp64 tensor, else in fp32."""
        groups = (starts >> 2).unsqueeze(1) + torch.arange(length // 4 + 2, device=starts.device)
        high = int(starts.max()) + length >> 34
        low_only: Any = groups >> 32 if high else 0
        words = philox4x32((groups & MASK if high else groups, low_only, step.number, 1), self.key)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        values = torch.empty(*groups.shape, 4, dtype=wide, device=groups.device)
        if step.func is aten.normal_.default:
            units = [torch.as_tensor(w).to(wide).add_(0.5).mul_(2.0**-32) for w in words]
            for i in (0, 2):
                radius, angle = units[i].log_().mul_(-2.0).sqrt_().mul_(second), units[i + 1].mul_(2.0 * math.pi)
                torch.mul(radius, angle.cos(), out=values[..., i])
                torch.mul(radius, angle.sin(), out=values[..., i + 1])
            values += first
        else:
            kept = 32 if wide == torch.float64 else 24  # bits that the dtype holds exactly: 1 is never reached
            torch.stack([(torch.as_tensor(w) >> (32 - kept)).to(wide) for w in words], -1, out=values)
            values.mul_((second - first) * 2.0**-kept).add_(first)
        flat, skipped = values.flatten(1), starts & 3
        if not bool(skipped.any()):
            return flat[:, :length]
        return flat.gather(1, skipped.unsqueeze(1) + torch.arange(length, device=starts.device))


# operation -> defaults of its two parameters: mean and std, low and high
_FILLS: dict[Any, tuple[float, float]] = {aten.normal_.default: (0.0, 1.0), aten.uniform_.default: (0.0, 1.0)}


def rows_of(box: ShardSlice, shape: Sequence[int]) -> tuple[list[int], int]:
    """A box -> (row-major indices at which its contiguous runs start, length of each run)."""
    cut = max((d for d, n in enumerate(shape) if box.sizes[d] != n), default=0)  # dims after it are whole
    stride = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    starts = [0]
    for d in range(cut):
        starts = [s + (box.offsets[d] + i) * stride[d] for s in starts for i in range(box.sizes[d])]
    if not shape:
        return [0], 1
    return [s + box.offsets[cut] * stride[cut] for s in starts], box.sizes[cut] * stride[cut]
