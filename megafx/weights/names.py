"""Map tensors of files to tensors of a model and back, with transformers' renaming, merging and splitting.

For Hugging Face models this follows transformers' own tables (`conversion_mapping.py`, `core_model_loading.py`): renamed
tensors, tensors that are merged or split (experts that files have one by one), the base model's prefix present or absent,
names that may be missing or superfluous. For any other model, files must have the names of its state dict.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from megafx.weights.files import Entry, torch_dtype
from megafx.weights.state import Stored


@dataclass
class Sources:
    """Where the values of a model's tensors are."""

    direct: dict[str, str] = field(default_factory=dict)  # name in the model -> name in the files
    converted: list[Conversion] = field(default_factory=list)  # groups of tensors that are made together
    unexpected: list[str] = field(default_factory=list)  # names in the files that the model does not have
    optional: Callable[[str], bool] = lambda name: False  # whether a name of the model may be missing
    rules: str = "the names of the model's state dict"  # how names were matched, for errors
    transforms: list[Any] | None = None  # those of transformers that renamed something


@dataclass
class Conversion:
    """Tensors of files that transformers' operations turn into tensors of the model; they are held whole meanwhile."""

    converter: Any
    first: str
    parts: list[tuple[str, str]]  # (name in the files, the converter's pattern that it fits)
    model: nn.Module

    def make(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Name in the model -> tensor, made of what `read` gives for names in the files."""
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.parts:
            converter.add_tensor(self.first, name, pattern, read(name))
        made = converter.convert(self.first, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def shapes(self, entries: Mapping[str, Entry]) -> dict[str, torch.Tensor]:
        """What `make` would return, as meta tensors."""
        return self.make(lambda n: torch.empty(entries[n].shape, dtype=torch_dtype(entries[n].dtype), device="meta"))


def find_sources(model: nn.Module, names: Sequence[str], stored: Iterable[str]) -> Sources:
    """names: those of the model's state, aliases of tied tensors included. stored: those in the files."""
    known = dict.fromkeys(names, True)
    if hasattr(model, "base_model_prefix") and hasattr(model, "config"):
        return _hugging_face(model, known, stored)
    stored = [*stored]
    return Sources({n: n for n in stored if n in known}, unexpected=[n for n in stored if n not in known])


def _hugging_face(model: Any, known: dict[str, bool], stored: Iterable[str]) -> Sources:
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms = get_model_conversion_mapping(model)
    renamings, converters, by_pattern = _of_kinds(transforms)
    prefix = model.base_model_prefix
    found = Sources(rules="transformers' renamings and the prefix " + repr(prefix))
    groups: dict[str, Conversion] = {}
    ignored = _patterns(model, "_keys_to_ignore_on_load_unexpected")
    buffers = [name for name, _ in model.named_buffers()]  # old files have some that models keep out of their state now
    if any(n.endswith("rotary_emb.inv_freq") for n in buffers):  # (as transformers' own loading has it)
        ignored.append(r"rotary_emb\.inv_freq")
    if any(n.endswith("position_ids") for n in buffers):
        ignored.append(r"(^|\.)position_ids$")
    for name in sorted(stored, key=loading.dot_natural_key):
        new, pattern = loading.rename_source_key(name, renamings, converters, prefix, known)
        if new not in known and name in known:
            new, pattern = name, None  # the rule is for old files; this is a new one
        if new not in known:
            if not any(re.search(p, name) for p in ignored):
                found.unexpected.append(name)
        elif pattern is None:
            found.direct[new] = name
        else:
            groups.setdefault(new, Conversion(by_pattern[pattern], new, [], model)).parts.append((name, pattern))
    found.converted = [*groups.values()]
    found.transforms = [t for t in transforms if t.was_used()]
    may_miss = _patterns(model, "_keys_to_ignore_on_load_missing")
    found.optional = lambda name: any(re.search(p, name) for p in may_miss)
    return found


def _of_kinds(transforms: Sequence[Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """(renamings, converters, pattern of a name -> its converter)"""
    from transformers import core_model_loading as loading

    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    return renamings, converters, {pattern: c for c in converters for pattern in c.source_patterns}


def _patterns(model: Any, attribute: str) -> list[str]:
    return sorted(getattr(model, attribute, None) or ())


def own_config(model: Any) -> Any:
    """A copy of a Hugging Face model's config, without what `parallelize` set in it to tell Trainer of the ranks."""
    config = copy.deepcopy(model.config)
    if getattr(config, "distributed_config", None) is not None:
        config.distributed_config = None
    return config


@dataclass
class Saving:
    """Tensors of the model that are converted and written together. entries: (name in the file, dtype, shape)."""

    names: list[str]
    entries: list[tuple[str, torch.dtype, tuple[int, ...]]]
    make: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in self.entries)


def find_savings(model: nn.Module, tensors: Sequence[Stored], original_format: bool = True) -> list[Saving]:
    """How `tensors` are written: tied ones once, under the name that transformers keeps, and as `from_pretrained` reads them
    (original_format: with the names and shapes of the files that the model was loaded from, or of published ones)."""
    tied = {*(getattr(model, "all_tied_weights_keys", None) or ())}
    left_out = {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    saved = [t for t in tensors if not left_out.intersection(t.names)]
    kept = {next((n for n in t.names if n not in tied), t.name): t for t in saved}
    if not original_format or not (hasattr(model, "base_model_prefix") and hasattr(model, "config")):
        return [_as_it_is(name, name, t) for name, t in kept.items()]
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    used = getattr(model, "_weight_conversions", None)  # those that renamed something when the model was loaded
    if used is None:  # else all that apply to its class, as transformers has it
        every = get_model_conversion_mapping(cast(Any, model), add_legacy=False)
        used = [t for t in every if not isinstance(t, loading.PrefixChange)]
    transforms = [t.reverse_transform() for t in reversed(used)]
    renamings, converters, by_pattern = _of_kinds(transforms)
    groups: dict[str, Conversion] = {}
    found = []
    for name in sorted(kept, key=loading.dot_natural_key):
        new, pattern = next(
            (made for t in converters if (made := t.rename_source_key(name))[1] is not None), (name, None)
        )
        if pattern is None:
            found.append(_as_it_is(name, _renamed(name, renamings), kept[name]))
        else:
            groups.setdefault(new, Conversion(by_pattern[pattern], new, [], model)).parts.append((name, pattern))
    for group in groups.values():
        found.append(_converted(group, kept, lambda name: _renamed(name, renamings)))
    return found


def _renamed(name: str, renamings: Sequence[Any]) -> str:
    for each in renamings:
        name, _ = each.rename_source_key(name)
    return name


def _as_it_is(name: str, new: str, stored: Stored) -> Saving:
    return Saving([name], [(new, stored.tensor.dtype, tuple(stored.tensor.shape))], lambda values: [*values])


def _converted(group: Conversion, kept: Mapping[str, Stored], rename: Callable[[str], str]) -> Saving:
    names = [name for name, _ in group.parts]
    about = {name: (kept[name].tensor.shape, kept[name].tensor.dtype) for name in names}
    made = group.make(lambda name: torch.empty(about[name][0], dtype=about[name][1], device="meta"))
    entries = [(rename(name), x.dtype, tuple(x.shape)) for name, x in made.items()]
    make = lambda values: [*group.make(dict(zip(names, values, strict=True)).__getitem__).values()]
    return Saving(names, entries, make)
