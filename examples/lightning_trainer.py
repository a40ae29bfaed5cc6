"""PyTorch Lightning with a parallelized model: its own ModelParallelStrategy makes the mesh, `configure_model` parallelizes.

    torchrun --standalone --nproc-per-node 2 examples/lightning_trainer.py --output runs/lightning     # CPU (gloo) or GPUs
    torchrun --standalone --nproc-per-node 2 examples/lightning_trainer.py --output runs/lightning --steps 40 --resume
    python examples/lightning_trainer.py                                                               # one process

A small Llama learns synthetic sequences: with clipping, accumulation, a scheduler, validation, checkpoints that are sharded.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from shared import sequences, small_llama
from torch import Tensor
from torch.utils.data import DataLoader

import megafx


class Llama(lightning.LightningModule):
    """The model is made in configure_model, where the mesh is known."""

    def __init__(self, eager: bool = False) -> None:
        super().__init__()
        self.eager, self.model, self.losses, self.held_out = eager, None, [], []

    def configure_model(self) -> None:
        if self.model is not None:  # Lightning calls this before each of fit, validate and test
            return
        self.model = small_llama()
        if not self.eager:
            mesh = None if self.device_mesh is None else self.device_mesh["tensor_parallel"]
            batch = torch.utils.data.default_collate(sequences(4, seed=3))
            self.model = megafx.parallelize(self.model.to(self.device), mesh=mesh, example_inputs=batch)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.held_out.append(self.model(**batch).loss.item())
        self.log("val_loss", self.held_out[-1], batch_size=len(batch["labels"]))

    def configure_gradient_clipping(self, optimizer: Any, *given: Any, **more: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)  # the norm is that of all shards

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="runs/lightning", help="folder of checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--eager", action="store_true", help="do not parallelize: to compare with")
    args = parser.parse_args()
    lightning.seed_everything(0)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ranks) if ranks > 1 else "auto"
    saver = ModelCheckpoint(dirpath=args.output, every_n_train_steps=args.steps // 2, save_last=True, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=strategy,
        max_steps=args.steps,
        accumulate_grad_batches=2,
        val_check_interval=4,
        use_distributed_sampler=False,  # nothing shares out the batches: there is no data parallelism here
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Llama(args.eager)
    data = DataLoader(
        sequences(48, seed=3), batch_size=4
    )  # the same on every rank: tensor-parallel ranks work on one batch
    held_out = DataLoader(sequences(10, seed=4), batch_size=3)
    last = Path(args.output) / "last.ckpt"
    trainer.fit(model, data, held_out, ckpt_path=last if args.resume and last.exists() else None)
    if trainer.is_global_zero:
        print("log", json.dumps({"losses": model.losses, "val_losses": model.held_out, "step": trainer.global_step}))


if __name__ == "__main__":
    main()
