"""Outputs of fused activations are not kept for backward: the kernel of their gradient writes them once more.

Before:  %y = glu(%gate, %up), %dy = mm(%g, %w), %dw = mm(t(%g), %y)          # y is kept for the weight gradient
         %d = glu_backward(%dy, %gate, %up, False)
After:   %y = glu(%gate, %up), %dy = mm(%g, %w)
         %d = glu_backward(%dy, %gate, %up, True), %dw = mm(t(%g), %d[2])
Legal because: the kernel reads gate and up anyway, and computes the same bits; what read y in backward comes after it.

Views of the output and what masks its padding are recomputed with it. It saves the largest activation of a layer (ffn width)
for one more write in backward. Left as they are: outputs that the user
gets, and those that something needs before their own gradient is known.
"""

from __future__ import annotations

import operator

from torch import fx

from megafx.ir.facts import declared, facts_of
from megafx.ir.nodes import in_backward, masks, op_name, shows_operand
from megafx.ir.program import VAL, Builder, Phase, Program
from megafx.planner.context import CompileContext

REQUIRES, ENSURES = Phase.JOINT, Phase.JOINT
NAME = "recompute_activations"


def recompute_activations(program: Program, context: CompileContext) -> int:
    """Return the number of outputs that backward recomputes: of ops that are the `recompute` fact of their gradient."""
    if not context.config.recompute_activation_func:
        return 0
    makers = {f"megafx.{facts.recompute}.default" for facts in declared().values() if facts.recompute}
    changes = sum(_recompute(program, node) for node in list(program.graph.nodes) if str(node.target) in makers)
    if changes:
        program.erase_unused()
        program.graph.lint()
    return changes


def _recompute(program: Program, output: fx.Node) -> bool:
    gradient = _gradient_of(output)
    users = {u for view in _views(output) for u in view.users}  # of the output, or of a view of it that forward made
    readers = {u for u in users if u.op == "output" or in_backward(u)}
    if gradient is None or not readers or program.output_node() in readers:
        return False
    late = _before(readers, gradient)
    if gradient in late:
        return False  # its own gradient needs what is read there
    build = Builder(program, gradient.next, gradient, NAME)
    again = build(gradient.target, *gradient.args[:-1], True)
    gradient.replace_all_uses_with(again)
    value = build(operator.getitem, again, len(again.meta[VAL]) - 1)
    shown = {output: value}  # each view of the output -> the same view of `value`
    for view in _views(output)[1:]:
        args = tuple(shown.get(x, x) if isinstance(x, fx.Node) else x for x in view.args)
        shown[view] = build(view.target, *args, **view.kwargs)
    for reader in readers:
        for old, new in shown.items():
            reader.replace_input_with(old, new)
    anchor = build.where.prev
    for node in late:
        anchor.append(node)
        anchor = node
    return True


def _gradient_of(output: fx.Node) -> fx.Node | None:
    """The node that makes the gradient of the activation's operands, from the same operands."""
    wanted = (*output.args, False)  # the last argument: whether the output is recomputed
    users = output.all_input_nodes[0].users
    alike = (u for u in users if facts_of(u.target).recompute == op_name(output) and u.args[1:] == wanted)
    return next(alike, None)


def _views(output: fx.Node) -> list[fx.Node]:
    """Views of the output that forward makes, and those without its padding, each after what it shows."""
    found = [output]
    for node in found:
        found += [u for u in node.users if (shows_operand(u) or masks(u, node)) and not in_backward(u)]
    return found


def _before(readers: set[fx.Node], gradient: fx.Node) -> list[fx.Node]:
    """The readers before the gradient's node, and all that depends on them, in order; the gradient itself if it does."""
    early = [r for r in readers if r < gradient]
    found: dict[fx.Node, None] = {}
    node = min(early, default=gradient.next)
    while node is not gradient.next:
        if node in readers or any(x in found for x in node.all_input_nodes):
            found[node] = None
        node = node.next
    return list(found)
