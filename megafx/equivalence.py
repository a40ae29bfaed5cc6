"""`megafx.verify`: all ranks of a training call in one process against the plain model, and where they first part."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megafx.capture.caches import is_cache
from megafx.capture.export import capture_call
from megafx.checks import simulate
from megafx.compiler.all_ranks import run_ranks
from megafx.compiler.pipeline import Compiled, compile_program
from megafx.config import Config
from megafx.errors import UsageError
from megafx.ir.interpret import input_values
from megafx.ir.program import VAL, Program
from megafx.planner.context import Planner
from megafx.planner.hardware import Hardware


@dataclass
class Verdict:
    """Relative errors by name. reference: 'eager', or 'megafx at t=1' where dropout draws other bits than eager's."""

    t: int
    reference: str
    tolerance: float
    outputs: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    divergence: simulate.Divergence | None = None

    @property
    def ok(self) -> bool:
        return all(e <= self.tolerance for e in (*self.outputs.values(), *self.gradients.values()))

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        worst = max(self.gradients.items(), key=lambda kv: kv[1], default=("none", 0.0))
        lines = [
            f"{'equal' if self.ok else 'DIFFERENT'}: {self.t} ranks against {self.reference}, tolerance {self.tolerance:.0e}",
            *(f"  output {name}: {error:.1e}" for name, error in self.outputs.items()),
            f"  {len(self.gradients)} gradients, worst {worst[1]:.1e} ({worst[0]})",
        ]
        if self.divergence is not None:
            lines.append(f"  they first part at {self.divergence}")
        elif not self.ok:
            lines.append("  they part at no node of the joint graph: the passes of stage 'rank' change numbers")
        return "\n".join(lines)


def verify_call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    config: Config,
    hardware: Hardware,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    loss_inputs: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
) -> Verdict:
    """Compare output, loss and every gradient of config.tensor_model_parallel_size simulated ranks with one process.

    Ranks run what real ones run (`run_ranks`): their own graphs, after all passes, with collectives among themselves.
    The model is used as it is (train or eval, with its weights) and left unchanged.
    """
    t = config.tensor_model_parallel_size or 2
    leaves = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if any(x.device.type == "meta" for x in (*model.parameters(), *leaves)):
        raise UsageError("verify computes, so it needs real weights and inputs", fix="materialise the model first")

    def compiled(ranks: int) -> Compiled:
        program = capture_call(
            model, args, kwargs, loss_fn=loss_fn, loss_inputs=loss_inputs, eager=config.eager_modules
        )
        return compile_program(program, Planner(config, ranks, hardware, wants_grad=lambda spec: spec.kind == "param"))

    sharded, single = compiled(t), compiled(1)
    plain = copy.deepcopy(model)
    eager = _eager_outputs(plain, single.program, args, kwargs, loss_fn, loss_inputs)
    seed = torch.initial_seed() % 2**62
    values = input_values(sharded.program, model, args, kwargs, loss_inputs=loss_inputs, seed=seed)
    values = {n: v.detach() if isinstance(v, Tensor) else v for n, v in values.items()}
    differentiated = [single.program.outputs[i].name for i in single.differentiated]
    tangents = {name: torch.ones_like(eager[name]) for name in differentiated}
    values |= tangents
    found, alone = run_ranks(sharded, values), run_ranks(single, values)
    random = any(spec.kind == "seed" for spec in sharded.program.inputs)
    if random:
        outputs, gradients = alone.outputs, alone.gradients
    else:
        torch.autograd.backward([eager[name] for name in tangents], [*tangents.values()])
        outputs = {name: value.detach() for name, value in eager.items()}
        gradients = {name: p.grad for name, p in plain.named_parameters()}
    limit = _rounding(single) if tolerance is None else tolerance
    verdict = Verdict(t, "megafx at t=1" if random else "eager", limit)
    verdict.outputs, verdict.gradients = simulate.relative_errors(found, simulate.Logical(outputs, gradients))
    if not verdict.ok:
        ours = simulate.local_inputs(sharded.program, values, sharded.plan.params, t)
        theirs = simulate.local_inputs(single.program, values, single.plan.params, 1)[0]
        verdict.divergence = simulate.first_divergence(sharded.program, ours, single.program, theirs, tolerance=limit)
    return verdict


def _eager_outputs(
    plain: nn.Module, program: Program, args: Any, kwargs: Any, loss_fn: Any, loss_inputs: Any
) -> dict[str, Tensor]:
    """Tensor outputs of the plain model, with autograd's graph, by the names that the graph gives them."""
    output = plain(*args, **kwargs)
    if loss_fn is not None and loss_inputs:
        output = (loss_fn(output, **loss_inputs), output)
    assert program.call is not None
    leaves = torch.utils._pytree.tree_leaves(output, is_leaf=is_cache)
    leaves = [leaf for leaf in leaves if not is_cache(leaf)]  # a graph makes none that was not asked for
    order = [leaf.index for leaf in program.call.out_leaves]
    user = [o for o in program.outputs if o.kind == "user"]
    named = {user[i].name: leaf for i, leaf in zip(order, leaves, strict=True) if i >= 0}
    return {name: leaf for name, leaf in named.items() if isinstance(leaf, Tensor)}


def _rounding(compiled: Compiled) -> float:
    """What the coarsest dtype of inputs and casts rounds to: fp64 models may compute their loss in fp32."""
    nodes = [n for n in compiled.program.graph.nodes if n.op == "placeholder" or "_to_copy" in str(n.target)]
    dtypes = {n.meta[VAL].dtype for n in nodes if isinstance(n.meta[VAL], Tensor)}
    known = [simulate.TOLERANCE[d] for d in dtypes if d in simulate.TOLERANCE]
    return max(known, default=simulate.TOLERANCE[torch.float32])
