"""How much memory a rank takes while a meta model is loaded from safetensors, and how long that takes beside reading the files.

    python benchmarks/load_memory.py                   # 2 gloo ranks; a Llama of 2.2 GiB in bf16, of random numbers
    python benchmarks/load_memory.py --ranks 3 --layers 4 --folder /some/disk

The script writes the files (once; `--folder` keeps them), drops them from the page cache, reads them with `readinto` for the
time that the disk takes, drops them again, and starts the ranks. Each reports, from /proc/self/status, the peak of its resident
memory since before the call (VmHWM, set back through /proc/self/clear_refs) above what it was before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megafx

MIB = 2**20
ALLOWED_MIB = 300  # above the shard


def config(layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        num_hidden_layers=layers, hidden_size=2048, num_attention_heads=16, num_key_value_heads=4, head_dim=128,
        intermediate_size=8192, vocab_size=49999, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip


def on_meta(layers: int) -> Any:
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(config(layers)).to(torch.bfloat16)


def write_model(folder: Path, layers: int) -> int:
    """Random weights, a file of 256 MiB at a time; bytes in all."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    model = on_meta(layers)
    config(layers).save_pretrained(folder)
    places: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}

    def flush() -> None:
        file = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        save_file(held, folder / file)
        places.update(dict.fromkeys(held, file))
        held.clear()

    for name, value in model.state_dict().items():
        held[name] = torch.randn(value.shape, dtype=torch.bfloat16)
        if sum(x.nbytes for x in held.values()) > 256 * MIB:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return sum(f.stat().st_size for f in folder.glob("*.safetensors"))


def drop_from_cache(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(folder: Path) -> float:
    """Seconds to read the files once, in order."""
    buffer = bytearray(16 * MIB)
    start = time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - start


def status(field: str) -> float:
    """MiB of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def rank_main(folder: Path, layers: int, rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks,
                            timeout=timedelta(minutes=10))  # fmt: skip
    model = megafx.parallelize(on_meta(layers))
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
    before, start = status("VmRSS"), time.perf_counter()
    megafx.load_safetensors(model, folder)
    seconds = time.perf_counter() - start
    shard = sum(p.to_local().nbytes for p in model.parameters()) / MIB
    peak = status("VmHWM") - before
    print(json.dumps({"rank": rank, "shard": shard, "peak": peak, "before": before, "seconds": seconds}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="keep the files here, and use those that are there")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args.folder, args.layers, args.rank, args.ranks, args.store)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch) / "model"
        if not folder.exists():
            write_model(folder, args.layers)
        size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        drop_from_cache(folder)
        disk = read_all(folder)
        drop_from_cache(folder)
        command = [sys.executable, __file__, "--ranks", str(args.ranks), "--layers", str(args.layers)]
        command += ["--folder", str(folder), "--store", str(Path(scratch) / "store")]
        processes = [
            subprocess.Popen([*command, "--rank", str(r)], stdout=subprocess.PIPE, text=True) for r in range(args.ranks)
        ]
        lines = [json.loads(p.communicate(timeout=900)[0].splitlines()[-1]) for p in processes]
    print(f"files {size / MIB:.0f} MiB; read once from the disk in {disk:.1f} s")
    for found in lines:
        over = found["peak"] - found["shard"]
        print(
            f"rank {found['rank']}: shard {found['shard']:.0f} MiB, peak {found['peak']:.0f} MiB above the "
            f"{found['before']:.0f} MiB before, that is {over:.0f} MiB above the shard; {found['seconds']:.1f} s"
        )
    return 0 if all(found["peak"] < found["shard"] + ALLOWED_MIB for found in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
