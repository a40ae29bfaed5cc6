"""Memory of a training step on one GPU: predicted beside measured at several budgets, and what less memory costs in time.

    python benchmarks/memory.py                        # both parts; about 4 minutes on an H200
    python benchmarks/memory.py --parts predicted      # five models, three budgets each
    python benchmarks/memory.py --parts traded         # beside torch.utils.checkpoint, torch.compile with its budget, Megatron
    python benchmarks/memory.py --parts fits           # a model that runs out of memory without a budget, and trains with "fit"
    python benchmarks/memory.py --parts traded --rows megafx,Megatron    # only rows whose name has one of these words
    python benchmarks/memory.py --tiny                 # small shapes, also without CUDA: does it run?

predicted: the highest bytes of forward and backward beside parameters and AdamW's moments, by `Compiled.memory()` and by
torch.cuda.max_memory_allocated(). traded: activations (what a step takes above what is held throughout), and the median time
of forward and backward. bf16; a model is captured and compiled once, and each budget is chosen on a copy. Megatron Core, if
it is installed, runs a model of the same shape (untied; attention is torch's, as its own kernels need Transformer Engine).

A row is printed as soon as it is measured. One that fails prints its error, and the others go on; then the exit status is 1.

fits: the process may have so much memory that seven tenths of what activations take fit in. Steps are those of a user, with
megafx.parallelize and AdamW.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import train_tp
import transformers

import megafx
from megafx.analysis.memory import MARGIN
from megafx.capture.export import capture_call
from megafx.compiler.compiled import Compiled
from megafx.compiler.pipeline import compile_program
from megafx.config import Config
from megafx.equivalence import input_values
from megafx.ir.program import VAL
from megafx.passes.recompute.choose_kept import choose_kept
from megafx.planner.context import CompileContext
from megafx.planner.hardware import Hardware

MIB = 2**20
BUDGETS: tuple[dict[str, Any], ...] = ({}, {"activation_memory_budget": 0.6}, {"activation_memory_budget": 0.3})
TRADED: tuple[dict[str, Any], ...] = (
    {},
    {"activation_memory_budget": 0.8},
    {"activation_memory_budget": 0.6},
    {"activation_memory_budget": 0.4},
    {"recompute_granularity": "full"},
    {"cpu_offloading": True, "activation_memory_budget": 0.6},
    {"cpu_offloading": True, "activation_memory_budget": 0.5},
    {"cpu_offloading": True, "activation_memory_budget": 0.4},
    {"cpu_offloading": True},
)
MEGATRON: tuple[dict[str, Any], ...] = (
    {},
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
)
# layers, hidden, heads, key-value heads, ffn, vocabulary, batch, seq
SHAPES: dict[str, tuple[int, ...]] = {
    "gpt2-medium": (24, 1024, 16, 16, 4096, 50257, 16, 1024),
    "llama-1.5b": (16, 2048, 32, 8, 8192, 128256, 4, 2048),
    "llama-8b-8-layers": (8, 4096, 32, 8, 14336, 128256, 2, 4096),
    "t5-base": (12, 768, 12, 12, 3072, 32128, 16, 512),
    "mixtral-like": (4, 1024, 16, 8, 3584, 32000, 4, 1024),
}


def shape_of(name: str, tiny: bool) -> tuple[int, ...]:
    _, _, heads, kv, *_ = found = SHAPES[name]
    return (2, 64, 4, 2 if kv < heads else 4, 128, 128, 2, 32) if tiny else found


def build(name: str, tiny: bool, device: torch.device) -> tuple[Any, dict[str, torch.Tensor]]:
    """(model, a call of it)"""
    layers, hidden, heads, kv, ffn, vocab, batch, seq = shape_of(name, tiny)
    common = {"vocab_size": vocab, "use_cache": False}
    stack = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": ffn}
    stack |= {"num_key_value_heads": kv, "max_position_embeddings": seq}
    made: dict[str, Callable[[], Any]] = {
        "gpt2-medium": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=layers, n_embd=hidden, n_head=heads, n_positions=seq, **common)
        ),
        "t5-base": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                num_layers=layers,
                d_model=hidden,
                num_heads=heads,
                d_kv=hidden // heads,
                d_ff=ffn,
                decoder_start_token_id=0,
                pad_token_id=0,
                **common,
            )
        ),
        "mixtral-like": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**stack, **common)),
    }
    torch.manual_seed(0)
    with torch.device(device):
        llama = lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**stack, **common))
        model = made.get(name, llama)().to(torch.bfloat16).train()
    ids = torch.randint(1, vocab, (batch, seq), generator=torch.Generator().manual_seed(0)).to(device)
    return model, {"input_ids": ids, "labels": ids.clone()}


def compiled(model: Any, call: dict[str, torch.Tensor], hardware: str) -> Compiled:
    program = capture_call(model, (), call)
    context = CompileContext(
        Config(), 1, Hardware.load(hardware), wants_grad=lambda spec: spec.kind == "param", at_call=True
    )
    return compile_program(program, context)


def chosen(made: Compiled, options: dict[str, Any]) -> Compiled:
    program, context = made.program.copy(), copy.copy(made.context)
    context.config = context.config.replace(**options)
    choose_kept(program, context)
    return Compiled(program, context)


def place_joined(model: Any, made: Compiled) -> None:
    """Parameters that the graph reads as one follow each other in memory, as `megafx.parallelize` lays them."""
    parts, params = made.executable().parts, dict(model.named_parameters())
    names = [spec.name for spec in made.program.inputs]
    for indices in parts.joins:
        group = [params[names[i]] for i in indices]
        flat = torch.cat([p.detach().flatten() for p in group])
        for p, part in zip(group, flat.split([p.numel() for p in group]), strict=True):
            p.data = part.view(p.shape)


class Step:
    """Forward and backward of one choice; gradients are given up at the next."""

    def __init__(self, made: Compiled, model: Any, call: dict[str, torch.Tensor], device: torch.device) -> None:
        self.executable = made.executable()
        values = input_values(made.program, model, (), call)
        nodes = made.program.input_nodes()
        # The model's own parameters: copies would be measured too, and would not lie as `place_joined` laid them.
        self.inputs = [values[spec.name].detach().to(device) for _, spec in nodes if spec.kind != "tangent"]
        self.tangents = [
            torch.ones((), dtype=n.meta[VAL].dtype, device=device) for n, i in nodes if i.kind == "tangent"
        ]

    def __call__(self) -> Any:
        outputs, kept = self.executable.forward(self.inputs)
        assert kept is not None
        return outputs[0], self.executable.backward(kept, list(self.tangents))


def timed(step: Callable[[], Any], steps: int = 5) -> tuple[float, int]:
    """(median ms, highest bytes allocated) after a first run; 0 bytes without CUDA."""
    cuda = torch.cuda.is_available()
    wait = torch.cuda.synchronize if cuda else lambda: None
    step()
    wait()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[steps // 2], torch.cuda.max_memory_allocated() if cuda else 0


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


failed: list[str] = []


@contextlib.contextmanager
def goes_on(what: str) -> Iterator[None]:
    """An error ends this row or model only."""
    try:
        yield
    except Exception as error:
        failed.append(what)
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}"
        print(f"{what}: {type(error).__name__}: {str(error)[:300]} ({where})", flush=True)


def text(options: dict[str, Any]) -> str:
    return ", ".join(f"{k.removeprefix('activation_memory_')} {v}" for k, v in options.items()) or "all kept"


def predicted(names: list[str], tiny: bool, cuda: bool, hardware: str) -> None:
    print(f"{'model':<20}{'budget':<16}{'kept MiB':>10}{'predicted':>12}{'measured':>12}{'off':>8}{'ms':>10}")
    for name in names:
        with goes_on(name):
            _predicted(name, tiny, cuda, hardware)
        if cuda:
            free()


def _predicted(name: str, tiny: bool, cuda: bool, hardware: str) -> None:
    start = time.perf_counter()
    model, call = build(name, tiny, torch.device("cuda" if cuda else "meta"))
    made = compiled(model, call, hardware)
    seconds = time.perf_counter() - start
    moments: list[torch.Tensor] = []
    if cuda:
        place_joined(model, made)
        moments = [torch.zeros_like(p) for p in model.parameters() for _ in range(2)]
    for options in BUDGETS:
        choice = chosen(made, options)
        found = choice.memory()
        graphs = max(v for k, v in found.peaks.items() if k != "optimizer step")
        row = f"{name:<20}{text(options):<16}{found.saved / MIB:>10.1f}{graphs / MIB:>12.1f}"
        if cuda:
            free()
            ms, peak = timed(Step(choice, model, call, torch.device("cuda")), 3)
            row += f"{peak / MIB:>12.1f}{100 * (graphs / peak - 1):>7.1f}%{ms:>10.1f}"
        print(row, flush=True)
    print(f"{'':<20}captured and compiled in {seconds:.0f} s", flush=True)
    del model, made, moments
    if cuda:
        free()


def traded(names: list[str], tiny: bool, hardware: str, rows: list[str]) -> None:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    print(f"{'model':<20}{'mode':<44}{'activations MiB':>16}{'ms':>10}{'memory':>9}{'time':>9}")
    for name in names:
        with goes_on(name):
            Traded(name, tiny, device, hardware, rows).run()
        free()


class Traded:
    """The rows of one model. Memory and time of a row are compared with those of the first row of its kind."""

    def __init__(self, name: str, tiny: bool, device: torch.device, hardware: str, rows: list[str]) -> None:
        self.name, self.tiny, self.device, self.hardware, self.rows = name, tiny, device, hardware, rows
        self.first: tuple[int, float] | None = None

    def run(self) -> None:
        self.one_model()
        free()
        self.first = None
        if self.wants("Megatron"):
            self.megatron()

    def one_model(self) -> None:
        """All rows but Megatron's; their weights are freed behind."""
        model, call = build(self.name, self.tiny, self.device)

        def eager(model: Any) -> Callable[[], None]:
            def step() -> None:
                model(**call).loss.backward()
                for p in model.parameters():
                    p.grad = None

            return step

        def checkpointed() -> Callable[[], None]:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return eager(model)

        def inductor(budget: float) -> Callable[[], None]:
            torch._dynamo.reset()
            torch._functorch.config.activation_memory_budget = budget
            return eager(torch.compile(model))

        self.show("eager", lambda: eager(model))
        self.show("eager, torch.utils.checkpoint of each layer", checkpointed)
        model.gradient_checkpointing_disable()
        self.first = None
        for budget in (1.0, 0.5):
            self.show(f"torch.compile, its budget {budget}", lambda budget=budget: inductor(budget))
        torch._dynamo.reset()
        self.first = None
        if self.wants("megafx"):
            made = compiled(model, call, self.hardware)
            place_joined(model, made)
            for options in TRADED:
                step = lambda options=options: Step(chosen(made, options), model, call, self.device)
                self.show(f"megafx, {text(options)}", step)

    def wants(self, mode: str) -> bool:
        return not self.rows or any(word.lower() in mode.lower() for word in self.rows)

    def show(self, mode: str, make: Callable[[], Callable[[], Any]]) -> None:
        """One row; an error is shown in its place."""
        if not self.wants(mode):
            return
        with goes_on(f"{self.name}, {mode}"):
            free()
            step = make()
            free()
            standing = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
            ms, peak = timed(step)
            held = peak - standing
            self.first = self.first or (held, ms)
            than = f"{100 * (held / max(self.first[0], 1) - 1):>8.0f}%{100 * (ms / self.first[1] - 1):>8.1f}%"
            print(f"{self.name:<20}{mode:<44}{held / MIB:>16.1f}{ms:>10.1f}{than}", flush=True)

    def megatron(self) -> None:
        """Rows of Megatron Core; 'not installed' where that is so."""
        try:
            import megatron.core  # noqa: F401
        except ImportError:
            print(f"{self.name:<20}Megatron Core is not installed", flush=True)
            return
        layers, hidden, heads, kv, ffn, vocab, batch, seq = shape_of(self.name, self.tiny)
        dropout = 0.1 if self.name.startswith("gpt") else 0.0
        shape = train_tp.Shape(layers, hidden, ffn, heads, kv, vocab, seq, dropout)
        if not dist.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            given = {"device_id": self.device} if self.device.type == "cuda" else {}
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **given)

        def made(options: dict[str, Any]) -> Callable[[], None]:
            model, step = train_tp.with_megatron("megatron", shape, batch, self.device, **options)
            ids = torch.randint(1, vocab, (batch, seq), device=self.device)

            def run() -> None:
                step(ids)
                for p in model.parameters():
                    p.grad = None

            return run

        for options in MEGATRON:
            mode = f"Megatron Core, {options.get('recompute_granularity', 'all kept')}"
            self.show(mode, lambda options=options: made(options))


def fits(names: list[str], tiny: bool, hardware: str) -> None:
    """Steps with AdamW in less memory than they take without a budget."""
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.get_device_properties(device).total_memory
    for name in names:
        model, call = build(name, tiny, torch.device("meta"))
        found = compiled(model, call, hardware).memory()
        held = found.standing + found.gradients
        limit = min((held + 0.7 * (found.peak - held)) / (1 - MARGIN), 0.97 * found.peak)
        print(
            f"{name}: a step takes {found.peak / MIB:.0f} MiB (predicted), the process may have {limit / MIB:.0f}",
            flush=True,
        )
        torch.cuda.set_per_process_memory_fraction(limit / total, device)
        for budget in (None, "fit"):
            free()
            torch.cuda.reset_peak_memory_stats()
            print(f"  activation_memory_budget={budget!r}: {trained(name, tiny, device, hardware, budget)}", flush=True)
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def trained(name: str, tiny: bool, device: torch.device, hardware: str, budget: str | None) -> str:
    """What three steps came to."""
    model, call = build(name, tiny, device)
    config = Config(tensor_model_parallel_size=1, activation_memory_budget=budget, hardware=hardware)
    model = megafx.parallelize(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    try:
        for _ in range(3):
            loss = model(**call).loss
            loss.backward()
            optimizer.step(), optimizer.zero_grad()
            losses.append(float(loss))
    except torch.cuda.OutOfMemoryError:
        return f"out of memory in step {len(losses) + 1}"
    peak = torch.cuda.max_memory_allocated() / MIB
    kept = model.megafx.settled.last.program.recomputed
    return f"trains (losses {', '.join(f'{x:.3f}' for x in losses)}), at most {peak:.0f} MiB; kept for backward: {kept}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="predicted,traded,fits")
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--fits-models", default="gpt2-medium")
    parser.add_argument("--traded-models", default="llama-8b-8-layers,gpt2-medium")
    parser.add_argument("--rows", default="", help="words, of which the name of a row of `traded` has to have one")
    parser.add_argument("--hardware", default="h200-nvlink")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    where = torch.cuda.get_device_name() if cuda else "no CUDA: no memory is measured"
    print(f"{where}, torch {torch.__version__}, transformers {transformers.__version__}")
    if "predicted" in args.parts:
        predicted(args.models.split(","), args.tiny, cuda, args.hardware)
    if "traded" in args.parts and (cuda or args.tiny):
        traded(args.traded_models.split(","), args.tiny, args.hardware, [w for w in args.rows.split(",") if w])
    if "fits" in args.parts and cuda:
        fits(args.fits_models.split(","), args.tiny, args.hardware)
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
