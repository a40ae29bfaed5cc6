"""What forward asks of its arguments that a trace does not know: how they lie in memory, and how they were computed.

if not x.is_contiguous():       # answered by the call's own tensor, and a graph serves calls with the same answer alone
if x.is_leaf:                   # or x.grad_fn is None: the same
if id(x) not in self.seen:      # a graph serves calls with this very tensor
if not mask.all():              # of values that follow from the call's arguments alone: computed of them at each call
"""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, SymTypes
from torch.utils._python_dispatch import _disable_current_modes

from megafx.capture.code_names import is_looked_at
from megafx.capture.eager_parts import follows
from megafx.errors import CaptureError
from megafx.ir.call_spec import ANSWERS, no_autocast
from megafx.ir.nodes import storage_of, writes
from megafx.ir.program import VAL
from megafx.ir.python_state import FIRST_ADDRESS
from megafx.ir.source_lines import current_user_line
from megafx.meanwhile import replacing

_WHY = "how an argument lies in memory, and how it was computed, is a matter of the call's own tensor"


class Asked:
    """real: the tensors of a call, by name. asked: of those, question (`ANSWERS`) -> the answer that the model's code got.
    model: whose parameters and buffers are in the trace under other addresses. leaves: of the call, where this rank alone
    decides by their values; questions: what code has asked of these, and the answers."""

    def __init__(
        self, model: nn.Module, real: Mapping[str, Tensor] | None = None, leaves: Sequence[tuple[str, Any]] = ()
    ) -> None:
        self.model, self.real, self.leaves = model, real or {}, leaves
        self.questions: dict[str, tuple[Question, bool]] = {}
        self.traced: list[Tensor | None] = []
        self.note: Callable[[str], None] = lambda text: None
        self.own, self.addresses = _tensors_of(model), dict[int, int]()
        self.addressed = 0  # how often code has asked for the address of a tensor or a module
        self.names: dict[int, str] = {}
        self.asked: dict[str, dict[str, Any]] = {}

    def begin(self, traced: Mapping[str, Tensor]) -> None:
        """Of a trace. traced: its inputs."""
        self.names = {id(x): name for name, x in traced.items() if name in self.real}
        of_fakes = zip(_tensors_of(self.model), self.own, strict=True)
        self.addresses = {id(fake): getattr(own, FIRST_ADDRESS, id(own)) for fake, own in of_fakes}
        self.traced = [traced[n] if type(x) is Tensor and not x.is_meta else None for n, x in self.leaves]
        self.questions.clear()
        self.asked.clear()

    def replacements(self) -> Iterator[tuple[Any, str, Callable[[Any], Any], str]]:
        """(object, name, old -> new, why)."""
        yield Tensor, "is_contiguous", self._is_contiguous, _WHY
        yield Tensor, "stride", self._stride, _WHY
        yield Tensor, "is_leaf", lambda old: property(self._answering("is_leaf")), _WHY
        yield Tensor, "grad_fn", lambda old: property(self._answering("grad_fn")), _WHY
        yield Tensor, "_version", lambda old: property(self._version), _WHY
        yield Tensor, "grad", lambda old: property(self._gradient, self._set_gradient), _WHY
        why = "a decision by values of arguments is made for the call at hand, and a graph serves calls that decide the same"
        yield SymNode, "guard_bool", self._guard_bool, why
        yield builtins, "id", self._id, "the address of a tensor of a trace is nothing that code could find again"

    def _name(self, x: Tensor, frames: int) -> str | None:
        """Of an argument of which code of the model asks, that many frames away."""
        name = self.names.get(id(x))
        return name if name is not None and is_looked_at(sys._getframe(frames + 1).f_code.co_filename) else None

    def _answer(self, name: str, question: str) -> Any:
        return self.asked.setdefault(name, {}).setdefault(question, ANSWERS[question](self.real[name]))

    def _answering(self, question: str) -> Callable[[Tensor], Any]:
        def get(x: Tensor) -> Any:
            if (name := self._name(x, 1)) is None:
                return getattr(super(Tensor, x), question)
            self._answer(name, question)
            return getattr(self.real[name], question)

        return get

    def _gradient(self, x: Tensor) -> Any:
        self._refuse(
            x, "reads `.grad`", "read it in the training loop, and pass what forward needs of it as an argument"
        )
        return super(Tensor, x).grad

    def _set_gradient(self, x: Tensor, value: Any) -> None:
        self._refuse(x, "sets `.grad`", "set it in the training loop")
        attribute: Any = super(Tensor, type(x)).grad
        attribute.__set__(x, value)

    def _version(self, x: Tensor) -> int:
        self._refuse(x, "reads `._version`", "count changes in an attribute of the model, which the training loop sets")
        return super(Tensor, x)._version

    def _refuse(self, x: Tensor, does: str, fix: str) -> None:
        if isinstance(x, FakeTensor) and (isinstance(x, nn.Parameter) or id(x) in self.names):
            code = sys._getframe(2).f_code
            if code.co_name == "zero_grad" and current_user_line() is not None:
                does, fix = "calls zero_grad, which sets `.grad`", "call it in the training loop"
            elif not is_looked_at(code.co_filename):
                return
            found = f"forward {does} of a parameter or an argument, which a graph does not have"
            raise CaptureError(found, source=current_user_line(), fix=fix)

    @replacing
    def _guard_bool(self, old: Callable[..., bool], node: SymNode, file: str, line: int) -> bool:
        try:
            return old(node, file, line)
        except GuardOnDataDependentSymNode:
            question = Question.of(node.expr, self.traced)
            if question is None or (question.text not in self.questions and len(self.questions) == _MOST):
                raise
            if question.text not in self.questions:
                self.questions[question.text] = question, question([x for _, x in self.leaves])
                self.note(f"{current_user_line()}: decided by values of arguments: a graph for each answer")
            return self.questions[question.text][1]

    @replacing
    def _id(self, old: Callable[[Any], int], x: Any) -> int:
        known = issubclass(type(x), (FakeTensor, nn.Module))
        if not known or not is_looked_at(sys._getframe(2).f_code.co_filename):
            return old(x)
        self.addressed += 1
        name = self.names.get(old(x))
        if name is None:
            return self.addresses.get(old(x), old(x))
        self._answer(name, "id")
        return old(self.real[name])

    @replacing
    def _is_contiguous(self, old: Callable[..., bool], /, x: Tensor, *args: Any, **kwargs: Any) -> bool:
        if args or kwargs or (name := self._name(x, 2)) is None:  # behind _here_alone
            return old(x, *args, **kwargs)
        return bool(self._answer(name, "is_contiguous"))

    @replacing
    def _stride(self, old: Callable[..., Any], /, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = self._name(x, 2)
        if name is not None and not self._answer(name, "is_contiguous"):
            own = re.sub(r"^kwargs\[(\w+)\]", r"\1", name)
            raise CaptureError(
                f"forward asks for strides of its argument '{own}', which is not contiguous: the graph would have those of "
                "a contiguous one",
                source=current_user_line(),
                fix=f"pass {own}.contiguous(), or index by sizes (unfold, narrow, reshape)",
            )
        return old(x, *args, **kwargs)


_MOST = 4  # questions of one trace: each may double the number of graphs


class Question:
    """Whether something is true of the values of a call's leaves. graph(*tensors): the numbers `symbols` of `condition`.

    places: which leaves the tensors are. sizes: symbol -> (leaf, dim).
    """

    def __init__(
        self, condition: Any, symbols: list[Any], graph: fx.GraphModule, places: list[int], sizes: dict[Any, Any]
    ) -> None:
        self.condition, self.symbols, self.graph, self.places, self.sizes = condition, symbols, graph, places, sizes
        constants = [(n, x.tolist()) for n, x in sorted(graph.named_buffers())]
        self.text = f"{condition} {symbols} {graph.code} {constants} {places} {sizes}"

    @staticmethod
    def of(expr: sympy.Basic, traced: Sequence[Tensor | None]) -> Question | None:
        """traced: the fakes of leaves that may be asked. None where the answer depends on anything else, or on chance."""
        mode = get_proxy_mode()
        if mode is None or not any(x is not None for x in traced):
            return None
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return _question(expr, traced, mode.tracer)

    def __call__(self, leaves: Sequence[Any]) -> bool:
        """The answer for the leaves of a call."""
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), no_autocast():
            found = self.graph(*(leaves[i].detach() for i in self.places))
        values = {
            s: sympy.sympify(int(x) if isinstance(x, bool) else x) for s, x in zip(self.symbols, found, strict=True)
        }
        sizes = {s: sympy.Integer(leaves[i].shape[d]) for s, (i, d) in self.sizes.items()}
        return bool(self.condition.xreplace(values | sizes))


def _question(expr: sympy.Basic, traced: Sequence[Tensor | None], tracer: Any) -> Question | None:
    data: dict[Any, fx.Node] = {}  # symbol -> the node of the number
    for node in tracer.graph.nodes:
        value = node.meta.get(VAL)
        if isinstance(value, SymTypes) and not value.node.has_hint():
            number = value.node._expr
            symbol = next(iter(number.free_symbols)) if number.is_Equality else number
            data.setdefault(symbol, node)
    leaves = {
        slot.proxy.node: i for i, x in enumerate(traced) if x is not None and (slot := get_proxy_slot(x, tracer, None))
    }
    sizes = {
        size.node.expr: (i, d)
        for i, x in enumerate(traced)
        for d, size in enumerate[Any]([] if x is None else x.shape)
        if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol
    }
    if not expr.free_symbols <= data.keys() | sizes.keys():
        return None
    symbols = sorted(expr.free_symbols & data.keys(), key=str)
    behind = dict.fromkeys(data[s] for s in symbols)
    todo = [*behind]
    while todo:
        each = todo.pop()
        number = each.target in _NUMBERS
        if not (each in leaves or number or follows(each)):
            return None
        new = [] if each in leaves else [x for x in each.all_input_nodes if x not in behind]
        behind |= dict.fromkeys(new)
        todo += new
    held = {storage_of(x) for x in behind}
    if any(
        writes(x) and x not in behind and not held.isdisjoint(map(storage_of, x.all_input_nodes))
        for x in tracer.graph.nodes
    ):
        return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    entering = sorted((x for x in behind if x in leaves), key=leaves.__getitem__)
    for node in (*entering, *(x for x in tracer.graph.nodes if x in behind and x not in leaves)):
        name, target = f"v{len(copies)}", node.target
        if node in leaves:
            copies[node] = graph.placeholder(name)
        else:
            args, kwargs = (fx.map_arg(x, copies.__getitem__) for x in (node.args, node.kwargs))
            copies[node] = graph.create_node(node.op, target, args, kwargs, name)
    graph.output(tuple(copies[data[s]] for s in symbols))
    constants = {str(x.target): getattr(tracer.root, str(x.target)) for x in behind if x.op == "get_attr"}
    made = fx.GraphModule(constants, graph)
    used = {s: sizes[s] for s in sorted(expr.free_symbols & sizes.keys(), key=str)}
    names = {s: sympy.Symbol(f"x{i}") for i, s in enumerate(symbols)}  # two traces, and two places, ask the same
    return Question(expr.xreplace(names), [*names.values()], made, [leaves[x] for x in entering], used)


_NUMBERS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)


def _tensors_of(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers, as often as they have names."""
    return [
        *dict(model.named_parameters(remove_duplicate=False)).values(),
        *dict(model.named_buffers(remove_duplicate=False)).values(),
    ]
