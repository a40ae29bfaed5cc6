"""Regions whose values backward recomputes: calls of torch.utils.checkpoint, and what Megatron's options name.

A value that is read only inside its region is recomputed from the region's inputs. A value that others read is kept: eager mode
keeps it too, for the op that reads it. Norms and activations that `recompute_modules` names are recomputed whoever reads them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from megafx.analysis.communication import is_start
from megafx.analysis.kept import Kept, is_free, is_given, is_value
from megafx.errors import ConfigError
from megafx.ir.nodes import in_backward, op_name, shows_operand
from megafx.ir.program import RECOMPUTE, REGION, VAL, Program, fqn_of
from megafx.ops.again import AGAIN, when_repeated
from megafx.passes.recompute.budget import allowed, layers_of, model_places, whole
from megafx.planner.context import CompileContext
from megafx.planner.cost import MATMUL, cost_kind

OUTSIDE = None  # the region of nodes that are in none
# Names of Config.recompute_modules that say what a module does; other names are globs of module paths.
MODULES = {
    "mlp": ("mlp", "ffn", "feed_forward", "feedforward", "ff"),
    "moe": ("moe", "block_sparse_moe", "sparse_moe"),
    "shared_experts": ("shared_experts", "shared_expert"),
    "mla_up_proj": ("q_b_proj", "kv_b_proj", "linear_q_up_proj", "linear_kv_up_proj"),
}
NORMS = ("layer_norm_forward", "rms_norm_forward", "native_layer_norm", "_fused_rms_norm", "native_group_norm")
ACTIVATIONS = ("bias_act", "glu", "glu_packed", "gelu", "silu", "relu", "elu", "tanh", "sigmoid", "leaky_relu", "mish")
SOFTMAXES = ("_softmax", "softmax", "masked_softmax")


@dataclass
class Regions:
    """of: node -> its region, of forward and backward nodes alike. dropped: nodes that are recomputed whoever reads them."""

    of: dict[fx.Node, Hashable] = field(default_factory=dict)
    dropped: set[fx.Node] = field(default_factory=set)


def regions_of(program: Program, context: CompileContext) -> Regions:
    """What the model's calls of checkpoint and the config say. Raises ConfigError for a name that matches nothing."""
    config, found = context.config, Regions()
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    for node in nodes:
        if node.meta.get(REGION) is not None:
            found.of[node] = node.meta[REGION]
    if config.recompute_granularity == "full":
        layer = layers_of(program)
        of_model = model_places(program, layer)
        step = config.recompute_num_layers or 1
        for node in nodes:
            place = of_model.get(layer[node])
            if place is not None and (config.recompute_method != "block" or place < step):
                found.of[node] = ("layers", place if config.recompute_method == "block" else place // step)
    elif config.recompute_granularity == "selective":
        for name in config.recompute_modules or ("core_attn",):
            _select(program, name, nodes, found)
    return found


def _select(program: Program, name: str, nodes: list[fx.Node], found: Regions) -> None:
    forward = [n for n in nodes if not in_backward(n)]
    if name in ("norm", "layernorm"):
        found.dropped.update(n for n in forward if op_name(n) in NORMS)
        gathers = [n for n in forward if is_start(n) and _made_again_by(n.all_input_nodes[0]) in found.dropped]
        found.dropped.update(gathers)  # sequence parallelism gathers a norm's shards for the product that reads it
        return
    if name in ("act", "moe_act"):
        found.dropped.update(n for n in forward if op_name(n) in ACTIVATIONS)
        return
    if name == "core_attn":
        for number, inside in enumerate(_attention_cores(forward)):
            found.of.update(dict.fromkeys(inside, ("core_attn", number)))
        return
    parts = MODULES.get(name)
    matched = False
    for node in nodes:
        path = fqn_of(node).split(".")
        for end in range(1, len(path) + 1):
            module = ".".join(path[:end])
            if path[end - 1] in parts if parts else fnmatch.fnmatchcase(module, name):
                found.of[node] = ("module", module)
                matched = True
                break
    if not matched:
        names = sorted({fqn_of(n) for n in nodes} - {""})
        raise ConfigError(
            f"Config.recompute_modules names '{name}', which matches no module of this model",
            fix=f"core_attn, norm, act, {', '.join(MODULES)}, or globs of module names such as '{names[len(names) // 2]}'"
            if names
            else "core_attn, norm, act",
        )


def _made_again_by(node: fx.Node) -> fx.Node:
    """The op that makes a value in backward, behind views."""
    while node.target is AGAIN or shows_operand(node):
        node = when_repeated(node)[0]
    return whole(node)


def _attention_cores(forward: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """For each attention written out in ops: the nodes between its two products, and the first product."""
    for softmax in (n for n in forward if op_name(n) in SOFTMAXES):
        inside: dict[fx.Node, None] = {}
        todo = [softmax]
        while todo:  # up to the scores
            node = todo.pop()
            if node in inside or node.op != "call_function" or not is_value(node):
                continue
            if cost_kind(op_name(node)) == MATMUL:
                if op_name(node) in ("bmm", "baddbmm"):
                    inside[node] = None
                continue
            inside[node] = None
            todo += node.all_input_nodes
        todo = list(softmax.users)
        while todo:  # down to the product with v
            node = todo.pop()
            if node in inside or in_backward(node) or node.op != "call_function" or cost_kind(op_name(node)) == MATMUL:
                continue
            inside[node] = None
            todo += node.users
        yield list(inside)


def tag_regions(program: Program, context: CompileContext, regions: Regions) -> list[fx.Node]:
    """The nodes that backward recomputes because of regions."""
    kept = Kept(program, lambda n: bool(n.meta.get(RECOMPUTE)))
    needed: dict[fx.Node, set[Hashable]] = {}
    for node, readers in kept.readers.items():
        outer = [r for r in readers if r not in kept.again]
        if outer:
            needed[node] = {regions.of.get(r, OUTSIDE) if in_backward(r) else OUTSIDE for r in outer}
    may = allowed(program, context)
    tags: list[fx.Node] = []
    stuck: dict[str, fx.Node] = {}
    # op with several results, or a collective -> its results that are needed
    waiting: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(program.graph.nodes):
        if node in waiting:
            needed[node] = set().union(*(needed[part] for part in waiting[node]))
        asked = needed.get(node)
        if isinstance(node.meta.get(VAL), (torch.SymInt, torch.SymFloat, torch.SymBool)):
            continue
        if not asked or is_given(node) or in_backward(node) or node in kept.lazy:
            continue
        maker = whole(node)
        if maker is not node and node not in kept.again:
            waiting.setdefault(maker, []).append(node)
            continue
        own = regions.of.get(node, OUTSIDE)
        parts = waiting.get(node, [])
        forced = node in regions.dropped
        if node.meta.get(RECOMPUTE) or is_free(node, kept.parameters):
            _pass_on(node, asked, needed)
        elif node.target is AGAIN:
            if _again(node, regions, asked, own):
                tags.append(node)
                _pass_on(node, {own}, needed)
            else:
                needed.setdefault(node.args[0], set()).update(asked)
        elif forced or (own is not OUTSIDE and asked == {own}):
            if may(node):
                tags += [node, *parts]
                _pass_on(node, {own}, needed)
            else:
                stuck.setdefault(str(node.target), node)
    for target, node in stuck.items():
        program.note(
            "recompute", f"results of {target} are kept: it is not known to give the same when it runs again", node
        )
    return tags


def _again(node: fx.Node, regions: Regions, asked: set[Hashable], own: Hashable) -> bool:
    return node.args[1].args[0] in regions.dropped or (own is not OUTSIDE and asked == {own})


def _pass_on(node: fx.Node, asked: set[Hashable], needed: dict[fx.Node, set[Hashable]]) -> None:
    for operand in when_repeated(node):
        needed.setdefault(operand, set()).update(asked)
