"""What this rank holds of a logical tensor, in original coordinates, as torch.distributed.checkpoint plans reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from megafx.errors import CheckpointError
from megafx.stored import local_of, slices_of


class Slice(NamedTuple):
    """`local` are the elements at [offsets, offsets + local.shape) of the logical tensor: a view of this rank's memory."""

    offsets: tuple[int, ...]
    local: torch.Tensor


@dataclass(frozen=True)
class Slices:
    """This rank's part of a logical tensor of `shape` and `dtype`; no parts where it holds padding only."""

    shape: torch.Size
    dtype: torch.dtype
    parts: tuple[Slice, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Slices:
        """Of a plain tensor the whole; of a DTensor the boxes that its shard consists of."""
        if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
            raise CheckpointError("a tensor whose ranks hold summands is to be saved", fix="redistribute it first")
        local = local_of(tensor)
        parts = tuple(Slice(box.offsets, local[box.local]) for box in slices_of(tensor))
        return Slices(tensor.shape, tensor.dtype, parts)

    def copied(self) -> Slices:
        """The same values in CPU memory of their own."""
        parts = tuple(Slice(s.offsets, s.local.to("cpu", copy=True)) for s in self.parts)
        return Slices(self.shape, self.dtype, parts)

    def at(self, offsets: Sequence[int] | None) -> torch.Tensor:
        """The slice that begins there."""
        wanted = tuple(offsets if offsets is not None else (0,) * len(self.shape))
        for part in self.parts:
            if part.offsets == wanted:
                return part.local
        raise CheckpointError(f"this rank holds no slice at {wanted} of a tensor of {tuple(self.shape)}")

    # -- torch.distributed.checkpoint's protocol

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(s.offsets), s.local.shape) for s in self.parts]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]
