"""The table of the model matrix: for each architecture what was exact, sharded, fused, and how long it took.

python tests/models/table.py [--jobs 2] [--some] [--write docs/models.md] [llama gpt2 ...]
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# pytest's `pythonpath` has them too
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support" / "small_models"))

from catalogue import Architecture, rows
from hf_plans import compare
from matrix import Cell, Result, Runner, all_cells, some_cells

from megafx.ir.facts import ATTENTION
from megafx.ir.nodes import op_name
from megafx.ir.program import VAL, Program
from megafx.planner.context import CompileContext
from megafx.planner.cost import cost_kind, op_flops
from megafx.planner.problem import known_terms
from megafx.rewrite.pattern import registered_patterns


@dataclass
class Entry:
    """One line of the table. parameters, flops: the least fraction sharded over all plans. whole: reason -> fraction of
    parameters; without_rule: ops that every rank computes whole."""

    name: str
    kind: str
    results: list[Result]
    parameters: float = 0.0
    flops: float = 0.0
    least: float = 0.0
    fusions: dict[str, int] = field(default_factory=dict)
    whole: dict[str, float] = field(default_factory=dict)
    without_rule: tuple[str, ...] = ()
    compared: int = 0  # weights that transformers' own plan places
    differences: list[str] = field(default_factory=list)  # from it
    capture_seconds: float = 0.0
    planning_seconds: float = 0.0

    @property
    def exact(self) -> int:
        return sum(result.exact for result in self.results)

    @property
    def ok(self) -> bool:
        return self.exact == len(self.results) and self.parameters >= self.least and not self.differences

    def cells(self) -> list[str]:
        """The line of a Markdown table."""
        captured = "yes" if self.capture_seconds else "no"
        fused = ", ".join(f"{n} {family}" for family, n in sorted(self.fusions.items()))
        whole = [f"{why} ({100 * part:.1f}%)" for why, part in sorted(self.whole.items(), key=lambda kv: -kv[1])]
        whole += [f"no rule for {op}" for op in self.without_rule]
        return [
            self.name,
            self.kind,
            captured,
            f"{self.exact}/{len(self.results)}",
            f"{100 * self.parameters:.1f}%",
            f"{100 * self.flops:.1f}%",
            fused,
            f"{self.compared - len(self.differences)}/{self.compared}" if self.compared else "",
            f"{self.capture_seconds:.1f}",
            f"{self.planning_seconds:.2f}",
            "; ".join(whole),
        ]


HEADER = (
    "architecture", "kind", "captured", "exact cells", "parameters sharded", "FLOPs sharded", "fused",
    "as transformers' plan", "capture, s", "plan, s", "stored whole (of all parameters), and why",
)  # fmt: skip


def entry(row: Architecture, cells: Iterable[Cell] | None = None, dynamic: bool = False) -> Entry:
    """Run the cells of one architecture (default: all). dynamic: of `Runner`."""
    runner = Runner(row, dynamic)
    results = [runner.run(cell) for cell in (all_cells(row) if cells is None else cells)]
    made = Entry(row.name, row.kind, results, least=row.least_sharded)
    plans = [p for p in runner.planned if p[1].t > 1]
    if plans:
        shares = [parameter_share(program, context) for program, context in plans]
        worst = min(range(len(plans)), key=lambda i: shares[i][0])
        made.parameters, made.whole = shares[worst]
        made.flops = min(flops_share(context) for _, context in plans)
        made.fusions = family_counts(plans[0][0])
        for program, context in plans:
            dims = {s.name: n.meta[VAL].ndim for n, s in program.input_nodes() if s.kind == "param"}
            made.compared, different = compare(row, context.solved, dims)
            made.differences += [d for d in different if d not in made.differences]
        bare = {
            str(n.target).removesuffix(".default") for _, p in plans for n, r in p.rules.items() if r.kind == "none"
        }
        made.without_rule = tuple(sorted(bare - {"<built-in function getitem>"}))
        made.capture_seconds = statistics.mean(p.capture_seconds for p in runner.prepared.values())
        made.planning_seconds = statistics.mean(p.solved.statistics["planning_seconds"] for _, p in plans)
    return made


def parameter_share(program: Program, context: CompileContext) -> tuple[float, dict[str, float]]:
    """(fraction of parameters stored in shards, reason -> fraction stored whole)."""
    numel, whole = 0, defaultdict(float)
    sharded = 0
    plan = context.solved
    for node, spec in program.input_nodes():
        if spec.kind == "param":
            n = math.prod(node.meta[VAL].shape)
            numel += n
            if plan.params[spec.name].is_shard:
                sharded += n
            else:
                whole[plan.replicated.get(spec.name, "?")] += n
    return sharded / numel, {why: n / numel for why, n in whole.items()}


def flops_share(context: CompileContext) -> float:
    """Fraction of the forward pass's matmul and attention FLOPs that the ranks share among them."""
    total = shared = 0
    for node, rule in context.rules.items():
        flops = node_flops(context, rule)
        total += flops
        shared += flops if context.solved.ops[node.name].factor else 0
    return shared / max(total, 1)


def node_flops(context: CompileContext, rule: Any) -> int:
    """FLOPs of one node at the workload, 0 for ops that are no products."""
    sizes = context.solved.sizes
    name = op_name(rule.node)
    value = rule.node.meta[VAL]
    shape = lambda x: [sizes.workload(n) for n in sizes.shape(x)]
    if name.startswith("linear_cross_entropy"):
        x, weight = (shape(o.node.meta[VAL]) for o in rule.operands[:2])
        return 2 * math.prod(x) * weight[0]
    if not hasattr(value, "shape"):
        value = value[0] if isinstance(value, (tuple, list)) and hasattr(value[0], "shape") else None
    if value is None or not rule.operands:
        return 0
    first = shape(rule.operands[0].node.meta[VAL])
    if cost_kind(name) == ATTENTION:
        return op_flops(op_name(rule.node), math.prod(shape(value)), shape(rule.operands[1].node.meta[VAL])[-2])
    if name.startswith("conv"):
        return 2 * math.prod(shape(value)) * math.prod(shape(rule.operands[1].node.meta[VAL])[1:])
    told = known_terms(rule.node)
    if told is not None:
        return op_flops(name, math.prod(shape(value)), told)
    if "grouped_mm" in name:
        return 2 * math.prod(shape(value)) * first[-1]
    if name == "einsum":
        name = "matmul"
        return 2 * math.prod({f: sizes.workload(n) for f, n in rule.sizes.items()}.values())
    return op_flops(op_name(rule.node), math.prod(shape(value)), first[-1]) if first else 0


def family_counts(program: Program) -> dict[str, int]:
    """Matches by family: the file of patterns/ that a pattern is in."""
    family = {p.name: p.__module__.rpartition(".")[2] for p in registered_patterns()}
    return dict(Counter(family.get(f.pattern, f.pattern) for f in program.fusions))


def run(names: Iterable[str] = (), jobs: int = 1, some: bool = False) -> Iterator[Entry]:
    """Entries of the named architectures (default: all), in the order of the table. some: of a tenth of their cells.

    jobs: processes. Each runs many architectures: traces of patterns and of ops are made once in a process.
    """
    chosen = list(names) or list(rows())
    of_name = partial(_named, some=some)
    if jobs == 1:
        yield from map(of_name, chosen)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(of_name, chosen)


def _named(name: str, some: bool) -> Entry:
    row = rows()[name]
    made = entry(row, some_cells(row) if some else None)
    gc.collect()  # captured programs are cycles
    return made


def markdown(entries: Iterable[Entry]) -> str:
    lines = [HEADER, ["---"] * len(HEADER), *(e.cells() for e in entries)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def failures(entries: Iterable[Entry]) -> list[str]:
    """What keeps the matrix from being all exact: cells with the same failure once."""
    lines: list[str] = []
    for made in entries:
        seen: dict[str, list[Result]] = defaultdict(list)
        for result in made.results:
            if not result.exact:
                seen[result.failure or result.worst].append(result)
        lines += [
            f"{made.name}: {same[0]}" + (f" (and {len(same) - 1} more)" if len(same) > 1 else "")
            for same in seen.values()
        ]
        lines += [f"{made.name}: {difference}" for difference in made.differences]
        if made.parameters < made.least:
            lines.append(
                f"{made.name}: {100 * made.parameters:.1f}% of parameters sharded, {100 * made.least:.0f}% wanted"
            )
    return lines


PAGE = """# Models

Generated by `{command}`.
`python tests/models/table.py llama gpt2` prints the lines of some architectures.

Each architecture is built tiny, with awkward sizes, random weights, labels and padding, in fp64. A cell is one combination of
training or eval, eager or sdpa attention, t = 2, 3 or 4 (or 8: GPT-BigCode, whose query heads share one key-value head), and
sequence parallelism off or auto; with dropout on, of attention and t. (The last decoders were tried to see what else breaks,
in 2 or 3 cells.) Batch and sequence are symbols in training without dropout with the first attention, and the call's sizes
elsewhere. A cell is exact where the loss, every output and every gradient equal those of one process to a relative
{rtol:.0e}: those of the plain eager model, or with dropout on (whose masks eager draws otherwise) of megafx on one rank.
Casts to fp32 inside of models are casts to fp64 on both sides. All ranks run in one process (`megafx.checks.simulate`).

Parameters and FLOPs (of matmuls and attention) sharded are the least fraction over the plans with symbolic sizes, which are
priced as those of large models are; at these sizes norms, biases and position tables weigh more than in real models. Fused:
matches by family. As transformers' plan: weights that are cut on the dim that transformers' own tensor-parallel plan cuts, of
those that it names. Seconds are means, of a capture and of a plan.

{table}
"""


def page(entries: list[Entry], command: str = "make test-models") -> str:
    from harness import RTOL

    text = PAGE.format(rtol=RTOL, table=markdown(entries), command=command)
    found = failures(entries)
    done, total = sum(e.exact for e in entries), sum(len(e.results) for e in entries)
    text += f"\n{done} of {total} cells are exact.\n"
    return text + ("\n## Not exact\n\n" + "\n".join(f"- {line}" for line in found) + "\n" if found else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it as a page; 0 if all cells are exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ARCHITECTURE", help="only these, for example llama")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--some", action="store_true", help="a tenth of the cells of each")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table as a page")
    args = parser.parse_args(argv)
    plain = lambda text: "".join(c for c in text.lower() if c.isalnum())  # 'gpt2' is GPT-2
    known = {plain(name): name for name in rows()}
    for name in args.names:
        if plain(name) not in known:
            parser.error(f"the matrix has no architecture '{name}'; it has {', '.join(known.values())}")
    entries = []
    for made in run([known[plain(name)] for name in args.names], args.jobs, args.some):
        print(f"{made.name}: {made.exact} of {len(made.results)} cells exact", file=sys.stderr, flush=True)
        entries.append(made)
    print(markdown(entries))
    failed = failures(entries)
    for line in failed:
        print(line)
    if args.write is not None:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        words = ["python tests/models/table.py", *args.names, *["--some"] * args.some, f"--write {args.write}"]
        args.write.write_text(page(entries, " ".join(words)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
