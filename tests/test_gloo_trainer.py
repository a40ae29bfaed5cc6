"""The Hugging Face Trainer on two tensor-parallel gloo ranks logs what it logs for the eager model; its checkpoint loads.

Run as a script, this file is one of the ranks.
"""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import torch

T = 2


@pytest.mark.dist
@pytest.mark.slow
def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    eager = subprocess.run([sys.executable, __file__, str(tmp_path)], env=common, capture_output=True, timeout=240)
    texts = processes.run_ranks(__file__, tmp_path, T, timeout=240, environment=common)
    assert eager.returncode == 0, eager.stderr.decode()
    logged = [
        eval(next(x for x in text.splitlines() if x.startswith("[("))) for text in (eager.stdout.decode(), texts[0])
    ]
    assert len(logged[0]) == 3
    for mine, theirs in zip(*logged, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def main(folder: Path) -> None:
    import accelerate.parallelism_config
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from megafx.api import parallelize
    from megafx.state import full_state_dict

    # accelerate knows tensor parallelism on accelerators only, and checks nothing else here
    accelerate.parallelism_config.ParallelismConfig._validate_accelerator = lambda self, accelerator: None
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    eager = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=1,
            num_attention_heads=3,
            num_key_value_heads=3,
            max_position_embeddings=32,
        )
    )
    model = parallelize(copy.deepcopy(eager)) if world > 1 else eager
    generator = torch.Generator().manual_seed(3)
    data = [{"input_ids": (ids := torch.randint(0, 61, (12,), generator=generator)), "labels": ids} for _ in range(24)]
    arguments = TrainingArguments(
        output_dir=str(folder / "runs"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=3,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    print([(h["loss"], float(h["grad_norm"])) for h in trainer.state.log_history if "loss" in h])
    if world > 1:
        trainer.save_model(str(folder / "saved"))
        dist.barrier()
        loaded = LlamaForCausalLM.from_pretrained(folder / "saved").state_dict()
        assert all(torch.equal(loaded[n], v) for n, v in full_state_dict(model).items())
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
