"""Train a byte-level GPT, tensor-parallel, on the source code of Python's standard library.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py           # CPU (gloo), or GPUs (NCCL) where there are any
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --dtype bfloat16 --compile
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --dp 2    # the batch cut over two groups of two ranks
    python examples/train_gpt.py                                             # one process, no process group
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py --save runs/gpt --resume

It first compares loss and every gradient with plain eager (dropout off), prints the plan, trains with dropout on, and then
trains the same model in one process (`tensor_model_parallel_size=1`) to show that the two loss curves are one.
"""

from __future__ import annotations

import argparse
import copy
import os
import sysconfig
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from models.gpt import GPT, GPTConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor

import megafx

# Largest relative difference that rounding may make, by dtype: (loss and gradients of one step, losses of the curve).
# A curve's differences grow with the steps, as AdamW divides small gradients by their own size; far more so without the
# warm-up of the learning rate (benchmarks/RESULTS.md).
TOLERANCE = {"float64": (1e-10, 1e-7), "float32": (1e-4, 1e-3), "bfloat16": (5e-2, 5e-2)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--embd", type=int, default=128)
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks; each takes its part of --batch")
    parser.add_argument("--data-parallel", choices=("ddp", "zero1", "fsdp"), default="ddp", help="what they shard")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=10, help="steps until the learning rate is reached")
    parser.add_argument("--sequence-parallel", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument("--autocast", action="store_true", help="bfloat16 products on parameters of --dtype")
    parser.add_argument("--fp8", choices=("e4m3", "hybrid"), help="products of inner layers in FP8 (docs/fp8.md)")
    parser.add_argument("--compile", action="store_true", help="lower the graphs through Inductor")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--save", metavar="FOLDER", help="checkpoints of the parallel run, of every --save-every steps")
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint, of any number of ranks"
    )
    return parser.parse_args()


def standard_library(most_bytes: int = 4_000_000) -> Tensor:
    """Python's own .py files one after another, as bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    text = bytearray()
    for file in sorted(root.rglob("*.py")):
        if not skipped & set(file.relative_to(root).parts):
            text += file.read_bytes()
        if len(text) >= most_bytes:
            break
    return torch.frombuffer(text[:most_bytes], dtype=torch.uint8).long()


def batches(data: Tensor, args: argparse.Namespace, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows and the same windows one byte later: the same sequence of batches on every rank."""
    generator = torch.Generator().manual_seed(args.seed)
    while True:
        starts = torch.randint(len(data) - args.seq - 1, (args.batch,), generator=generator)
        windows = torch.stack([data[start : start + args.seq + 1] for start in starts]).to(device)
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def rows_of(x: Tensor, config: megafx.Config) -> Tensor:
    """This data-parallel rank's part of a batch."""
    parts, tensor_ranks = config.data_parallel_size or 1, config.tensor_model_parallel_size or 1
    return x.chunk(parts)[dist.get_rank() // tensor_ranks] if parts > 1 else x


def new_model(args: argparse.Namespace, device: torch.device, dropout: float, vocab_size: int = 256) -> GPT:
    torch.manual_seed(args.seed)
    shape = {"n_layer": args.layers, "n_head": args.heads, "n_embd": args.embd, "block_size": args.seq}
    return GPT(GPTConfig(vocab_size, dropout=dropout, **shape)).to(device, getattr(torch, args.dtype))


def autocast(args: argparse.Namespace, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=args.autocast)


def tolerance(args: argparse.Namespace) -> tuple[float, float]:
    # in FP8, sums of another order round to other numbers; in float64 hardly ever
    rounds = args.autocast or (args.fp8 and args.dtype != "float64")
    return TOLERANCE["bfloat16" if rounds else args.dtype]


def relative_error(found: Tensor, expected: Tensor) -> float:
    scale = expected.double().norm().clamp(min=1e-12)
    return float((found.double() - expected.double()).norm() / scale)


def check_against_eager(args, config, batch, device, console) -> None:  # type: ignore[no-untyped-def]
    """One step without dropout: the loss and every gradient are those of the plain model."""
    eager = new_model(args, device, dropout=0.0)
    with autocast(args, device):
        mine = tuple(rows_of(x, config) for x in batch)
        parallel = megafx.parallelize(copy.deepcopy(eager), config, example_inputs=mine)
        _, expected = eager(*batch)
        _, loss = parallel(*mine)
    expected.backward()
    loss.backward()
    gradients = megafx.full_gradients(parallel)
    errors = {name: relative_error(gradients[name], p.grad) for name, p in eager.named_parameters()}
    worst = max(errors, key=lambda name: errors[name])
    console.print(
        f"dropout off: loss {loss.item():.6f}, eager {expected.item():.6f}; "
        f"largest gradient error {errors[worst]:.1e} ({worst}, of {len(errors)} parameters)"
    )
    allowed = tolerance(args)[0]
    assert abs(loss.item() - expected.item()) <= allowed * abs(expected.item()), "the loss is not eager's"
    wrong = [name for name, error in errors.items() if not error <= allowed]  # not a number is wrong too
    assert not wrong, f"the gradients of {', '.join(wrong)} are not eager's"


def train(  # type: ignore[no-untyped-def]
    model, data, args, config, device, title: str, console: Console, comm_bytes: int, folder: str | None = None
) -> list[float]:
    """The user's own loop: nothing in it knows that the model is parallel. folder: where checkpoints are."""
    # fused where there is a GPU: otherwise torch picks one implementation for plain tensors and another for DTensors, and in
    # bf16 they round differently
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, fused=device.type == "cuda")
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / args.warmup, total_iters=args.warmup)
    torch.manual_seed(args.seed)  # the dropout masks of every step follow from this, at any degree
    model.train()
    losses: list[float] = []
    if folder and args.resume:
        loaded = megafx.load_checkpoint(folder, model, optimizer, extra={"warmup": warmup}, missing_ok=True)
        losses = loaded.extra["losses"] if loaded is not None else []
    first = len(losses)
    columns = (TextColumn(title), BarColumn(bar_width=16), MofNCompleteColumn(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=args.steps, completed=first, state="")
        start = time.perf_counter()
        for step, (inputs, targets) in enumerate(islice(batches(data, args, device), args.steps)):
            if step < first:  # a batch that was trained on before the checkpoint
                continue
            with autocast(args, device):
                _, loss = model(rows_of(inputs, config), rows_of(targets, config))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            warmup.step()
            losses.append(loss.item())
            if folder and (step + 1) % args.save_every == 0:
                extra = {"warmup": warmup, "losses": losses}
                megafx.save_checkpoint(folder, model, optimizer, step=step + 1, extra=extra, keep=2)
            rate = (step + 1 - first) * inputs.numel() / (time.perf_counter() - start)
            state = f"loss {losses[-1]:.4f}  {rate:,.0f} tokens/s  {comm_bytes / 1e6:.2f} MB/step"
            progress.update(task, advance=1, state=state)
    return losses


def show_curves(parallel: list[float], single: list[float], ranks: int, console: Console) -> None:
    table = Table(title="loss, step by step")
    for column in ("step", f"{ranks} ranks", "one process", "difference"):
        table.add_column(column, justify="right")
    shown = sorted({*range(0, len(parallel), max(1, len(parallel) // 12)), len(parallel) - 1})
    for step in shown:
        a, b = parallel[step], single[step]
        table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{a - b:+.1e}")
    console.print(table)


def main() -> None:
    args = arguments()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):  # a GPU for each rank of this machine
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    console = Console(quiet=rank != 0)
    sequence_parallel = {"auto": "auto", "on": True, "off": False}[args.sequence_parallel]
    config = megafx.Config(
        tensor_model_parallel_size=ranks // args.dp,
        data_parallel_size=args.dp,
        data_parallel=args.data_parallel,
        sequence_parallel=sequence_parallel,
        micro_batch_size=args.batch,
        seq_length=args.seq,
        compile=args.compile,
        fp8=args.fp8,
    )
    data = standard_library()
    first = next(batches(data, args, device))
    products = ", bfloat16 products" if args.autocast else ""
    console.print(f"{len(data):,} bytes of Python's standard library; {ranks} x {device.type}, {args.dtype}{products}")

    check_against_eager(args, config.replace(fp8=None), first, device, console)  # eager has no products in FP8

    with autocast(args, device):  # as the steps will be: it is planned, and compiled, for them
        model = megafx.parallelize(new_model(args, device, args.dropout), config, example_inputs=first)
    report = megafx.explain(model)
    sent_per_step = sum(count_and_bytes[1] for count_and_bytes in report.collectives().values())
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    parallel = train(model, data, args, config, device, f"{ranks} ranks", console, sent_per_step, args.save)

    if rank == 0:  # the same run in this process alone; the other ranks wait
        alone = config.replace(tensor_model_parallel_size=1, data_parallel_size=1)
        model = megafx.parallelize(new_model(args, device, args.dropout), alone, example_inputs=first)
        single = train(model, data, args, alone, device, "one process", console, 0)
        show_curves(parallel, single, ranks, console)
        allowed = tolerance(args)[1]
        differences = [abs(a - b) / abs(b) for a, b in zip(parallel, single, strict=True)]
        worst = max(differences)
        tenth = max(1, args.steps // 10)
        fell = sum(parallel[:tenth]) / tenth, sum(parallel[-tenth:]) / tenth
        console.print(f"the curves differ by at most {worst:.1e} (allowed: {allowed:.0e})")
        console.print(f"mean loss of the first {tenth} steps {fell[0]:.4f}, of the last {fell[1]:.4f}")
        assert all(d <= allowed for d in differences), "the tensor-parallel curve is not the one-process curve"
        assert fell[1] < fell[0], "the loss did not fall"
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
