"""Factor strings: the grammar of sharding rules. No torch import.

    aten.linear:   "lin: ... k, n k, +n -> ... n"
    kv attention:  "nl[2]: b (n g) t e!, b n s! e!, b n s! f -> b (n g) t f"

    rule     = (("lin" | "nl") ["[" i {"," i} "]"] | "max" | "sum") ":" operand {"," operand} "->" result {";" result}
    operand  = ["+" | "~"] dims | "*"
    result   = ["~"] dims | "*"
    dims     = {name | "..." | "1" | "(" name name {name} ")"} , each optionally followed by "!"

One operand a tensor argument of the op, in schema order; those that a call leaves out are skipped.

    name     a factor: dims with the same name are sharded together, by one layout
    ...      any number of dims, aligned from the right: factors _1 (the rightmost), _2, ...
    1        a dim of length 1, never sharded. A named dim of length 1 broadcasts: it drops its factor
    (n g)    one dim of n*g elements, major factor first: sharding n keeps each group of g whole
    !        the factor is never sharded (the op mixes elements along it and its sum is not what the op computes)
    +        additive operand: where the row's result is partial, so is this operand
    ~        control operand (ids, masks, seeds): never partial
    *        an operand whose elements are not read (type_as), or a result that is no tensor: takes part in no row
    ~ result never partial: it does not depend on the operands that are

lin: the op is linear in each unmarked operand (together with all '+'); nl: in none; lin[i], nl[i]: in operand i alone.
A factor that is missing from a result is summed over: sharding it gives P, where the op is linear in an operand that has it.
max: linear in none, and the largest over each factor that is missing from a result: sharding it gives M.
sum: linear in none, and a sum over each factor that is missing from a result: sharding it without padding gives P.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megafx.errors import MegafxError

_TOKEN = re.compile(r"\s*(\.\.\.|\([^()]*\)|[A-Za-z]\w*|1)(!?)")
_NAME = re.compile(r"[A-Za-z]\w*")
_KIND = re.compile(r"(max|sum|(lin|nl)(?:\[\s*(\d+(?:\s*,\s*\d+)*)\s*\])?)$")


class RuleError(MegafxError, ValueError):
    """A rule string that does not parse, or does not fit the op that it is for."""


@dataclass(frozen=True)
class Dim:
    """One token of a pattern. factors: () for '1', one name, or the names of a merged dim, major first."""

    factors: tuple[str, ...]
    whole: bool = False  # '!'


@dataclass(frozen=True)
class Factors:
    """The dims of one operand or result: `head`, then any number of lead dims if `dots`, then `tail`."""

    role: str  # 'x', '+', '~' or '*'
    head: tuple[Dim, ...] = ()
    dots: bool = False
    dots_whole: bool = False
    tail: tuple[Dim, ...] = ()

    def fit(self, ndim: int) -> tuple[Dim, ...] | None:
        """One Dim for each dim of a tensor, or None where the number of dims does not fit."""
        lead = ndim - len(self.head) - len(self.tail)
        if lead < 0 or (lead and not self.dots):
            return None
        dots = tuple(Dim((f"_{lead - i}",), self.dots_whole) for i in range(lead))
        return self.head + dots + self.tail


@dataclass(frozen=True)
class Rule:
    """A parsed rule."""

    text: str
    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]
    groups: tuple[tuple[int, ...], ...]  # operands that may be partial together while all others are replicated
    # the placement of a result from which a sharded factor is missing: 'M' of 'max:', 'P' of 'sum:'
    reduces: str = ""


@dataclass(frozen=True)
class Bound:
    """A rule bound to shapes. A dim's entry: None (not shardable), 'f', or '(n g)' for a merged dim."""

    # None for an operand that the call leaves out or whose elements are not read
    operands: tuple[tuple[str | None, ...] | None, ...]
    results: tuple[tuple[str | None, ...], ...]
    sizes: dict[str, int]  # length of each factor
    forbidden: dict[str, str]  # factor -> why it is not sharded


def names(entry: str | None) -> tuple[str, ...]:
    """Factors of one dim's entry: () for None, ('f',), or ('n', 'g') for '(n g)'."""
    if entry is None:
        return ()
    return tuple(entry[1:-1].split()) if entry[0] == "(" else (entry,)


@cache
def parse(text: str) -> Rule:
    """Rule string -> Rule; RuleError says where and what was expected."""
    head, colon, body = text.partition(":")
    kind = _KIND.match(head.strip())
    if not colon or kind is None:
        raise RuleError(
            f"rule '{text}' starts with '{head.strip()}'", fix="start with 'lin:', 'nl:', 'nl[i]:', 'max:' or 'sum:'"
        )
    left, arrow, right = body.partition("->")
    if not arrow:
        raise RuleError(f"rule '{text}' has no '->'", fix="write 'operands -> result'")
    operands = tuple(_factors(p, text) for p in left.split(","))
    results = tuple(_factors(p, text) for p in right.split(";"))
    if any(r.role == "+" for r in results):
        raise RuleError(f"rule '{text}' marks a result with '+'", fix="'+' is for operands")
    adds = tuple(i for i, p in enumerate(operands) if p.role == "+")
    plain = tuple(i for i, p in enumerate(operands) if p.role == "x")
    if kind[3]:
        plain = tuple(int(i) for i in kind[3].split(","))
        for i in plain:
            if i >= len(operands) or operands[i].role != "x":
                found = "not there" if i >= len(operands) else f"marked '{operands[i].role}'"
                fix = "number the operands from 0, and name an unmarked one"
                raise RuleError(f"rule '{text}' is linear in operand {i}, which is {found}", fix=fix)
    groups: tuple[tuple[int, ...], ...] = tuple((i, *adds) for i in plain) or ((adds,) if adds else ())
    if kind[1] in ("nl", "max", "sum"):
        groups = ()
    return Rule(text, operands, results, groups, {"max": "M", "sum": "P"}.get(kind[1], ""))


def _factors(text: str, rule: str) -> Factors:
    body = text.strip()
    if body == "*":
        return Factors("*")
    role = body[0] if body[:1] in ("+", "~") else "x"
    body = body[1:] if role != "x" else body
    head: list[Dim] = []
    tail: list[Dim] = []
    dots = dots_whole = False
    at = 0
    while at < len(body):
        token = _TOKEN.match(body, at)
        if token is None:
            found = f"rule '{rule}': cannot read '{body[at:].strip()}' in '{text.strip()}'"
            raise RuleError(found, fix="dims are names, '...', '1' or '(major minor)', each optionally followed by '!'")
        at = token.end()
        word, whole = token[1], token[2] == "!"
        if word == "...":
            if dots:
                raise RuleError(f"rule '{rule}': '...' twice in '{text.strip()}'", fix="one '...' an operand")
            dots, dots_whole = True, whole
            continue
        factors: tuple[str, ...] = () if word == "1" else (word,)
        if word[0] == "(":
            factors = tuple(word[1:-1].split())
            if len(factors) < 2 or not all(_NAME.fullmatch(f) for f in factors):
                raise RuleError(f"rule '{rule}': '{word}' is no merged dim", fix="write '(major minor)'")
        (tail if dots else head).append(Dim(factors, whole))
    return Factors(role, tuple(head), dots, dots_whole, tuple(tail))


def bind(
    rule: Rule,
    operands: Sequence[tuple[int, ...] | None],
    results: Sequence[tuple[int, ...] | None],
    *,
    free: Sequence[tuple[int, str]] = (),
    cut: Sequence[int] = (),
) -> Bound:
    """Bind a rule to shapes. RuleError where the number of dims does not fit.

    free: (operand or -1 for the result, factor) whose length is its own (a slice of the factor).
    cut: for each operand the dim that is known to be sharded, or -1: it never broadcasts, though its local length be 1.
    """
    if len(results) > len(rule.results):
        raise RuleError(f"rule '{rule.text}' has {len(rule.results)} results, the op {len(results)}")
    if len(operands) > len(rule.operands):
        raise RuleError(f"rule '{rule.text}' has {len(rule.operands)} operands, the call {len(operands)}")
    skip = [s is None or p.role == "*" for s, p in zip(operands, rule.operands, strict=False)]
    dims = [
        None if gone else _fit(rule, p, shape or ())
        for gone, p, shape in zip(skip, rule.operands, operands, strict=False)
    ]
    made = [() if p.role == "*" or s is None else s for p, s in zip(rule.results, results, strict=False)]
    outs = [() if p.role == "*" or s is None else _fit(rule, p, s) for p, s in zip(rule.results, results, strict=False)]
    operand_dims = [
        (i, at, d, n)
        for i, (ds, s) in enumerate(zip(dims, operands, strict=True))
        if ds
        for at, (d, n) in enumerate(zip(ds, s or (), strict=True))
    ]
    operand_dims.sort(key=lambda p: not (p[0] < len(cut) and cut[p[0]] == p[1]))  # cut dims say how long a factor is
    placed = [(i, d, n) for i, _, d, n in operand_dims]
    placed += [(-1, d, n) for ds, s in zip(outs, made, strict=True) for d, n in zip(ds, s, strict=True)]
    solid = {f for ds, c in zip(dims, cut, strict=False) if ds and c >= 0 for f in ds[c].factors}
    forbidden = {
        f: f"'{f}' is marked '!' in the rule '{rule.text}'" for _, d, _ in placed if d.whole for f in d.factors
    }
    sizes = _sizes(placed, set(free), solid, forbidden)
    for ds in dims:
        seen = [f for d in ds or () for f in d.factors]
        for f in {f for f in seen if seen.count(f) > 1}:
            forbidden[f] = f"'{f}' appears twice in one operand"

    def entries(i: int, ds: tuple[Dim, ...], shape: tuple[int, ...] | None) -> tuple[str | None, ...]:
        found: list[str | None] = []
        for at, (d, n) in enumerate(zip(ds, shape or (), strict=True)):
            left = tuple(f for f in d.factors if sizes.get(f, 1) != 1 or f in solid)
            broadcast = n == 1 and not (i == -1 and left) and not (0 <= i < len(cut) and cut[i] == at)
            found.append(None if broadcast or not left else left[0] if len(left) == 1 else f"({' '.join(left)})")
        return tuple(found)

    ins = [None if ds is None else entries(i, ds, s) for i, (ds, s) in enumerate(zip(dims, operands, strict=True))]
    return Bound(tuple(ins), tuple(entries(-1, ds, s) for ds, s in zip(outs, made, strict=True)), sizes, forbidden)


def _fit(rule: Rule, pattern: Factors, shape: tuple[int, ...]) -> tuple[Dim, ...]:
    dims = pattern.fit(len(shape))
    if dims is None:
        raise RuleError(f"rule '{rule.text}' does not fit a tensor of {len(shape)} dims")
    return dims


def _sizes(
    placed: list[tuple[int, Dim, int]], free: set[tuple[int, str]], solid: set[str], forbidden: dict[str, str]
) -> dict[str, int]:
    """Length of each factor; factors with conflicting or unknown lengths are forbidden."""
    sizes: dict[str, int] = {}
    for i, d, n in placed:
        if len(d.factors) == 1 and (i, d.factors[0]) not in free:
            f = d.factors[0]
            if sizes.get(f, 1) == 1 and not (f in solid and f in sizes):
                sizes[f] = n
            elif n not in (1, sizes[f]):
                forbidden.setdefault(f, f"'{f}' has two lengths, {sizes[f]} and {n}")
            elif n == 1 and i == -1 and sizes[f] != 1:
                forbidden.setdefault(f, f"'{f}' has length {sizes[f]} in an operand and 1 in the result")
    for _, d, n in placed:
        unknown = [f for f in d.factors if f not in sizes]
        if len(d.factors) < 2 or n == 1:
            continue
        rest = math.prod(sizes.get(f, 1) for f in d.factors)
        if len(unknown) == 1 and n % rest == 0:
            sizes[unknown[0]] = n // rest
        elif unknown or rest != n:
            for f in d.factors:
                sizes.setdefault(f, n)
                forbidden.setdefault(f, f"a dim of {n} is not ({' '.join(d.factors)})")
    for _, d, n in placed:
        if n == 1:  # one local element of a merged dim, if no other dim says more
            for f in d.factors:
                sizes.setdefault(f, 1)
    return sizes


# -- rules of users' ops (those of megafx's own are facts of the op: ir/facts.py)

_registered: dict[str, str] = {}


def op_key(op: Any) -> str:
    """'namespace.name.overload' of an operator, custom_op, or such a string (overload 'default' if left out)."""
    text = op if isinstance(op, str) else str(getattr(op, "_opoverload", op))
    text = text.replace("::", ".")
    parts = text.split(".")
    if len(parts) not in (2, 3) or not all(parts):
        raise RuleError(f"'{text}' names no operator", fix="pass torch.ops.mylib.my_op.default or 'mylib.my_op'")
    return text if len(parts) == 3 else text + ".default"


def register_rule(op: Any, rule: str) -> None:
    """Give an operator of your own a sharding rule; see the grammar above. A later rule replaces an earlier one.

    megafx.register_rule(torch.ops.mylib.scale_rows, "lin: ..., ... -> ...")
    """
    key, parsed = op_key(op), parse(rule)
    schema = getattr(getattr(op, "_opoverload", op), "_schema", None)
    if schema is not None:
        _check_schema(key, parsed, schema)
    _registered[key] = rule


def _check_schema(key: str, rule: Rule, schema: Any) -> None:
    """A rule has an operand for each tensor argument and a result for each return (lists of tensors count as any number)."""
    kinds = {a.name: str(a.type) for a in schema.arguments if "Tensor" in str(a.type)}
    listed = any("List" in kind for kind in kinds.values())
    if len(rule.operands) != len(kinds) and not listed:
        found = f"has {len(rule.operands)} operands, {key} takes {len(kinds)} tensors: {', '.join(kinds)}"
        fix = "one operand a tensor argument, in the order of the schema; '*' for one whose elements are not read"
        raise RuleError(f"rule '{rule.text}' {found}", fix=fix)
    if len(rule.results) != len(schema.returns):
        found = f"has {len(rule.results)} results, {key} returns {len(schema.returns)}"
        raise RuleError(f"rule '{rule.text}' {found}", fix="separate results by ';'")


def registered_rule(key: str) -> str | None:
    return _registered.get(key)


def registered() -> list[str]:
    """Keys of users' ops."""
    return sorted(_registered)
