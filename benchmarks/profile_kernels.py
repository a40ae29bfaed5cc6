"""Cases of benchmarks/kernels.py under a profiler: forward and backward once unseen, to compile, and once seen. Needs CUDA.

    ncu --clock-control none --profile-from-start off --section SpeedOfLight --section SchedulerStats --section Occupancy \\
        --section ComputeWorkloadAnalysis python benchmarks/profile_kernels.py "attention dropout [4,32,2048,128]"
"""

from __future__ import annotations

import importlib
import sys

import torch
from kernel_cases.measure import Runner
from kernels import FAMILIES


def main(names: list[str]) -> int:
    cases = {c.name: c for family in FAMILIES for c in importlib.import_module(f"kernel_cases.{family}").cases()}
    if not names or (unknown := [n for n in names if n not in cases]):
        print(f"no case {', '.join(unknown) if names else 'given'}; there are: {', '.join(cases)}", file=sys.stderr)
        return 1
    runners = [Runner(cases[n], cases[n].ours) for n in names]
    for runner in runners:
        runner.both(0)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for runner in runners:
        runner.both(1)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
