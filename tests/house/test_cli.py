"""Covers: cli.py, named_model.py, replaying.py, measure.py; the stages of calls."""

import dataclasses
import json
import pkgutil
import re
import subprocess
import sys
from importlib import metadata

import pytest
import torch

import megafx
from megafx.cli import _config, _parser, _value, main
from megafx.compiler.stages import pipeline
from megafx.config import Config
from megafx.errors import UsageError
from megafx.named_model import example_inputs
from megafx.planner.hardware import Hardware
from megafx.progress import progress
from megafx.versions import version_of

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


@pytest.fixture(autouse=True)
def nets_of_this_test():
    """Tests write a nets.py of their own."""
    sys.modules.pop("nets", None)
    yield
    sys.modules.pop("nets", None)


@pytest.fixture
def llama(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_rehearse(llama, tmp_path, capsys):
    found = tmp_path / "found.json"
    options = ["--tp", "2", "--world", "4", "--hardware", "h100-nvlink", "--json", str(found)]
    assert main(["rehearse", str(llama), *options]) == 0
    assert capsys.readouterr().out.startswith("4 ranks: dp 2 x tp 2\n")
    assert json.loads(found.read_text())["classes"][0]["fits"] is True
    options = [
        "--pipeline-stages",
        "2",
        "--microbatches",
        "4",
        "--schedule",
        "GPipe",
        "--world",
        "4",
        "--json",
        str(found),
    ]
    assert main(["rehearse", str(llama), *options]) == 0
    assert "both ends of each message" in capsys.readouterr().out
    data = json.loads(found.read_text())
    assert data["mesh"] == {"pp": 2, "dp": 2, "tp": 1} and [c["alive"] for c in data["classes"]] == [4, 4]
    assert main(["rehearse", str(llama), "--tp", "2", "--world", "3"]) == 2
    assert "3 ranks are no multiple of the 2" in capsys.readouterr().err


def test_options_are_the_fields_of_config(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    shown = capsys.readouterr().out
    for f in dataclasses.fields(Config):
        assert (f"--{f.name.replace('_', '-')} " in shown) == (f.name != "passes"), f.name
    assert "usage: megafx plan MODEL [options]" in shown and "(default: 25)" in shown
    words = ["--tp", "8", "--dp", "2", "--sp", "auto", "--seq", "8192", "--batch", "3", "--overrides", "*.up=colwise"]
    given = _parser().parse_args(["plan", "m", *words])
    config = Config(tensor_model_parallel_size=8, data_parallel_size=2, seq_length=8192, micro_batch_size=3)
    assert _config(given) == config.replace(sequence_parallel="auto", overrides={"*.up": "colwise"})


def test_every_command_names_its_python_call(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    ([a-z-]+)", capsys.readouterr().out.partition("positional")[2], re.MULTILINE)
    listed = "plan rehearse explain verify passes check-rules convert diff profile-hardware replay version"
    assert sorted(commands) == sorted(listed.split())
    for command in commands:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        named = re.findall(r"In Python: ([\w.]+)", text)[0].rstrip(".")
        assert callable(pkgutil.resolve_name(named)) or named == "megafx.__version__", named


def test_passes_are_listed_in_their_order(capsys, tmp_path):
    assert main(["passes"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    listed = [p.name for stage in pipeline(Config()).values() for p in stage]
    assert [words[0] for words in lines] == listed and all(len(words) > 4 for words in lines)
    assert lines[listed.index("build_joint_graph")][1] == "JOINT"


def test_models_are_built_without_memory(llama):
    model, inputs = megafx.load_model(str(llama))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert inputs is None
    assert all(p.is_meta for p in model.parameters())
    named, _ = megafx.load_model("LlamaForCausalLM", {k: v for k, v in LLAMA.items() if isinstance(v, int)})
    assert str(named) == str(model)
    smaller, _ = megafx.load_model(str(llama), {"num_hidden_layers": 1})
    assert len(smaller.model.layers) == 1


def test_a_field_that_only_the_code_of_the_model_reads():
    """T5's config has no decoder_start_token_id until it is given one."""
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    model, _ = megafx.load_model("T5ForConditionalGeneration", sizes | {"decoder_start_token_id": 3})
    assert model.config.decoder_start_token_id == 3
    with pytest.raises(
        UsageError, match="has no field 'decoder_start_token'\n  fix: did you mean decoder_start_token_id"
    ):
        megafx.load_model("T5ForConditionalGeneration", sizes | {"decoder_start_token": 3})
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_experts": 2, "vocab_size": 16}
    model, _ = megafx.load_model("Qwen3MoeForCausalLM", small | {"head_dim": 24})  # by getattr, with a default
    assert model.config.head_dim == 24 and model.model.layers[0].self_attn.k_norm.weight.shape == (24,)


OWN = """
import torch
from dataclasses import dataclass
@dataclass
class NetConfig:
    width: int = 8
    vocabulary: int = 10
class Net(torch.nn.Module):
    def __init__(self, config: NetConfig, bias: bool = True):
        super().__init__()
        self.embed = torch.nn.Embedding(config.vocabulary, config.width)
        self.up = torch.nn.Linear(config.width, 32, bias=bias)
        self.down = torch.nn.Linear(32, config.width)
    def forward(self, ids, scale=None):
        x = self.embed(ids)
        x = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return (x if scale is None else x * scale).square().mean()
def build(width, layers=1):
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
NUMBER = 3
"""


def test_values_of_settings():
    given = {"1e-5": 1e-5, "3": 3, "true": True, "False": False, "relu": "relu", "[1, 2]": [1, 2], "null": None}
    assert {text: _value(text) for text in given} == given


def test_models_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "own_nets.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    for name in ("own_nets:Net", "own_nets.py:Net"):
        model, _ = megafx.load_model(name, {"width": 4, "bias": False})
        assert model.up.weight.shape == (32, 4) and model.up.bias is None and model.embed.weight.is_meta
    assert len(megafx.load_model("own_nets:build", {"width": 4, "layers": 2})[0]) == 2
    (ids,), named = example_inputs(["int64[3,5]", "scale=float32[]"], model, device="cpu")
    assert ids.shape == (3, 5) and ids.max() < 10 and named["scale"].shape == ()


def test_verify_and_replay_by_name(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_nets2.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    model = ["own_nets2:Net", "--set", "width=6", "--input", "int64[3,5]"]
    assert main(["verify", *model, "--tp", "2"]) == 0
    assert "equal: 2 ranks against eager, tolerance 1e-10" in capsys.readouterr().out
    with megafx.debug(dump="dumped"):
        main(["plan", *model, "--tp", "2", "--quiet"])
    capsys.readouterr()
    assert main(["replay", "dumped", *model]) == 0
    assert re.search(r"the same \d+ graphs", capsys.readouterr().out)
    file = tmp_path / "dumped" / "05_fuse.txt"
    file.write_text(file.read_text().replace("gelu", "silu"))
    assert main(["replay", "dumped", *model]) == 1
    assert "the first graph that differs is that after 'fuse'" in capsys.readouterr().out


def test_a_whole_compile_is_replayed(tmp_path):
    """The plan of a training call, and what it is compiled to: folders of one job."""
    made = lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
    model, batch = made(), torch.randn(2, 3, 4)
    with megafx.debug(dump=str(tmp_path / "job")):
        megafx.parallelize(model, megafx.Config(tensor_model_parallel_size=1), example_inputs=batch)
        model(batch).sum().backward()
    for folder, graphs in (("job", 11), ("job/graph1", 35)):
        replayed = megafx.replay(tmp_path / folder, made(), example_inputs=batch)
        assert replayed, str(replayed)
        assert replayed.graphs >= graphs
    file = tmp_path / "job" / "graph1" / "about.json"
    about = json.loads(file.read_text())
    file.write_text(json.dumps(about | {"config": about["config"] | {"passes": [["after fuse", "os:system"]]}}))
    with pytest.raises(UsageError, match="os:system.*which a replay does not import"):
        megafx.replay(tmp_path / "job" / "graph1", made(), example_inputs=batch)


def test_profile_hardware(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("megafx.measure.MATMUL", {"cpu": 16, "cuda": 16})
    monkeypatch.setattr("megafx.measure.COPY_BYTES", {"cpu": 4096, "cuda": 4096})
    file = str(tmp_path / "mine.yaml")
    assert main(["profile-hardware", file, "--link", "pcie"]) == 0
    assert "the link is that of pcie" in capsys.readouterr().out
    found, pcie = Hardware.load(file), Hardware.load("pcie")
    assert found.name == "mine" and found.link_bytes_per_second == pcie.link_bytes_per_second
    assert set(found.flops_per_second) == {"bfloat16", "float16", "float32", "float64"}
    assert main(["profile-hardware", file]) == 2
    assert "one process cannot measure the link" in capsys.readouterr().err


@pytest.mark.dist
@pytest.mark.slow
def test_profile_hardware_on_two_ranks(tmp_path):
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "megafx.cli",
    ]
    command = [*launch, "profile-hardware", "mine.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found = Hardware.load(tmp_path / "mine.yaml")
    assert found.source.startswith("measured on 2x") and 0 < found.alpha_seconds < 1


def test_progress_tells_the_stages():
    seen = []
    with progress(lambda name, seconds: seen.append((name, seconds))):
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        megafx.plan(model, megafx.Config(tensor_model_parallel_size=2), example_inputs=torch.randn(2, 3, 4))
    begun, ended = ([name for name, seconds in seen if (seconds is None) == now] for now in (True, False))
    assert begun == [ended[-1], *ended[:-1]]
    assert begun[:4] == ["plan", "capture", "canonicalize", "drop_idle_masks"]


def test_explain_a_hugging_face_config(llama, capsys):
    page, data = llama / "plan.html", llama / "plan.json"
    command = ["explain", str(llama / "config.json"), "--tp", "2", "--sequence-parallel", "off", "--seq-length", "64"]
    trace = llama / "step.json"
    files = ["--html", str(page), "--json", str(data), "--trace", str(trace)]
    assert main([*command, *files, "--predict-memory"]) == 0
    shown = capsys.readouterr().out
    assert "peak of backward" in shown and json.loads(data.read_text())["curve"]["predicted"]
    assert {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]} == {"M", "X", "C"}
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
    assert main(["diff", "plan.json", "plan.json"]) == 0
    assert main([*command[:-1], "other.json", "--overrides", "0=replicate", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["diff", "plan.json", "other.json"]) == 1
    assert re.search(r"-  0.weight +S0\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("nothing.json", "UsageError: there is no file 'nothing.json'"),
        ("just-a-name", "UsageError: 'just-a-name' names no model"),
        ("no_such_module:build", "UsageError: 'no_such_module:build' cannot be imported: No module named"),
        ("json:nothing", "has no attribute 'nothing'"),
        (
            "json:JSONDecodeError",
            "UsageError: 'json:JSONDecodeError' cannot be called: missing a required argument: 'msg'",
        ),
        ("math:pi", "UsageError: 'math:pi' is a float, not a class or a function"),
        ("argparse:Namespace", "UsageError: 'argparse:Namespace' makes a Namespace, not a torch.nn.Module"),
        ("builtins:dict", "UsageError: 'builtins:dict' cannot be called by name: no signature found"),
        ("LlamaForCausaLM", "no architecture and no model type of transformers\n  fix: did you mean LlamaForCausalLM"),
        ("llama --set hiden_size=3", "has no field 'hiden_size'\n  fix: did you mean hidden_size"),
        ("llama --set hidden_size", "UsageError: --set hidden_size has no value\n  fix: write --set NAME=VALUE"),
        ("llama --input long", "UsageError: 'long' describes no input\n  fix: write NAME=DTYPE[SIZES]"),
        ("llama --input int63[2,64]", "has the dtype 'int63', which torch does not know\n  fix: did you mean int64"),
        ("argparse:Namespac", "has no attribute 'Namespac'\n  fix: did you mean Namespace"),
    ],
)
def test_models_that_do_not_exist(model, found, capsys):
    assert main(["plan", "--quiet", *model.split()]) == 2
    assert found in capsys.readouterr().err


def test_diff_of_dumps(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "00_capture.txt").write_text("%0 = x  # f32[4]\nreturn %0\n")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    (tmp_path / "b" / "00_capture.txt").write_text("%0 = x  # f32[5]\nreturn %0\n")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "+ %0 = x  # f32[5]" in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "c")]) == 2
    assert "is not a dump folder" in capsys.readouterr().err


def test_check_rules_of_one_op(capsys):
    assert main(["check-rules", "aten.mm.default"]) == 0
    assert "0 wrong, 0 missing" in capsys.readouterr().out


def test_version(capsys):
    assert main(["version"]) == 0
    assert f"torch {metadata.version('torch')}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("plan nets:Net --tp 0", "Config.tensor_model_parallel_size = 0 is out of range"),
        ("plan nets:Net --hardware h300", "no hardware profile 'h300'"),
        ("plan nets:Net --config none.yaml", "'none.yaml' cannot be read as YAML: No such file or directory"),
        ("passes --config nets.py", "'nets.py' cannot be read as YAML"),
        ("plan nets:Net --overrides up", "fix: write --overrides PATTERN=STYLE"),
        ("plan nets:Net --set width=6", "describe a call of forward(ids, scale=None): --input NAME=DTYPE[SIZES]"),
        ("plan nets:Net --set width=-6", "'nets:Net' cannot be made: RuntimeError: Trying to create tensor"),
        ("plan llama --set hidden_size=65", "(LlamaConfig) cannot be made: ValueError: The hidden size (65) is not"),
        ("plan llama --set hidden_size=abc", "Field 'hidden_size' expected int, got str"),
        ("plan llama --set num_hidden_layers=1 --gpus 8", "--gpus and --memory go together"),
        ("check-rules --import no_such_module", "--import no_such_module: No module named 'no_such_module'"),
        (
            "check-rules aten.mmm.default",
            "'aten.mmm.default' has no sharding rule\n  fix: did you mean aten.mm.default",
        ),
        ("replay nets.py nets:Net", "'nets.py' is not a dump folder"),
    ],
)
def test_arguments_that_do_not_fit(command, found, tmp_path, monkeypatch, capsys):
    (tmp_path / "nets.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    assert found in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--save no/such/plan.json", "--gpus 0", "--pipeline-stages none"])
def test_options_are_checked_before_the_work(option):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "llama", *option.split()])
    assert stopped.value.code == 2


def test_a_call_that_does_not_fit_the_model(tmp_path, monkeypatch, capsys):
    (tmp_path / "nets.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--quiet", "nets:Net", "--input", "idz=int64[3,5]"]) == 1
    assert "the call does not fit the model: Net.forward() got an unexpected keyword" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("plan llama --tpp 2", "did you mean --tp"),
        ("explain llama --tensor-paralel-size 2", "did you mean --tensor-model-parallel-size"),
        ("plan llama --sp atuo", "did you mean auto"),
        ("plann llama", "did you mean plan"),
        ("check-rules --imports my_ops", "did you mean --import"),
        ("verify --sabotag llama --nothing-like-it", "`megafx verify --help` lists what there is"),
        (
            "plan llama --gpus 8 --memory 80",
            "'80' is 80 bytes, which is less than a device has\n  fix: give a unit: 80GiB",
        ),
        ("plan llama --gpus 8 --memory much", "memory='much' is no size"),
        ("plan nets.py:Net --input 'int63[2,64]'", "did you mean int64"),
        (
            "plan LlamaForCausaLM",
            "no architecture and no model type of transformers\n  fix: did you mean LlamaForCausalLM",
        ),
        ("verify lama", "did you mean llama"),
        ("plan T5EncoderModl", "did you mean T5EncoderModel"),
        ("explain llama --set hiden_size=3", "has no field 'hiden_size'\n  fix: did you mean hidden_size"),
        ("plan nets.py:Nett", "'nets.py' has no attribute 'Nett'\n  fix: did you mean Net"),
        ("replay dumped nets:Nett", "did you mean Net"),
        ("verify no_such_module:Net", "No module named 'no_such_module'"),
        ("plan nets2.py:Net", "there is no file 'nets2.py'\n  fix: did you mean nets.py"),
        ("plan llama --hardware h200-nvlnk", "did you mean 'h200-nvlink'"),
        ("plan llama --fusion-profile h20", "did you mean 'h200'"),
        ("convert nothing files", "there is no file or folder 'nothing'"),
        ("convert nets.py files --max-shard-size much", "max_shard_size='much' is no size"),
    ],
)
def test_misspelt_arguments_are_errors_before_torch_is_imported(command, meant, tmp_path):
    (tmp_path / "nets.py").write_text(OWN)
    code = (
        "import contextlib, shlex, sys; from megafx.cli import main\n"
        "try: status = main(shlex.split(sys.argv[1]))\n"
        "except SystemExit as stop: status = stop.code\n"
        "assert status == 2 and 'torch' not in sys.modules"
    )
    words = [sys.executable, "-c", code, command]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and meant in done.stderr, done.stderr


def test_a_tree_without_metadata_has_no_version():
    """As one that PYTHONPATH names, or that is vendored: ranks still compare settings, and calls are still compiled."""
    assert version_of("a-package-that-nobody-installed") == "unknown" and version_of("torch") == metadata.version(
        "torch"
    )


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(
        f"megafx {megafx.__version__}, torch {metadata.version('torch')}, Python 3."
    )


def test_padding_is_noted_by_plan(tmp_path, monkeypatch, capsys):
    (tmp_path / "nets3.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "nets3:Net", "--set", "width=6", "--input", "int64[3,5]", "--tp", "100"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\d+ rows are shared by \d+ of 100 ranks; the others hold padding", shown), shown


def test_wrong_arguments():
    with pytest.raises(SystemExit) as stopped:
        main(["plan"])
    assert stopped.value.code == 2
