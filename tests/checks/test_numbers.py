"""Covers: checks/numbers.py, on the whole pipeline."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import megafx
from megafx.capture.export import capture_call
from megafx.compiler.pipeline import compile_program
from megafx.compiler.runner import PassFunction
from megafx.debugging import debug
from megafx.errors import MegafxError
from megafx.ir.program import PHASE, Program
from megafx.placements.data_axis import DataAxis
from megafx.planner.context import CompileContext
from megafx.testing import make_context

aten, mfx = torch.ops.aten, torch.ops.megafx


def example(name):
    """A module of examples/models, which is no package."""
    file = Path(__file__).resolve().parents[2] / "examples" / "models" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def compile_gpt(*passes, t=2, data=None, **options):
    gpt = example("gpt")
    model = gpt.GPT(gpt.GPTConfig(n_layer=1, n_embd=32, vocab_size=64, dropout=options.pop("dropout", 0.0)))
    ids = torch.zeros(2, 8, dtype=torch.long)
    program = capture_call(model, (ids, ids), {})
    config = megafx.Config(tensor_model_parallel_size=t, passes=passes, **options)
    context = make_context(t, config, hardware="cpu-gloo", wants_grad=lambda spec: spec.kind == "param", data=data)
    with debug(check=2):
        return compile_program(program, context)


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"t": 3, "sequence_parallel": True}])
def test_the_pipeline_changes_no_numbers(options):
    """Compiling raises where a pass changes them, as the tests below show."""
    assert compile_gpt(**options).program.gm is not None


def drop_a_bias(program: Program, context: CompileContext) -> int:
    """A pass with a fault in the forward."""
    node = program.graph.find_nodes(op="call_function", target=aten.linear.default)[0]
    node.args = node.args[:2]
    return 1


def lose_a_gradient_collective(program: Program, context: CompileContext) -> int:
    """A pass with a fault in the backward: one all-reduce is left out on the way back."""
    for node in program.graph.find_nodes(op="call_function", target=mfx.transition.default):
        if node.meta.get(PHASE) == "backward" and (node.args[1], node.args[2]) == ("P", "I"):
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
            return 1
    raise AssertionError("the joint graph has no P -> I in its backward")


@pytest.mark.parametrize(
    ("place", "fault", "found"),
    [
        ("after canonicalize", drop_a_bias, "pass 'drop_a_bias' changed numbers: output "),
        ("after build_joint_graph", lose_a_gradient_collective, "lose_a_gradient_collective"),
    ],
)
def test_the_faulty_pass_is_named(place, fault, found):
    with pytest.raises(MegafxError) as error:
        compile_gpt((place, fault))
    assert found in "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "t", "options"),
    [
        (DataAxis(2), 1, {"dropout": 0.2}),
        (DataAxis(3, "fsdp", 3, 4000), 2, {}),
        pytest.param(DataAxis(4, "zero1", 2), 1, {}, marks=pytest.mark.slow),
        pytest.param(DataAxis(2, "fsdp", 2), 1, {"data_parallel_loss": "average"}, marks=pytest.mark.slow),
    ],
)
def test_data_parallel_passes_keep_numbers(data, t, options):
    compiled = compile_gpt(t=t, data=data, **options)
    assert compiled.program.before_reduction is not None


def lose(op: str, place: int) -> PassFunction:
    """A pass that takes one rank's value for what the op makes of all."""

    def lose_a_sum(program: Program, context: CompileContext) -> int:
        node = [n for n in program.graph.nodes if op in str(n.target)][place]
        (node if op == "transition" else next(iter(node.users))).replace_all_uses_with(node.args[0])
        return 1

    return lose_a_sum


@pytest.mark.parametrize(
    ("where", "op", "place"), [("place_axes", "transition", 0), ("data_parallel", "all_reduce", -1)]
)
def test_a_lost_sum_over_data_parallel_ranks_is_named(where, op, place):
    with pytest.raises(MegafxError, match="pass 'lose_a_sum' changed numbers|'lose_a_sum' left this program") as caught:
        compile_gpt((f"after {where}", lose(op, place)), t=1, data=DataAxis(2))
    assert "lose_a_sum" in str(caught.value) + str(getattr(caught.value, "__notes__", ""))
