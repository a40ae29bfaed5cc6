"""Covers: parameters in the form 'fsdp' on real gloo ranks: beside its shard a rank has one region's whole parameters and those
of the next one, which are on their way, in forward and in backward.

Run as a script, this file is one of the ranks.
"""

from __future__ import annotations

import itertools
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from batch_model import Model, batch, mine
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

LAYERS = 5


@pytest.mark.dist
def test_a_region_and_the_next_one(tmp_path: Path) -> None:
    texts = processes.run_ranks(__file__, tmp_path, 2, timeout=240)
    assert all("forward: a region and the next" in t and "backward: a region and the next" in t for t in texts), texts


class Watch(TorchDispatchMode):
    """Bytes of gathered parameters that are there at once: sizes of the gathers in order, and the most."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.most = 0
        self.held: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.held = [(ref, size) for ref, size in self.held if not ref.expired()]
        if func is torch.ops.megafx.gather_region.default:
            storage = found.untyped_storage()
            self.held.append((StorageWeakRef(storage), storage.nbytes()))
            self.sizes.append(storage.nbytes())
            self.most = max(self.most, sum(size for _, size in self.held))
        return found


def check(watch: Watch, what: str) -> None:
    """One gather a region, as there is one group of ranks and one dtype."""
    sizes, most = watch.sizes, watch.most
    assert len(sizes) >= LAYERS and not [ref for ref, _ in watch.held if not ref.expired()], (what, sizes)
    assert max(sizes) < most <= max(a + b for a, b in itertools.pairwise(sizes)) < sum(sizes) / 2, (what, sizes, most)
    print(f"{what}: a region and the next, {most} of {sum(sizes)} bytes")


def main(folder: str, rank: int) -> None:
    import megafx

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    torch.manual_seed(0)
    config = megafx.Config(tensor_model_parallel_size=1, data_parallel_size=2, data_parallel="fsdp")
    model = megafx.parallelize(Model(layers=LAYERS).double(), config)
    ids, labels = (mine(x, 2, 1) for x in batch(0, 2))
    model(ids, labels).backward()  # captured, and gloo has its buffers
    forward, backward = Watch(), Watch()
    with forward:
        loss = model(ids, labels)
    check(forward, "forward")
    with backward:
        loss.backward()
    check(backward, "backward")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
