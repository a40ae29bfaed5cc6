"""Patterns: a piece of eager Python, and what to compute instead. Declared here, found and replaced by rewrite/driver.py.

    import megafx.kernels.activation.activation  # noqa: F401  registers the op
    from megafx.rewrite.pattern import Pattern, register

    @register                                        # megafx.register_pattern is the same function
    class BiasGelu(Pattern):
        "gelu(linear(x, w, b)) -> bias_act(linear(x, w), b): one pass over memory; saves its input alone."

        name = "bias_gelu"
        knob = "bias_activation_fusion"              # Config field that switches the family off; None: always on
        tensors = {"x": "D[... k]", "weight": "param D[n k]", "bias": "param D[n]"}
        variants = {"approximate": ("none", "tanh")} # the product of all is traced, each lazily and once a process
        needs = ("gelu",)                            # ops that the graph must have (names without namespace): not traced else

        def match(x, weight, bias, *, approximate):  # eager Python, no self; traced and canonicalized as models are
            return F.gelu(F.linear(x, weight, bias), approximate=approximate)

        def make(x, weight, bias, *, approximate):   # eager Python too, on the tensors that were found
            act = "gelu_tanh" if approximate == "tanh" else "gelu"
            return torch.ops.megafx.bias_act(F.linear(x, weight), bias, act)

        def where(m):                                # optional: None, or why this match is refused (a near miss; '': silently)
            if m["x"].dtype == torch.float64:
                return "fp64 stays as it is"

TENSORS. `tensors` describes each tensor parameter of `match`: `[param ]dtype[dims][?]`.
    dtype   a capital letter: any floating dtype of the model, the same for all that bear it; else f32, bf16, i64, bool, ...
    dims    letters are sizes, equal where letters are equal; a number is itself; `2h` and `n*d` are products;
            `1|s` is either (traced as s); `...` leading dims, any number of them, the same for all that have them
    param   canonicalize treats it as a weight (`x @ w` with a weight becomes linear); it matches any tensor
    ?       the model may have None there (linear without bias): match and make then get None. It is a variant of its own
  Sizes inside `match` come from shapes (`x.shape[0]`, `x.view(b, s, n, d)`); they are compared as expressions, whatever
  the model's sizes, static or dynamic. A size that no shape gives alone is solved for: x: "D[b s n*d]", and in match
  `x.view(b, s, n, -1)` with n among `scalars` as int. `tensors` and `needs` may be functions of the variant's keywords;
  a tensor that a variant does not describe is None in match and make.

SCALARS. `scalars = {"eps": float}`: keyword parameters of `match` that are numbers in the user's graph (float or int),
  captured: write them where the op takes them (`x.pow(2).mean(-1) + eps`), without arithmetic on them; make gets the number
  that was found (None where the op's schema says None). Numbers that are not declared must be equal.

DROPOUT. Write `F.dropout(x, p, True)` in `match`, with p a scalar or any number: it matches dropout of any p. make (and
  where, as m["drop"]) may ask for `drop`, whose fields are seed, p, op_id, shard_dim, layout, axis and whose `args` is all of
  them in the order that megafx ops take them: `torch.ops.megafx.bias_dropout_add(x, bias, residual, *drop.args)`. In a variant
  without dropout `drop.args` is that of dropout that is off (seed None, p 0). Several dropouts: `drops`, a tuple in the order
  of the graph. A `match` that calls megafx ops which draw takes `drop` itself, and passes `*drop.args` to them.

  redraws = True: the op draws other bits than F.dropout of the same value would. It is then made wherever it is found, so
  that masks depend on no measurement of speed.

LOCAL. `local = True`: matched on one rank's shapes, after planning; only these may have several results (match and make
  return tuples): a sum and its norm give (sum, normed). Patterns that are not local have one result, and the planner sees what
  they make.

What is found: ops as canonicalize spells them; operands of commutative ops in either order; dims counted from either end.
Larger patterns come first, then the order of names; `priority` (default 0) comes before size. An interior value may have no
other user, and the result must have the shape and dtype of what it replaces. What nearly matched is a note of the report, with
the reason. Values that depend on no parameter and no floating input (masks, position tables) may be used elsewhere too: they
are computed once for all layers. Unlike spellings (x*x for x.pow(2)) are variants of the pattern. Two variants whose traces
come out equal (a cast that is none in fp32) count once, as the first.

make may use: all names of `match`'s parameters, `drop`, `drops`, and the letters of `tensors` (sizes of this match). It sees
fake tensors; what it computes with numbers (1/scale) is baked into the match at hand. It must not draw, or write in place.
`megafx.testing.fuse_with(BiasGelu, ...)` runs one pattern on a small graph: see there for how to test yours.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megafx.errors import MegafxError


class PatternError(MegafxError, ValueError):
    """A pattern's declaration is wrong, or its match or make cannot be traced."""


class Pattern:
    """Base of patterns; see the module's docstring. Subclasses are never instantiated: their functions take no self."""

    name: str = ""
    knob: str | None = None
    tensors: Any = None
    variants: Mapping[str, tuple[Any, ...]] = {}
    scalars: Mapping[str, type] = {}
    needs: Any = ()
    local: bool = False
    redraws: bool = False
    priority: int = 0
    match: Any = None
    make: Any = None
    where: Any = None

    def __init_subclass__(cls) -> None:
        for name in ("match", "make", "where", "tensors", "needs"):
            value = cls.__dict__.get(name)
            if inspect.isfunction(value):
                setattr(cls, name, staticmethod(value))


# -- what a pattern's strings mean


@dataclass(frozen=True)
class DimSpec:
    """One dim: coefficient times letters; or_one: it may also be 1."""

    coefficient: int
    letters: tuple[str, ...]
    or_one: bool = False


@dataclass(frozen=True)
class TensorSpec:
    """One parameter of match. dots: leading dims come before `dims`."""

    dtype: str
    dots: bool
    dims: tuple[DimSpec, ...]
    param: bool = False
    optional: bool = False

    @property
    def free_dtype(self) -> bool:
        return len(self.dtype) == 1 and self.dtype.isupper()


DTYPES = ("f64", "f32", "bf16", "f16", "i64", "i32", "i16", "i8", "u8", "bool")
_SPEC = re.compile(r"(?P<param>param )?(?P<dtype>\w+)\[(?P<dims>[^\]]*)\](?P<optional>\?)?")
_DIM = re.compile(r"(?P<one>1\|)?(?P<product>(?P<number>\d*)(?P<letters>[a-z]?(?:\*[a-z])*))")


@functools.cache
def parse_spec(text: str) -> TensorSpec:
    """'param D[n 2k]?' -> TensorSpec."""
    found = _SPEC.fullmatch(text.strip())
    if found is None or not (found["dtype"] in DTYPES or (len(found["dtype"]) == 1 and found["dtype"].isupper())):
        raise PatternError(
            f"'{text}' describes no tensor",
            fix=f"write it like 'D[... h]', 'param D[n k]', 'bool[b 1 s t]?'; dtypes: a letter, or {', '.join(DTYPES)}",
        )
    words = found["dims"].split()
    dots = bool(words) and words[0] == "..."
    dims = tuple(_dim(word, text) for word in words[dots:])
    return TensorSpec(found["dtype"], dots, dims, bool(found["param"]), bool(found["optional"]))


def _dim(word: str, text: str) -> DimSpec:
    found = _DIM.fullmatch(word)
    if found is None or not found["product"]:
        fix = "write h, 4, 2h, n*d or 1|s; '...' only in front of all others"
        raise PatternError(f"'{word}' in '{text}' is no dim", fix=fix)
    letters = tuple(x for x in found["letters"].split("*") if x)
    return DimSpec(int(found["number"] or 1), letters, bool(found["one"]))


class Variant(NamedTuple):
    """One choice of everything that is declared. absent: optional tensors that are None."""

    values: tuple[tuple[str, Any], ...]
    absent: frozenset[str]

    def __str__(self) -> str:
        return ", ".join([f"{k}={v!r}" for k, v in self.values] + [f"{name}=None" for name in sorted(self.absent)])


def variants_of(pattern: type[Pattern]) -> Iterator[Variant]:
    """Every variant, in the order declared; optional tensors are there first."""
    names = list(pattern.variants)
    for values in itertools.product(*pattern.variants.values()):
        chosen = tuple(zip(names, values, strict=True))
        optional = [n for n, spec in specs_of(pattern, dict(chosen)).items() if spec.optional]
        for gone in itertools.product((False, True), repeat=len(optional)):
            yield Variant(chosen, frozenset(itertools.compress(optional, gone)))


def specs_of(pattern: type[Pattern], chosen: Mapping[str, Any]) -> dict[str, TensorSpec]:
    tensors = pattern.tensors(**chosen) if callable(pattern.tensors) else pattern.tensors
    return {name: parse_spec(text) for name, text in tensors.items()}


def needs_of(pattern: type[Pattern], chosen: Mapping[str, Any]) -> tuple[str, ...]:
    found = pattern.needs(**chosen) if callable(pattern.needs) else pattern.needs
    return (found,) if isinstance(found, str) else tuple(found)


# -- the registry

_patterns: dict[str, type[Pattern]] = {}


def register(pattern: type[Pattern]) -> type[Pattern]:
    """Add a pattern to those that every later compilation looks for; one of the same name is replaced. A class decorator."""
    check_pattern(pattern)
    _patterns[pattern.name] = pattern
    return pattern


def registered_patterns() -> list[type[Pattern]]:
    """In the order of their names."""
    return [_patterns[name] for name in sorted(_patterns)]


def unregister(name: str) -> None:
    """Take a pattern out again."""
    _patterns.pop(name, None)


def check_pattern(pattern: Any) -> None:
    """Raise PatternError where a declaration cannot work."""
    if not (inspect.isclass(pattern) and issubclass(pattern, Pattern)):
        raise PatternError(f"{pattern!r} is no pattern", fix="derive a class from megafx.rewrite.pattern.Pattern")
    if not pattern.name:
        raise PatternError(f"{pattern.__name__} has no name", fix='write name = "..."')
    for part in ("match", "make", "tensors"):
        if getattr(pattern, part) is None:
            fix = "see the docstring of megafx.rewrite.pattern"
            raise PatternError(f"pattern '{pattern.name}' has no {part}", fix=fix)
    chosen = [dict(variant.values) for variant in variants_of(pattern)]
    tensors = {name: spec for values in chosen for name, spec in specs_of(pattern, values).items()}
    letters = {letter for spec in tensors.values() for dim in spec.dims for letter in dim.letters}
    known = {*tensors, *pattern.variants, *pattern.scalars, "drop"}
    _check_names(pattern, "match", known)
    _check_names(pattern, "make", known | letters | {"drops"})
    missing = [n for n in tensors if n not in parameters(pattern.match)]
    if missing:
        raise PatternError(f"pattern '{pattern.name}': match does not take {missing[0]}, which `tensors` describes")


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _check_names(pattern: type[Pattern], part: str, known: set[str]) -> None:
    for name in parameters(getattr(pattern, part)):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"it may take {', '.join(sorted(known))}"
            raise PatternError(f"pattern '{pattern.name}': {part} takes '{name}', which is not declared", fix=hint)
