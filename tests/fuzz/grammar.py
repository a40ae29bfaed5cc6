"""A grammar of transformer-like models: what a case may be, drawn by hypothesis. fuzz/models.py builds them.

Every choice is a plain value of a frozen dataclass, so that a case prints as what makes it again, and shrinks.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

NORMS = (
    "layer",
    "layer without bias",
    "layer without weights",
    "rms",
    "hand-written layer",
    "hand-written rms",
    "none",
)
RESIDUALS = ("pre", "post", "sandwich", "parallel", "scaled", "gated", "highway", "concatenated", "none")
PROJECTIONS = (
    "apart",  # three linears
    "chunk",  # one linear, its result in three
    "split",
    "unbind",  # view(b, s, 3, heads, width).unbind(2)
    "by head",  # view(b, s, heads, 3 * width).chunk(3, -1): GPT-NeoX
    "slices",
    "three of the input",  # a parameter [3, h, h], by einsum
    "transposed",  # x @ weight [in, out]: GPT-2's Conv1D
)
SCORES = ("sdpa", "sdpa with a mask", "matmul", "einsum", "baddbmm", "masked_fill", "softcap")
MASKS = ("causal", "none", "padding", "causal and padding", "window", "alibi", "learned bias")
MLPS = (
    "plain",
    "glu of two linears",
    "glu of halves",
    "interleaved glu",
    "low rank",
    "convolution",
    "depthwise",
    "mixture",
    "none",
)
ACTIVATIONS = (
    "gelu",
    "gelu tanh",
    "quick gelu",
    "relu",
    "silu",
    "relu squared",
    "softplus",
    "elu",
    "hardswish",
    "mish",
    "tanh",
)
POSITIONS = ("none", "table", "parameter", "sinusoids", "rope", "interleaved rope", "parameter and rope")
VIEWS = (
    "none",
    "flat tokens",  # [b, s, h] -> [b * s, h] around a block
    "sequence first",
    "there and back",  # transposes and reshapes that cancel
    "split and cat",
    "token shift",  # RWKV's: half of the channels come from the token before
    "rolled",  # torch.roll along the sequence and back
    "flipped",
    "gathered",  # index_select by a permutation of the channels
    "padded",  # zeros at the end of the sequence, cut off again
    "recurrence",  # a loop over tokens that carries a state
    "running mean",  # a buffer that forward writes in training
    "memory",  # a tensor that forward leaves in an attribute for the next call, in every mode
    "counter",  # a number that forward counts, and computes with
    "sizes of one",  # branches on one row and on one token
)
# What happens before a call of a loop, to the model or to the call; fuzz/loops.py does it.
EVENTS = (
    "nothing",
    "another scale",  # an attribute that forward reads: a number
    "the flag",  # one that forward branches on
    "one row",
    "one token",
    "beside the loss",  # another loss, of an output
    "freeze",  # parameters by name, or free them
    "zero a row",
    "scale by data",  # p.data = ...
    "new parameters",  # of the last norm and the first block's MLP: others in their place
    "a step",  # of SGD, by the gradients of the call before
    "accumulate",  # gradients of two calls
    "load a state",  # load_state_dict, of numbers that differ
    "buffers",  # written in place, and replaced
    "a hook",  # on the first block, that changes its output
    "evaluation",
    "without gradients",
)
HEADS = (
    "logits",
    "tied",
    "rows of the table",  # x @ table[:v].T
    "transposed table",
    "two layers",
    "mean pooling",
    "masked mean",
    "first token",
    "maximum",
    "spans",  # two numbers a token
    "multiple choice",
)
LOSSES = (
    "shifted",
    "plain",
    "flat",
    "ignored",
    "smoothed",
    "z-loss",
    "weights of classes",
    "regression",
    "two losses",
    "logits alone",
)


@dataclass(frozen=True)
class Attention:
    heads: int
    key_value_heads: int
    width: int  # of a head
    projection: str
    scores: str
    mask: str
    bias: bool
    query_key_norm: bool
    dropout: float


@dataclass(frozen=True)
class Mlp:
    kind: str
    width: int
    activation: str
    bias: bool
    dropout: float


@dataclass(frozen=True)
class Block:
    attention: Attention | None
    mlp: Mlp
    norm: str
    residual: str
    view: str
    dropout: float


@dataclass(frozen=True)
class Case:
    vocab: int
    hidden: int
    batch: int
    sequence: int
    position: str
    embedding_scale: bool
    embedding_norm: bool
    frozen_embedding: bool
    blocks: tuple[Block, ...]
    shared_blocks: bool  # one block, called twice
    final_norm: str
    head: str
    loss: str
    outputs: str  # "tensor", "tuple", "dict", "dataclass"
    frozen: str  # parameters whose name has this in it need no gradient; "" none
    ranks: int
    sequence_parallel: bool
    seed: int
    events: tuple[str, ...] = ()


PROBABILITY = st.sampled_from((0.0, 0.0, 0.0, 0.1))


@st.composite
def attentions(draw: st.DrawFn) -> Attention:
    heads = draw(st.integers(1, 6))
    projection = draw(st.sampled_from(PROJECTIONS))
    grouped = projection in ("apart", "split", "slices")
    groups = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])) if grouped else heads
    return Attention(
        heads,
        groups,
        draw(st.sampled_from((4, 6, 8))),
        projection,
        draw(st.sampled_from(SCORES)),
        draw(st.sampled_from(MASKS)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(PROBABILITY),
    )


MLP: SearchStrategy[Mlp] = st.builds(
    Mlp,
    st.sampled_from(MLPS),
    st.integers(4, 26).map(lambda n: 2 * n),
    st.sampled_from(ACTIVATIONS),
    st.booleans(),
    PROBABILITY,
)
BLOCK: SearchStrategy[Block] = st.builds(
    Block,
    st.one_of(attentions(), attentions(), attentions(), st.none()),
    MLP,
    st.sampled_from(NORMS),
    st.sampled_from(RESIDUALS),
    st.sampled_from(VIEWS),
    PROBABILITY,
)
CASE: SearchStrategy[Case] = st.builds(
    Case,
    vocab=st.integers(7, 40),
    hidden=st.sampled_from((12, 16, 18, 20, 24)),
    batch=st.integers(1, 4),
    sequence=st.integers(2, 9),
    position=st.sampled_from(POSITIONS),
    embedding_scale=st.booleans(),
    embedding_norm=st.booleans(),
    frozen_embedding=st.sampled_from((False, False, False, True)),
    blocks=st.lists(BLOCK, min_size=1, max_size=2).map(tuple),
    shared_blocks=st.sampled_from((False, False, False, True)),
    final_norm=st.sampled_from(NORMS),
    head=st.sampled_from(HEADS),
    loss=st.sampled_from(LOSSES),
    outputs=st.sampled_from(("tensor", "tuple", "dict", "dataclass")),
    frozen=st.sampled_from(("", "", "", "bias", "norm", "attention", "mlp")),
    ranks=st.sampled_from((2, 3, 4)),
    sequence_parallel=st.booleans(),
    seed=st.integers(0, 2**16),
    events=st.lists(st.sampled_from(EVENTS), max_size=4).map(tuple),
)
