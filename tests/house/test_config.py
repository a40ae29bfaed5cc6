"""Covers: config.py."""

import dataclasses
import json

import pytest
import torch

from megafx.config import Config
from megafx.errors import ConfigError


def a_pass(program) -> int:
    return 0


def test_help_lists_every_field():
    for f in dataclasses.fields(Config):
        assert f"\n    {f.name}: {f.metadata['doc'][:20]}" in Config.__doc__
    assert "25)" in Config.__doc__


def test_defaults_are_valid_and_survive_a_round_trip():
    config = Config()
    assert (config.tensor_model_parallel_size, config.sequence_parallel, config.micro_batch_size) == (
        None,
        "auto",
        None,
    )
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_everything_survives_a_round_trip():
    config = Config(
        tensor_model_parallel_size=4,
        sequence_parallel=False,
        seq_length=2048,
        params_dtype=torch.bfloat16,
        overrides={"*.up_proj": "ColwiseParallel"},
        passes=[("after canonicalize", a_pass)],
    )
    assert config.params_dtype == "bfloat16"
    assert config.overrides == {"*.up_proj": "colwise"}
    assert config.passes == (("after canonicalize", a_pass),)
    plain = config.replace(passes=()).to_dict()
    assert Config.from_dict(json.loads(json.dumps(plain))) == config.replace(passes=())


def test_functions_are_named_in_plain_data():
    config = Config.from_dict({"passes": [["before plan_sharding", "json:loads"]]})
    assert config.passes == (("before plan_sharding", json.loads),)
    assert config.to_dict()["passes"] == [["before plan_sharding", "json:loads"]]


@pytest.mark.parametrize("spelling", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_dtype_spellings(spelling):
    assert Config(params_dtype=spelling).params_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("tensor_model_parallel_size", 0, "a whole number of at least 1, or None"),
        ("tensor_model_parallel_size", True, "a whole number of at least 1, or None"),
        ("tensor_model_parallel_size", 2.0, "a whole number of at least 1, or None"),
        ("micro_batch_size", 0, "a whole number of at least 1, or None"),
        ("seq_length", -1, "a whole number of at least 1, or None"),
        ("check_inputs_every", -1, "a whole number of at least 0"),
        ("sequence_parallel", "yes", "True or False or 'auto'"),
        ("sequence_parallel", 1, "True or False or 'auto'"),
        ("gather_outputs", "no", "True or False"),
        ("planner_policy", "zero", "'megatron' or 'free'"),
        ("hardware", 3, "a profile name, the path of a .yaml file, or None"),
        ("params_dtype", "int8", "one of fp64, fp32, bf16, fp16, float64, float32, bfloat16, float16, or None"),
        ("overrides", ["colwise"], "a mapping of name patterns to styles"),
        ("passes", a_pass, 'pairs ("after <pass>" or "before <pass>", function)'),
    ],
)
def test_out_of_range(field, value, allowed):
    with pytest.raises(ConfigError) as error:
        Config(**{field: value})
    assert str(error.value) == f"Config.{field} = {value!r} is out of range\n  fix: {field} must be {allowed}"


def test_unknown_field_names_the_nearest():
    with pytest.raises(ConfigError, match=r"no field 'sequence_paralel'\n  fix: did you mean 'sequence_parallel'\?"):
        Config.from_dict({"sequence_paralel": True})
    with pytest.raises(ConfigError, match="known fields: tensor_model_parallel_size, "):
        Config.from_dict({"zzz": 1})


def test_unknown_style_names_the_nearest():
    with pytest.raises(ConfigError) as error:
        Config(overrides={"h.*.fc": "colwize"})
    assert str(error.value) == (
        "Config.overrides['h.*.fc'] = 'colwize' is no style\n"
        "  fix: styles: colwise, rowwise, expert, replicate, sequence; did you mean 'colwise'?"
    )


@pytest.mark.parametrize("passes", [[("canonicalize", a_pass)], [("after x", 3)], [("after x",)], ["after x"]])
def test_malformed_passes(passes):
    with pytest.raises(ConfigError, match="is out of range"):
        Config(passes=passes)


def test_pass_path_that_does_not_exist():
    with pytest.raises(ConfigError, match=r"'no\.such:thing': No module named 'no'"):
        Config(passes=[("after x", "no.such:thing")])


def test_replace_validates():
    assert Config().replace(seq_length=8).seq_length == 8
    with pytest.raises(ConfigError):
        Config().replace(seq_length=0)


def test_from_yaml(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("sequence_parallel: true\noverrides:\n  '*.wte': replicate\n")
    assert Config.from_yaml(file) == Config(sequence_parallel=True, overrides={"*.wte": "replicate"})
    file.write_text("")
    assert Config.from_yaml(file) == Config()
    file.write_text("- 1\n")
    with pytest.raises(ConfigError, match="holds list, not a mapping"):
        Config.from_yaml(file)
