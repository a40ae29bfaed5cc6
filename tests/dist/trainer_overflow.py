"""examples/hf_trainer.py in fp16, where a gradient of one rank alone overflows in some steps: one process, or one rank.

    python tests/dist/trainer_overflow.py --at 6 --eager --fp16 --output FOLDER
    torchrun --standalone --nproc-per-node 2 tests/dist/trainer_overflow.py --at 6 --fp16 --output FOLDER

All ranks have to have the same scale, and to skip the same steps. (What overflows by itself at this size does on every rank.)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import AutocastKwargs
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import hf_trainer


class Overflow(hf_trainer.LogScale):
    steps: list[int]

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """After a micro-batch that is not the last one of its step: element [0, 0] of a row-parallel weight's gradient."""
        weight = given["model"].model.layers[1].mlp.down_proj.weight
        if state.global_step + 1 not in self.steps:
            return
        if not isinstance(weight, DTensor):
            weight.grad[0, 0] = float("inf")
            return
        assert weight.placements[0].is_shard(), weight.placements
        if dist.get_rank() == 0:
            weight.grad.to_local()[0, 0] = float("inf")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        super().on_optimizer_step(args, state, control, **given)
        if dist.is_initialized():
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, state.log_history[-1])
            assert everyone == everyone[:1] * len(everyone), f"ranks scale apart: {everyone}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--at", type=int, nargs="*", default=[], help="steps, from 1")
    parser.add_argument("--exact", action="store_true", help="without autocast, so that nothing overflows by itself")
    options, others = parser.parse_known_args()
    sys.argv[1:] = others
    Overflow.steps = options.at
    hf_trainer.LogScale = Overflow  # type: ignore[misc] # the example has no place for a callback of tests
    if options.exact:
        scale = hf_trainer.scale_on_cpu

        def without_autocast(accelerator: Any) -> None:
            scale(accelerator)
            accelerator.autocast_handler = AutocastKwargs(enabled=False)

        hf_trainer.scale_on_cpu = without_autocast
    torch.set_num_threads(1)
    hf_trainer.main()


if __name__ == "__main__":
    main()
