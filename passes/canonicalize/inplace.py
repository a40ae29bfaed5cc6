"""In-place ops become functional; what they change in buffers becomes an output.

Before:  %v = select(%x, 1, 0); copy_(%v, %y); %z = relu(%x)
After:   %n = select_scatter(%x, %y, 1, 0); %z = relu(%n)
Legal because: the walk knows of every view which tensor it is a view of, and each use of a tensor or view after a write reads
its memory as the last write left it. Needs views in one spelling (views.py), but copies that are not yet erased. A parameter
that is written under no_grad gets the gradient of its new value, if nothing that autograd sees has read the old one.

batch_norm in training updates its running statistics without saying so in its schema; these writes are written out before.
Before:  %y = batch_norm(%x, %w, %b, %mean, %var, True, 0.1, 1e-5)        # changes %mean and %var
After:   %y = batch_norm(%x, %w, %b, None, None, True, 0.1, 1e-5); copy_(%mean, 0.9 * %mean + 0.1 * mean(%x)); ...
Legal because: in training the batch's own statistics normalise the result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from megafx.errors import CaptureError
from megafx.ir.nodes import argument, aten_ops, op_name, replace, writes
from megafx.ir.program import VAL, Output, active_nodes, fake_args, inherit, located
from megafx.kernels.written_over import written_over
from megafx.passes.canonicalize.editor import BY, Editor, arguments, on, respell

aten = torch.ops.aten

# Views that show the whole of their operand, in order, where the shape is the same (casts and copies that are none too).
_WHOLE = aten_ops(
    "slice.Tensor reshape expand alias detach contiguous type_as to.dtype to.device to.other to.dtype_layout lift_fresh"
)
# Ops that give a tensor another shape in place, and write nothing into its memory.
_RESHAPES = aten_ops("unsqueeze_ squeeze_ squeeze_.dim squeeze_.dims transpose_ t_")
_IRREGULAR: dict[Any, Callable[..., Any]] = {
    aten.transpose_.default: aten.transpose.int,
    aten.exponential_.default: aten.exponential.default,
    aten.normal_.default: aten.normal_functional.default,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
    aten.float_power_.Scalar: aten.float_power.Tensor_Scalar,
    aten.float_power_.Tensor: aten.float_power.Tensor_Tensor,
    aten.floor_divide_.Tensor: aten.floor_divide.default,
    aten.ldexp_.default: aten.ldexp.Tensor,
}
_SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}


def take_views_for_reshapes(editor: Editor) -> int:
    """`x.unsqueeze_(1)` is a view: what uses x from there on has been traced as using the result."""
    count = 0
    order = {node: i for i, node in enumerate(editor.graph.nodes)}
    for node in list(order):
        if node.target in _RESHAPES:
            operand = node.args[0]
            if any(order[user] > order[node] for user in operand.users):
                raise _refuse(node, f"{node.target} changes the shape of a tensor that is used under another name, too")
            count += respell(node, functional_form(node), node.args, dict(node.kwargs))
    return count


# Their results have no gradient, whatever they are made like.
_FRESH = ("new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like", "ones_like", "full_like")


def functionalize(editor: Editor) -> int:
    """Rewrite every in-place op; no work where the graph has none."""
    return _Functionalizer(editor).run() if any(map(writes, editor.graph.nodes)) else 0


class _Functionalizer:
    """A node of the captured graph is the name of a piece of memory; `current` is the node whose value is in it now.

    parent: view -> the tensor that it shows. same: in-place op -> its operand, which is its result. version: base -> how often
    it was written. seen: name -> the base's version when `current` was computed.
    """

    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        self.parent: dict[fx.Node, fx.Node] = {}
        self.same: dict[fx.Node, fx.Node] = {}
        self.current: dict[fx.Node, fx.Node] = {}
        self.version: dict[fx.Node, int] = {}
        self.seen: dict[fx.Node, int] = {}
        self.graded: set[fx.Node] = set()  # bases written where autograd sees it
        self.used: set[fx.Node] = set()  # bases read where autograd sees it
        self.active = active_nodes(editor.program)
        self.grads = any(o.requires_grad for o in editor.program.outputs)
        call = editor.program.call
        self.leave = () if call is None else call.written  # inputs whose new values leave the graph

    def run(self) -> int:
        done: list[fx.Node] = []
        for node in list(self.editor.graph.nodes):
            if node.op == "output":
                self._read_operands(node)
            elif node.op == "call_function" and writes(node):
                self._write(node)
                done.append(node)
            elif node.op == "call_function":
                operand = self._viewed_operand(node)
                if (
                    node in self.active
                    and node not in self.editor.without_grad
                    and node.target is not aten.detach.default
                ):
                    names = map(self._name, node.all_input_nodes)
                    self.used.update(self._base(n) for n in names if not self._detached(n))
                self._read_operands(node)
                if operand is not None:
                    self.parent[node] = operand
                    self.seen[node] = self.version.get(self._base(node), 0)
        self._output_mutations()
        for node in reversed(done):
            self.editor.graph.erase_node(node)
        return len(done)

    # -- names

    def _name(self, node: fx.Node) -> fx.Node:
        while node in self.same:
            node = self.same[node]
        return node

    def _base(self, node: fx.Node) -> fx.Node:
        while node in self.parent:
            node = self.parent[node]
        return node

    def _viewed_operand(self, node: fx.Node) -> fx.Node | None:
        """The tensor whose memory the node's result shows: found by running an op that may return a view."""
        call: Any = node.args[0] if node.target is operator.getitem else node
        target = call.target
        if not isinstance(target, torch._ops.OpOverload) or not isinstance(node.meta.get(VAL), torch.Tensor):
            return None
        if not any(r.alias_info is not None for r in target._schema.returns) and not _is_composite(target):
            return None
        with self.editor.program.fake_mode, torch.no_grad(), enable_python_dispatcher():
            result = target(*fake_args(call.args), **fake_args(call.kwargs))
        memory = (result if call is node else result[node.args[1]]).untyped_storage()._cdata
        operands = [n for n in call.all_input_nodes if isinstance(n.meta.get(VAL), torch.Tensor)]
        shown = (n for n in operands if n.meta[VAL].untyped_storage()._cdata == memory)
        return next(map(self._name, shown), None)

    # -- reads

    def _read_operands(self, node: fx.Node) -> None:
        node.args = fx.node.map_arg(node.args, lambda n: self._read(n, node))
        node.kwargs = fx.node.map_arg(node.kwargs, lambda n: self._read(n, node))

    def _read(self, node: fx.Node, where: fx.Node) -> fx.Node:
        """What is in the node's memory now; a view of something written since is taken again before `where`."""
        node = self._name(node)
        version = self.version.get(self._base(node), 0)
        if node in self.parent and self.seen.get(node, 0) != version:
            operand = self._read(self.parent[node], where)
            if node.target is operator.getitem or not isinstance(node.args[0], fx.Node):
                raise _refuse(
                    where, f"{where.target} reads a view made by {op_name(node)}, whose memory was written since"
                )
            again = self.editor.at(where)(node.target, operand, *node.args[1:], **node.kwargs)
            self.current[node], self.seen[node] = inherit(again, node, BY), version
        return self.current.get(node, node)

    # -- writes

    def _write(self, node: fx.Node) -> None:
        self._out_as_copy(node)
        schema = node.target._schema
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        target = argument(node, written[0])
        if len(written) != 1 or written[0] != schema.arguments[0].name or not isinstance(target, fx.Node):
            raise _refuse(node, f"{node.target} writes into {', '.join(written)}")
        name = self._name(target)
        base = self._base(name)
        spec = dict(self.editor.program.input_nodes())[base] if base.op == "placeholder" else None
        if spec is not None and spec.kind in ("user", "constant") and spec.name not in self.leave:
            raise _refuse(node, "the model writes into one of its inputs")
        how = (
            "under no_grad"
            if node in self.editor.without_grad
            else "by detach() or .data"
            if self._detached(name)
            else ""
        )
        leaf = bool(how) and self._has_gradient(base) and spec is not None and spec.kind == "param"
        # Autograd counts it, and fails where backward needs what was read before.
        counted = node in self.editor.without_grad or node.target is aten.embedding_renorm_.default
        fresh = (leaf and (counted or base not in self.used)) or (op_name(base) in _FRESH and base not in self.graded)
        if how and self._has_gradient(base) and not fresh and base not in self.editor.without_grad:
            if leaf and spec is not None:
                found = (
                    f"forward has read parameter '{spec.name}', and writes into it {how}, which backward would not see"
                )
                fix = "write into the parameter itself under torch.no_grad(), before forward first reads it, or between calls"
                raise CaptureError(found, fix=fix, **located(node))
            raise _refuse(node, f"the model writes {how} into a tensor that has a gradient")
        version = self.version.get(base, 0) + 1
        value = self._new_value(node, name)
        if node in self.editor.without_grad:
            value = self.editor.at(node)(aten.detach.default, value)
        self._store(name, value, node, version)
        if leaf:
            emit = self.editor.at(node)
            self.current[base] = emit(written_over, base, emit(aten.detach.default, self.current[base]))
        self.version[base], self.same[node] = version, name
        if not how:
            self.graded.add(base)

    def _out_as_copy(self, node: fx.Node) -> None:
        """op(..., out=x) becomes x.copy_(op(...)), where the op has a form without `out` and x its shape."""
        schema = node.target._schema
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        out = node.kwargs.get("out")
        if written != ["out"] or not isinstance(out, fx.Node):
            return
        packet = getattr(aten, str(schema.name).split("::")[1], None)
        wanted = [(a.name, str(a.type)) for a in schema.arguments if a.name != "out"]
        forms = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
        plain = [f for f in forms if [(a.name, str(a.type)) for a in f._schema.arguments] == wanted]
        if not plain or not str(schema.name).startswith("aten::"):
            return
        emit = self.editor.at(node)
        read = lambda x: fx.node.map_arg(x, lambda n: self._read(n, node))
        value = emit(plain[0], *read(node.args), **read({k: v for k, v in node.kwargs.items() if k != "out"}))
        if not self.editor.same_shape(value.meta[VAL], out.meta[VAL]):  # `out` would be resized
            return
        node.target, node.args, node.kwargs = aten.copy_.default, (out, value), {}

    def _has_gradient(self, base: fx.Node) -> bool:
        """True if the value may have one in eager mode."""
        if not self.grads:
            return False
        kind = dict(self.editor.program.input_nodes())[base].kind if base.op == "placeholder" else ""
        if kind == "user" or (kind == "param" and not base.meta[VAL].requires_grad):  # a frozen one is as a buffer
            return base in self.graded or base.meta[VAL].requires_grad
        return base in self.active

    def _detached(self, name: fx.Node) -> bool:
        """True if the name is a view of a detached tensor: autograd sees no write into the base."""
        while name in self.parent:
            if name.target is aten.detach.default:
                return True
            name = self.parent[name]
        return False

    def _new_value(self, node: fx.Node, name: fx.Node) -> fx.Node:
        """What the op leaves in its first operand, in that operand's dtype."""
        emit = self.editor.at(node)
        old = self._read(name, node)
        rest = fx.node.map_arg(node.args[1:], lambda n: self._read(n, node))
        kwargs = fx.node.map_arg(node.kwargs, lambda n: self._read(n, node))
        value = old.meta[VAL]
        new: fx.Node
        if node.target in (aten.fill_.Scalar, aten.zero_.default):
            fill = rest[0] if node.target is aten.fill_.Scalar else 0
            return emit(aten.full.default, self.editor.shape(value), fill, dtype=value.dtype, device=value.device)
        # the probability is a number that changes between calls, or one of each
        if node.target is aten.bernoulli_.Tensor:
            new = emit(aten.bernoulli.default, emit(aten.expand.default, rest[0], self.editor.shape(value)))
        elif node.target is aten.bernoulli_.float:  # whose default, 0.5, is none of the functional form's
            new = emit(aten.bernoulli.p, old, argument(node, "p"))
        elif node.target in (aten.copy_.default, aten.fill_.Tensor):
            new = rest[0]
        else:
            new = emit(functional_form(node), old, *rest, **kwargs)
        if new.meta[VAL].device != value.device:  # copy_ takes a number from the host
            new = emit(aten.to.device, new, value.device, value.dtype)
        elif new.meta[VAL].dtype != value.dtype:
            new = emit(aten.to.dtype, new, value.dtype)
        if not self.editor.same_shape(new.meta[VAL], value):
            new = emit(aten.expand.default, new, self.editor.shape(value))
        return new

    def _store(self, name: fx.Node, value: fx.Node, where: fx.Node, version: int) -> None:
        """`value` is now in the memory of `name`, and so in that of every tensor that it is a view of."""
        if name in self.parent:
            whole = self.parent[name]
            self._store(whole, self._scatter(name, self._read(whole, where), value, where), where, version)
        self.current[name], self.seen[name] = value, version

    def _scatter(self, view: fx.Node, whole: fx.Node, part: fx.Node, where: fx.Node) -> fx.Node:
        """`whole` with the elements that `view` shows replaced by `part`: the inverse of the view."""
        emit = self.editor.at(where)
        target = view.target
        rest = view.args[1:]
        if target is aten.detach.default:
            return emit(aten.detach.default, part)
        if self.editor.same_shape(whole.meta[VAL], part.meta[VAL]) and target in _WHOLE:
            return part
        # autograd has real ones alone
        if target in (aten.slice.Tensor, aten.select.int) and whole.meta[VAL].is_complex():
            dim, *more = rest or (0,)
            own = [emit(aten.clone.default, x) if x.meta[VAL].is_conj() else x for x in (whole, part)]
            pairs = [emit(aten.view_as_real.default, x) for x in own]
            written = emit(_SCATTERS[target], *pairs, dim % whole.meta[VAL].dim(), *more)
            return emit(aten.view_as_complex.default, written)
        if target in _SCATTERS:
            return emit(_SCATTERS[target], whole, part, *rest)
        if target is aten.transpose.int:
            return emit(aten.transpose.int, part, *rest)
        if target is aten.permute.default:
            order: Any = rest[0]
            return emit(aten.permute.default, part, [order.index(d) for d in range(len(order))])
        if target in (aten.reshape.default, aten.unsqueeze.default):
            return emit(aten.reshape.default, part, self.editor.shape(whole.meta[VAL]))
        raise _refuse(where, f"{where.target} writes into a view made by {target}")

    # -- results

    def _output_mutations(self) -> None:
        program = self.editor.program
        output = program.output_node()
        values = list(output.args[0])
        for node, spec in program.input_nodes():
            if node in self.version and spec.kind != "user":  # what arguments hold is an output already
                values.append(self.current[node])
                program.outputs.append(Output("mutation", spec.name))
        output.args = (tuple(values),)


def _is_composite(target: torch._ops.OpOverload) -> bool:
    """True if the op is made of others: it may return a view and not say so in its schema, as type_as and einsum do."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")


def functional_form(node: fx.Node) -> Callable[..., Any]:
    """aten.add_.Tensor -> aten.add.Tensor, aten.__iand__.Scalar -> aten.__and__.Scalar."""
    if node.target in _IRREGULAR:
        return _IRREGULAR[node.target]
    name = op_name(node)
    plain = f"__{name[3:]}" if name.startswith("__i") and name.endswith("__") else name.rstrip("_")
    packet = getattr(aten, plain, None)
    overload = node.target._overloadname
    if packet is None or overload not in packet.overloads():
        raise _refuse(node, f"{node.target} has no functional form")
    return getattr(packet, overload)


def _refuse(node: fx.Node, found: str) -> CaptureError:
    return CaptureError(
        f"{found}, which cannot be made functional",
        fix="write the result to a new tensor (x = x + y for x += y, torch.where or torch.cat for x[...] = y)",
        **located(node),
    )


# -- writes that no schema declares


@on("embedding embedding_bag embedding_bag.padding_idx")
def refuse_sparse_gradients(editor: Editor, node: fx.Node) -> bool:
    """A graph's gradients are dense: torch.optim.SparseAdam, which `sparse` is for, takes no others."""
    if argument(node, "sparse"):
        raise CaptureError(
            "an embedding with sparse=True has a sparse gradient, and gradients of a parallelized model are dense",
            fix="make it with sparse=False, and train it with AdamW or SGD",
            **located(node),
        )
    return False


@on("batch_norm instance_norm")
def write_out_running_statistics(editor: Editor, node: fx.Node) -> bool:
    """A norm that trains with running statistics -> one without, and their updates. Those of instance_norm are means over the
    rows, each of which has statistics of its own."""
    of_batch = node.target is aten.batch_norm.default
    x, weight, bias, mean, var, training, momentum, eps, cudnn = arguments(
        node, "input", "weight", "bias", "running_mean", "running_var", "training" if of_batch else "use_input_stats",
        "momentum", "eps", "cudnn_enabled",
    )  # fmt: skip
    if not training or mean is None:  # an instance_norm of running statistics is a batch_norm
        target = aten.batch_norm.default if mean is not None else node.target
        return respell(node, target, (x, weight, bias, mean, var, training, momentum, eps, cudnn))
    emit = editor.at(node)
    dims = [d for d in range(0 if of_batch else 2, x.meta[VAL].dim()) if d != 1]
    still = emit(aten.detach.default, x)
    now = [emit(aten.mean.dim, still, dims), emit(aten.var.correction, still, dims, correction=1)]
    for running, of_x in zip((mean, var), now if of_batch else [emit(aten.mean.dim, y, [0]) for y in now], strict=True):
        kept = emit(aten.mul.Tensor, running, 1.0 - momentum)
        emit(aten.copy_.default, running, emit(aten.add.Tensor, kept, emit(aten.mul.Tensor, of_x, momentum)))
    return respell(node, node.target, (x, weight, bias, None, None, True, momentum, eps, cudnn))


@on("embedding")
def gradients_by_frequency(editor: Editor, node: fx.Node) -> bool:
    """scale_grad_by_freq -> a division of the gradient by how often the row is looked up in the whole batch.

    Before:  %y = embedding(%w, %ids, -1, True)
    After:   %e = embedding(%w, %ids); %n = embedding(embedding_dense_backward(ones, %ids), %ids)
             %y = %e.detach() + (%e - %e.detach()) / %n
    """
    if not argument(node, "scale_grad_by_freq"):
        return False
    emit = editor.at(node)
    weight, ids, padding = arguments(node, "weight", "indices", "padding_idx")
    rows = emit(aten.embedding.default, weight, ids, padding)
    value = weight.meta[VAL]
    once = emit(aten.ones.default, [*editor.shape(ids.meta[VAL]), 1], dtype=value.dtype, device=value.device)
    counts = emit(aten.embedding_dense_backward.default, once, ids, editor.shape(value)[0], -1, False)
    counts = emit(aten.embedding.default, counts, ids)
    still = emit(aten.detach.default, rows)
    moved = emit(aten.div.Tensor, emit(aten.sub.Tensor, rows, still), counts)
    return replace(node, emit(aten.add.Tensor, still, moved))
