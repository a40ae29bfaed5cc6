"""Covers: megafx/__init__.py. What a start imports: nothing that it does not need."""

import resource
import subprocess
import sys

import pytest

# Stages of a start, and whether each of HEAVY is imported after it
STAGES = """
import sys
heavy = sys.argv[1].split()
def shown(stage):
    print(stage, *(name for name in heavy if name in sys.modules))

import time
begin = time.process_time()
import megafx
dir(megafx), megafx.__all__, megafx.Config(), megafx.MegafxError
assert time.process_time() - begin < 0.3
shown("import")
assert "torch" not in sys.modules
megafx.parallelize
shown("front")

import os
import torch
from megafx.runtime.program_cache.cache_key import watching
os.environ["NOBODY_READS_IT"], read = "1", {}
with watching(read):
    megafx.parallelize(torch.nn.LayerNorm(4), example_inputs=torch.ones(2, 4))
assert "NOBODY_READS_IT" not in read  # another start may have another value there
model = megafx.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)), example_inputs=torch.ones(2, 4))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
shown("step")

from megafx import *
import pickle, pydoc
assert not {*megafx.__all__} - globals().keys()
text = pydoc.render_doc(megafx, renderer=pydoc.plaintext)
assert all(name in text for name in megafx.__all__)
assert pickle.loads(pickle.dumps([megafx.parallelize, Config()])) == [parallelize, Config()]
"""
ONLY_SOME_NEED = "scipy rich transformers torch._inductor.compile_fx torch.distributed.checkpoint"
TORCH_NEEDS = "torch._dynamo torch._inductor torch.distributed.fsdp triton networkx"  # in optimizers and torch.export
LATE = {  # stage -> what has not been imported after it
    "import": f"{ONLY_SOME_NEED} {TORCH_NEEDS} torch numpy sympy",
    "front": f"{ONLY_SOME_NEED} {TORCH_NEEDS}",
    "step": ONLY_SOME_NEED,
}


def test_a_start_imports_what_it_needs():
    command = [sys.executable, "-c", STAGES, LATE["import"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    found = {stage: {*names} for stage, *names in map(str.split, done.stdout.splitlines())}
    assert found.keys() == LATE.keys()
    early = {stage: found[stage] & {*late.split()} for stage, late in LATE.items()}
    assert not any(early.values()), early
    assert {"torch", "sympy"} < found["front"] and "torch._dynamo" in found["step"]  # else nothing would be found


@pytest.mark.parametrize("command", ["--help", "--version", "plna", "plan --help"])
def test_the_command_answers_without_torch(command):
    """A quarter of a second of CPU time; torch alone takes two."""
    code = (
        "import sys; from megafx.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'rich'} & sys.modules.keys()"
    )
    begin = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", code, *command.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "megafx" in done.stdout + done.stderr, done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begin < 1
