"""Covers: the advice of errors of configs, profiles, models by name and plans: each is raised, and then followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from advice import refused
from torch import nn

import megafx
from megafx.config import Config
from megafx.debugging import debug
from megafx.named_model import example_inputs, load_model
from megafx.planner.fusion_profile import FusionProfile
from megafx.planner.hardware import Hardware
from megafx.planner.plan import Plan
from megafx.testing import graph
from megafx.units import bytes_of, device_memory

X = torch.ones(3, 4)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))


def plan_of(config: Config, model: nn.Module | None = None, call: Any = (X,)) -> Plan:
    return megafx.plan(model or net(), config, example_inputs=call)


def compiled(**options: Any) -> nn.Module:
    return megafx.parallelize(net(), Config(tensor_model_parallel_size=1, **options), example_inputs=(X,))


def two(**options: Any) -> Config:
    return Config(tensor_model_parallel_size=2, **({"hardware": "h100-nvlink"} | options))


def words(error: Any) -> list[str]:
    """The names that a fix lists after its last colon."""
    return [w.strip() for w in error.fix.rpartition(":")[2].split(",")]


def test_yaml(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("a: [")
    with refused("'<path>' cannot be read as YAML"):
        Config.from_yaml(file)
    file.write_text("- a")
    with refused("<path> holds <__name__>, not a mapping"):
        Config.from_yaml(file)
    file.write_text("tensor_model_parallel_size: 2\n")
    assert Config.from_yaml(file).tensor_model_parallel_size == 2


def test_fields() -> None:
    with refused("Config has no field") as near:
        Config.from_dict({"tensor_parallel_size": 2})
    name = near[0].fix.split("'")[1]
    assert Config.from_dict({name: 2}).tensor_model_parallel_size == 2
    with refused("Config has no field") as far:
        Config.from_dict({"zzz": 2})
    assert "micro_batch_size" in words(far[0])
    with refused("Config.<name> = <value> is out of range"):
        Config(planner_policy="megatrom")
    Config(planner_policy="megatron")
    with refused("Config.overrides[<pattern>] = <style> is no style") as style:
        Config(overrides={"0": "colwisee"})
    assert "did you mean 'colwise'" in style[0].fix
    Config(overrides={"0": "colwise"})


def test_passes() -> None:
    def fuse(program: Any, context: Any) -> int:
        return 0

    def mine(program: Any, context: Any) -> int:
        return 0

    with refused("Config.passes names"):
        Config(passes=(("after fuse", "os.nothing"),))
    assert Config(passes=(("after fuse", "os:getpid"),)).passes
    with refused("Config.passes says") as error:
        plan_of(two(passes=(("after fuze", mine),)))
    assert "fuse" in words(error[0])
    with refused("Config.passes brings a second pass"):
        plan_of(two(passes=(("after fuse", fuse),)))
    plan_of(two(passes=(("after fuse", mine),)))
    with refused("<flag> names '<name>', which is no pass") as flag, debug(skip=("fuze",)):
        plan_of(two())
    assert "fuse" in words(flag[0])
    with debug(skip=("fuse",)):
        plan_of(two())
    with refused("pass '<name>' requires phase"), debug(skip=("insert_transitions",)):
        megafx.verify(net(), two(), example_inputs=(X,))


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("debug <name> = <value> is out of range") as error, debug(level=9):
        pass
    with debug(level=int(error[0].fix.split()[-1])):
        plan_of(two())
    monkeypatch.setenv("MEGAFX_DEBUGG", "1")
    with refused("environment variable <name> is no megafx flag") as flag:
        plan_of(two())
    assert "MEGAFX_DEBUG" in words(flag[0])
    monkeypatch.delenv("MEGAFX_DEBUGG")
    plan_of(two())


def test_names_of_modules() -> None:
    with refused("Config.eager_modules: '<pattern>' matches no submodule"):
        plan_of(two(eager_modules=["layer"]))
    plan_of(two(eager_modules=[[n for n, _ in net().named_modules()][2]]))
    with refused("Config.recompute_modules names"):
        compiled(recompute_granularity="selective", recompute_modules=["layers.*"])
    compiled(recompute_granularity="selective", recompute_modules=["norm"])
    compiled(recompute_granularity="selective", recompute_modules=["0"])
    with refused("cpu_offloading=True, but this model has no layers"):
        compiled(cpu_offloading=True)
    compiled(activation_memory_budget=0.5)


def test_profiles(tmp_path: Path) -> None:
    with refused("no <kind> profile") as near:
        Hardware.load("h100-nvlnk")
    Hardware.load(near[0].fix.split("'")[1])
    with refused("no such <kind> profile") as error:
        Hardware.load(tmp_path / "none.yaml")
    Hardware.load(words(error[0])[0])
    known = yaml.safe_load((Path(megafx.__file__).parent / "planner/hardware/h200-nvlink.yaml").read_text())
    for row, fields in (
        ("<where> is no mapping of fields", []),
        ("<where> has an unknown field", known | {"speed": 1}),
        ("<where> lacks", {"name": "mine"}),
        ("hardware profile '<name>': <name> is <value>", known | {"memory_bytes_per_second": "4e12"}),
        ("hardware profile '<name>': <name> is <value>", known | {"source": ""}),
    ):
        file = tmp_path / "mine.yaml"
        file.write_text(yaml.safe_dump(fields))
        with refused(row):
            Hardware.load(file)
    file.write_text(yaml.safe_dump(known | {"memory_bytes_per_second": 4.0e12, "source": "measured by me"}))
    plan_of(two(hardware=str(file)))
    with refused("no <kind> profile") as fusion:
        FusionProfile.load("h100")
    FusionProfile.load(fusion[0].fix.split("profiles: ")[1].split(";")[0].split(", ")[0])


def test_sizes_and_values() -> None:
    with refused("<what>=<size> is no size"):
        bytes_of("much", "memory")
    assert bytes_of("80GiB", "memory") == 80 * 2**30 and bytes_of("200MiB", "memory") == 200 * 2**20
    with refused("memory=<size> is <found> bytes") as error:
        device_memory("80")
    assert device_memory(error[0].fix.split()[-1]) == 80 * 2**30
    with refused("'<text>' is no value"):
        graph(lambda x: torch.ops.aten.neg(x), x="bf16 4 8")
    with refused("'<text>' is no placement"):
        graph(lambda x: torch.ops.aten.neg(x), x="bf16[t=4 k=8] X1@tp")
    graph(lambda x: torch.ops.aten.neg(x), x="bf16[t=4 k=8] S1@tp", out="S1@tp")


# -- models by name


def test_models_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    def __init__(self, n=2):\n        super().__init__(4 // n, 2)\n"
        "def none(size): return 3\nsize = 3\n"
    )
    (tmp_path / "config.json").write_text("{")
    for row, name in (
        ("'<name>' makes a <__name__>, not a torch.nn.Module", "nets:none"),
        ("'<name>' is a <__name__>, not a class or a function", "nets:size"),
        ("'<name>' cannot be imported", "nets:Nett"),
        ("'<name>' names no model", "some model"),
        ("'<name>' is no architecture and no model type", "LlamaForCausalLMM"),
        ("there is no file '<path>'", "nett.py:Net"),
        ("there is no file '<path>'", "confi.json"),
        ("'<path>' is not JSON", "config.json"),
        ("'<name>' cannot be called by name", "builtins:type"),
    ):
        with refused(row) as error:
            load_model(name, {"size": 1} if "none" in name else {})
        if name in ("nets:Nett", "nett.py:Net", "LlamaForCausalLMM"):
            assert "did you mean " in error[0].fix and (
                name[:-1] in error[0].fix or "nets" in error[0].fix or "Net" in error[0].fix
            )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine"}))
    with refused("'<name>' says model_type"):
        load_model("config.json")
    assert load_model("nets:Net")[0].in_features == 2  # 'module:name' of a class
    small = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_key_value_heads": 2, **small}))
    for name in ("config.json", "."):
        assert load_model(name)[0].config.hidden_size == 8
    with refused("'<name>' cannot be called: "):
        load_model("nets:Net", {"m": 1})
    with refused("'<name>' cannot be made"):
        load_model("nets:Net", {"n": 0})
    assert load_model("nets:Net", {"n": 4})[0].in_features == 1
    (tmp_path / "broken.py").write_text("import torch\nNet = torch.nn.Linears\n")
    with refused("'<name>' cannot be imported") as broken:
        load_model("broken.py:Net")
    assert "broken.py:2 `Net = torch.nn.Linears`" in broken[0].found and broken[0].fix == "correct this line"
    with refused("the config of '<name>' has no field") as field:
        load_model("llama", {"hiden_size": 8})
    assert "hidden_size" in field[0].fix
    with refused("the config of '<name>' (<__name__>) cannot be made"):
        load_model("llama", small | {"hidden_size": 9})
    assert load_model("LlamaForCausalLM", small | {"num_key_value_heads": 2})[0].config.hidden_size == 8


def test_inputs_by_text() -> None:
    model = net()
    with refused("'<text>' describes no input"):
        example_inputs(["ids 2 64"], model)
    with refused("the input '<text>' has the dtype") as error:
        example_inputs(["input=float23[2,4]"], model)
    assert "float32" in error[0].fix
    _, call = example_inputs(["input=float32[2,4]"], model, device="cpu")
    model(**call)


# -- plans


def test_saved_plans(tmp_path: Path) -> None:
    plan, file = plan_of(two()), tmp_path / "plan.json"
    with refused("the plan has no parameter") as error:
        plan.placement_of("0.weigh")
    assert str(plan.placement_of(error[0].fix.split()[3].rstrip(",?"))) == "S0"
    for text, row in (("[]", "'<path>': "), ("{", "'<path>': "), ('{"format": 0}', "'<path>': ")):
        file.write_text(text)
        with refused(row):
            Plan.load(file)
    for text, row in (("{", "this is no plan"), ('{"format": 0}', "plan format")):
        with refused(row):
            Plan.from_json(text)
    with open(file, "wb") as opened:
        opened.truncate(2**40)  # sparse
    with refused("'<path>' has <size> MiB"):
        Plan.load(file)
    for path in (tmp_path, tmp_path / "none.json"):
        with refused("'<path>' cannot be read: "):
            Plan.load(path)
    plan_of(two()).save(file)
    assert plan.diff(Plan.load(file)) == ""


# -- what cannot be planned


def test_overrides() -> None:
    with refused("override '<pattern>' matches no parameter and no module") as error:
        plan_of(two(overrides={"0.weigh": "colwise"}))
    plan_of(two(overrides={error[0].fix.split()[3].rstrip(",?"): "colwise"}))
    normed = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4))
    with refused("override '<pattern>' is <style>, but nothing that it matches can be <style>"):
        plan_of(two(overrides={"1": "colwise"}), normed)
    plan_of(two(overrides={"0": "colwise", "2": "rowwise"}), normed)


def test_budgets(tmp_path: Path) -> None:
    profile = yaml.safe_load((Path(megafx.__file__).parent / "planner/hardware/h100-nvlink.yaml").read_text())
    bare = {k: v for k, v in profile.items() if k not in ("memory_bytes", "host_bytes_per_second")}
    (tmp_path / "bare.yaml").write_text(yaml.safe_dump(bare))
    with refused("activation_memory_budget='fit' on a device whose memory is not known"):
        compiled(activation_memory_budget="fit", hardware=str(tmp_path / "bare.yaml"))
    compiled(activation_memory_budget="24GiB", hardware=str(tmp_path / "bare.yaml"))
    compiled(activation_memory_budget="fit", hardware="h100-nvlink")


def test_pipelines_without_ranks() -> None:
    example = {"example_inputs": torch.zeros(4, 4)}

    def make(schedule: str = "1F1B", microbatches: int = 2, **options: Any) -> None:
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        megafx.pipeline(model, Config(**options), stages=2, microbatches=microbatches, schedule=schedule, **example)

    with refused("schedule='<schedule>' is none of those that run") as error:
        make("ZBVZeroBubble")
    assert "backward is one graph" in str(error[0])
    with refused("microbatches=<microbatches>"):
        make(microbatches=0)
    with refused("cuda_graphs=<cuda_graphs> does not go together with a pipeli"):
        make(cuda_graphs=True)
    with refused("activation_memory_budget='fit' would fit one micr"):
        make(activation_memory_budget="fit")
    with refused("a pipeline of tensor_model_parallel_size=<t>, con"):
        make(activation_memory_budget=0.5)
    for schedule in ("GPipe", "Interleaved1F1B"):  # the advice
        with refused("a pipeline of tensor_model_parallel_size=<t>, con"):
            make(schedule)
