"""What users do around a model, each situation in eager mode, on one rank and on two gloo ranks (support/loop.py).

The two ranks are started once, and run those situations that pytest selected. Run as a script, this file is one of them; by
hand: torchrun --standalone --nproc-per-node 2 tests/loop/test_loop.py [names of situations]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
FILES = sorted((HERE / "situations").rglob("*.py"), key=lambda file: file.stem)
sys.path[:0] = sorted({str(file.parent) for file in FILES})
if __name__ == "__main__":  # pytest has them by pyproject.toml
    sys.path[:0] = [str(HERE.parent / name) for name in ("support", "support/small_models", "models")]

import loop  # noqa: E402
import ranks  # noqa: E402

import megafx  # noqa: E402

for module in FILES:
    __import__(module.stem)


def cases() -> Iterator[Any]:
    """By default each situation that is not like another runs once: on one rank, one in fifteen of those that may run on either
    on two, or, where both are slow, in its first form of data parallelism. One in fifteen runs in its other forms too."""
    for number, (name, each) in enumerate(loop.SITUATIONS.items()):
        runs = [(world, name, world) for world in each.ranks] + [(2, f"{name}:{form}", form) for form in each.data]
        quick = [key for *_, key in runs if key not in each.slow]
        if number % 15:
            quick = [key for key in quick if key != 2 or 1 not in quick][:1]
        elif 2 in quick:
            quick = [key for key in quick if key != 1]
        for world, run, key in runs:
            yield pytest.param(world, run, marks=pytest.mark.slow if each.like or key not in quick else [])


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, Any]]:
    """World -> {situation: (PASS or FAIL, text)} of the selected ones."""
    here = [item for item in request.session.items if item.path == Path(__file__)]
    chosen = [item.callspec.params for item in here if hasattr(item, "callspec")]

    @cache
    def launch(world: int) -> dict[str, Any]:
        names = [params["name"] for params in chosen if params["world"] == world]
        return ranks.verdicts(__file__, tmp_path_factory.mktemp(f"loop{world}"), world, *names)

    return launch


@pytest.mark.dist
@pytest.mark.parametrize(("world", "name"), list(cases()))
def test_a_situation_is_as_in_eager_mode(world: int, name: str, results: Callable[[int], dict[str, Any]]) -> None:
    if world == 1:
        loop.run(name, config(1))
        return
    verdict, text = results(world)[name]
    assert verdict == "PASS", text


def test_what_a_situation_is_like_runs_by_default() -> None:
    by_default = {case.values[1].partition(":")[0] for case in cases() if not case.marks}
    assert [each.like for each in loop.SITUATIONS.values() if each.like and each.like not in by_default] == []


def test_a_difference_is_seen() -> None:
    def differs(run: loop.Loop) -> None:
        run.see(loss=1.0 if run.eager else 1.1)

    loop.SITUATIONS["differs"] = loop.Situation(differs, "", (1,), (), loop.RTOL)
    try:
        with pytest.raises(AssertionError, match=r"loss is 1.1 where eager has 1.0"):
            loop.run("differs", config(1))
    finally:
        del loop.SITUATIONS["differs"]


def config(world: int, form: str = "") -> megafx.Config:
    """form: of data parallelism over these ranks; without one they are tensor-parallel."""
    if not form:
        return megafx.Config(tensor_model_parallel_size=world, hardware="h100-nvlink")
    return megafx.Config(
        tensor_model_parallel_size=1, data_parallel_size=world, data_parallel=form, hardware="h100-nvlink"
    )


def main() -> None:
    import torch.distributed as dist

    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun
        folder, rank, names = Path(tempfile.gettempdir()), int(os.environ["RANK"]), sys.argv[1:]
        folder = folder / f"megafx_loop_{os.environ['TORCHELASTIC_RUN_ID']}"
        folder.mkdir(exist_ok=True)
    else:
        folder, rank, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    ranks.start_group(folder, rank)
    world = dist.get_world_size()
    every = [case.values for case in cases()]
    for name in names or [run for ranks_of_it, run in every if ranks_of_it == world]:
        error, seen, begin = None, "", time.perf_counter()
        situation, _, form = name.partition(":")
        try:
            seen = loop.run(situation, config(world, form))
        except Exception:
            error = f"rank {rank}: {traceback.format_exc()}"
        errors: list[Any] = [None] * world
        dist.all_gather_object(errors, error)
        failed = [e.replace("\n", " | ") for e in errors if e]
        if rank == 0:
            print(
                f"FAIL {name}: {failed[0]}" if failed else f"PASS {name}: {seen}, {time.perf_counter() - begin:.1f} s",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
