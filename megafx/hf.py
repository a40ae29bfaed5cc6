"""Hugging Face models: inputs made from signature and config, so that no example is needed. Does not import transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megafx.errors import CaptureError, UsageError

BATCH, SEQ, TARGET_SEQ = 2, 64, 48  # trace sizes, never the workload; the two sides of an encoder-decoder differ


def is_hf_model(model: nn.Module) -> bool:
    """Whether some base class of the model is transformers' PreTrainedModel."""
    return any(c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers") for c in type(model).__mro__)


def is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def sequence_group(model: nn.Module) -> Callable[[str], str]:
    """Leaf name -> 'target' for what belongs to the decoder of an encoder-decoder, '' otherwise."""
    if not is_encoder_decoder(model):
        return lambda name: ""
    return lambda name: "target" if "decoder" in name or "labels" in name else ""


def part_group(name: str) -> str:
    """As `sequence_group`'s, for a direct call of a submodule: what a decoder gets of the encoder is apart."""
    return "memory" if "encoder_" in name and "decoder_" not in name else ""


def check_generation(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a `generate()` that transformers gets wrong: chunks of a decoder's prompt beside a mask of the encoder's tokens.

    It cuts `attention_mask` to the length of each chunk, whichever side that mask is of.
    """
    config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    size = kwargs.get("prefill_chunk_size", getattr(config, "prefill_chunk_size", None))
    if size is None or not is_encoder_decoder(model) or getattr(model, "main_input_name", "") != "input_ids":
        return
    pad = kwargs.get("pad_token_id", getattr(config, "pad_token_id", None))
    ids = next(
        (x for x in (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids")) if isinstance(x, torch.Tensor)), None
    )
    padded = isinstance(pad, int) and ids is not None and bool((ids == pad).any())  # generate makes a mask of it
    if kwargs.get("attention_mask") is not None or padded:
        raise UsageError(
            f"generate(prefill_chunk_size={size}) of a model with an encoder, with padding or an attention_mask: transformers "
            f"cuts that mask, which is of the encoder's tokens, to the length of each chunk of the decoder's",
            fix="leave out prefill_chunk_size: only the decoder's prompt would be split",
        )


def synthesize_inputs(model: nn.Module) -> tuple[tuple[Any, ...], dict[str, torch.Tensor]]:
    """(args, kwargs) of a call with labels, as meta tensors: only shapes and dtypes matter to capture."""
    if not is_hf_model(model):
        raise CaptureError(
            f"the inputs of a {type(model).__name__} are unknown",
            fix="pass example_inputs= (a tuple of args, a dict of kwargs, or both), or call the model once",
        )
    return (), _Inputs(model).make()


class _Inputs:
    """The call of one model: main input, decoder input, labels by the shape of the head's output."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.config = model, model.config
        self.parameters = inspect.signature(model.forward).parameters
        self.text = getattr(self.config, "text_config", None) or self.config
        self.vision = getattr(self.config, "vision_config", None) or self.config
        self.kwargs: dict[str, torch.Tensor] = {}

    def takes(self, name: str) -> bool:
        return name in self.parameters

    def make(self) -> dict[str, torch.Tensor]:
        main = getattr(self.model, "main_input_name", "input_ids")
        if main == "pixel_values" or (self.takes("pixel_values") and self.takes("input_ids")):
            self.pixels()
        if main == "input_features":
            self.features()
        if main == "input_values":
            self.kwargs["input_values"] = _floats(BATCH, 16000)
        length = self.length(SEQ)
        if main != "input_features" and self.takes("input_ids"):
            self.kwargs["input_ids"] = _ids(BATCH, length)
            if self.takes("attention_mask"):
                self.kwargs["attention_mask"] = _ids(BATCH, length)
        target = self.length(TARGET_SEQ)
        if is_encoder_decoder(self.model) and self.takes("decoder_input_ids"):
            self.kwargs["decoder_input_ids"] = _ids(BATCH, target)
        self.labels(length, target)
        if self.takes("return_loss"):
            self.kwargs["return_loss"] = True  # type: ignore[assignment]
        return self.kwargs

    def length(self, wanted: int) -> int:
        """At most the model's maximum."""
        known = (
            getattr(self.text, k, None)
            for k in ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
        )
        limits = [n for n in known if isinstance(n, int) and n > 1]
        # RoBERTa-like position tables start after the padding index.
        limit = min(limits) - (2 if getattr(self.text, "pad_token_id", None) == 1 else 0) if limits else wanted
        return max(2, min(wanted, limit if wanted != TARGET_SEQ else min(limit, TARGET_SEQ * limit // max(limit, SEQ))))

    def pixels(self) -> None:
        size = getattr(self.vision, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        self.kwargs["pixel_values"] = _floats(BATCH, getattr(self.vision, "num_channels", 3), height, width)

    def features(self) -> None:
        """Log-mel frames; the encoder halves their number by its second convolution's stride."""
        frames = 2 * getattr(self.config, "max_source_positions", 1500)
        self.kwargs["input_features"] = _floats(BATCH, getattr(self.config, "num_mel_bins", 80), frames)

    def labels(self, length: int, target: int) -> None:
        head = type(self.model).__name__
        if self.takes("start_positions") and "QuestionAnswering" in head:
            self.kwargs["start_positions"], self.kwargs["end_positions"] = _ids(BATCH), _ids(BATCH)
        elif self.takes("next_sentence_label") and self.takes("labels"):
            self.kwargs["labels"], self.kwargs["next_sentence_label"] = _ids(BATCH, length), _ids(BATCH)
        elif not self.takes("labels"):
            return
        elif is_encoder_decoder(self.model) and "Classification" not in head:
            self.kwargs["labels"] = _ids(BATCH, target)
        elif "TokenClassification" in head:
            self.kwargs["labels"] = _ids(BATCH, length)
        elif "MultipleChoice" in head:
            self.kwargs["labels"] = _ids(BATCH)
            for name in ("input_ids", "attention_mask"):
                if name in self.kwargs:
                    self.kwargs[name] = _ids(BATCH, 3, length)
        elif "Classification" in head:
            self.kwargs["labels"] = self.class_labels()
        else:
            self.kwargs["labels"] = _ids(BATCH, length)

    def class_labels(self) -> torch.Tensor:
        """Labels by `problem_type`, or by the number of classes as transformers itself decides."""
        count = getattr(self.config, "num_labels", 2)
        kind = getattr(self.config, "problem_type", None) or (
            "regression" if count == 1 else "single_label_classification"
        )
        if kind == "single_label_classification":
            return _ids(BATCH)
        return _floats(BATCH, count) if kind == "multi_label_classification" or count > 1 else _floats(BATCH)


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _floats(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.get_default_dtype(), device="meta")
