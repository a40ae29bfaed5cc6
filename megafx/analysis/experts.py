"""Which values of a graph are one expert's alone, of experts that are modules of one list (expert parallelism).

    for lst in expert_lists(program, overrides, {}):    # ModuleLists whose experts the user's override says to give to ranks
        lst.path, lst.experts                           # 'moe.experts', {'0': parameters of experts.0, ...}
        expert_values(program, lst)                     # node -> key of its expert

An expert's values are those computed from its parameters, as long as they meet nothing of other experts, together with what
only they need: the rows that the expert gets, what it takes of them, the weights of its results. Outside of the expert's own
module they end where they are added to a value of the whole mixture. Values that do not have a row for each of the expert's
tokens end with the module that has the list, too.

Sums into rows are first rewritten, `out[rows] += y` to `out + scatter(y)`, so that each expert's contribution is a node:

    index_add(%out, 0, %rows, %y)                      ->  add(%out, index_add(%zeros, 0, %rows, %y))
    index_put(%out, [%rows], %y, True)                 ->  add(%out, index_put(%zeros, [%rows], %y, True))
    index_put(%out, [%rows], index(%out, [%rows]) + %y) ->  add(%out, index_put(%zeros, [%rows], %y))     # out[rows] += y
    scatter_add(%out, 0, %index, %y)                   ->  add(%out, scatter_add(%zeros, 0, %index, %y))

Legal because: the ops' definitions; in the third form a row that is named twice gets one of its values, before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx

from megafx.errors import PlanError
from megafx.ir.nodes import behind, is_zero
from megafx.ir.program import VAL, Builder, Program, ancestors, fqn_of, source_of
from megafx.ir.sizes import SizeEmitter, row_sources
from megafx.placements.types import Owned, Placement
from megafx.planner.overrides import Overrides

NAME, STYLE = "own_experts", "expert"
aten = torch.ops.aten
_Make = Callable[[Builder, fx.Node], fx.Node]
_SUMS = (aten.add.Tensor, aten.sub.Tensor)


@dataclass
class ExpertList:
    """Experts of one list. path: of the list; experts: key of each in it -> its parameters; pattern: the user's."""

    path: str
    pattern: str
    experts: dict[str, list[fx.Node]] = field(default_factory=dict)

    @property
    def mixture(self) -> str:
        """Path of the module that has the list."""
        return self.path.rpartition(".")[0]

    def module(self, key: str) -> str:
        return f"{self.path}.{key}"


def is_inside(fqn: str, module: str) -> bool:
    return not module or fqn == module or fqn.startswith(module + ".")


def expert_lists(program: Program, overrides: Overrides, settled: Mapping[str, Placement]) -> list[ExpertList]:
    """Lists whose experts are each to be one rank's. Raises PlanError where a pattern does not say which modules these are.

    A pattern names the list ('*.mlp.experts') or all that is in it ('*.mlp.experts.*'). Stacks of experts' weights, which
    patterns name too, are left out (passes/experts/join_experts.py). settled: how earlier graphs, or a given plan, store
    parameters; experts that are no rank's there are left out, and lists that they know are taken as they are.
    """
    found: dict[str, ExpertList] = {}
    for node, spec in program.input_nodes():
        style, pattern = overrides.style_of_parameter(spec) if spec.kind == "param" else ("", "")
        if style != STYLE or spec.aliases or node.meta[VAL].dim() == 0:
            continue  # tied parameters and numbers are held by every rank
        path = _list_of(spec.name, pattern)
        stored = settled.get(spec.name)
        if path is None or (stored is not None and not isinstance(stored, Owned)):
            continue
        key = spec.name.removeprefix(path + ".").partition(".")[0]
        experts = found.setdefault(path, ExpertList(path, pattern)).experts
        experts.setdefault(key, []).append(node)
    known = {path for path in found if any(is_inside(name, path) for name in settled)}
    return [lst if path in known else _checked(program, overrides, lst) for path, lst in found.items()]


def _list_of(name: str, pattern: str) -> str | None:
    """'moe.experts' of 'moe.experts.3.up.weight', if `pattern` names that; None for parameters of no module of a list.

    Modules of a list are those with numbers: '3', and 'expert_3' of a dict.
    """
    wanted = pattern.removesuffix(".*")
    parts = name.split(".")
    prefixes = [".".join(parts[:i]) for i in range(1, len(parts) - 1)]
    paths = [p for p in prefixes if fnmatchcase(p, wanted) and parts[p.count(".") + 1][-1:].isdigit()]
    if len(paths) > 1:
        raise PlanError(
            f"override '{pattern}' is expert: it names several lists that have '{name}': {', '.join(paths)}",
            fix="name the list of the experts alone",
        )
    return paths[0] if paths else None


def _checked(program: Program, overrides: Overrides, lst: ExpertList) -> ExpertList:
    """All parameters of its experts must be so styled: an expert is whole."""
    if len(lst.experts) < 2:
        raise PlanError(
            f"override '{lst.pattern}' is expert, but '{lst.path}' has one module with parameters: '{next(iter(lst.experts))}'",
            fix="name the list (or the dict) that has the experts as its modules",
        )
    for spec in program.inputs:
        if spec.kind == "param" and is_inside(spec.name, lst.path):
            style, _ = overrides.style_of_parameter(spec)
            if style != STYLE:
                raise PlanError(
                    f"override '{lst.pattern}' is expert, but '{spec.name}' of these experts "
                    + (f"is {style} by another override" if style else "is not matched by it"),
                    fix=f"give each rank whole experts: overrides={{'{lst.path}': 'expert'}} and none for parts of them",
                )
    return lst


def expert_values(program: Program, lst: ExpertList) -> dict[fx.Node, str]:
    """Node -> key of the expert whose value it is. Parameters are left out. Rewrites sums into rows."""
    label = {parameter: key for key, parameters in lst.experts.items() for parameter in parameters}
    found: dict[fx.Node, str] = {}
    for node in list(program.graph.nodes):
        if node._erased:
            continue
        keys = {label[a] for a in node.all_input_nodes if a in label}
        if node.op != "call_function" or not keys:
            continue
        if (own := _separate_sum(program, node, label)) is not None:
            node = own
            keys = {label[a] for a in node.all_input_nodes if a in label}
        if len(keys) != 1:
            continue
        (key,) = keys
        if is_inside(fqn_of(node), lst.module(key)) or _goes_on(program, lst, node, label):
            label[node] = found[node] = key
    for node in reversed(program.graph.nodes):  # what only these need
        if node.op == "call_function" and node not in found and node.users:
            owners = {found.get(user) for user in node.users}
            if len(owners) == 1 and None not in owners:
                found[node] = owners.pop()  # type: ignore[assignment]  # not None
    sources = row_sources(program.graph)
    # without the rows that say how long a value is that others read: all ranks must know
    for node, key in [*found.items()]:
        if _of_rows(program, node) and any(found.get(user) != key for user in node.users):
            symbols = {s for n in node.meta[VAL].shape if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols}
            for kept in ancestors([sources[s][0] for s in symbols if s in sources]):
                found.pop(kept, None)
    return found


def _goes_on(program: Program, lst: ExpertList, node: fx.Node, label: dict[fx.Node, str]) -> bool:
    """True if a value outside of the expert's module is still the expert's."""
    if _of_rows(program, node):
        return True
    if not is_inside(fqn_of(node), lst.mixture):
        return False
    if node.target not in _SUMS:
        return True
    tensors = [a for a in node.all_input_nodes if isinstance(a.meta.get(VAL), torch.Tensor)]
    return all(a in label for a in tensors)


def _of_rows(program: Program, node: fx.Node) -> bool:
    """True if data decides a size of the value: it has a row for each token that the expert gets."""
    value = node.meta.get(VAL)
    return isinstance(value, torch.Tensor) and any(program.sizes.from_data(n) for n in program.sizes.shape(value))


def refuse_between(lst: ExpertList, node: fx.Node, operands: Iterable[fx.Node], values: dict[fx.Node, str]) -> None:
    """Raise PlanError where an expert's value is computed inside of another expert's module."""
    for key in lst.experts:
        other = next((values[a] for a in operands if a in values and values[a] != key), None)
        if other is not None and is_inside(fqn_of(node), lst.module(key)):
            raise PlanError(
                f"override '{lst.pattern}' is expert, but '{lst.module(key)}' takes what '{lst.module(other)}' computes: "
                "experts of different ranks do not wait for each other",
                fix="name a list of modules that take the same tokens and whose results are added",
                module=fqn_of(node),
                source=source_of(node),
            )


# -- sums into rows


def _separate_sum(program: Program, node: fx.Node, label: dict[fx.Node, str]) -> fx.Node | None:
    """Rewrite `node` where it adds one expert's rows to a value that is not that expert's.

    label: node -> key of its expert. Returns what the expert adds; None where there is nothing to rewrite.
    """
    found = rows_added(node)
    if found is None:
        return None
    out, y, make = found
    if y not in label or label.get(out) == label[y] or is_zero(out):
        return None
    emitter, value = SizeEmitter(program.graph, program.sizes), out.meta[VAL]
    sizes = [emitter(program.sizes.of(n)) for n in value.shape]
    build = Builder(program, node, node, NAME)
    own = make(build, build(aten.full.default, sizes, 0, dtype=value.dtype, device=value.device))
    node.replace_all_uses_with(build(aten.add.Tensor, out, own))
    todo = [node]
    while todo:  # with what nothing else needs
        unused = todo.pop()
        operands = unused.all_input_nodes
        unused.graph.erase_node(unused)
        todo += [n for n in operands if n.op == "call_function" and not n.users]
    return own


def rows_added(node: fx.Node) -> tuple[fx.Node, fx.Node, _Make] | None:
    """(what is added to, the rows that are added, the same op on zeros)."""
    arguments = node.args
    if node.target in (aten.index_add.default, aten.scatter_add.default):
        out, dim, index, y = arguments[:4]
        return out, y, lambda build, zeros: build(node.target, zeros, dim, index, y, *arguments[4:], **node.kwargs)
    if node.target is not aten.index_put.default or node.kwargs:
        return None
    out, indices, values, *accumulate = arguments
    if accumulate and accumulate[0]:
        return out, values, lambda build, zeros: build(aten.index_put.default, zeros, indices, values, True)
    if values.target is not aten.add.Tensor or values.kwargs:
        return None
    for rows, y in (values.args[:2], values.args[1::-1]):  # index(out, indices) + y
        if is_zero(out):  # placed in any way
            rows = behind(rows, {torch.ops.megafx.transition.default})
        read = isinstance(rows, fx.Node) and rows.target is aten.index.Tensor and rows.args[0] is out
        if read and isinstance(y, fx.Node) and _same(list(rows.args[1]), list(indices)):
            return out, y, lambda build, zeros, y=y: build(aten.index_put.default, zeros, indices, y)
    return None


def _same(a: Any, b: Any) -> bool:
    """True if two arguments are the same rows: `out[mask] += y` computes them twice."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or a is b:
        return a is b or (not isinstance(a, fx.Node) and not isinstance(b, fx.Node) and a == b)
    if a.target is b.target is torch.ops.megafx.rows.default:
        return a.args[0] is b.args[0]
    return a.target is b.target is aten.select.int and all(map(_same, a.args, b.args))
