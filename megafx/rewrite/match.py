"""Does a trace match the graph at this node? Unification with backtracking over the operands of commutative ops.

The answer is a `Match`, or a `Refusal` that says why not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from megafx.ir.dump import dtype_text, op_text, target_text
from megafx.ir.nodes import Draw, draw_of
from megafx.ir.program import VAL, Program, active_nodes, fqn_of, source_of
from megafx.rewrite.pattern import DimSpec, Pattern, parameters
from megafx.rewrite.trace import DTYPE_OF, Trace, TraceNumber, TraceSize, arguments_of


class Refusal(NamedTuple):
    """Why a match did not come about. node: where; matched: nodes of the pattern that were found; whole: all of them."""

    reason: str
    node: fx.Node
    matched: int
    whole: bool


class Match:
    """A place in the graph where a pattern is found. `m["x"]` is what the pattern's name is bound to there.

    A tensor's name gives its fake value (shape, dtype, device), or None where it is left out; a declared number's the number; a
    variant's its choice; a letter's the size; "drop" and "drops" what is known of dropout.
    """

    def __init__(self, trace: Trace, program: Program) -> None:
        self.trace, self.program = trace, program
        self.nodes: dict[fx.Node, fx.Node] = {}  # of the pattern -> of the graph
        self.operands: dict[str, fx.Node] = {}
        self.letters: dict[str, int] = {}  # structural sizes
        self.numbers: dict[str, Any] = {}

    @property
    def pattern(self) -> type[Pattern]:
        return self.trace.pattern

    @property
    def roots(self) -> list[fx.Node]:
        """The nodes whose values are replaced."""
        return [self.nodes[r] for r in self.trace.roots]

    @property
    def matched(self) -> list[fx.Node]:
        """Every node that the pattern covers."""
        return list(dict.fromkeys(self.nodes[n] for n in self.trace.calls))

    @property
    def elements(self) -> int:
        """Elements of the largest value that the pattern covers, as a structural integer."""
        sizes = self.program.sizes
        values = [n.meta[VAL] for n in self.matched]
        counts = [math.prod(sizes.shape(v)) for v in values if isinstance(v, torch.Tensor)]
        return max(counts, key=sizes.workload, default=0)

    @property
    def drops(self) -> tuple[Draw, ...]:
        """The dropouts found, their seeds and layouts as graph nodes."""
        return tuple(draw_of(self.nodes[n]) for n in self.trace.drops)

    def __getitem__(self, name: str) -> Any:
        if name in self.operands:
            return self.operands[name].meta[VAL]
        if name in self.trace.variant.absent:
            return None
        chosen = dict(self.trace.variant.values)
        if name in chosen:
            return chosen[name]
        if name in self.pattern.scalars:
            return self.numbers.get(name, self.letters.get(name))
        if name in self.letters:
            expr = self.program.sizes.expr(self.letters[name])
            return int(expr) if expr.is_Integer else expr
        if name == "drop":
            return self.drops[0] if self.drops else Draw()
        if name == "drops":
            return self.drops
        if name in parameters(self.pattern.match):
            return None  # a tensor of other variants
        raise KeyError(name)

    def node(self, name: str) -> fx.Node:
        """The graph node of a tensor."""
        return self.operands[name]


def user_text(node: fx.Node) -> str:
    place = f" in '{fqn_of(node)}'" if fqn_of(node) else ""
    line = source_of(node)
    return "the output" if node.op == "output" else f"{op_text(node)}{place}" + (f" at {line}" if line else "")


def value_text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return op_text(value)
    if isinstance(value, TraceSize):
        return "*".join([str(value.coefficient), *value.letters]) if value.coefficient != 1 else "*".join(value.letters)
    if isinstance(value, TraceNumber):
        return f"the number '{value.name}'"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(value_text, value))}]"
    return repr(value)


Todo = Any  # linked list of (pattern value, graph value), or None


class Matcher:
    """Matches traces against one program. candidates(target) gives the graph's nodes of an op, in graph order."""

    def __init__(self, program: Program, candidates: Callable[[Any], list[fx.Node]]) -> None:
        self.program, self.candidates = program, candidates
        active = active_nodes(program)
        self.cheap = {n for n in program.graph.nodes if n.op == "call_function" and n not in active}  # masks and tables
        self._arguments: dict[fx.Node, list[tuple[str, Any]]] = {}

    def at(self, trace: Trace, root: fx.Node) -> Match | Refusal:
        """The match whose anchor is this node, or why there is none."""
        return _Attempt(self, trace, root).run()

    def arguments(self, node: fx.Node) -> list[tuple[str, Any]]:
        if node not in self._arguments:
            self._arguments[node] = arguments_of(node)
        return self._arguments[node]

    def forget(self, nodes: list[fx.Node]) -> None:
        """These nodes are new: their users have other arguments than before."""
        for node in nodes:
            for user in node.users:
                self._arguments.pop(user, None)


class _Attempt:
    """One trace at one node. Every binding is in `trail`, so that a failure undoes what was bound since."""

    def __init__(self, matcher: Matcher, trace: Trace, root: fx.Node) -> None:
        self.matcher, self.trace, self.root = matcher, trace, root
        self.sizes = matcher.program.sizes
        self.match = Match(trace, matcher.program)
        self.equations: list[tuple[TraceSize, int]] = []
        self.trail: list[tuple[dict[Any, Any], Any]] = []
        self.count = 0
        self.best: tuple[int, Callable[[], str], fx.Node] = (0, lambda: "", root)
        self.refused: Refusal | None = None

    def run(self) -> Match | Refusal:
        todo: Todo = None
        for extra in reversed(self.trace.search[1:]):
            todo = ((extra, None), todo)
        if self._solve(((self.trace.anchor, self.root), todo)):
            return self.match
        if self.refused is not None:
            return self.refused
        count, reason, node = self.best
        return Refusal(reason(), node, count, False)

    # -- search

    def _solve(self, todo: Todo) -> bool:
        """Unify everything in the list. On failure the state is as before."""
        mark, equations, count = len(self.trail), len(self.equations), self.count
        while todo is not None:
            (pattern, found), todo = todo
            if isinstance(pattern, fx.Node) and found is None and pattern in self.trace.roots:
                return self._next_root(pattern, todo) or self._undo(mark, equations, count)
            more = self._step(pattern, found, todo)
            if more is False:
                return self._undo(mark, equations, count)
            if isinstance(more, list):  # alternatives: the rest is solved for each
                return any(self._solve(m) for m in more) or self._undo(mark, equations, count)
            todo = more
        return self._complete() or self._undo(mark, equations, count)

    def _undo(self, mark: int, equations: int, count: int) -> bool:
        while len(self.trail) > mark:
            table, key = self.trail.pop()
            del table[key]
        del self.equations[equations:]
        self.count = count
        return False

    def _bind(self, table: dict[Any, Any], key: Any, value: Any) -> Any:
        table[key] = value
        self.trail.append((table, key))
        return value

    def _fail(self, node: Any, reason: Callable[[], str]) -> bool:
        if self.count > self.best[0]:
            self.best = (self.count, reason, node if isinstance(node, fx.Node) else self.best[2])
        return False

    def _next_root(self, pattern: fx.Node, todo: Todo) -> bool:
        """A further result: found already, or the nearest node that fits."""
        if pattern in self.match.nodes:
            return self._solve(todo)
        taken = {self.match.nodes[r] for r in self.trace.roots if r in self.match.nodes}
        nodes = self.matcher.candidates(pattern.target)
        here = sum(n < self.root for n in nodes)
        for _, node in sorted(enumerate(nodes), key=lambda pair: abs(pair[0] - here)):
            if node not in taken and self._solve(((pattern, node), todo)):
                return True
        return False

    def _step(self, pattern: Any, found: Any, todo: Todo) -> Any:
        """Compare one pair: the list with what is left to compare, a list of such lists, or False."""
        if isinstance(pattern, fx.Node):
            if pattern in self.match.nodes:
                same = self.match.nodes[pattern] is found
                return todo if same else self._fail(found, lambda: f"two uses of one value are two values: %{found}")
            if not isinstance(found, fx.Node):
                return self._fail(found, lambda: f"{value_text(found)} is where the pattern has a tensor")
            if pattern.op == "placeholder":
                return todo if self._operand(pattern, found) else False
            return self._call(pattern, found, todo)
        if isinstance(pattern, TraceSize):
            size = self._structural(found)
            if size is None:
                return self._fail(found, lambda: f"{value_text(found)} is where the pattern has a size")
            self.equations.append((pattern, size))
            return todo
        if isinstance(pattern, TraceNumber):
            return todo if self._number(pattern.name, found) else False
        if isinstance(pattern, tuple):
            same = isinstance(found, (list, tuple)) and len(found) == len(pattern)
            for pair in reversed(list(zip(pattern, found, strict=True)) if same else []):
                todo = (pair, todo)
        else:
            literal = self._structural(found) if isinstance(found, fx.Node) else found
            same = _same(pattern, literal) and (literal is not None or found is None)
        if same:
            return todo
        return self._fail(found, lambda: f"{value_text(found)} is where the pattern has {value_text(pattern)}")

    def _call(self, pattern: fx.Node, found: fx.Node, todo: Todo) -> Any:
        call = self.trace.calls[pattern]
        if found.target != call.target or found.op != "call_function":
            return self._fail(found, lambda: f"{op_text(found)} is where the pattern has {target_text(call.target)}")
        arguments = self.matcher.arguments(found)
        if len(arguments) != len(call.arguments):
            return self._fail(found, lambda: f"{op_text(found)} has other arguments than in the pattern")
        self._bind(self.match.nodes, pattern, found)
        self.count += 1
        for (name, value), (_, have) in reversed(list(zip(call.arguments, arguments, strict=True))):
            if not (call.commutes and name in ("self", "other")):
                todo = ((value, have), todo)
        if not call.commutes:
            return todo
        (_, a), (_, b) = call.arguments[:2]
        (_, x), (_, y) = arguments[:2]
        straight, crossed = ((a, x), ((b, y), todo)), ((a, y), ((b, x), todo))
        return straight if x is y else [straight, crossed]

    # -- leaves

    def _operand(self, pattern: fx.Node, found: fx.Node) -> bool:
        """A tensor of the graph is bound to a parameter of match: dtype and shape must be as declared."""
        name = self.trace.inputs.get(pattern)
        if name is None or name == "drop":
            self._bind(self.match.nodes, pattern, found)
            return True
        value = found.meta.get(VAL)
        spec = self.trace.specs[name]
        if not isinstance(value, torch.Tensor):
            return self._fail(found, lambda: f"'{name}' is no tensor")
        wanted = (DTYPE_OF | self.trace.dtypes)[spec.dtype]
        if value.dtype != wanted:
            return self._fail(found, lambda: f"'{name}' is {dtype_text(value.dtype)}, not {dtype_text(wanted)}")
        lead = self.trace.lead if spec.dots else 0
        if value.dim() != lead + len(spec.dims):
            return self._fail(found, lambda: f"'{name}' has {value.dim()} dims, not {lead + len(spec.dims)}")
        dims = [DimSpec(1, (f"_{lead - i}",)) for i in range(lead)] + list(spec.dims)
        for dim, size in zip(dims, self.sizes.shape(value), strict=True):
            if not self._dim(dim, size):
                shape, text = tuple(value.shape), value_text(TraceSize(dim.coefficient, dim.letters))
                return self._fail(found, lambda: f"'{name}' of shape {shape} has no dim '{text}' there")  # noqa: B023  left at once
        self._bind(self.match.nodes, pattern, found)
        self._bind(self.match.operands, name, found)
        return True

    def _dim(self, dim: DimSpec, size: int) -> bool:
        if dim.or_one and size == 1:
            return True
        if not dim.letters:
            return size == dim.coefficient
        if len(dim.letters) == 1 and dim.coefficient == 1:
            letters, letter = self.match.letters, dim.letters[0]
            return (letters[letter] if letter in letters else self._bind(letters, letter, size)) == size
        self.equations.append((TraceSize(dim.coefficient, dim.letters), size))
        return True

    def _number(self, name: str, found: Any) -> bool:
        if found is not None and (isinstance(found, bool) or not isinstance(found, (int, float))):
            return self._fail(found, lambda: f"{value_text(found)} is where the pattern has the number '{name}'")
        numbers = self.match.numbers
        if name not in numbers:
            self._bind(numbers, name, found)
        if not _same(numbers[name], found):
            return self._fail(found, lambda: f"'{name}' is both {numbers[name]} and {found}")
        return True

    def _structural(self, found: Any) -> int | None:
        """A size argument of the graph as a structural integer."""
        value = found.meta.get(VAL) if isinstance(found, fx.Node) else found
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            return None
        return self.sizes.of(value)

    # -- the whole

    def _complete(self) -> bool:
        """Everything is unified: sizes, outside users and the pattern's own guard decide."""
        if not self._solve_sizes():
            return self._refuse(self.root, "its sizes are not those of the pattern")
        for node in self.trace.drops:  # a declared number may be the probability of a dropout
            marker, found = draw_of(node).p, draw_of(self.match.nodes[node]).p
            for name, value in self.trace.markers.items():
                if value == marker and name not in self.match.numbers:
                    self._bind(self.match.numbers, name, found)
        inside = set(self.match.matched)
        roots = set(self.match.roots)
        if len(roots) < len(self.trace.roots):
            return self._refuse(self.root, "two results of the pattern are one value")
        for node in self.match.matched:
            outside = [u for u in node.users if u not in inside]
            if node not in roots and outside and node not in self.matcher.cheap:
                return self._refuse(node, f"{op_text(node)} inside of it is also used by {user_text(outside[0])}")
        for name, node in self.match.operands.items():
            if node in inside and node not in self.matcher.cheap:
                return self._refuse(node, f"{op_text(node)} is inside of it and its operand '{name}'")
        reason = self.match.pattern.where(self.match) if self.match.pattern.where is not None else None
        return reason is None or (reason != "" and self._refuse(self.root, reason))

    def _refuse(self, node: fx.Node, reason: str) -> bool:
        if self.refused is None:
            self.refused = Refusal(reason, node, self.count, True)
        return False

    def _solve_sizes(self) -> bool:
        """Unknown letters from the equations, one at a time; then every equation must hold."""
        letters = self.match.letters
        waiting = list(self.equations)
        products: dict[tuple[str, ...], int] = {}  # of letters whose values are not known one by one
        while waiting:
            left = []
            products.clear()
            for size, value in waiting:
                known, unknown = size.coefficient, []
                for letter in size.letters:
                    if letter in letters:
                        known *= letters[letter]
                    else:
                        unknown.append(letter)
                if not unknown:
                    if known != value:
                        return False
                elif known == 0 or value % known:
                    return False
                elif len(unknown) > 1:
                    left.append((size, value))
                    if products.setdefault(tuple(sorted(unknown)), value // known) != value // known:
                        return False
                else:
                    self._bind(letters, unknown[0], value // known)
            if len(left) == len(waiting):
                return True  # sizes that are not known: make cannot ask for them
            waiting = left
        return True


def _same(a: Any, b: Any) -> bool:
    """Equal literals; 2 and 2.0 are equal, True and 1 are not."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b or (a != a and b != b)
    return type(a) is type(b) and bool(a == b)
