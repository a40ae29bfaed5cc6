"""Covers: cli.py."""

import dataclasses
import json

import pytest
import torch

from megafx.cli import load_model, main
from megafx.compiler.pipeline import pipeline
from megafx.config import Config

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
FACTORY = """
import torch
def build():
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)), (torch.ones(2, 8, 64),)
"""


@pytest.fixture
def llama(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_options_are_the_fields_of_config(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    shown = capsys.readouterr().out
    for f in dataclasses.fields(Config):
        of_shell = f.name not in ("overrides", "eager_modules", "passes", "recompute_modules")
        assert (f"--{f.name.replace('_', '-')} " in shown) == of_shell, f.name
    assert "usage: megafx plan [options] MODEL" in shown and "(default: 25)" in shown


def test_passes_are_listed_in_their_order(capsys, tmp_path):
    assert main(["passes"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    listed = [p.name for stage in pipeline(Config()).values() for p in stage]
    assert [words[0] for words in lines] == listed and all(len(words) > 4 for words in lines)
    assert lines[listed.index("build_joint_graph")][1] == "JOINT"


def test_models_are_built_without_memory(llama):
    model, inputs = load_model(str(llama))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert inputs is None
    assert all(p.is_meta for p in model.parameters())


def test_explain_a_hugging_face_config(llama, capsys):
    page, data = llama / "plan.html", llama / "plan.json"
    command = ["explain", str(llama / "config.json"), "--tp", "2", "--sequence-parallel", "off", "--seq-length", "64"]
    assert main([*command, "--html", str(page), "--json", str(data)]) == 0
    shown = capsys.readouterr().out
    assert "tp=2" in shown and "seq=64" in shown
    assert "column-parallel" in shown and "row-parallel" in shown
    assert "row-parallel" in page.read_text()
    assert json.loads(data.read_text())["header"]["axis"] == "tp=2"


def test_plan_of_a_factory(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_models.py").write_text(FACTORY)
    (tmp_path / "config.yaml").write_text("tensor_model_parallel_size: 8\nsequence_parallel: false\n")
    monkeypatch.chdir(tmp_path)
    command = ["plan", "my_models:build", "--config", "config.yaml", "--tp", "4", "--save", "plan.json"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "tp=4" in shown  # the option wins over the file
    assert "0.weight" in shown
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert saved["t"] == 4
    assert saved["params"]["0.weight"][0] == "S0"
    assert saved["params"]["2.weight"][0] == "S1"


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("nothing.json", "UsageError: there is no file 'nothing.json'"),
        ("just_a_name", "UsageError: 'just_a_name' names no model"),
        ("no_such_module:build", "UsageError: 'no_such_module:build' cannot be imported: No module named"),
        ("json:nothing", "has no attribute 'nothing'"),
    ],
)
def test_models_that_do_not_exist(model, found, capsys):
    assert main(["plan", model]) == 1
    assert found in capsys.readouterr().err


def test_diff_of_dumps(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "00_capture.txt").write_text("%0 = x  # f32[4]\nreturn %0\n")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    (tmp_path / "b" / "00_capture.txt").write_text("%0 = x  # f32[5]\nreturn %0\n")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "+ %0 = x  # f32[5]" in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    assert "is not a dump folder" in capsys.readouterr().err


def test_check_rules_of_one_op(capsys):
    assert main(["check-rules", "aten.mm.default"]) == 0
    assert "0 wrong, 0 missing" in capsys.readouterr().out


def test_version(capsys):
    assert main(["version"]) == 0
    assert f"torch {torch.__version__}" in capsys.readouterr().out


def test_wrong_arguments():
    with pytest.raises(SystemExit) as stopped:
        main(["plan"])
    assert stopped.value.code == 2
