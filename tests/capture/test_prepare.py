"""Covers: megafx/capture/prepare.py. What is replaced while a model is traced is as before afterwards, object by object."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megafx.capture import prepare
from megafx.capture.export import capture_call
from megafx.capture.layerdrop import LayerDraws
from megafx.capture.prepare import Replacement, replaced, replacements
from megafx.ops.eager_call import LeftEager


class Dropping(nn.Module):
    """Something for each line of the table: layers that are dropped, a module left eager, a place that fails."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head, self.layerdrop, self.fails = nn.Linear(4, 4), 0.5, fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) < self.layerdrop:
                continue
            x = layer(x)
        if self.fails:
            raise KeyError("the user's own error")
        return self.head(x)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=13))


def table(model: nn.Module, eager: tuple[str, ...] = ()) -> list[Replacement]:
    left = [LeftEager(model.get_submodule(fqn), fqn) for fqn in eager]
    return replacements(model, lambda text: None, left, LayerDraws(torch.device("cpu"), lambda text: None))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], int]] = {
    "dropping": (lambda: Dropping().train(), ("head", "layers.0"), 9),  # a layer is left eager and dropped as well
    "hugging face": (gpt2, (), 10),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fails", [False, True])
def test_the_table_holds_within_and_is_gone_afterwards(name: str, fails: bool) -> None:
    make, eager, lines = MODELS[name]
    rows = table(make(), eager)
    assert len(rows) == lines and all(row.why for row in rows)
    before = [row.now() for row in rows]
    try:
        with replaced(rows):
            assert all(row.now() is not old for row, old in zip(rows, before, strict=True))
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert all(row.now() is old for row, old in zip(rows, before, strict=True))


def test_a_line_that_cannot_be_put_in_place_undoes_those_before() -> None:
    class Owner:
        value = 1

    def refuse(old: Any) -> Any:
        raise ValueError

    with (
        pytest.raises(ValueError),
        replaced([Replacement(Owner, "value", lambda old: 2, ""), Replacement(Owner, "value", refuse, "")]),
    ):
        pass
    assert Owner.value == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_leaves_nothing_behind(fails: bool) -> None:
    model, x = Dropping(fails).train(), torch.randn(3, 5, 4)
    rows = table(model, ("head",))
    before = [row.now() for row in rows]
    inside: list[Any] = []
    hook = model.head.register_forward_pre_hook(lambda module, args: inside.append([row.now() for row in rows]))
    if fails:
        with pytest.raises(Exception, match="the user's own error"):
            capture_call(model, (x,), eager=["head"])
    else:
        capture_call(model, (x,), eager=["head"])
        assert inside and all(now is not old for now, old in zip(inside[0][:5], before[:5], strict=True))
    hook.remove()
    assert all(row.now() is old for row, old in zip(rows, before, strict=True))


def test_one_thread_captures_at_a_time() -> None:
    """What is replaced is seen by all threads: a second capture waits for the first."""
    free = []
    with replaced([]):
        other = threading.Thread(target=lambda: free.append(prepare._LOCK.acquire(blocking=False)))
        other.start()
        other.join()
    assert free == [False] and prepare._LOCK.acquire(blocking=False)
    prepare._LOCK.release()
