"""All checks on real gloo ranks, from the modules of on_ranks/; each says what it covers.

One process group is started for each number of ranks, as starting one costs about 10 s, and runs those checks that pytest
selected. Run as a script, this file is one of the ranks; by hand:

torchrun --standalone --nproc-per-node 2 tests/dist/test_on_ranks.py [names of checks]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":  # pytest has them by pyproject.toml
    sys.path[:0] = [
        str(HERE / "on_ranks"),
        str(HERE.parent / "support"),
        str(HERE.parent / "support" / "small_models"),
        str(HERE.parent / "models"),
        str(HERE.parents[1] / "examples"),
    ]

import ranks  # noqa: E402

MODULES = (
    "transitions", "parameters", "optimizers", "train_models", "call_forms", "call_structures", "data_parallel", "batches",
    "experts", "weights", "fsdp_checkpoint", "generation", "pipeline", "pipelines", "more_pipelines", "accelerated",
    "one_rank", "recompute", "main_grad", "verified", "whole_parameters", "cached", "fp8_casts", "context",
    "experts_shared_out",
)  # fmt: skip
for module in MODULES:
    __import__(module)


def cases() -> Iterator[Any]:
    for name, check in ranks.CHECKS.items():
        for world in check.worlds:
            yield pytest.param(world, name, marks=pytest.mark.slow if world in check.slow else [])


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, Any]]:
    """World -> {check: (PASS or FAIL, text)} of the selected checks."""
    chosen = [item.callspec.params for item in request.session.items if item.path == Path(__file__)]  # type: ignore[attr-defined]

    @cache
    def launch(world: int) -> dict[str, Any]:
        names = [params["name"] for params in chosen if params["world"] == world]
        return ranks.verdicts(__file__, tmp_path_factory.mktemp(f"ranks{world}"), world, *names)

    return launch


@pytest.mark.dist
@pytest.mark.parametrize(("world", "name"), list(cases()))
def test_on_ranks(world: int, name: str, results: Callable[[int], dict[str, Any]]) -> None:
    verdict, text = results(world)[name]
    assert verdict == "PASS", text


def main() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun
        folder, rank, names = Path(os.environ.get("TMPDIR", "/tmp")), int(os.environ["RANK"]), sys.argv[1:]
        folder = folder / f"megafx_checks_{os.environ['TORCHELASTIC_RUN_ID']}"
        folder.mkdir(exist_ok=True)
    else:
        folder, rank, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    world = int(os.environ["WORLD_SIZE"])
    ranks.run_checks(folder, rank, names or [n for n, c in ranks.CHECKS.items() if world in c.worlds])


if __name__ == "__main__":
    main()
