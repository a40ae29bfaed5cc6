"""The architectures of the model matrix: each is a row that says how a tiny model of it and the inputs of a call are made.

Configs are tiny and awkward: two layers, head counts, KV heads, ffn sizes and vocabularies that few degrees divide. Every
parameter is drawn anew (also norms and biases, which fresh models have at 1 and 0). Calls have labels, with ignored ones, and
a mask with padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

VOCAB, BATCH, SEQ, TARGET_SEQ, SHORT = 67, 3, 13, 11, 5
DROPOUT = 0.2
PADDED = 4  # positions of the second sequence that are padding

Inputs = Callable[[nn.Module], dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """One row. config, model: names of transformers' classes; fields: of the config; kind: as the table says.

    make: probability of dropout -> the module, of a model that is none of transformers'; config and model are empty then.

    attention: implementations that the architecture has. least_sharded: of its parameters, at least this fraction is stored in
    shards. tried: run in a few modes only. degrees: numbers of ranks. inputs: model -> kwargs of a call.
    """

    name: str
    kind: str
    config: str
    model: str
    fields: Mapping[str, Any]
    inputs: Inputs
    attention: tuple[str, ...] = ("eager", "sdpa")
    least_sharded: float = 0.9
    tried: bool = False
    degrees: tuple[int, ...] = (2, 3, 4)
    nested: Mapping[str, str] = field(default_factory=dict)  # field -> config class of the dict given for it
    make: Callable[[float], nn.Module] | None = None

    def build(self, *, attention: str, dropout: float = 0.0) -> nn.Module:
        """A fp64 model with all dropout of its config at this probability."""
        make = self.make or partial(self._of_transformers, attention)
        torch.manual_seed(1)
        model = make(dropout).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model

    def _of_transformers(self, attention: str, dropout: float) -> nn.Module:
        fields = dict(self.fields)
        for name, kind in self.nested.items():
            fields[name] = getattr(transformers, kind)(**fields[name]).to_dict()
        config = getattr(transformers, self.config)(**fields, attn_implementation=attention)
        set_dropout(config, dropout)
        torch.manual_seed(1)  # making a config may draw
        return getattr(transformers, self.model)(config)

    @property
    def has_dropout(self) -> bool:
        """Whether its config, or a module of it, knows any dropout."""
        if self.make is not None:
            return any(isinstance(m, nn.Dropout) for m in self.make(DROPOUT).modules())
        config = getattr(transformers, self.config)(**self.fields)
        return set_dropout(config, DROPOUT) > 0


def set_dropout(config: Any, p: float) -> int:
    """Set every dropout probability of a config and of the configs within; returns how many there are."""
    count = 0
    for name, value in vars(config).items():
        if type(value).__name__.endswith("Config"):
            count += set_dropout(value, p)
        elif "drop" in name and not any(word in name for word in ("layer", "path", "classifier")):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            vars(config)[name] = p  # past type checks: some configs call theirs an int
            count += 1
    return count


def ids(batch: int, seq: int, *, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def padding(batch: int, seq: int) -> torch.Tensor:
    """A mask whose second sequence ends in padding."""
    mask = torch.ones(batch, seq, dtype=torch.int64)
    mask[1, -PADDED:] = 0
    return mask


def token_labels(batch: int, seq: int) -> torch.Tensor:
    """Labels of tokens; padding and every fifth are ignored."""
    labels = ids(batch, seq, seed=1)
    labels[:, 1::5] = -100
    labels[1, -PADDED:] = -100
    return labels


def text(model: nn.Module) -> dict[str, Any]:
    """A call with token labels, and with a mask where the model takes one."""
    call = {"input_ids": ids(BATCH, SEQ), "labels": token_labels(BATCH, SEQ)}
    if "attention_mask" in inspect.signature(model.forward).parameters:
        call["attention_mask"] = padding(BATCH, SEQ)
    return call


def short_text(model: nn.Module) -> dict[str, Any]:
    """A call of few tokens, for models whose graph has a part for each token."""
    return {"input_ids": ids(BATCH, SHORT), "labels": ids(BATCH, SHORT, seed=1)}


def rows() -> dict[str, Architecture]:
    """Name -> row, in the order of the table."""
    import decoders
    import encoders
    import plain

    return {row.name: row for row in (*decoders.ROWS, *encoders.ROWS, *plain.ROWS)}
