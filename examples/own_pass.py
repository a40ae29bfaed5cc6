"""A pass of your own, with its unit test: `x * 1` and `x + 0` disappear.

python examples/own_pass.py           # plan a model with it
pytest examples/own_pass.py           # golden text and numbers, on all ranks of a small mesh
"""

from __future__ import annotations

import torch

import megafx
from megafx.ir.program import Phase, Program
from megafx.planner.context import CompileContext
from megafx.testing import assert_same, expect, graph, run_pass

aten = torch.ops.aten
NEUTRAL = {aten.mul.Tensor: 1, aten.add.Tensor: 0}
REQUIRES = (Phase.CANONICAL, Phase.PLANNED)  # it leaves the phase that it finds; graphs of tests are PLANNED


def drop_neutral_numbers(program: Program, context: CompileContext) -> int:
    """x * 1 -> x and x + 0 -> x.

    Legal because: both have the value, shape and dtype of x, forward and backward.
    """
    count = 0
    for node in list(program.graph.nodes):
        if node.target not in NEUTRAL or node.kwargs or node.args[1] != NEUTRAL[node.target]:
            continue
        x = node.args[0]
        if x.meta["val"].dtype == node.meta["val"].dtype:
            node.replace_all_uses_with(x)
            program.graph.erase_node(node)
            count += 1
    return count


def test_neutral_numbers_disappear() -> None:
    before = graph(lambda x: aten.add.Tensor(aten.mul.Tensor(aten.sin(x), 1), 0), x="f64[b=4 h=8]")
    after = run_pass(drop_neutral_numbers, before)
    expect(
        after,
        """
        %0 = x        # f64[4 8]
        %1 = sin(%0)  # f64[4 8]
        return %1
        """,
    )
    assert_same(before, after)


def test_others_stay() -> None:
    before = graph(lambda x: aten.add.Tensor(aten.mul.Tensor(x, 2), 1), x="f64[b=4 h=8]")
    after = run_pass(drop_neutral_numbers, before)
    assert [n.target for n in after.graph.nodes] == [n.target for n in before.graph.nodes]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(torch.relu(self.up(x)) * 1) + 0).square().mean()


def main() -> megafx.Config:
    config = megafx.Config(tensor_model_parallel_size=2, passes=[("after canonicalize", drop_neutral_numbers)])
    plan = megafx.plan(Net(), config, example_inputs=torch.randn(4, 6, 16))
    print(plan)
    print(megafx.verify(Net().double(), config, example_inputs=torch.randn(4, 6, 16).double()))
    return config


if __name__ == "__main__":
    main()
