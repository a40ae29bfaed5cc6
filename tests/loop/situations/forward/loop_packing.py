"""Several documents in one row: masks, positions, and losses that know where they end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loop import Loop, situation
from loop_adapters import llama
from loop_models import Language, tokens
from torch import Tensor, nn

from megafx.errors import CaptureError

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 1, 1]])


def mask_of(documents: Tensor) -> Tensor:
    """[rows, 1, tokens, tokens]: earlier tokens of the same document."""
    same = documents[:, :, None] == documents[:, None, :]
    return (same & torch.ones(same.shape[1:], dtype=torch.bool).tril())[:, None]


def labels_of(ids: Tensor, documents: Tensor) -> Tensor:
    return ids.roll(-1, 1).masked_fill(documents != documents.roll(-1, 1), -100)


@situation("https://github.com/huggingface/transformers/issues/25452", slow=(1, "ddp"), data=("ddp",))
def documents_by_a_mask_of_blocks(loop: Loop) -> None:
    model, ids = loop.model(Language()), tokens(2, 8)
    for documents in (DOCUMENTS, DOCUMENTS.flip(0)):
        logits = model(loop.rows(ids), loop.rows(mask_of(documents)))
        labels = loop.rows(labels_of(ids, documents))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        losses = losses * loop.parts / 13  # gradients are averaged over ranks
        losses.backward()
        loop.see(loss=loop.mean(losses))
    loop.see_gradients(model)


@situation("https://github.com/huggingface/trl/issues/2805", like="documents_by_their_positions")
def a_loss_for_each_document(loop: Loop) -> None:
    """Means over documents of unequal lengths, summed by index."""
    model, ids = loop.model(Language()), tokens(2, 8)
    losses = F.cross_entropy(model(ids, mask_of(DOCUMENTS)).flatten(0, 1), ids.flatten(), reduction="none")
    which = (DOCUMENTS + torch.tensor([[0], [3]])).flatten()
    each = torch.zeros(5).index_add(0, which, losses) / which.bincount(minlength=5)
    each.mean().backward()
    loop.see(each=each)
    loop.see_gradients(model)


@situation("https://github.com/huggingface/transformers/issues/31629", slow=(2,), rtol=2e-6)
def documents_by_their_positions(loop: Loop) -> None:
    """transformers finds packed rows by positions that begin again."""
    model, ids = loop.model(llama()), tokens(1, 8)
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
    out = model(input_ids=ids, position_ids=positions, labels=labels_of(ids, DOCUMENTS[:1]))
    out.loss.backward()
    loop.see(loss=out.loss)
    loop.see_gradients(model)


class Tokens(nn.Module):
    """Treats each token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 10), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class Inside(nn.Module):
    """Makes a nested tensor, and pads it again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        rows = [row[:length] for row, length in zip(x, lengths, strict=False)]
        return self.inner(torch.nested.nested_tensor(rows, layout=torch.jagged)).to_padded_tensor(0.0)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.tokens = Inside(), Tokens()

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        return self.tokens(self.inside(x, lengths))


@situation("https://docs.pytorch.org/docs/stable/nested.html")
def nested_batches(loop: Loop) -> None:
    """As arguments, and in the model's own forward, refused; the advice is followed. Inside of a submodule they stay eager."""
    model = loop.model(Tokens())
    for layout in (torch.jagged, torch.strided):
        batch = torch.nested.nested_tensor([torch.randn(3, 12), torch.randn(5, 12)], layout=layout)
        if not loop.eager:
            with pytest.raises(
                CaptureError, match=r"argument x is a nested tensor.*\n  fix: .*x.to_padded_tensor\(0.0\)"
            ):
                model(batch)
        y = model(batch.to_padded_tensor(0.0))
        y.square().mean().backward()
        loop.see(y=y)
        if layout is torch.jagged:
            loop.see(flat=model(batch).values() if loop.eager else model(batch.values()[None])[0])
    loop.see_gradients(model)
    x, lengths, inside, outside = torch.randn(2, 5, 12), [3, 5], Inside(), Around()
    if not loop.eager:
        with pytest.raises(
            CaptureError, match=r"tensors are nested.*\n.*\n  fix: .* into a submodule, which is left eager"
        ):
            loop.model(inside)(x, lengths)
    around = loop.model(outside)
    y = around(x, lengths)
    y.square().mean().backward()
    loop.see(y=y)
    loop.see_gradients(around)


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 5)

    def forward(self, mix: Tensor, x: Tensor) -> Tensor:
        return self.linear(mix @ x)


class Shares(nn.Module):
    """A linear whose weight is changed where a sparse adapter says so, as peft's SHiRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.values = nn.Linear(12, 12), nn.Parameter(torch.randn(9))
        self.register_buffer("at", torch.randint(0, 12, (2, 9)))

    def forward(self, x: Tensor) -> Tensor:
        change = torch.sparse_coo_tensor(self.at, 0.5 * self.values, (12, 12))
        return F.linear(x, self.linear.weight + change, self.linear.bias)


class Graph(nn.Module):
    """Mixes rows by a sparse buffer, and has a sparse adapter. inside: in a submodule."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.up, self.shares, self.inside = nn.Linear(12, 12), Shares(), inside
        self.register_buffer("mix", torch.eye(4).roll(1, 0).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sparse.mm(self.mix, self.up(x))
        return self.shares(x) if self.inside else Shares.forward(self.shares, x)


@situation("https://docs.pytorch.org/docs/stable/sparse.html")
def sparse_matrices(loop: Loop) -> None:
    """As arguments, and made in the model's own forward, refused; the advice is followed. One that is made in a submodule stays
    eager, and buffers are part of the graph."""
    graph, x = loop.model(Graph(inside=True)), torch.randn(4, 12)
    for _ in range(2):
        y = graph(x)
        y.square().mean().backward()
        loop.see(y=y)
    loop.see_gradients(graph)
    outside = Graph(inside=False)
    if not loop.eager:
        found = r"forward makes a sparse tensor.*\n.*\n  fix: .* into a submodule, which is left eager"
        with pytest.raises(CaptureError, match=found):
            loop.model(outside)(x)
    model, x, mix = loop.model(Mixes()), torch.randn(4, 12), torch.eye(4).roll(1, 0).to_sparse()
    if not loop.eager:
        with pytest.raises(
            CaptureError, match=r"argument mix is a sparse tensor.*\n  fix: give the model mix.to_dense\(\)"
        ):
            model(mix, x)
    y = model(mix if loop.eager else mix.to_dense(), x)
    y.square().mean().backward()
    loop.see(y=y)
    loop.see_gradients(model)


class Logged(torch.Tensor):
    """Notes what functions of torch are called with it."""

    calls: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


@situation("https://docs.pytorch.org/docs/stable/notes/extending.html")
def tensors_of_a_class_with_functions_of_its_own(loop: Loop) -> None:
    model, x = loop.model(Tokens()), torch.randn(4, 12)
    if not loop.eager:
        with pytest.raises(CaptureError, match=r"argument x is a Logged.*\n  fix: .*x.as_subclass\(torch.Tensor\)"):
            model(x.as_subclass(Logged))
    y = model(x.as_subclass(Logged) if loop.eager else x.as_subclass(torch.Tensor)).as_subclass(Logged)
    y.as_subclass(torch.Tensor).square().mean().backward()
    loop.see(y=y.as_subclass(torch.Tensor))
    loop.see_gradients(model)


class Padded(nn.Module):
    """Sequences are padded inside, on either side; a token is 0 there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(19, 12), nn.Linear(12, 5)

    def forward(self, sequences: list[Tensor], weights: list[Tensor]) -> Tensor:
        ids = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        scale = nn.utils.rnn.pad_sequence(weights, padding_value=0.5, padding_side="left").transpose(0, 1)
        kept = (ids != 0).unsqueeze(-1)
        return self.head((self.embed(ids) * kept * scale).sum(1) / kept.sum(1))


@situation("https://discuss.pytorch.org/t/how-to-use-pad-sequence-in-the-collate-fn/69063", slow=(2,))
def sequences_are_padded_in_forward(loop: Loop) -> None:
    """Which is the longest differs from call to call."""
    model = loop.model(Padded())
    for counts in ((3, 5, 2), (4, 2, 6), (6, 6, 1)):
        sequences = [torch.randint(1, 19, (n,)) for n in counts]
        out = model(sequences, [torch.randn(n, 12) for n in counts])
        out.square().mean().backward()
        loop.see(out=out)
    loop.see_gradients(model)
