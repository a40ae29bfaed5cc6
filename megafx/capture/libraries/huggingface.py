"""Hugging Face models: their attention while a model is captured, and inputs so that no example is needed.

ATTENTION. transformers makes a [b, 1, s, t] mask when it is traced, which shuts out the flash kernels. While a model is
captured, the mask function returns that same mask with a tag that says what it is (`Shape`). If the model hands it to attention
untouched, attention is megafx.attention by the tag, and the mask is dead code. A mask that the model has changed, or whose
function is not known, has no tag: it is captured as transformers has it.

(Reading the masks from the graph, as describe_masks does for other models, was tried in place of tags: beside any mask
transformers repeats keys and values for groups of query heads, and it refuses soft-capped scores.)

INPUTS (`synthesize_inputs`) are made from the model's signature and config. Transformers is imported only where it is used.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from megafx.errors import CaptureError

_TAG = "_megafx_shape"
# `use_cache` of a config where it was True, while the model is captured: no cache is made, and forward sees who turned it off.
NO_CACHE = type("NoCache", (int,), {})()
PACKED_WITH_CACHE = (
    "position_ids do not separate packed sequences here, as in eager mode: transformers separates them only without a "
    "cache, and use_cache is True. Pass use_cache=False if they are packed"
)
_SAME_STEPS = ("unsqueeze", "expand", "view", "reshape", "clone", "to", "_to_copy", "detach", "alias", "add")


class Shape(NamedTuple):
    """What a mask lets be seen: keys up to the query, |query - key| < window (0: all), keys where padding [b, t] is True."""

    causal: bool
    window: int
    padding: Tensor | None


def attention_replacements() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """(object, or registry's dict; name; old -> new) of what transformers has for "sdpa" attention, masks and packing."""
    try:
        from transformers import masking_utils
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as attentions
    except ImportError:  # no transformers, or one without these interfaces: its models are captured as they are
        return
    masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    yield masks._local_mapping, "sdpa", lambda old: _tagging(old or masks["sdpa"])
    yield attentions._local_mapping, "sdpa", lambda old: _attention_by_tag(old or attentions["sdpa"])


def _tagging(original: Callable[..., Any]) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("use_vmap") and _by_indices(kwargs.get("mask_function")):
            kwargs["use_vmap"] = False  # the same mask, made by broadcasting: no graph holds vmap
        made = original(*args, **kwargs)
        if isinstance(made, Tensor) and not args and (shape := _shape_of(made, kwargs)) is not None:
            setattr(made, _TAG, shape)
        return made

    return mask


def _shape_of(made: Tensor, kwargs: dict[str, Any]) -> Shape | None:
    """What a mask is, by the arguments of the function that made it; None where that is not known."""
    seen, padding = _seen_by(kwargs.get("mask_function")), kwargs.get("attention_mask")
    at_zero = all(isinstance(kwargs.get(k, 0), int) and kwargs.get(k, 0) == 0 for k in ("q_offset", "kv_offset"))
    if seen is None or not at_zero or made.dim() != 4:
        return None
    if padding is not None and (padding.dim() != 2 or padding.dtype != torch.bool or padding.shape[1] != made.shape[3]):
        return None
    return Shape(*seen, padding)


def _seen_by(function: Any) -> tuple[bool, int] | None:
    """(causal, window) of the mask functions that transformers makes itself."""
    from transformers import masking_utils as hf

    if function is None or function is hf.causal_mask_function:
        return True, 0
    if function is hf.bidirectional_mask_function:
        return False, 0
    parts = _cell(function, "and_masks", "mask_functions")
    if not isinstance(parts, tuple) or len(parts) != 2:
        return None
    overlay, rest = parts
    width = _cell(overlay, "sliding_window_overlay", "sliding_window")
    if isinstance(width, int) and rest is hf.causal_mask_function:
        return True, width
    width = _cell(overlay, "sliding_window_bidirectional_overlay", "sliding_window")
    if isinstance(width, int) and rest is hf.bidirectional_mask_function:
        return False, width + 1
    return None


def _by_indices(function: Any) -> bool:
    """True if a mask function, and all that it calls, are transformers' own, which take indices of any shape."""
    if isinstance(function, (tuple, list)):
        return all(map(_by_indices, function))
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return False
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return all(_by_indices(c) for c in cells if callable(c) or isinstance(c, (tuple, list)))


def _cell(function: Any, maker: str, variable: str) -> Any:
    """A variable that a function which `maker` returned has closed over."""
    if not getattr(function, "__qualname__", "").startswith(f"{maker}.<locals>"):
        return None
    names = function.__code__.co_freevars
    return function.__closure__[names.index(variable)].cell_contents if variable in names else None


class CachesLeftOut:
    """Finds calls for which eager mode would make a key-value cache that nobody asked for, and a graph makes none.

    transformers takes positions 0 1 2 0 1 for packed sequences, but only where there is no cache. note: called where positions
    that may be packed are not taken so.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note = note
        self.left_out: list[bool] = []  # one entry for each model whose forward is running

    def replacements(self, model: nn.Module) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
        """(object, name, old -> new): the forward of each transformers model, and how packing is found."""
        models = [m for m in model.modules() if is_hf_model(m)]
        if not models:
            return
        from transformers import masking_utils

        if hasattr(masking_utils, "_preprocess_mask_arguments"):
            yield masking_utils, "_preprocess_mask_arguments", _positions_of_rows
        if hasattr(masking_utils, "find_packed_sequence_indices"):
            yield masking_utils, "find_packed_sequence_indices", self._packing
            for each in models:
                yield each, "forward", functools.partial(self._forward, vars(each.config))

    def _forward(self, config: Mapping[str, Any], old: Callable[..., Any]) -> Callable[..., Any]:
        takes = inspect.signature(old)

        @functools.wraps(old)
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = {**takes.bind_partial(*args, **kwargs).arguments, **kwargs}.get("use_cache")
            self.left_out.append((config.get("use_cache") if given is None else given) is NO_CACHE)
            try:
                return old(*args, **kwargs)
            finally:
                self.left_out.pop()

        return forward

    def _packing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Positions 0, 1, 2, ... are one sequence a row. transformers sees that by their values, which a trace lacks."""

        def find(position_ids: Tensor) -> Any:
            if _counts(position_ids):
                return None
            if self.left_out and self.left_out[-1]:
                self.note(PACKED_WITH_CACHE)
                return None
            return original(position_ids)

        return find


def no_cache(config: Any, model: nn.Module) -> Any:
    """The `use_cache` of a config, where it was True and no cache is made."""
    parts = (vars(m) for m in model.modules() if m.training and vars(m).get("config") is config)
    return False if any(p.get("gradient_checkpointing") for p in parts) else NO_CACHE


@contextlib.contextmanager
def caches_left_out(model: nn.Module, configs: Sequence[Any], asked: bool) -> Iterator[None]:
    """Within, calls in eager mode make no key-value cache that nobody asked for, as graphs do, and compute the same. asked: the
    call says whether it wants one."""
    before = [(vars(c), vars(c)["use_cache"], no_cache(c, model)) for c in configs if vars(c).get("use_cache")]
    if asked or not before:
        yield
        return
    try:
        from transformers import masking_utils
    except ImportError:
        names = {}
    else:
        names = vars(masking_utils)
    find = names.get("find_packed_sequence_indices")
    if find is not None and any(new is NO_CACHE for _, _, new in before):
        names["find_packed_sequence_indices"] = lambda position_ids: None
    try:
        for attributes, _, new in before:
            attributes["use_cache"] = new
        yield
    finally:
        for attributes, old, _ in before:
            attributes["use_cache"] = old
        if find is not None:
            names["find_packed_sequence_indices"] = find


def _positions_of_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Positions that serve all rows are expanded to the batch before transformers asks whether they have as many rows: the
    answer is then the same for a batch of one, which needs no trace of its own."""
    takes = inspect.signature(original)

    @functools.wraps(original)
    def preprocess(*args: Any, **kwargs: Any) -> Any:
        given = takes.bind(*args, **kwargs)
        positions, rows = (given.arguments.get(name) for name in ("position_ids", "inputs_embeds"))
        if isinstance(positions, Tensor) and isinstance(rows, Tensor) and _is_one_row(positions):
            given.arguments["position_ids"] = positions.expand(rows.shape[0], -1)
        return original(*given.args, **given.kwargs)

    return preprocess


def _is_one_row(x: Tensor) -> bool:
    return x.dim() == 2 and isinstance(x.shape[0], int) and x.shape[0] == 1


def _counts(position_ids: Tensor) -> bool:
    """True if each row of a traced tensor is an arange, whatever it starts at."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(position_ids, mode.tracer, None)
    node = getattr(getattr(slot, "proxy", None), "node", None)
    while isinstance(node, fx.Node) and node.op == "call_function":
        name = str(node.target).split(".")[1] if "." in str(node.target) else ""
        if name == "arange":
            return len(node.args) < 3 or bool(node.args[2] == 1)
        plain = name != "add" or isinstance(node.args[1], int)
        node = node.args[0] if name in _SAME_STEPS and plain else None
    return False


def _attention_by_tag(original: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
        scaling: float | None = None, is_causal: bool | None = None, position_bias: Tensor | None = None,
        softcap: float | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        shape: Shape | None = getattr(attention_mask, _TAG, None)
        if shape is None and attention_mask is None and (position_bias is not None or softcap):
            given = is_causal if is_causal is not None else getattr(module, "is_causal", True)
            shape = Shape(given is True, 0, None) if isinstance(given, bool) else None
        same_batch = key.shape[0] == query.shape[0] == value.shape[0]
        if shape is None or kwargs.get("cache") is not None or not same_batch or query.shape[2] == 1:
            extra = {} if softcap is None else {"softcap": softcap}
            return original(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
                position_bias=position_bias, **extra, **kwargs,
            )  # fmt: skip
        mask, key_mask = shape.padding, None
        if position_bias is not None:
            mask = position_bias
            if shape.padding is not None:
                zeros = torch.zeros_like(shape.padding, dtype=position_bias.dtype)
                key_mask = zeros.masked_fill(~shape.padding, torch.finfo(position_bias.dtype).min)
        scale = float(scaling if scaling is not None else 1.0 / math.sqrt(query.shape[-1]))
        drawn: tuple[Any, ...] = (0, float(dropout), -1, -1, [], "tp")
        out = torch.ops.megafx.attention(
            query, key, value, mask, key_mask, None, None, None, scale, shape.causal, shape.window, float(softcap or 0.0),
            *drawn,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    return attention


BATCH, SEQ, TARGET_SEQ = 2, 64, 48  # trace sizes, never the workload; the two sides of an encoder-decoder differ


def is_hf_model(model: nn.Module) -> bool:
    """True if some base class of the model is transformers' PreTrainedModel."""
    return any(c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers") for c in type(model).__mro__)


def adapted(model: nn.Module) -> nn.Module | None:
    """transformers' model inside of one of peft, which takes the same arguments; None of any other."""
    inner = getattr(model, "get_base_model", lambda: None)()
    return inner if isinstance(inner, nn.Module) and inner is not model and is_hf_model(inner) else None


def is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def sequence_group(model: nn.Module) -> Callable[[str], str]:
    """Leaf name -> 'target' for what belongs to the decoder of an encoder-decoder, '' otherwise."""
    if not is_encoder_decoder(model):
        return lambda name: ""
    return lambda name: "target" if "decoder" in name or "labels" in name else ""


def part_group(name: str) -> str:
    """The same for a direct call of a submodule: 'memory' for what a decoder gets of the encoder, '' otherwise."""
    return "memory" if "encoder_" in name and "decoder_" not in name else ""


def synthesize_inputs(model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a call with labels, as meta tensors: only shapes and dtypes matter to capture."""
    if not is_hf_model(model):
        raise CaptureError(
            f"the inputs of a {type(model).__name__} are unknown",
            fix="pass example_inputs= (a tuple of args, a dict of kwargs, or both), or call the model once",
        )
    config, takes = model.config, inspect.signature(model.forward).parameters
    text, vision = (getattr(config, name, None) or config for name in ("text_config", "vision_config"))
    length, target = _length(text, SEQ), _length(text, TARGET_SEQ)
    main = getattr(model, "main_input_name", "input_ids")
    inputs: dict[str, Any] = {}
    if main == "pixel_values" or ("pixel_values" in takes and "input_ids" in takes):
        size = getattr(vision, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        inputs["pixel_values"] = _floats(BATCH, getattr(vision, "num_channels", 3), height, width)
    if main == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 1500)  # the encoder's second convolution halves them
        inputs["input_features"] = _floats(BATCH, getattr(config, "num_mel_bins", 80), frames)
    if main == "input_values":
        inputs["input_values"] = _floats(BATCH, 16000)
    if main != "input_features" and "input_ids" in takes:
        choices = (3,) if "MultipleChoice" in type(model).__name__ and "labels" in takes else ()
        names = ("input_ids", "attention_mask") if "attention_mask" in takes else ("input_ids",)
        inputs |= {name: _ids(BATCH, *choices, length) for name in names}
    if is_encoder_decoder(model) and "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = _ids(BATCH, target)
    inputs |= _labels(model, takes, length, target)
    if "return_loss" in takes:
        inputs["return_loss"] = True
    return (), inputs


def _length(config: Any, wanted: int) -> int:
    """A length of at most the model's maximum."""
    keys = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
    limits = [n for key in keys if isinstance(n := getattr(config, key, None), int) and n > 1]
    # RoBERTa-like position tables start after the padding index.
    limit = min(limits) - (2 if getattr(config, "pad_token_id", None) == 1 else 0) if limits else wanted
    return max(2, min(wanted, limit if wanted != TARGET_SEQ else min(limit, TARGET_SEQ * limit // max(limit, SEQ))))


def _labels(model: Any, takes: Mapping[str, Any], length: int, target: int) -> dict[str, Tensor]:
    """Labels by the shape of the head's output."""
    head = type(model).__name__
    if "start_positions" in takes and "QuestionAnswering" in head:
        return {"start_positions": _ids(BATCH), "end_positions": _ids(BATCH)}
    if "labels" not in takes:
        return {}
    if "next_sentence_label" in takes:
        return {"labels": _ids(BATCH, length), "next_sentence_label": _ids(BATCH)}
    if is_encoder_decoder(model) and "Classification" not in head:
        return {"labels": _ids(BATCH, target)}
    if "MultipleChoice" in head:
        return {"labels": _ids(BATCH)}
    if "Classification" not in head or "TokenClassification" in head:
        return {"labels": _ids(BATCH, length)}
    count = getattr(model.config, "num_labels", 2)
    default = "regression" if count == 1 else "single_label_classification"  # as transformers itself decides
    kind = getattr(model.config, "problem_type", None) or default
    if kind == "single_label_classification":
        return {"labels": _ids(BATCH)}
    return {"labels": _floats(BATCH, count) if kind == "multi_label_classification" or count > 1 else _floats(BATCH)}


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _floats(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.get_default_dtype(), device="meta")
