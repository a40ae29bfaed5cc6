"""Which dims of a call's tensors are batch and sequence: shared named dims for torch.export."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from megafx.capture.libraries.caches import growing_dims, states_for_caches
from megafx.capture.libraries.huggingface import sequence_group
from megafx.config import Config
from megafx.ir.call_spec import call_tree, leaf_name
from megafx.ir.python_state import of_parameters

# Sizes to trace with where the call does not fix them. Larger than twice every tensor-parallel degree, so that no local size is
# 0 or 1 (which torch.export specialises); distinct, so that two dims are never taken for one; primes, so that no degree divides
# them (what holds for divisible lengths alone would trace as if it always held).
BATCH_HINT = 19
SEQ_HINTS = (67, 53, 83, 113)

_FEW = 3  # numbers in a row that are no sequence
# Attributes by which configs name the greatest sequence length.
_MAX_LENGTH = (
    *("max_position_embeddings", "max_target_positions", "n_positions", "n_ctx", "block_size", "context_length"),
    *("max_seq_len", "max_sequence_length", "max_seq_length"),
)


@dataclass
class NamedDims:
    """names[i][d]: name of dim d of tensor i (absent: static). user, hints: the size of each name in the call, in the trace.

    more[i, d]: by how much dim d of tensor i is longer than its name says.
    """

    names: list[dict[int, str]]
    user: dict[str, int] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)
    bounds: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)
    constant: set[str] = field(default_factory=set)  # names that the model's code fixes: they keep the call's size
    more: dict[tuple[int, int], int] = field(default_factory=dict)

    def no_batch_in(self, exported: ExportedProgram) -> bool:
        """True if the batch is a constant of a trace: of each input that has it."""
        users = {s.arg.name for s in exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT}
        inputs = [n.meta["val"] for n in exported.graph.find_nodes(op="placeholder") if n.name in users]
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        sizes = [
            x.shape[d] for x, dims in zip(tensors, self.names, strict=True) for d, n in dims.items() if n == "batch"
        ]
        return not any(isinstance(size, torch.SymInt) and size.node.expr.free_symbols for size in sizes)

    def shape(self, i: int, tensor: torch.Tensor, sizes: dict[str, int]) -> tuple[int, ...]:
        named = {
            d: sizes[name] + self.more.get((i, d), 0) for d, name in self.names[i].items() if name not in self.constant
        }
        return tuple(named.get(d, n) for d, n in enumerate(tensor.shape))

    def specs(self, automatic: bool) -> list[dict[int, Any]]:
        """One dynamic_shapes entry a tensor: shared named dims, or a dim of its own each (`automatic`)."""
        if automatic:
            return [dict.fromkeys(names, Dim.AUTO) for names in self.names]
        dims = {}
        for name in (n for n in self.user if n not in self.constant):
            least, greatest = self.bounds.get(name, (None, None))
            dims[name] = Dim(name, min=least, max=greatest)
        return [
            {d: dims[n] + self.more[i, d] if (i, d) in self.more else dims[n] for d, n in names.items() if n in dims}
            for i, names in enumerate(self.names)
        ]

    def apply(self, fixes: Fixes) -> bool:
        """Take the fixes over; False if they change nothing, or exclude the size that the call has."""
        for name, (least, greatest) in fixes.bounds.items():
            if name not in self.user or not (least or 0) <= self.user[name] <= (greatest or self.user[name]):
                return False
        constants = fixes.constants & self.user.keys()
        if not constants and all(self.bounds.get(n) == b for n, b in fixes.bounds.items()):
            return False
        self.bounds.update(fixes.bounds)
        self.constant |= constants
        return True

    def hints_within_bounds(self) -> dict[str, int]:
        """The sizes of the trace, as large as the bounds allow that are known now.

        Below a bound: of the longest sequence, `seq >= bound` holds in the trace, which makes the size a number.
        """
        taken: set[int] = set()
        found = {}
        for name, hint in self.hints.items():
            greatest = self.bounds.get(name, (None, None))[1]
            found[name] = prime_up_to(min(hint, max(greatest - 1, 2)) if greatest else hint, taken)
            taken.add(found[name])
        return found


@dataclass(frozen=True)
class Traced:
    """How an export went that worked: the sizes and the mode of its trace, and what was known of the dims by then. A later
    one of the same kind of call begins with it."""

    sizes: dict[str, int]
    mode: str
    bounds: dict[str, tuple[int | None, int | None]]
    constant: dict[str, int]  # names that keep the call's size -> that size

    @classmethod
    def of(cls, dims: NamedDims, sizes: dict[str, int], mode: str) -> Traced:
        constant = {name: dims.user[name] for name in dims.constant if name in dims.user}
        return cls(dict(sizes), mode, dict(dims.bounds), constant)

    def dims(self, named: NamedDims) -> NamedDims | None:
        """These dims with what was known; None where it does not hold for the sizes of the call."""
        within = all(
            (least or 0) <= named.user[name] <= (greatest or named.user[name])
            for name, (least, greatest) in self.bounds.items()
        )
        if not within or any(named.user[name] != size for name, size in self.constant.items()):
            return None
        return replace(named, bounds=dict(self.bounds), constant=named.constant | self.constant.keys())


def prime_up_to(size: int, taken: set[int]) -> int:
    """The greatest prime of at most `size` that is not taken; 2 where there is none."""
    while size > 2 and (size in taken or not sympy.isprime(size)):
        size -= 1
    return size


def max_length(model: Any) -> int | None:
    """The greatest sequence length that the model's config states, if it states one."""
    lengths = [getattr(getattr(model, "config", None), key, None) for key in _MAX_LENGTH]
    known = [n for n in lengths if isinstance(n, int) and not isinstance(n, bool) and n > 1]
    return min(known) if known else None


def with_sizes(config: Config, model: Any, example: tuple[Sequence[Any], Mapping[str, Any]] | None) -> Config:
    """Fill in the sizes that are priced, where the config has none: those of the user's example (args, kwargs), else the
    model's maximum sequence length."""
    if example is None:
        sizes = {"seq": n} if (n := max_length(model)) is not None else {}
    else:
        args, kwargs, _ = states_for_caches(*example)
        tree = call_tree(args, kwargs, None)
        leaves = [(leaf_name(path), value) for path, value in pytree.tree_flatten_with_path(tree)[0]]
        tensors = [(name, value) for name, value in leaves if isinstance(value, torch.Tensor)]
        sizes = name_dims(tensors, None, sequence_group(model), growing_dims(tree)).user
    at_least_1 = {name: max(size, 1) for name, size in sizes.items()}
    batch, length = config.micro_batch_size or at_least_1.get("batch"), config.seq_length or at_least_1.get("seq")
    return config.replace(micro_batch_size=batch, seq_length=length)


def name_dims(
    tensors: Sequence[tuple[str, torch.Tensor]],
    longest: int | None,
    group_of: Callable[[str], str],
    growing: Mapping[str, tuple[int, ...]] | None = None,
) -> NamedDims:
    """Name dims by role: dim 0 is 'batch', dim 1 of 2-D ids 'seq', and so is every dim of the same size at those positions.

    group_of(leaf name) keeps apart sequences whose lengths may be equal by accident (the two sides of an encoder-decoder).
    growing: the tensors of a cache -> which of their dims count the tokens that it holds: 'past'. Beside a cache the length of
    a single token is no symbol; a mask over the cache and that token is one longer than 'past'.
    """
    growing = growing or {}
    past: dict[int, str] = {}
    for name, tensor in tensors:
        for d in growing.get(name, ()):
            past.setdefault(tensor.shape[d], f"past{len(past) + 1}" if past else "past")
    outside = [(n, t) for n, t in tensors if n not in growing and not of_parameters(t)]
    ids = [(n, t) for n, t in outside if _is_ids(t)]
    ids = [(n, t) for n, t in ids if group_of(n) or not _is_table(t, [other for _, other in ids])]
    choices = [(n, t) for n, t in outside if _is_choices(t)]
    embedded = [(n, t) for n, t in outside if t.dim() == 3 and t.is_floating_point()]
    trained = lambda t: t.requires_grad and t.is_leaf  # a prompt, an image that is optimised
    by_dims = sorted((t for _, t in outside if t.dim()), key=lambda t: (trained(t), t.dim() == 1))  # 1-D ones last
    batch = next((t.shape[0] for t in (*(t for _, t in ids), *by_dims)), -1)
    sequences: dict[tuple[int, str], str] = {}
    carriers = ids or choices or embedded
    if growing and any(t.shape[1] == 1 for _, t in carriers if t.dim() == 2):  # one token after a cache
        carriers = [(n, t) for n, t in carriers if t.shape[1] != 1 and t.shape[1] - 1 not in past]
    if len({group_of(name) for name, _ in carriers}) == 1:
        group_of = lambda name: ""  # one side only: its length is 'seq'
    for name, tensor in carriers:
        size, group = tensor.shape[2 if _is_choices(tensor) else 1], group_of(name)
        if (size, group) not in sequences:
            number = 1 + sum(g == group for _, g in sequences)
            sequences[size, group] = (group or "seq") + (str(number) if number > 1 else "")

    def sequence(size: int, group: str) -> str | None:
        return sequences.get((size, group)) or next((n for (s, _), n in sequences.items() if s == size), None)

    result = NamedDims([])
    for name, tensor in tensors:
        dims: dict[int, str] = {}
        if of_parameters(tensor):
            result.names.append(dims)
            continue
        group, shape = group_of(name), tensor.shape
        if name in growing:
            dims = {d: past[shape[d]] for d in growing[name]}
            if shape and shape[0] == batch and 0 not in dims and tensor.dim() > 2:
                dims[0] = "batch"
        elif growing and _is_ids(tensor) and (1, "") not in sequences and shape[1] - 1 in past:
            dims[1] = past[shape[1] - 1]
            result.more[len(result.names), 1] = 1
        square = tensor.dim() >= 2 and shape[-1] == shape[-2] and not (tensor.dim() == 3 and tensor.is_floating_point())
        if tensor.dim() == 2 and square and shape[0] != batch and sequence(shape[0], group):
            dims = {0: str(sequence(shape[0], group)), 1: str(sequence(shape[1], group))}
        elif tensor.dim() >= 1 and shape[0] == batch:
            dims[0] = "batch"
        along = 2 if _is_choices(tensor) else 1
        if tensor.dim() in (2, 3) and along not in dims and (found := sequence(shape[along], group)):
            dims[along] = found
        if tensor.dim() >= 3 and square and (found := sequence(shape[-1], group)):
            dims[tensor.dim() - 1] = dims[tensor.dim() - 2] = found
        result.names.append(dims)
        for d, dim_name in dims.items():
            result.user[dim_name] = shape[d]
    _choose_hints(result, longest)
    return result


def _is_ids(tensor: torch.Tensor, dims: int = 2) -> bool:
    """[batch, sequence] of integers (a bool tensor may be a [sequence, sequence] mask)."""
    return tensor.dim() == dims and tensor.dtype in (torch.int64, torch.int32)


def _is_table(tensor: torch.Tensor, ids: Sequence[torch.Tensor]) -> bool:
    """True if the rows of a tensor beside ids hold a few numbers each (the grid of an image, a span), and no sequence."""
    return tensor.shape[1] <= _FEW < max(t.shape[1] for t in ids)


def _is_choices(tensor: torch.Tensor) -> bool:
    """[batch, choices, sequence] of ids."""
    return _is_ids(tensor, 3)


def _choose_hints(dims: NamedDims, longest: int | None) -> None:
    """The size of each name in the trace: at most the longest sequence that the model takes."""
    taken: set[int] = set()
    lengths = iter(SEQ_HINTS)
    for name, size in dims.user.items():
        if name == "batch":
            hint = max(size, BATCH_HINT)
        else:
            hint = size if size >= SEQ_HINTS[0] else next(lengths, SEQ_HINTS[0])
            hint = min(hint, max(longest - 1, 2)) if longest else hint
            dims.bounds[name] = (None, None)
        dims.hints[name] = prime_up_to(hint, taken)
        taken.add(dims.hints[name])


@dataclass(frozen=True)
class Fixes:
    """What export asks for: tighter bounds of some names, and names that are constants."""

    bounds: dict[str, tuple[int | None, int | None]]
    constants: frozenset[str]


def suggested_fixes(message: str) -> Fixes | None:
    """The 'Suggested fixes' of a constraint violation; None if there are none, or others than bounds and constants."""
    if "Suggested fixes:" not in message:
        return None
    bounds: dict[str, tuple[int | None, int | None]] = {}
    constants = set()
    for line in message.split("Suggested fixes:")[1].strip().splitlines():
        if " = " not in line:
            break
        if found := re.match(r"\s*(\w+) = Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+))?\)", line):
            name, least, greatest = found.groups()
            bounds[name] = (int(least) if least else None, int(greatest) if greatest else None)
        elif found := re.match(r"\s*(\w+) = \d+$", line):
            constants.add(found.group(1))
        else:
            return None
    return Fixes(bounds, frozenset(constants))


def plain_lists(tree: Any) -> Any:
    """The tree with lists for all nodes that are none of Python's containers (cache states, transformers' outputs):
    torch.export wants the dims of a tree in this form."""

    def is_other(value: Any) -> bool:
        return type(value) in pytree.SUPPORTED_NODES and type(value) not in pytree.BUILTIN_TYPES

    def one(value: Any) -> Any:
        return plain_lists(list(pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0])) if is_other(value) else value

    return pytree.tree_map(one, tree, is_leaf=is_other)
