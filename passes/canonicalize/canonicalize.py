"""One spelling for each thing: CAPTURED -> CANONICAL.

A canonical graph is functional. Its views are reshape, slice, select, transpose, permute, unsqueeze and expand with explicit
sizes; products with weights are aten.linear; cross entropy is megafx.cross_entropy with a reduction; dropout is megafx.dropout
with a seed. Sizes are computed from graph inputs at the top, and what computes nothing is gone. The order of the steps matters:
views before in-place ops (they tell what shares memory), in-place ops before copies (a copy is nothing only in a functional
graph).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from megafx.analysis.reached import find_reached
from megafx.ir.nodes import replace
from megafx.ir.program import Phase, Program, active_nodes
from megafx.passes.canonicalize import (
    bodies,
    composites,
    inplace,
    linear,
    loss,
    names,
    numbers,
    packed,
    random,
    sizes,
    views,
)
from megafx.passes.canonicalize.editor import Editor, is_tensor
from megafx.planner.context import CompileContext
from megafx.rewrite.trace import CanonicalForm, register_canonical_form

REQUIRES, ENSURES = Phase.CAPTURED, Phase.CANONICAL

Step = Callable[[Editor, fx.Node], bool]
VIEWS: tuple[Step, ...] = (
    packed.packed_attention,
    names.one_name,
    names.resolve_getitem,
    names.expand_of_broadcast,
    views.split_to_slices,
    views.one_spelling_of_reshape,
    views.one_spelling_of_expand,
    views.one_spelling_of_transpose,
    views.memory_of_complex,
    views.one_spelling_of_unsqueeze,
    views.one_spelling_of_select,
    views.one_spelling_of_slice,
    random.native_dropout_to_dropout,
    random.dropout_between_layers,
    names.erase_idle_dropout,
    inplace.refuse_sparse_gradients,
)
VALUES: tuple[Step, ...] = (
    names.scalar_of_a_scalar,
    views.copies_of_views,
    views.memory_as_values,
    views.index_that_counts,
    views.put_into_each_row,
    names.one_spelling_of_casts,
    names.one_spelling_of_padding,
    names.weighted_by_a_size,
    names.bicubic_by_products,
    names.sequences_side_by_side,
    names.erase_identity,
    names.erase_empty_operands,
    names.like_to_full,
    names.put_where_a_mask_says,
    names.dtype_of_the_capture,
    random.attention_dropout,
    random.uniform_from_bits,
    random.normal_from_bits,
    random.bernoulli_from_bits,
    random.exponential_from_bits,
    random.integers_from_bits,
    random.permutation_from_bits,
    random.slopes_from_bits,
    inplace.gradients_by_frequency,
    random.dropout_of_other_kinds,
    loss.cross_entropy_to_tokens,
    loss.nll_of_log_softmax,
    loss.loss_of_elements,
)


def canonicalize(program: Program, context: CompileContext) -> int:
    """Rewrite the program in place; return the number of rewrites."""
    changes = canonicalize_program(program)
    program.reached = find_reached(program, context.wants_grad)
    return changes


def canonicalize_program(program: Program) -> int:
    editor = Editor(program)
    changes = bodies.inline_bodies(editor)
    changes += names.erase_asserts(editor)
    changes += numbers.numbers_behind_the_graph(editor)
    changes += sizes.name_sizes_of_data(editor)
    changes += _each(editor, (inplace.write_out_running_statistics,))
    changes += composites.made_of_others(editor)
    changes += inplace.take_views_for_reshapes(editor)
    changes += _each(editor, VIEWS)
    changes += inplace.functionalize(editor)
    changes += _each(editor, VALUES)
    active = active_nodes(program)
    changes += sum(names.erase_inactive_detach(editor, n, active) for n in list(editor.graph.nodes))
    for product in (linear.product_to_linear, linear.add_bias_to_linear):
        weights = linear.weight_nodes(editor)
        changes += sum(product(editor, n, weights) for n in list(editor.graph.nodes))
    changes += _each(editor, (linear.unflatten_linear, linear.unflatten_rows, linear.merge_reshapes))
    changes += random.number_dropouts(editor)
    random.refuse_other_randomness(editor)
    changes += sizes.root_sizes(editor)
    changes += sizes.check_sizes_of_data(editor)
    changes += _merge_duplicates(editor)
    changes += _erase_dead(editor)
    sizes.refuse_numbers_from_data(editor)
    shape_env = program.fake_mode.shape_env
    for name, symbol in program.sizes.symbols.items():  # running an op on fakes may fix one to its hint without a word
        if shape_env is not None and shape_env.replace(symbol) != symbol:
            raise AssertionError(f"canonicalize fixed the size '{name}' to {shape_env.replace(symbol)}")
    program.gm.delete_all_unused_submodules()
    program.graph.lint()
    program.gm.recompile()
    program.phase = Phase.CANONICAL
    return changes


def canonicalize_nodes(program: Program, nodes: list[fx.Node]) -> None:
    """Respell a few nodes that a later pass has put into a canonical graph."""
    editor = Editor(program)
    for rewrites in (VIEWS, VALUES):
        _each(editor, rewrites, nodes)


register_canonical_form(CanonicalForm(canonicalize_program, canonicalize_nodes))


def _each(editor: Editor, rewrites: tuple[Step, ...], nodes: list[fx.Node] | None = None) -> int:
    """Every rewrite once on every node, in graph order; a rewrite that took the node out ends its turn."""
    count = 0
    for node in list(editor.graph.nodes) if nodes is None else nodes:
        for rewrite in rewrites:
            if node.op != "call_function" or node._erased:
                break
            count += rewrite(editor, node)
    return count


def _merge_duplicates(editor: Editor) -> int:
    """Equal ops on equal operands are one value. Without gradient only: merging others would reorder gradient sums."""
    active = active_nodes(editor.program)
    known: dict[Any, fx.Node] = {}
    count = 0
    for node in list(editor.graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or node in active or not is_tensor(node):
            continue
        first = known.setdefault((node.target, _frozen(node.args), _frozen(node.kwargs)), node)
        count += first is not node and replace(node, first)
    return count


def _frozen(args: Any) -> Any:
    """A hashable form in which 1, 1.0 and True differ."""
    if isinstance(args, (list, tuple)):
        return tuple(_frozen(a) for a in args)
    if isinstance(args, dict):
        return tuple((k, _frozen(v)) for k, v in args.items())
    return args if isinstance(args, fx.Node) else (type(args), args)


def _erase_dead(editor: Editor) -> int:
    """A functional graph has no effects: what nobody uses is not needed."""
    count = 0
    for node in reversed(list(editor.graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            editor.graph.erase_node(node)
            count += 1
    return count
