"""The intermediate form: a `Program` is a flat ATen graph with named inputs and outputs.

Meta keys of a node (the only ones that passes may rely on):

    val        FakeTensor, SymInt or tuple of them; global shapes until `localize_shapes`, one rank's afterwards
    source     SourceLine of the user's code
    fqn        path of the user's module that the node belongs to ('' is the root)
    made_by    tuple of pass names that made or rewrote the node; () is capture
    placement  Placement of the value, from `insert_transitions` on (absent: a replicated value that needs no gradient)
    phase      'backward' on backward nodes of a joint graph
    recompute  True on forward nodes whose value backward computes again (`partition`) instead of keeping it
    tokens     dims (structural) that the value's first dim represents, where `flatten_tokens` made one of several
    region     number of the call of torch.utils.checkpoint, the outermost one, in which the node was traced
    layer      number of the node's layer in the order of use, where kept values are offloaded (`choose_kept`)
    held       axis -> Placement on it, of axes outside of the tensor-parallel one (`place_axes`, `cut_sequence`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx._lazy_graph_module import _LazyGraphModule

from megafx.errors import SourceLine
from megafx.ir.sizes import Sizes
from megafx.placements.types import Placement
from megafx.units import mib_text

if TYPE_CHECKING:
    from torch._subclasses import FakeTensorMode
    from torch.utils._pytree import TreeSpec

    from megafx.ir.call_spec import CallSpec

VAL, SOURCE, FQN, MADE_BY, PLACEMENT, PHASE = "val", "source", "fqn", "made_by", "placement", "phase"
TOKENS = "tokens"
RECOMPUTE = "megafx_recompute"  # torch has a "recompute" of its own
REGION = "region"
GIVEN = "given"  # (place, parameters) of a cast of weights that is made before forward, and given to both graphs
LAYER = "layer"
HELD = "held"


class Phase(IntEnum):
    """What a graph is; `ir/contracts.py` says what is legal in each."""

    CAPTURED = 0  # as exported: in-place ops, aliases of tied weights, asserts
    CANONICAL = 1  # functional, one spelling for each thing, sizes rooted on graph inputs
    PLANNED = 2  # plan chosen; graph unchanged
    PLACED = 3  # transitions inserted, placements on nodes; shapes still global, transitions are identities
    LOCAL = 4  # one rank's shapes
    JOINT = 5  # forward and backward in one graph
    LOWERED = 6  # transitions are collectives (start, wait) and local ops
    BOUND = 7  # what one rank runs: its coordinates are constants, mesh axes are process groups
    PARTITIONED = 8  # cut into a forward and a backward graph (`Program.partition`); the whole graph stays as it was


@dataclass(frozen=True)
class Input:
    """One placeholder. name: FQN of the parameter or buffer, or the path of a user input such as `args[0]`.

    A 'pending' one is a gradient of that parameter that earlier calls held back (`data_parallel`).
    """

    kind: Literal["param", "buffer", "constant", "user", "seed", "tangent", "pending"]
    name: str
    aliases: tuple[str, ...] = ()  # further FQNs of a tied parameter


@dataclass(frozen=True)
class Output:
    """One element of the output tuple. An 'order' keeps calls with effects in the graph (ops/eager_call.py), a 'check' those
    that may raise an error (kernels/lengths.py)."""

    kind: Literal["user", "mutation", "gradient", "saved", "order", "check"]
    name: str  # path of a user output; FQN of the buffer or parameter otherwise
    loss: bool = False
    # that of the value as it leaves, from `insert_transitions` on. The node's own may differ once lowering has dropped
    # the identity R -> I
    placement: Placement | None = None
    lazy: bool = False  # it may be computed when somebody first reads it (lazy_outputs)
    cache: str = ""  # path inside of a key-value cache that the call returns or changes ('' where it is none)
    requires_grad: bool = True  # whether it does in eager mode, where the call was captured with gradients
    # forward leaves it in a Python object (its name says where), and does not return it
    written: bool = False


@dataclass(frozen=True)
class Note:
    """Something the user should know: what was not fused, not sharded, specialised, or brought to agreement."""

    topic: str  # 'capture', 'plan', 'replicated', 'agreement', ...
    message: str
    fqn: str = ""
    source: SourceLine | None = None

    def __str__(self) -> str:
        where = f" [{self.fqn}]" if self.fqn else ""
        return f"{self.topic}{where}: {self.message}" + (f" ({self.source})" if self.source else "")


@dataclass(frozen=True)
class Fusion:
    """One replaced match of a pattern. stage: the pass that replaced it; elements: of the largest value that it covered."""

    pattern: str
    fqn: str
    source: SourceLine | None
    stage: str
    elements: int = 0  # structural, as `Sizes` counts


@dataclass(frozen=True)
class Batch:
    """How the batch is cut over the data-parallel ranks (`place_axes`)."""

    ranks: int
    inputs: dict[str, Placement]  # placement on that axis of each input that is cut, by name
    outputs: tuple[Placement, ...]  # of each forward result: R or S
    # the gradients of the ranks are to be added, since those of the outputs are divided by their number (there is a loss
    # in the graph); else they are averaged, as are the losses that users compute, one on each rank
    summed: bool
    equal: bool  # the graph relies on batches of equal shapes
    whole: bool = True  # values were typed, and draws are parts of one mask
    reduced: bool = False  # gradients are those of all ranks (`data_parallel` has run)
    # ranks that cut the sequence of each part of the batch (`cut_sequence`); what enters and leaves the graph is the same
    # on each of them, but for gradients of parameters, of which they have summands, and for what a stage of a pipeline
    # gets and gives: context_inputs and context_outputs are their placements on that axis
    cp: int = 1
    context_inputs: Mapping[str, Placement] = field(default_factory=dict)
    context_outputs: tuple[Placement, ...] = ()
    # parameters of which a rank has its experts alone, as in a plan (`hold_experts`)
    experts: dict[str, int] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)  # sizes of the axes of the mesh but the tensor-parallel one


@dataclass(frozen=True)
class Saved:
    """One thing handed from forward to backward."""

    kind: Literal["input", "size", "value"]
    index: int  # of the program's input (from len(inputs) on: of a join), or -1
    name: str
    fqn: str
    source: SourceLine | None
    numel: int  # structural; 0 for what is handed over by reference
    itemsize: int
    # the memory is also an input's, a user output's or kept for a lazy output: the user may change it, and backward must
    # not
    shared: bool


@dataclass(frozen=True)
class Recomputed:
    """What `choose_kept` decided, for one rank at the workload."""

    without: int  # bytes that would be kept if nothing were recomputed
    kept: int  # bytes that are
    promise: int | None  # the bytes that a budget allows
    seconds: float  # modelled time of what backward recomputes
    at: Any = None  # if the promise holds for calls of any sizes: the bytes kept, as an expression in those sizes
    offloaded: int = 0  # bytes that wait on the host

    def holds(self, sizes: Mapping[Any, int]) -> bool:
        """True if a call of these sizes keeps no more than what is promised."""
        return self.promise is None or self.at is None or int(self.at.xreplace(sizes)) <= self.promise

    def __str__(self) -> str:
        text = f"{mib_text(self.kept)} of {mib_text(self.without)}, the rest recomputed in {1e6 * self.seconds:.0f} us"
        if self.offloaded:
            text = f"{text}, {mib_text(self.offloaded)} of it on the host"
        return text if self.promise is None else f"{text} (budget {mib_text(self.promise)})"


Source = str | tuple[str, int]  # an output, or a tensor that a call of an eager module gets: (its key, which)


@dataclass(frozen=True)
class Reached:
    """Where gradients of a graph can come from (analysis/reached.py)."""

    # name of a parameter or user input -> all that its gradient can come from
    inputs: Mapping[str, tuple[Source, ...]]
    # key of a call of an eager module -> the same for each of its results
    results: Mapping[str, tuple[tuple[Source, ...], ...]]
    # name of an output -> the others that depend on it
    outputs: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    # name of an output -> those (it may be one) whose backward frees in eager mode what its own needs
    sharing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Partition:
    """The graphs that a program is cut into.

    forward(*inputs) -> (*outputs, *kept for backward, *kept for lazy outputs)
    backward([*saved, *tangents, *pending]) -> gradients
    lazy_graph(*saved_for_lazy) -> lazy outputs
    cast_weights(*inputs, *joins) -> casts of weights, which are the last inputs of forward

    forward returns the saved of kind 'size' and 'value' only, in order; those of kind 'input' come first in `saved`, which
    backward takes as a list and clears. backward is None where the program has no gradients; last_backward may overwrite
    what was kept, and is for the last backward of a call. Where outputs are lazy, forward gives None in their places
    (`lazy`). joins: further inputs of forward, after the program's: each joins the inputs with these indices. gathered: index
    of a join that is a `gather_region` of its inputs, not their concatenation -> (ranks, axis). casts: of each cast of weights,
    the indices of the inputs that it is made of. What they give is kept until a weight changes (compiler/kept_values.py).
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: tuple[Saved, ...]
    lazy_graph: fx.GraphModule | None = None
    saved_for_lazy: tuple[Saved, ...] = ()
    lazy: tuple[int, ...] = ()
    joins: tuple[tuple[int, ...], ...] = ()
    gathered: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    last_backward: fx.GraphModule | None = None
    cast_weights: fx.GraphModule | None = None
    casts: tuple[tuple[int, ...], ...] = ()

    @property
    def origins(self) -> tuple[tuple[int, ...], ...]:
        """Of each further input of forward, the indices of the program's inputs that it is made of."""
        return (*self.joins, *self.casts)

    def changed(self, change: Callable[[fx.GraphModule, str], tuple[fx.GraphModule, int]]) -> tuple[Partition, int]:
        """(the partition with the graphs that change(graph, "forward" or "backward") makes, the sum of its counts). Changes
        of the last backward are not counted: they are those of backward."""
        forward, count = change(self.forward, "forward")
        backward, last = self.backward, self.last_backward
        if backward is not None:
            backward, more = change(backward, "backward")
            count += more
        if last is not None:
            last = backward if last is self.backward else change(last, "backward")[0]
        casts = self.cast_weights
        if casts is not None:
            casts, more = change(casts, "forward")
            count += more
        made = replace(self, forward=forward, backward=backward, last_backward=last, cast_weights=casts)
        return made, count


@dataclass
class Program:
    """A captured call of a model. inputs and outputs are in the order of placeholders and of the output tuple."""

    gm: fx.GraphModule
    inputs: list[Input]
    outputs: list[Output]
    sizes: Sizes
    fake_mode: FakeTensorMode
    out_spec: TreeSpec
    constants: dict[str, Any] = field(default_factory=dict)  # name of a 'constant' input -> tensor
    phase: Phase = Phase.CAPTURED
    notes: list[Note] = field(default_factory=list)
    fusions: list[Fusion] = field(default_factory=list)  # in the order in which they were made
    table: Callable[[str], Any] = lambda name: None  # FQN of a buffer -> what it holds (tables.py), where that is known
    assumed: dict[str, Any] = field(default_factory=dict)  # buffers whose numbers the graph relies on -> what they held
    batch: Batch | None = None  # on the data-parallel axis, where there is one
    # with gradients as each rank computes them: where further backward graphs start
    before_reduction: Program | None = None
    recomputed: Recomputed | None = None  # set by choose_kept, where there was a choice
    reached: Reached | None = None  # set by canonicalize, where gradients of a call can be absent
    partition: Partition | None = None  # set by the pass of this name
    call: CallSpec | None = None  # how a call maps to the user inputs and outputs (set by capture)

    @property
    def graph(self) -> fx.Graph:
        return self.gm.graph

    def copy(self) -> Program:
        """The same program with a graph and lists of its own; values, sizes and constants are shared."""
        gm = graph_module(self.gm, copied_graph(self.graph))
        lists: dict[str, Any] = {name: [*getattr(self, name)] for name in ("inputs", "outputs", "notes", "fusions")}
        return replace(self, gm=gm, assumed=dict(self.assumed), **lists)

    def become(self, copy: Program) -> None:
        """Take what a copy has, its graph included: the copy is of no use afterwards."""
        vars(self).update(vars(copy))

    def erase_unused(self) -> None:
        """Erase the calls whose values nothing reads, but those with an effect of their own."""
        erase_unused(self.graph)

    def placeholders(self) -> list[fx.Node]:
        return list(self.graph.find_nodes(op="placeholder"))

    def input_nodes(self) -> list[tuple[fx.Node, Input]]:
        """Each placeholder with what it is."""
        return list(zip(self.placeholders(), self.inputs, strict=True))

    def output_node(self) -> fx.Node:
        return self.graph.output_node()

    def results(self) -> tuple[Any, ...]:
        """What the graph returns, one for each of `outputs`: nodes, or the constants themselves."""
        values: Any = self.output_node().args[0]
        return tuple(values)

    def parameter_gradients(self) -> list[tuple[int, fx.Node, str]]:
        """(place among the outputs, gradient, name) of each parameter that has one."""
        params = {spec.name for spec in self.inputs if spec.kind == "param"}
        found = enumerate(zip(self.results(), self.outputs, strict=True))
        wanted = [(i, node, spec) for i, (node, spec) in found if spec.kind == "gradient" and spec.name in params]
        return [(i, node, spec.name) for i, node, spec in wanted if isinstance(node, fx.Node)]

    def note(self, topic: str, message: str, node: fx.Node | None = None) -> None:
        """Record a note once."""
        note = Note(topic, message, *((fqn_of(node), source_of(node)) if node is not None else ()))
        if note not in self.notes:
            self.notes.append(note)


def erase_unused(graph: fx.Graph) -> None:
    """As torch's `eliminate_dead_code`, which looks through all arguments first: the runner of passes does after each."""
    if graph.find_nodes(op="get_attr"):  # bodies of loops
        graph.eliminate_dead_code()
        return
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def fqn_of(node: fx.Node) -> str:
    return node.meta.get(FQN, "")


def source_of(node: fx.Node) -> SourceLine | None:
    return node.meta.get(SOURCE)


def located(node: fx.Node) -> dict[str, Any]:
    """Where an error is: the arguments `module` and `source` of MegafxError."""
    return {"module": fqn_of(node), "source": source_of(node)}


def inherit(node: fx.Node, origin: fx.Node, by: str) -> fx.Node:
    """Give a new node the user's line and module of the node that it stems from, and the pass that made it."""
    for key in (SOURCE, FQN, PHASE, RECOMPUTE, REGION, HELD, "nn_module_stack", "stack_trace"):
        if key in origin.meta:
            node.meta[key] = origin.meta[key]
    node.meta[MADE_BY] = (*origin.meta.get(MADE_BY, ()), by)
    return node


def new_call(where: fx.Node, target: Any, args: tuple[Any, ...], value: Any, origin: fx.Node, by: str) -> fx.Node:
    """A call in front of `where` that stems from `origin`, with its value, which nothing computes (as `Builder` does)."""
    with where.graph.inserting_before(where):
        made = where.graph.call_function(target, args)
    made.meta[VAL] = value
    return inherit(made, origin, by)


def get_at(node: fx.Node, path: tuple[Any, ...]) -> Any:
    """The argument of `node` at `path`: a position, a position inside a list argument, or a keyword."""
    first, *rest = path
    found: Any = node.kwargs[first] if isinstance(first, str) else node.args[first]
    for index in rest:
        found = found[index]
    return found


def set_at(node: fx.Node, path: tuple[Any, ...], value: Any) -> None:
    """Replace the argument of `node` at `path`."""
    first, *rest = path
    if rest:
        items = list(get_at(node, (first,)))
        items[rest[0]] = value
        value = items
    if isinstance(first, str):
        node.update_kwarg(first, value)
    else:
        node.update_arg(first, value)


def fake_args(args: Any) -> Any:
    """Replace nodes by their values."""
    return fx.node.map_arg(args, lambda n: n.meta[VAL])


class Builder:
    """Emits nodes before `where` that stem from `origin`, each with `val` computed by running the op on fakes."""

    def __init__(self, program: Program, where: fx.Node, origin: fx.Node, by: str) -> None:
        self.program, self.where, self.origin, self.by = program, where, origin, by

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        graph = self.program.graph
        with graph.inserting_before(self.where):
            node = graph.call_function(target, args, kwargs)
        recompute_val(self.program, node)
        return inherit(node, self.origin, self.by)


def graph_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """One whose code is written when it is first needed: the next pass reads the graph."""
    return _LazyGraphModule(root, graph)


def copied_node(graph: fx.Graph, node: fx.Node, placed: Callable[[fx.Node], Any] = lambda node: node) -> fx.Node:
    """As `fx.Graph.node_copy`, in half of the time: `create_node` looks through arguments that it is given."""
    made = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    made.args = fx.node.map_arg(node.args, placed)
    if node.kwargs:
        made.kwargs = fx.node.map_arg(node.kwargs, placed)
    made.meta = dict(node.meta)
    return made


def copied_graph(graph: fx.Graph) -> fx.Graph:
    """The same nodes, with metadata of their own that has the same values, and the same way to write code."""
    made, placed = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        placed[node] = copied_node(made, node, placed.__getitem__)
    made.set_codegen(graph._codegen)
    return made


def compiled_graph(gm: fx.GraphModule) -> Callable[..., Any]:
    """The function that the graph's code is."""
    _LazyGraphModule.force_recompile(gm)
    return gm.forward


def recompute_val(program: Program, node: fx.Node) -> None:
    """Set `val` from the node's operands."""
    mode: Any = program.fake_mode  # a QuickFakeTensorMode, but for programs that tests make by hand
    with mode, torch.no_grad(), enable_python_dispatcher():
        args, kwargs = fake_args(node.args), fake_args(node.kwargs)
        node.meta[VAL] = mode.run(node.target, args, kwargs) if hasattr(mode, "run") else node.target(*args, **kwargs)


def number_nodes(graph: fx.Graph) -> None:
    """Name each op after its target and its place: `linear`, `linear_1`, ... Graphs that are alike then have equal names.

    fx names say in which order passes made nodes, which differs between a graph and its copy.
    """
    names = fx.graph._Namespace()
    inputs = list(graph.find_nodes(op="placeholder"))
    for node in [*inputs, *(n for n in graph.nodes if n.op != "placeholder")]:
        target = node.target
        name = node.name
        if node.op == "call_function":
            name = target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else target.__name__
        node.name = names.create_name(name, node)
    graph._graph_namespace = names


def number_sizes(graph: fx.Graph) -> None:
    """Name the nodes that read sizes by their order. Names of fx count those that were taken away again, too: how many there
    were depends on what the process has traced before."""
    names = fx.graph._Namespace()
    sizes = {*graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)}
    for node in [*(n for n in graph.nodes if n not in sizes), *(n for n in graph.nodes if n in sizes)]:
        node.name = names.create_name("sym_size_int" if node in sizes else node.name, node)
    graph._graph_namespace = names


def ancestors(
    roots: Iterable[Any],
    stop: Callable[[fx.Node], bool] = lambda node: False,
    operands: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.all_input_nodes,
) -> set[fx.Node]:
    """Nodes that the roots depend on, roots included, not looking behind nodes for which `stop` holds. Roots may be constants.

    By hand: fx has the edges already. Copying 6000 nodes into a networkx graph takes 40 ms, the walk 8 ms.
    """
    seen: set[fx.Node] = set()
    todo = [n for n in roots if isinstance(n, fx.Node)]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if not stop(node):
            todo += operands(node)
    return seen


def active_nodes(program: Program) -> set[fx.Node]:
    """Nodes whose value depends on a parameter or a floating user input: those that get placements.

    The others (ids, masks, position tables) are computed whole on every rank and sliced without communication. A value that
    needs no gradient can be active: the comparison in `where(x > 0, x, 0)` is sharded as x is.
    """
    active: set[fx.Node] = set()
    for node, spec in program.input_nodes():
        if spec.kind == "param" or (spec.kind == "user" and is_floating(node)):
            active.add(node)
    for node in program.graph.nodes:
        if node.op == "call_function" and tensors_of(node) and any(a in active for a in node.all_input_nodes):
            active.add(node)
    return active


def differentiable_nodes(program: Program, wants_grad: Callable[[Input], bool] | None) -> set[fx.Node]:
    """Floating values that depend on an input whose gradient is wanted: the others get none in backward."""
    found: set[fx.Node] = set()
    if wants_grad is None:
        return found
    for node, spec in program.input_nodes():
        if spec.kind in ("param", "user") and is_floating(node) and wants_grad(spec):
            found.add(node)
    for node in program.graph.nodes:
        if node.op == "call_function" and is_floating(node) and any(a in found for a in node.all_input_nodes):
            found.add(node)
    return found


def differentiable_outputs(program: Program, given_back: bool = False) -> list[int]:
    """Indices of user outputs that require a gradient in eager mode. given_back: with inputs that are returned: each is the
    user's own tensor, unless a transition gathers it."""
    made = [
        isinstance(x, fx.Node) and (given_back or x.op != "placeholder") and is_floating(x) for x in program.results()
    ]
    return [i for i, o in enumerate(program.outputs) if made[i] and o.kind == "user" and o.requires_grad]


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The node's value, or those of its values that are tensors."""
    value = node.meta.get(VAL)
    values: Iterable[Any] = value if isinstance(value, (tuple, list)) else (value,)
    return [v for v in values if isinstance(v, torch.Tensor)]


def is_floating(node: fx.Node) -> bool:
    return any(v.dtype.is_floating_point or v.dtype.is_complex for v in tensors_of(node))
