"""Ops of torch's own table of ops (op_db), behind one linear layer and before another, on two ranks against eager.

`outcome(op, sample)` is 'exact', 'refused' (with a text of ours) or 'skipped' (nothing to compare); raises AssertionError for
wrong numbers, and lets errors pass that are no refusals. Ranks run what real ranks run (`all_ranks.run_ranks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from calls import captured, compiled, eager, simulated, wanted_gradients
from harness import RTOL, errors
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_unflatten

from megafx.errors import MegafxError, PlacementError

F64 = torch.float64


def ops() -> list[OpInfo]:
    """Those with a gradient in fp64."""
    return [op for op in op_db if op.supports_autograd and F64 in op.supported_dtypes("cpu")]


def samples(op: OpInfo, count: int) -> Iterator[SampleInput]:
    """The first few whose (first) operand has a dim that a linear layer can make, small ones."""
    found = op.sample_inputs("cpu", F64, requires_grad=False)
    return islice((s for s in found if (x := _first(s)) is not None and x.dim() and 0 < x.numel() <= 1000), count)


def _first(sample: SampleInput) -> Tensor | None:
    given = [x for x in tree_flatten(sample.input)[0] if isinstance(x, Tensor)]
    return given[0] if given and given[0].dtype == F64 else None


class Between(nn.Module):
    """An op of a linear layer's result (near the sample's operand, so that it is defined) and before another layer."""

    def __init__(self, op: OpInfo, sample: SampleInput) -> None:
        super().__init__()
        leaves, self.form = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.op, self.leaves = op.op, []
        self.place = next(i for i, x in enumerate(leaves) if isinstance(x, Tensor))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self.register_buffer(f"given{i}", leaf.detach().clone())
            self.leaves.append(f"given{i}" if isinstance(leaf, Tensor) else leaf)
        like = leaves[self.place]
        self.up = nn.Linear(5, like.shape[-1], dtype=F64)
        with torch.no_grad():
            self.up.weight.mul_(0.1)
        self.call = {"x": torch.randn(*like.shape[:-1], 5, dtype=F64)}
        with torch.no_grad():
            sizes = [y.shape[-1] for y in self.results(**self.call)]
        self.down = nn.ModuleList(nn.Linear(n, 4, dtype=F64) for n in sizes)

    def results(self, x: Tensor) -> list[Tensor]:
        leaves = [getattr(self, x) if isinstance(x, str) and x.startswith("given") else x for x in self.leaves]
        leaves[self.place] = leaves[self.place] + self.up(x)
        first, args, kwargs = tree_unflatten(leaves, self.form)
        made = (y for y in tree_flatten(self.op(first, *args, **kwargs))[0] if isinstance(y, Tensor))
        made = (torch.view_as_real(y.resolve_conj()) if y.is_complex() else y for y in made)
        return [y if y.dim() else y[None] for y in made if y.dtype == F64 and y.numel()]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        made = [down(y) for down, y in zip(self.down, self.results(x), strict=True)]
        return {"loss": sum((y.square().sum() for y in made), x.new_zeros(()))}


def outcome(op: OpInfo, sample: SampleInput, t: int = 2, limit: float = RTOL) -> str:
    torch.manual_seed(0)
    try:
        model = Between(op, sample)
        first, again = (model(**model.call)["loss"] for _ in range(2))
        first.backward()
    except Exception:
        return "skipped"  # eager takes no such operand, or has no gradient
    finite = all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    if not len(model.down) or not torch.equal(first, again) or not finite:
        return "skipped"
    model.zero_grad(set_to_none=True)
    try:
        program = captured(model, model.call)
        made = compiled(program, t, wanted_gradients(model, program, model.call), promoted=False)
    except PlacementError:
        raise
    except MegafxError as error:
        assert error.fix, error
        return "refused"
    if any(spec.kind == "seed" for spec in program.inputs + made.program.inputs):
        return "skipped"  # eager draws other bits
    names = [made.program.outputs[i].name for i in made.differentiated]
    wanted, tangents = eager(model, program, model.call, names, promoted=False)
    off = errors(simulated(made, model, model.call, tangents), wanted)
    worst = max(off, key=lambda name: off[name])
    assert off[worst] <= limit, f"{worst} is off by {off[worst]:.1e}"
    return "exact"
