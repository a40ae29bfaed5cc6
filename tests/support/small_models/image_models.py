"""A model of images and text in small, which needs the values of the images' grids, as Qwen2-VL does."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IMAGE = 19


def patch_places(grids: Tensor) -> Tensor:
    """[patches, 2]: row and column of each patch. grids: frames, height and width; the latter are even."""
    found = []
    for frames, height, width in grids.tolist():
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        blocks = (height // 2, 2, width // 2, 2)
        places = torch.stack([x.reshape(blocks).transpose(1, 2).flatten() for x in (rows, columns)], -1)
        found.append(places.repeat(frames, 1))
    return torch.cat(found)


class Attention(nn.Module):
    """Of the patches of each frame among themselves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        lengths = ends[1:] - ends[:-1]
        parts = self.qkv(x).split(lengths.tolist())
        mixed = [F.scaled_dot_product_attention(*(y[None] for y in part.chunk(3, -1)))[0] for part in parts]
        return self.out(torch.cat(mixed))


class Vision(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches, self.places = nn.Linear(6, width), nn.Linear(2, width)
        self.attention, self.up, self.down = Attention(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, patches: Tensor, grids: Tensor) -> Tensor:
        x = self.patches(patches) + self.places(patch_places(grids).to(patches.dtype))
        lengths = torch.repeat_interleave(grids[:, 1] * grids[:, 2], grids[:, 0])
        x = x + self.attention(x, F.pad(lengths.cumsum(0), (1, 0)))
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Text in which images stand: their patches take the place of tokens, and positions stop within an image."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.vision, self.embed = Vision(width), nn.Embedding(20, width)
        self.places, self.up, self.down = nn.Embedding(64, width), nn.Linear(width, 64), nn.Linear(64, width)
        self.head, self.spread = nn.Linear(width, 20), None

    def positions(self, ids: Tensor, grids: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, tokens], and how far the last position of each row is behind its length."""
        made, sizes = torch.zeros_like(ids), iter(grids)
        for row, tokens in enumerate(ids):
            at, parts = 0, []
            for is_image, group in itertools.groupby((tokens == IMAGE).tolist()):
                count = len(list(group))
                if is_image:
                    parts.append(torch.full((count,), at))
                    at += int(next(sizes).max())
                else:
                    parts.append(torch.arange(count) + at)
                    at += count
            made[row] = torch.cat(parts)
        return made, made.amax(1, keepdim=True) + 1 - ids.shape[1]

    def forward(self, ids: Tensor, patches: Tensor, grids: Tensor, labels: Tensor) -> Tensor:
        positions, self.spread = self.positions(ids, grids)
        x = self.embed(ids).masked_scatter((ids == IMAGE)[..., None], self.vision(patches, grids))
        x = x + self.places(positions)
        x = x + self.down(torch.relu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build() -> Net:
    torch.manual_seed(0)
    return Net().double()


def call(*rows: list[tuple[int, int, int]], seq: int = 32, seed: int = 0) -> dict[str, Tensor]:
    """Rows of text with images of these sizes."""
    g = torch.Generator().manual_seed(seed)
    ids, grids = torch.randint(0, IMAGE, (len(rows), seq), generator=g), [size for row in rows for size in row]
    for row, sizes in enumerate(rows):
        at = 1
        for size in sizes:
            ids[row, at : at + math.prod(size)] = IMAGE
            at += math.prod(size) + 1
    patches = torch.randn(sum(map(math.prod, grids)), 6, generator=g, dtype=torch.float64)
    return {"ids": ids, "patches": patches, "grids": torch.tensor(grids), "labels": ids.roll(-1, 1) % IMAGE}
