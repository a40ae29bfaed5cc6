"""What torch.export exported -> the inputs, outputs and marked nodes of a `Program`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import predispatch
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from megafx.capture.errors import GENERATOR, TRANSFORM
from megafx.capture.functions import region_of
from megafx.capture.host_numbers import Compute, HostNumber
from megafx.capture.libraries.caches import ORDER_KEY, CacheKey, OutputKey
from megafx.capture.tensor_hooks import gradient_in_forward
from megafx.errors import CaptureError, or_leave_eager
from megafx.ir.call_spec import OutputLeaf
from megafx.ir.nodes import aten_ops
from megafx.ir.program import FQN, MADE_BY, REGION, SOURCE, VAL, Input, Output, Program, active_nodes
from megafx.ir.source_lines import fqn_of_stack, source_of_trace, strip_root

_TRANSFORMS = predispatch.__name__
_DUAL = torch.ops.aten._make_dual.default  # all that torch 2.11 traces of jvp
ROOT = "model"  # the user's model within what is exported
PRODUCTS = aten_ops("linear mm bmm matmul addmm baddbmm conv1d conv2d")


def mark_nodes(gm: fx.GraphModule) -> None:
    """Set source, fqn, made_by and region on every node, those in bodies of higher-order ops included.

    Fakes of small constants hold their numbers, with which ops would be computed: passes look at forms alone. Nodes that torch
    took out of a body may be missing among the users of their operands.
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                for operand in node.all_input_nodes:
                    operand.users.setdefault(node)
                for value in pytree.tree_leaves(node.meta.get(VAL)):
                    if isinstance(value, FakeTensor):
                        value.constant = None
                if node.op in ("placeholder", "output", "get_attr"):
                    continue
                node.meta[FQN] = fqn_of_stack(node.meta.get("nn_module_stack"), ROOT)
                node.meta[MADE_BY] = ()
                if (region := region_of(node)) is not None:
                    node.meta[REGION] = region
                if (source := source_of_trace(node.meta.get("stack_trace") or "")) is not None:
                    node.meta[SOURCE] = source


def refuse_nodes(gm: fx.GraphModule) -> None:
    """Raise CaptureError for what fakes let pass: products of different dtypes, and transforms of torch.func, within which ops
    are others than on whole tensors."""
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            where = {"module": node.meta.get(FQN), "source": node.meta.get(SOURCE)}
            if getattr(node.target, "__module__", "") == _TRANSFORMS or node.target is _DUAL:
                found, fix = TRANSFORM
                error = CaptureError(found, fix=or_leave_eager(fix, where["module"]), **where)
                error.part = where["module"] or ""
                raise error
            if node.target not in PRODUCTS or module is not gm:  # autocast, which casts, has a body of its own
                continue
            given = [n.meta[VAL].dtype for n in node.all_input_nodes if isinstance(n.meta.get(VAL), torch.Tensor)]
            if len(set(given)) > 1:
                names = ", ".join(str(dtype).removeprefix("torch.") for dtype in given)
                error = CaptureError(
                    f"{node.target} of different dtypes ({names}), which is an error in eager mode too",
                    fix="give the inputs in the dtype of the parameters (`x.to(dtype)`), or call under torch.autocast",
                    **where,
                )
                raise error.caught_as(RuntimeError)


def name_inputs(
    exported: ExportedProgram, model: nn.Module, user_names: list[str]
) -> tuple[list[Input], dict[str, Any]]:
    """Name the placeholders; one placeholder for each tensor, however many names it has."""
    groups: dict[int, list[str]] = {}  # all FQNs of each tensor, the first in named_parameters order first
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            groups.setdefault(id(tensor), []).append(name)
    aliases = {name: group for group in groups.values() for name in group}
    nodes = {n.name: n for n in exported.graph.find_nodes(op="placeholder")}
    kept: dict[str, fx.Node] = {}
    inputs: list[Input] = []
    constants: dict[str, Any] = {}
    names = iter(user_names)
    for spec in exported.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            fqn = strip_root(spec.target or "", ROOT)
            first, *others = aliases.get(fqn, [fqn])
            if first in kept:
                node.replace_all_uses_with(kept[first])
                exported.graph.erase_node(node)
                continue
            kept[first] = node
            node._rename(f"{'p' if spec.kind is InputKind.PARAMETER else 'b'}_{first.replace('.', '_')}")
            inputs.append(Input("param" if spec.kind is InputKind.PARAMETER else "buffer", first, tuple(others)))
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            name = spec.target or spec.arg.name
            if isinstance(exported.constants[name], FakeTensor):  # of `grad` that a model has bound before
                reads = next(iter(node.users), node)
                source = source_of_trace(reads.meta.get("stack_trace") or "")
                raise gradient_in_forward(source, ", or computes in another thread")
            constants[name] = exported.constants[name]
            inputs.append(Input("constant", name))
        elif spec.kind is InputKind.CUSTOM_OBJ:
            raise _object_in_graph(node, spec.target or "")
        elif isinstance(spec.arg, ConstantArgument):
            if node.users:
                found = f"the graph computes with the Python value {spec.arg.value!r} as if it were a tensor"
                raise CaptureError(found)
            exported.graph.erase_node(node)
        else:
            inputs.append(Input("user", next(names)))
    return inputs, constants


def _object_in_graph(node: fx.Node, target: str) -> CaptureError:
    """The error for an op that takes what is no tensor, number or string: a torch.Generator, mostly."""
    reader = next(iter(node.users), node)
    module = reader.meta.get(FQN)
    found, fix = GENERATOR
    return CaptureError(found, fix=or_leave_eager(fix, module), module=module, source=reader.meta.get(SOURCE))


@dataclass(frozen=True)
class Returned:
    """A leaf of what the model returned. compute(): its value in a call, where it is a number that forward counts."""

    requires_grad: bool
    compute: Compute | None

    @staticmethod
    def of(leaf: Any) -> Returned:
        return Returned(getattr(leaf, "requires_grad", False), leaf.compute if isinstance(leaf, HostNumber) else None)


def name_outputs(
    exported: ExportedProgram, graph: fx.Graph, returned: Sequence[Returned]
) -> tuple[list[Output], tuple[OutputLeaf, ...]]:
    """Name the user outputs by their path, and 'output.' before it where a parameter or buffer is named so; constants leave
    the graph. A tensor in several places is one output.

    returned: the leaves of what the model returned.
    """
    node = graph.output_node()
    spec = exported.call_spec.out_spec
    assert spec is not None
    values = node.args[0]
    assert isinstance(values, (tuple, list))
    paths = [p for p, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(len(values))), spec))[0]]
    named = (spec.target for spec in exported.graph_signature.input_specs if spec.target)
    taken = {name.partition(".")[2] for name in named}  # of `ExportedCall.model`
    outputs: list[Output] = []
    leaves: list[OutputLeaf] = []
    kept: list[fx.Node] = []
    order: Any = None
    for path, value, leaf in zip(paths, values, returned, strict=True):
        if path and path[-1] == ORDER_KEY:
            leaves.append(OutputLeaf(-1))
            order = value
        elif isinstance(value, fx.Node):
            path = tuple(key for key in path if not isinstance(key, OutputKey))
            last = path[-1] if path else None
            in_cache = last.key if isinstance(last, CacheKey) else ""
            name, written = output_path(path), False
            if path[:1] in ((pytree.GetAttrKey("written"),), (pytree.GetAttrKey("arguments"),)):
                place, *at = path[1:]
                assert isinstance(place, pytree.MappingKey)
                name, written = f"{place.key}{_later(at[0])}" if at else str(place.key), True
            elif name in taken and name != "loss":  # the name that `mark_losses` looks for
                name = f"output.{name}"
            found = Output("user", name, cache=in_cache, requires_grad=leaf.requires_grad, written=written)
            same = next((i for i, n in enumerate(kept) if n is value and not (in_cache or outputs[i].cache)), None)
            if same is not None and found.name == "loss":
                outputs[same] = found
            leaves.append(OutputLeaf(len(kept) if same is None else same))
            if same is None:
                outputs.append(found)
                kept.append(value)
        elif leaf.compute is not None:
            leaves.append(OutputLeaf(-1, ("host", leaf.compute), True))
        else:
            leaves.append(OutputLeaf(-1, value))
    if order is not None:
        outputs.append(Output("order", "order"))
        kept.append(order)
    node.args = (tuple(kept),)
    return outputs, tuple(leaves)


def _later(key: Any) -> str:
    """Of the tensors that forward leaves at one place: '' for the first, '[1]' for the second."""
    return f"[{key.idx}]" if key.idx else ""


def output_path(path: Sequence[Any]) -> str:
    """Key path of an output -> 'loss', '[0]', 'hidden_states[1]'; '' is the output itself."""
    text = ""
    for key in path:
        if isinstance(key, OutputKey):  # what the model returns
            continue
        if isinstance(key, pytree.SequenceKey):
            text += f"[{key.idx}]"
        else:
            name = str(key.key if isinstance(key, pytree.MappingKey) else getattr(key, "name", key))
            text += f".{name}" if text else name
    return text


def drop_unread(program: Program) -> None:
    """Take out the parameters and buffers that the graph does not read: those of the rest of the model."""
    kept = []
    for node, spec in program.input_nodes():
        if spec.kind in ("param", "buffer") and not node.users:
            program.graph.erase_node(node)
        else:
            kept.append(spec)
    program.inputs = kept


def mark_losses(program: Program) -> None:
    """A field called `loss`; else the first element of what loss_fn made a pair; else every 0-d floating active output.

    What eager mode gives without a gradient beside others that have one (`loss.detach()`, for the log) is no loss, nor is a
    parameter that is returned. A number that forward leaves in an attribute is one beside others.
    """
    active = active_nodes(program)
    values = [(node, node.meta.get(VAL)) for node in program.results()]
    scalars = [i for i, (n, v) in enumerate(values) if isinstance(v, torch.Tensor) and v.dim() == 0 and n in active]
    scalars = [i for i in scalars if program.outputs[i].kind == "user"]
    scalars = [i for i in scalars if values[i][0].op != "placeholder"]
    if any(o.requires_grad for o in program.outputs):
        scalars = [i for i in scalars if program.outputs[i].requires_grad]
    named = [i for i in scalars if program.outputs[i].name == "loss" and not program.outputs[i].written]
    if not (named or [i for i in scalars if not program.outputs[i].written]):
        return  # what forward leaves in attributes is no reason to take no gradient of what it returns
    for i in [*named, *(i for i in scalars if program.outputs[i].written)] if named else scalars:
        program.outputs[i] = replace(program.outputs[i], loss=True)
