"""Replace chains of ops that have several results by fused ones, on one rank's shapes.

Before:  %h = megafx.bias_dropout_add(...); %y = megafx.layer_norm(%h, ...)        # %h is used further on
After:   %n = megafx.bias_dropout_add_layer_norm(...); %h = %n[0]; %y = %n[1]
Legal because: where two ops differ in placement a transition stands between them, which no pattern matches; so every op of a
match is local, and the fused op on shards gives the shards of its results.
"""

from __future__ import annotations

from megafx import patterns  # noqa: F401  registers the patterns
from megafx.config import Config
from megafx.ir import Phase, Program
from megafx.pattern import registered_patterns
from megafx.rewrite import patterns_of, rewrite
from megafx.rewrite_replace import Respell
from megafx.rewrite_trace import Canonicalize

REQUIRES, ENSURES = Phase.LOCAL, Phase.LOCAL


def fuse_local(program: Program, config: Config, canonicalize: Canonicalize, respell: Respell) -> int:
    """Returns the number of matches."""
    chosen = patterns_of(registered_patterns(), config, local=True)
    return sum(rewrite(program, chosen, canonicalize, respell, "fuse_local").counts.values())
