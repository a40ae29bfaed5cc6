"""`model.save_pretrained(folder)` of a sharded Hugging Face model, written as `megafx.save_pretrained` writes.

What the method's arguments mean here: `max_shard_size`, `variant` and `save_original_format` what they mean there;
`is_main_process` is true on some rank, or nothing is written (the Trainer gives each rank its own); a `state_dict` of whole
tensors, adapters and quantized models are left to the method itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from megafx.errors import UsageError
from megafx.lost_ranks import meet
from megafx.save_weights import save_whole

if TYPE_CHECKING:
    from megafx.runtime import Runtime

CALLER = "model.save_pretrained"


def bound(
    method: Callable[..., Any], folder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """The method's arguments by name, defaults included; None where the method itself has to save."""
    known = inspect.signature(method)
    options = known.bind(folder, *args, **kwargs)
    options.apply_defaults()
    model: Any = getattr(method, "__self__", None)
    special = getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "hf_quantizer", None) is not None
    if special or "max_shard_size" not in known.parameters or options.arguments.get("state_dict") is not None:
        return None
    return options.arguments


def save(model: nn.Module, options: dict[str, Any], runtime: Runtime) -> None:
    """Write the files. Collective over all ranks of the model."""
    if options.get("push_to_hub"):
        raise no_upload("save_pretrained(push_to_hub=True)")
    if options.get("distributed_checkpoint"):
        raise UsageError(
            "save_pretrained(distributed_checkpoint=True) would write shards as this number of ranks lays them out",
            fix="megafx.save_checkpoint(folder, model, optimizer, step=...), which loads on any number of ranks",
        )
    if not _wanted(bool(options.get("is_main_process", True)), runtime):
        return
    folder = Path(options["save_directory"])
    save_whole(
        model,
        folder,
        options["max_shard_size"],
        CALLER,
        variant=options.get("variant") or "",
        original_format=bool(options.get("save_original_format", True)),
    )
    if runtime.is_first and getattr(model, "is_remote_code", bool)():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, str(folder), config=model.config)  # type: ignore[arg-type]  # HF annotates a dict


def _wanted(main: bool, runtime: Runtime) -> bool:
    """Whether some rank is to write."""
    group = runtime.everyone
    if group is None:
        return main
    meet(CALLER, group)
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, main, group=group)
    return any(said)


def no_upload(call: str) -> UsageError:
    return UsageError(
        f"{call} of a model whose weights are on several ranks",
        fix="model.save_pretrained(folder) on every rank, then huggingface_hub.HfApi().upload_folder(folder_path=folder, "
        "repo_id=...) on one",
    )
