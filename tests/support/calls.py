"""One call of a model, in any form, on simulated ranks at fp64 against the plain model: what tests of call structures share.

`compare(model, call, t)` captures the call in the model's state and in the ambient modes (grad mode, autocast), compiles it for
t ranks with gradients of what requires them, and compares every output and gradient with eager's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from eager import Promoted
from harness import errors, promote_casts, values_of
from torch import Tensor, nn
from torch.utils._pytree import SequenceKey, tree_leaves, tree_map_with_path

from megafx.capture.export import capture_call
from megafx.checks.simulate import Logical
from megafx.compiler.all_ranks import run_ranks
from megafx.compiler.compiled import Compiled
from megafx.compiler.pipeline import compile_program
from megafx.config import Config
from megafx.ir.call_spec import leaf_name
from megafx.ir.program import Program
from megafx.testing import make_context

Names = frozenset[str]


def captured(model: nn.Module, call: Mapping[str, Any]) -> Program:
    """The program of a call; sizes that a model makes from Python numbers are fp64 as the model is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(next(model.parameters()).dtype)
    try:
        return capture_call(model, (), call)
    finally:
        torch.set_default_dtype(before)


def wanted_gradients(model: nn.Module, program: Program, call: Mapping[str, Any]) -> Names:
    """Names of the inputs of a program that require gradients: parameters, and tensors of the call."""
    state = dict(model.named_parameters(remove_duplicate=False))
    users = values_of(program, model, call)
    names = {i.name for i in program.inputs if i.kind == "param" and state[i.name].requires_grad}
    return frozenset(names | {i.name for i in program.inputs if i.kind == "user" and users[i.name].requires_grad})


def compiled(program: Program, t: int, wanted: Names, promoted: bool = True, **config: Any) -> Compiled:
    """For t ranks. wanted: names of inputs whose gradients are taken; none: a graph without backward."""
    if promoted:
        config = {"passes": (("after canonicalize", promote_casts),)} | config
    context = make_context(t, Config(**config), training=False)
    context.wants_grad = (lambda spec: spec.name in wanted) if wanted else None
    return compile_program(program.copy(), context)


def simulated(made: Compiled, model: nn.Module, call: Mapping[str, Any], tangents: Mapping[str, Tensor]) -> Logical:
    """Outputs and gradients of all ranks together. tangents: by name of output; 1 where there is none."""
    values = {n: v.detach() if isinstance(v, Tensor) else v for n, v in values_of(made.program, model, call).items()}
    return run_ranks(made, {**values, **tangents})


def eager(
    model: nn.Module, program: Program, call: Mapping[str, Any], differentiated: list[str], promoted: bool = True
) -> tuple[Logical, dict[str, Tensor]]:
    """(outputs and gradients of a plain copy by the names of the program, the tangents that its backward began with)."""
    plain = copy.deepcopy(model)
    leaves: dict[str, Tensor] = {}

    def fresh(path: Any, value: Any) -> Any:
        """Inputs that require gradients get leaves of their own."""
        if not getattr(value, "requires_grad", False):
            return value
        leaf = leaves[leaf_name((SequenceKey(1), *path))] = value.detach().clone().requires_grad_()
        return leaf

    call = tree_map_with_path(fresh, dict(call))
    with Promoted() if promoted else torch.utils._python_dispatch._disable_current_modes():
        results = tree_leaves(plain(**call))
        assert program.call is not None
        order = [leaf.index for leaf in program.call.out_leaves]
        users = [o for o in program.outputs if o.kind == "user"]
        named = {users[i].name: leaf for i, leaf in zip(order, results, strict=True) if i >= 0}
        tangents = {}
        for seed, name in enumerate(differentiated):
            value = named[name]
            noise = torch.randn(value.shape, dtype=value.dtype, generator=torch.Generator().manual_seed(seed))
            tangents[name] = noise if value.dim() else torch.ones_like(value)
        if tangents:
            torch.autograd.backward([named[n] for n in tangents], [*tangents.values()])
    gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    gradients |= {n: v.grad for n, v in leaves.items() if v.grad is not None}
    return Logical({n: v.detach() for n, v in named.items() if isinstance(v, Tensor)}, gradients), tangents


def compare(
    model: nn.Module, call: Mapping[str, Any], t: int, promoted: bool = True, **config: Any
) -> tuple[dict[str, float], Compiled]:
    """Relative error of each output ('output logits') and gradient (by parameter, or 'kwargs[name]'), and what ran."""
    program = captured(model, call)
    wanted = wanted_gradients(model, program, call) if torch.is_grad_enabled() else frozenset()
    made = compiled(program, t, wanted, promoted, **config)
    names = [made.program.outputs[i].name for i in made.differentiated]
    reference, tangents = eager(model, program, call, names, promoted)
    found = simulated(made, model, call, tangents)
    assert {n for n, g in found.gradients.items() if g is not None} == set(reference.gradients)
    assert found.outputs.keys() == reference.outputs.keys() and reference.outputs
    return errors(found, reference), made
