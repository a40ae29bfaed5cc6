"""A training step on all GPUs of a host by tensor parallelism: megafx and its peers, interleaved in one run.

    torchrun --nproc-per-node 2 benchmarks/train_tp.py                                  # Llama-8B shape, B=4 and 1
    torchrun --nproc-per-node 2 benchmarks/train_tp.py --model gpt --batch 8 --modes ideal,sp,sp-plain,megatron-sp
    torchrun --nproc-per-node 2 benchmarks/train_tp.py --modes sp,tp --profile          # where the time goes
    torchrun --nproc-per-node 2 benchmarks/train_tp.py --modes ideal,tp,sp,async-tp --losses 50 --plot step.png
    torchrun --nproc-per-node 1 benchmarks/train_tp.py --batch 2 --modes ideal,ideal-fp8,ideal-fp8-rowwise   # FP8 on one GPU
    torchrun --nproc-per-node 2 benchmarks/train_tp.py --tiny --modes sp,tp,dtensor     # two small layers on CPUs: does it run

Modes: `ideal` is the step of one GPU with megafx, divided by the number of GPUs. `tp`, `sp`, `auto`: layouts of megafx;
`-plain`: without overlap (tp_comm_overlap=False); `-graphs`: as CUDA graphs; `-compile`: through Inductor; `-b50`: with an
activation_memory_budget of 0.5; `-fp8`, `-fp8-rowwise`: products of all layers in FP8, the head's not; `-head`: the head's
too; `-store`: inputs of activations are kept in e4m3; `-seed1`: other initial weights; several, as in
`sp-plain-compile`. `dtensor`, `dtensor-compile`, `async-tp`: torch's parallelize_module with sequence parallelism and
loss_parallel, eager, with layers compiled, and with its async TP. `megatron`, `megatron-sp`: Megatron Core with SDPA, where
that is installed. `hf-tp`: transformers' own plan (llama).

bf16 parameters, fused AdamW, labels = input ids. All modes of a batch size are built first; then each round runs a few
steps of each, so that clocks that fall under load fall for all. A time is the median over rounds of the slowest rank. Peak: of
one mode's own tensors and its step; predicted: by megafx. Exposed: time in which communication alone runs, by the profiler.

Before that, each mode takes --losses steps on batches that come again, from the same weights (megafx and DTensor; with dropout
megafx alone) and seeds. `losses`: the largest relative difference of a step's loss from the first mode's, which rounding to
bf16 explains up to 2%; the run fails where a mode of megafx is farther off. --plot (with matplotlib): times, and these losses.

Each mode and each round is printed when it is done. A mode that fails prints its error, and the others go on; then the exit
status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import megafx

Step = Callable[[Tensor], Tensor]
BATCHES = 4  # that come again while losses are recorded
# Relative difference between two curves that rounding explains: benchmarks/bf16_curves.py, with warm-up.
NOISE = 2e-2


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv: int
    vocab: int
    seq: int
    dropout: float = 0.0


SHAPES = {
    "llama": Shape(8, 4096, 14336, 32, 8, 128256, 4096),
    "llama-1.5b": Shape(16, 2048, 8192, 32, 8, 128256, 4096),
    "gpt": Shape(12, 4096, 16384, 32, 32, 51200, 2048, 0.1),
}
TINY = {name: Shape(2, 64, 128, 4, 2 if "llama" in name else 4, 256, 32, s.dropout) for name, s in SHAPES.items()}
MODES = ("ideal", "tp", "tp-plain", "sp", "sp-plain", "auto", "dtensor-compile", "async-tp", "megatron", "megatron-sp")


# -- the plain models, as a user writes them


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.size, bias = s.hidden // s.heads, s.dropout > 0
        self.wq = nn.Linear(s.hidden, s.hidden, bias=bias)
        self.wk = nn.Linear(s.hidden, s.kv * self.size, bias=bias)
        self.wv = nn.Linear(s.hidden, s.kv * self.size, bias=bias)
        self.wo = nn.Linear(s.hidden, s.hidden, bias=bias)
        self.dropout = s.dropout

    def forward(self, x: Tensor, rope: Tensor | None) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (w(x).view(b, n, -1, self.size).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        if rope is not None:
            q, k = rotated(q, rope), rotated(k, rope)
        p = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(b, n, -1))


def rotated(x: Tensor, rope: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * rope[0] + torch.cat((-second, first), -1) * rope[1]


class LlamaBlock(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(s), nn.RMSNorm(s.hidden, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(s.hidden, eps=1e-5)
        self.w1, self.w3 = (nn.Linear(s.hidden, s.ffn, bias=False) for _ in range(2))
        self.w2 = nn.Linear(s.ffn, s.hidden, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class GPTBlock(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(s), nn.LayerNorm(s.hidden)
        self.ffn_norm = nn.LayerNorm(s.hidden)
        self.w1, self.w2 = nn.Linear(s.hidden, s.ffn), nn.Linear(s.ffn, s.hidden)
        self.drop1, self.drop2 = nn.Dropout(s.dropout), nn.Dropout(s.dropout)

    def forward(self, x: Tensor, rope: None) -> Tensor:
        x = x + self.drop1(self.attention(self.attention_norm(x), rope))
        return x + self.drop2(self.w2(F.gelu(self.w1(self.ffn_norm(x)), approximate="tanh")))


class Model(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(s.vocab, s.hidden)
        self.positions = nn.Embedding(s.seq, s.hidden) if s.dropout else None
        self.drop = nn.Dropout(s.dropout)
        self.layers = nn.ModuleList((GPTBlock if s.dropout else LlamaBlock)(s) for _ in range(s.layers))
        self.norm = nn.LayerNorm(s.hidden) if s.dropout else nn.RMSNorm(s.hidden, eps=1e-5)
        self.output = nn.Linear(s.hidden, s.vocab, bias=False)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        """places: cos and sin of the rotations, or position ids."""
        x = self.tokens(ids)
        if self.positions is not None:
            x = self.drop(x + self.positions(places))
        for layer in self.layers:
            x = layer(x, None if self.positions is not None else places)
        return self.output(self.norm(x))


class WithLoss(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        return F.cross_entropy(self.model(ids, places).flatten(0, 1).float(), ids.flatten())


def places_of(s: Shape, device: torch.device) -> Tensor:
    if s.dropout:
        return torch.arange(s.seq, device=device)
    size = s.hidden // s.heads
    rates = 5e5 ** (-torch.arange(0, size, 2, device=device).float() / size)
    angles = torch.outer(torch.arange(s.seq, device=device).float(), rates).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()]).bfloat16()


def plain(s: Shape, device: torch.device, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    with torch.device(device):
        return Model(s).bfloat16()


# -- modes: each gives (parameters' module, ids -> loss after backward)


def with_megafx(mode: str, s: Shape, batch: int, device: torch.device) -> tuple[nn.Module, Step]:
    layout, *flags = mode.split("-")
    one = layout == "ideal"
    config = megafx.Config(
        tensor_model_parallel_size=1 if one else dist.get_world_size(),
        sequence_parallel={"sp": True, "tp": False, "ideal": False, "auto": "auto"}[layout],
        tp_comm_overlap=False if "plain" in flags else "auto" if device.type == "cuda" else True,
        compile="compile" in flags,
        cuda_graphs="graphs" in flags,
        fp8="hybrid" if "fp8" in flags else None,
        fp8_recipe="rowwise" if "rowwise" in flags else "tensorwise",
        fp8_head="head" in flags,
        activation_func_fp8_input_store="store" in flags,
        first_last_layers_bf16=False,
        activation_memory_budget=next((int(f[1:]) / 100 for f in flags if re.fullmatch(r"b\d+", f)), None),
        micro_batch_size=batch,
        seq_length=s.seq,
    )
    places = places_of(s, device)
    ids = torch.zeros(batch, s.seq, dtype=torch.long, device=device)
    seed = next((int(f[4:]) for f in flags if f.startswith("seed")), 0)
    model = megafx.parallelize(WithLoss(plain(s, device, seed)), config, example_inputs=(ids, places))

    def step(ids: Tensor) -> Tensor:
        loss = model(ids, places)
        loss.backward()
        return loss

    return model, step


def with_dtensor(mode: str, s: Shape, batch: int, device: torch.device) -> tuple[nn.Module, Step]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    model, places = plain(s, device), places_of(s, device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    scatter = tp.RowwiseParallel(output_layouts=Shard(1))
    outer: dict[str, Any] = {
        "tokens": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": tp.SequenceParallel(),
        "output": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    if s.dropout:
        outer["positions"] = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
        outer["drop"] = tp.SequenceParallel()
    tp.parallelize_module(model, mesh, outer)
    whole = {"input_layouts": (Shard(1), None), "desired_input_layouts": (Replicate(), None)}
    inner: dict[str, Any] = {
        "attention_norm": tp.SequenceParallel(),
        "attention": tp.PrepareModuleInput(**whole),
        **{f"attention.{name}": tp.ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": scatter,
        "ffn_norm": tp.SequenceParallel(),
        "w1": tp.ColwiseParallel(input_layouts=Shard(1)),
        "w2": scatter,
    }
    inner |= {"drop1": tp.SequenceParallel(), "drop2": tp.SequenceParallel()} if s.dropout else {}
    inner |= {} if s.dropout else {"w3": tp.ColwiseParallel(input_layouts=Shard(1))}
    for layer in model.layers:
        tp.parallelize_module(layer, mesh, inner)
    if mode == "async-tp":
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        torch._inductor.config._micro_pipeline_tp = True
        enable_symm_mem_for_group(mesh.get_group().group_name)
    if mode != "dtensor":
        for layer in model.layers:
            layer.compile(fullgraph=True)

    def step(ids: Tensor) -> Tensor:
        with tp.loss_parallel():
            loss = F.cross_entropy(model(ids, places).flatten(0, 1).float(), ids.flatten())
            loss.backward()
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss

    return model, step


def with_megatron(
    mode: str, s: Shape, batch: int, device: torch.device, **recompute: Any
) -> tuple[nn.Module, Step]:  # recompute: further fields of TransformerConfig
    import megatron.core.transformer.transformer_block as blocks
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    ranks, sequence = dist.get_world_size(), mode.endswith("-sp")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(ranks, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(123)
    norm, base = ("LayerNorm", nn.LayerNorm) if s.dropout else ("RMSNorm", nn.RMSNorm)
    config = TransformerConfig(
        num_layers=s.layers, hidden_size=s.hidden, ffn_hidden_size=s.ffn, num_attention_heads=s.heads,
        num_query_groups=s.kv, normalization=norm, layernorm_epsilon=1e-5, gated_linear_unit=not s.dropout,
        activation_func=F.gelu if s.dropout else F.silu, bias_activation_fusion=True, add_bias_linear=s.dropout > 0,
        bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, tensor_model_parallel_size=ranks,
        sequence_parallel=sequence, hidden_dropout=s.dropout, attention_dropout=s.dropout, masked_softmax_fusion=False,
        attention_softmax_in_fp32=True, gradient_accumulation_fusion=False, cross_entropy_loss_fusion=True,
        apply_rope_fusion=False, bias_dropout_fusion=True, **recompute,
    )  # fmt: skip

    class Norm(base):  # type: ignore[misc,valid-type]  # WrappedTorchNorm refuses sequence parallelism: the same arithmetic
        def __init__(self, config: Any = None, hidden_size: int = 0, eps: float = 1e-5, **_: Any) -> None:
            super().__init__(hidden_size, eps=eps, device=device, dtype=torch.bfloat16)
            for parameter in self.parameters():
                parameter.sequence_parallel = True

    class Core(MegatronModule):  # type: ignore[misc]
        def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: Any, **_: Any) -> None:
            super().__init__(config=config)

        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> Tensor:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
            p = s.dropout if self.training else 0.0
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p, enable_gqa=True)
            return out.permute(2, 0, 1, 3).reshape(out.shape[2], out.shape[0], -1)

    spec = get_gpt_layer_local_spec(normalization=norm)
    spec.submodules.self_attention.submodules.core_attention = Core
    if sequence:
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
        blocks.LayerNormImpl = Norm
    model = GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=s.vocab, max_sequence_length=s.seq, parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute" if s.dropout else "rope", rotary_base=500000,
    )  # fmt: skip
    model = model.to(device).bfloat16()
    places = torch.arange(s.seq, device=device)

    def step(ids: Tensor) -> Tensor:
        loss = model(ids, places.expand(ids.shape[0], -1), None, labels=ids).mean()
        loss.backward()
        return loss

    return model, step


def with_transformers(mode: str, s: Shape, batch: int, device: torch.device) -> tuple[nn.Module, Step]:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        num_hidden_layers=s.layers, hidden_size=s.hidden, intermediate_size=s.ffn, num_attention_heads=s.heads,
        num_key_value_heads=s.kv, max_position_embeddings=s.seq, vocab_size=s.vocab, tie_word_embeddings=False,
        use_cache=False, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    apply_tensor_parallelism(model, init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",)))
    model.to_empty(device=device)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.fill_(1.0) if "norm" in name else local.normal_(0, 0.02)

    def step(ids: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss

    return model, step


def maker(mode: str) -> Callable[[str, Shape, int, torch.device], tuple[nn.Module, Step]]:
    for start, make in (("dtensor", with_dtensor), ("async", with_dtensor), ("megatron", with_megatron)):
        if mode.startswith(start):
            return make
    return with_transformers if mode == "hf-tp" else with_megafx


# -- measuring


@dataclass
class Run:
    """One mode of one batch size, ready to take steps."""

    mode: str
    step: Callable[[Tensor], Tensor]
    first: float  # seconds of the first step, compilation included
    peak: float  # GB
    predicted: float  # GB, by megafx; 0: by no one
    losses: list[float]  # of the steps before the first round
    times: list[float] = field(default_factory=list)  # ms of a step, one entry a round
    error: str = ""


def prepare(mode: str, s: Shape, batch: int, device: torch.device, steps: int) -> Run:
    """Build a mode and take a few steps; its losses follow those of the other modes."""
    cuda = device.type == "cuda"
    gc.collect()
    before = 0
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    torch._inductor.config._micro_pipeline_tp = False
    start = time.monotonic()
    model, backward = maker(mode)(mode, s, batch, device)
    sharded = [p for p in model.parameters() if hasattr(p, "to_local")]
    others = [p for p in model.parameters() if not hasattr(p, "to_local")]
    optimizers = [torch.optim.AdamW(group, lr=1e-4, fused=True) for group in (sharded, others) if group]

    def step(ids: Tensor) -> Tensor:
        loss = backward(ids)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    torch.manual_seed(1)  # of dropout
    found = [step(batch_of(s, batch, device, 0))]
    first = time.monotonic() - start
    found += [step(batch_of(s, batch, device, number % BATCHES)) for number in range(1, steps)]
    losses = [float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss) for loss in found]
    peak = (torch.cuda.max_memory_allocated() - before) / 1e9 if cuda else 0.0
    predicted = megafx.explain(model).memory("fused adamw").peak / 1e9 if maker(mode) is with_megafx else 0.0
    return Run(mode, step, first, peak, predicted, losses)


def batch_of(s: Shape, batch: int, device: torch.device, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, s.vocab, (batch, s.seq), generator=generator).to(device)


def everywhere(error: str, device: torch.device) -> str:
    """The error, or that another rank has one; '' where none has. A rank that fails inside of a collective is not rescued."""
    failed = torch.tensor([float(bool(error))], device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    return error or ("another rank failed" if float(failed) else "")


def measure(runs: list[Run], ids: Tensor, rounds: int, steps: int, say: Callable[..., None]) -> None:
    """Rounds of all modes in turn; the first round warms up. A mode that fails takes no part in further rounds."""
    for number in range(rounds + 1):
        for run in [r for r in runs if not r.error]:
            dist.barrier()
            try:
                elapsed, error = timed(run.step, ids, steps), ""
            except Exception as found:
                elapsed, error = float("inf"), f"{type(found).__name__}: {str(found)[:300]}"
            run.error = everywhere(error, ids.device)
            slowest = torch.tensor([elapsed], device=ids.device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if run.error:
                say(f"{run.mode}: {run.error}", flush=True)
            elif number:
                run.times.append(float(slowest))
        if number:
            found_so_far = ", ".join(f"{r.mode} {r.times[-1]:.1f}" for r in runs if r.times and not r.error)
            say(f"round {number}, ms: {found_so_far}", flush=True)


def timed(step: Step, ids: Tensor, steps: int) -> float:
    if ids.device.type != "cuda":
        start = time.monotonic()
        for _ in range(steps):
            step(ids)
        return (time.monotonic() - start) * 1000 / steps
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(steps):
        step(ids)
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / steps


def exposed(step: Step, ids: Tensor) -> dict[str, Any]:
    """One step by the profiler: ms of kernels, of communication, of communication alone, of idle GPU; the costliest kernels."""
    from torch.profiler import ProfilerActivity, profile

    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step(ids)
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    spans = [(e.time_range.start, e.time_range.end, e.name) for e in profiler.events() if e.device_type == cuda]
    communicates = lambda name: "nccl" in name.lower() or "PtoP" in name or "barrier" in name.lower()
    work = joined([(a, b) for a, b, name in spans if not communicates(name)])
    talk = joined([(a, b) for a, b, name in spans if communicates(name)])
    both = joined([(a, b) for a, b, _ in spans])
    length = lambda found: sum(b - a for a, b in found) / 1000
    totals: dict[str, list[float]] = {}
    for a, b, name in spans:
        totals.setdefault(name[:70], []).append((b - a) / 1000)
    costly = sorted(totals.items(), key=lambda item: -sum(item[1]))[:20]
    return {
        "step": (both[-1][1] - both[0][0]) / 1000,
        "work": length(work),
        "communication": length(talk),
        "exposed": length(both) - length(work),
        "idle": (both[-1][1] - both[0][0]) / 1000 - length(both),
        "kernels": [(name, len(found), round(sum(found), 2)) for name, found in costly],
    }


def joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of spans, as spans apart."""
    found: list[tuple[float, float]] = []
    for a, b in sorted(spans):
        if found and a <= found[-1][1]:
            found[-1] = found[-1][0], max(b, found[-1][1])
        else:
            found.append((a, b))
    return found


def clocks() -> str:
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return "; ".join(subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.strip().splitlines())
    return ""


def row(run: Run, ranks: int) -> dict[str, Any]:
    share = ranks if run.mode.startswith("ideal") else 1
    times = [t / share for t in run.times]
    middle = statistics.median(times) if times else float("nan")
    spread = (max(times) - min(times)) / middle * 100 if times else 0.0
    return {
        "mode": run.mode,
        "ms": middle,
        "spread": spread,
        "peak": run.peak,
        "predicted": run.predicted,
        "first": run.first,
        "losses": run.losses,
    }


def noise_of(mode: str) -> float:
    """The relative difference of a loss from bf16's that rounding explains. FP8: torchao's first 14 steps are 2.4% off."""
    return 5e-2 if "fp8" in mode else NOISE


def comparable(mode: str, s: Shape) -> bool:
    """Whether it starts from the weights that megafx starts from, and draws the same dropout."""
    same = maker(mode) is with_megafx and "seed" not in mode
    return same or (maker(mode) is with_dtensor and not s.dropout)


def apart(rows: list[dict[str, Any]], s: Shape) -> None:
    """Note how far each curve is from the first one that can be compared."""
    wanted = next((r["losses"] for r in rows if comparable(r["mode"], s)), [])
    for r in rows:
        pairs = zip(r["losses"], wanted, strict=True) if comparable(r["mode"], s) else ()
        r["apart"] = max((abs(a - b) / abs(b) for a, b in pairs), default=None)


def compared(rows: list[dict[str, Any]]) -> str:
    """How far losses of all ranks are from those of one (`ideal`), in bf16 and FP8; those of FP8 beside several seeds."""
    losses = {r["mode"]: r["losses"] for r in rows}
    far = lambda a, b: max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))
    lines = [
        f"{mode}: {far(found, losses[one]):.1e} from {one} at most, {far(found[-10:], losses[one][-10:]):.1e} in the last ten"
        for mode, found in losses.items()
        if mode.startswith("sp") and (one := mode.replace("sp", "ideal", 1)) in losses
    ]
    seeds = [found for mode, found in losses.items() if re.fullmatch(r"sp(-seed\d+)?", mode)]
    if len(seeds) > 1:
        spread = [max(each) - min(each) for each in zip(*seeds, strict=True)]
        for mode in (mode for mode in losses if mode.startswith("sp-fp8")):
            gaps = [a - b for a, b in zip(losses[mode], losses["sp"], strict=True)]
            inside = sum(abs(gap) <= width for gap, width in zip(gaps, spread, strict=True))
            lines.append(
                f"{mode}: within the spread of {len(seeds)} seeds of bf16 in {inside} of {len(gaps)} steps; mean of the last "
                f"ten {sum(gaps[-10:]) / 10:+.4f} from bf16, spread {sum(spread[-10:]) / 10:.4f}"
            )
    return "\n".join(lines)


def plot(found: list[dict[str, Any]], path: Path) -> str:
    """Times of all modes and their losses, a row a batch size. -> what was done."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(found), 2, figsize=(12, 4 * len(found)), squeeze=False)
    for (bars, curves), run in zip(axes, found, strict=True):
        rows = [r for r in run["rows"] if r["ms"] == r["ms"]]
        bars.barh([r["mode"] for r in rows], [r["ms"] for r in rows], color="tab:blue")
        bars.invert_yaxis()
        ideal = next((r["ms"] for r in rows if r["mode"] == "ideal"), None)
        if ideal:
            bars.axvline(ideal, color="black", linestyle="--", linewidth=1)
        bars.set_xlabel("ms a step")
        bars.set_title(f"{run['model']}, B={run['batch']}")
        for r in rows:
            curves.plot(r["losses"], label=r["mode"], linewidth=1)
        curves.set_xlabel("step")
        curves.set_title("loss")
        curves.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return f"plot: {path}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="llama")
    parser.add_argument("--layers", type=int, help="in place of the shape's own")
    parser.add_argument("--batch", default="4,1", help="batch sizes")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--losses", type=int, default=3, help="steps before the first round, whose losses are compared")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="an image of times and losses")
    args = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(None, device_id=device if device.type == "cuda" else None)
    s = (TINY if args.tiny else SHAPES)[args.model]
    s = replace(s, layers=args.layers or s.layers)
    say = print if rank == 0 else lambda *_, **__: None
    found: list[dict[str, Any]] = []
    wrong: list[str] = []
    failed: list[str] = []
    for batch in map(int, args.batch.split(",")):
        runs = []
        for mode in args.modes.split(","):
            run, error = None, ""
            try:
                run = prepare(mode, s, batch, device, args.losses)
            except Exception as caught:
                error = f"{type(caught).__name__}: {str(caught)[:300]}"
            error = everywhere(error, device)
            if error or run is None:
                failed.append(f"{mode}, B={batch}")
                say(f"{mode}: {error}", flush=True)
            else:
                runs.append(run)
                say(f"{mode}: first step {run.first:.0f} s, peak {run.peak:.1f} GB", flush=True)
            del run
        ids = batch_of(s, batch, device, 0)
        measure(runs, ids, args.rounds, args.steps, say)
        failed += [f"{run.mode}, B={batch}" for run in runs if run.error]
        rows = [row(run, ranks) for run in runs]
        apart(rows, s)
        ideal = next((r["ms"] for r in rows if r["mode"] == "ideal"), None)
        say(
            f"\n{args.model}, B={batch}, s={s.seq}, {ranks} ranks, {args.rounds} rounds of {args.steps} steps; {clocks()}"
        )
        say(
            f"| mode | ms a step | spread | of ideal | peak GB | predicted | first step, s | loss {args.losses} | losses |"
        )
        say("|---|---|---|---|---|---|---|---|---|")
        for r in rows:
            part = f"{r['ms'] / ideal:.3f}" if ideal else ""
            off = "" if r["apart"] is None else f"{r['apart']:.1e}"
            line = "| {mode} | {ms:.1f} | {spread:.1f}% | {part} | {peak:.2f} | {predicted:.2f} | {first:.0f} | "
            line += "{last:.4f} | {off} |"
            say(line.format(part=part, off=off, last=r["losses"][-1], **r))
        wrong += [
            r["mode"] for r in rows if maker(r["mode"]) is with_megafx and (r["apart"] or 0.0) > noise_of(r["mode"])
        ]
        say(compared(rows))
        for run, r in zip(runs, rows, strict=True):
            if args.profile and device.type == "cuda" and not run.error:
                r["profile"] = exposed(run.step, ids)
                say(f"{run.mode}: " + ", ".join(f"{k} {v:.1f}" for k, v in r["profile"].items() if k != "kernels"))
                for name, count, ms in r["profile"]["kernels"]:
                    say(f"    {ms:8.2f} {count:5} {name}")
        found.append(
            {"model": args.model, "batch": batch, "shape": vars(s) if hasattr(s, "__dict__") else {}, "rows": rows}
        )
        runs.clear()
        if args.json and rank == 0:  # after each batch size
            about = {"device": str(device), "torch": torch.__version__, "runs": found}
            args.json.write_text(json.dumps(about, indent=1))
    if args.plot and rank == 0:
        say(plot(found, args.plot))
    dist.destroy_process_group()
    if wrong:
        failed.append(f"losses differ by more than {NOISE:.0%} from those of the first mode: {', '.join(wrong)}")
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
