"""Time from the start of the process to the end of the second step, stage by stage, for Hugging Face's Llama-3-8B.

torchrun --nproc-per-node 2 benchmarks/start.py                 # on GPUs: imports, model, parallelize, three steps
torchrun --nproc-per-node 2 benchmarks/start.py --cpu           # on CPUs: as many layers, of width 64, 64 tokens
python benchmarks/start.py --plan --ranks 2                     # no GPU, no weights: imports, plan, compile for 2 ranks
python benchmarks/start.py --plan --model 405b --ranks 8        # of 405B

A cold start has empty caches (MEGAFX_CACHE=$(mktemp -d) TRITON_CACHE_DIR=$(mktemp -d), exported for all ranks); the next start
with these folders is a warm one. MEGAFX_DEBUG=1 tells what each pass takes. Seconds are of the clock and (in brackets) of the
process's CPU; rank 0 prints.
"""

import time

CLOCK, CPU = time.perf_counter(), time.process_time()

import argparse  # noqa: E402  the clock starts first
import contextlib  # noqa: E402
import os  # noqa: E402
from collections.abc import Iterator  # noqa: E402

SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "405b": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}


@contextlib.contextmanager
def timed(name: str) -> Iterator[None]:
    clock, cpu = time.perf_counter(), time.process_time()
    yield
    said(name, time.perf_counter() - clock, time.process_time() - cpu)


def said(name: str, clock: float, cpu: float) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"{name:<28}{clock:7.1f} s ({cpu:.1f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="plan and compile on meta, without ranks")
    parser.add_argument("--cpu", action="store_true", help="a narrow model on gloo ranks: what a start takes of a CPU")
    parser.add_argument("--model", choices=[*SHAPES], default="8b")
    parser.add_argument("--layers", type=int, help="default: all of the model's")
    parser.add_argument("--ranks", type=int, default=2, help="with --plan")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=2048)
    options = parser.parse_args()
    with timed("import torch"):
        import torch
    with timed("import transformers' Llama"):
        from transformers import LlamaConfig, LlamaForCausalLM
    with timed("import megafx"):
        import megafx

        _ = megafx.parallelize  # names are imported when they are read
    layers = {"num_hidden_layers": options.layers} if options.layers else {}
    shape = SHAPES[options.model] | {"num_key_value_heads": 8, "vocab_size": 128256} | layers
    if options.cpu:
        shape |= {"hidden_size": 64, "intermediate_size": 224, "vocab_size": 512}
        shape |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(**shape, max_position_embeddings=8192)
    if options.plan:
        with timed("model on meta"), torch.device("meta"):
            model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        chosen = megafx.Config(tensor_model_parallel_size=options.ranks)
        with timed("megafx.plan"):
            megafx.plan(model, chosen)
        with timed("megafx.predict_memory"):  # all passes up to a rank's graph
            megafx.predict_memory(model, chosen)
    else:
        device = torch.device("cpu") if options.cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if options.cpu:
            torch.distributed.init_process_group("gloo")
        else:
            torch.cuda.set_device(device)
            torch.distributed.init_process_group("nccl", device_id=device)
        with timed("model"), torch.device(device):
            torch.manual_seed(0)
            model = LlamaForCausalLM(config).to(torch.float32 if options.cpu else torch.bfloat16).train()
        ids = torch.randint(config.vocab_size, (options.batch, 64 if options.cpu else options.seq), device=device)
        call = {"input_ids": ids, "labels": ids}
        chosen = megafx.Config(tensor_model_parallel_size=torch.distributed.get_world_size())
        with timed("megafx.parallelize"):
            model = megafx.parallelize(model, chosen, example_inputs=call)
        for step in range(1, 4):
            with timed(f"step {step}"):
                model(**call).loss.backward()
                model.zero_grad()
                if not options.cpu:
                    torch.cuda.synchronize()
        torch.distributed.destroy_process_group()
    said("in all", time.perf_counter() - CLOCK, time.process_time() - CPU)


if __name__ == "__main__":
    main()
