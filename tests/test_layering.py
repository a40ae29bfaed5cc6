"""Covers: who may import whom. Imports go strictly downward in LAYERS; some modules must not need torch."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Lowest first. A module imports only from layers below its own. `passes.*` stands for every module of the folder.
LAYERS = [
    # vocabulary
    {
        "errors",
        "placements",
        "placements_nested",
        "placements_owned",
        "sizes",
        "hardware",
        "draws",
        "data_sizes",
        "fills",
        "aten_rules",
        "aliasing",
        "autocast",
        "kernels.philox",
        "kernels.philox_triton",
    },
    # settings; the intermediate form; plain algebra
    {"safetensors_writer", "data_axis", "regions", "lost_ranks", "finite", "gloo_exit"}
    | {"config", "debug", "ir", "plan", "rules", "views", "solver", "cost", "sharding", "stacking"}
    | {"shard_slices", "op_families", "joined", "source_lines", "call_spec", "guards", "tables", "kernels.runs"},
    # what reads one graph, or one tensor
    {
        "collectives",
        "dump",
        "verify",
        "interpret",
        "op_rules",
        "op_families_*",
        "hf",
        "hf_attention",
        "mask_algebra",
        "mask_reader",
        "caches",
        "eager_modules",
        "pattern",
        "fusion_profile",
        "fusion_cases",
        "tp_*",
        "safetensors_files",
        "kernels.dropout_triton",
    },
    # kernels, capture, the planner's parts, the runtime's parts
    {"region_gather", "owners", "expert_sums"},
    {"overlap", "gathered"},
    {"kernels.*", "capture*", "simulate", "communication", "lazy", "later"}
    | {"rewrite_arguments", "rewrite_found", "rewrite_trace"}
    | {"candidates", "overrides", "planning", "policy", "rule_samples"}
    | {"init_replay"}
    | {"params", "stored", "outputs", "agreement", "meshes", "held_gradients", "inference", "cache_shard"},
    {"check_numbers_data"},
    {"rewrite", "rewrite_*", "patterns.*", "check_numbers", "rule_trials", "lookups", "problem", "report"}
    | {"materialize", "weight_names", "expert_regions"}
    | {"graph_keys"},
    {"state", "alternatives", "index_random", "init_log"},
    {"checkpoint_*", "data", "save_weights"},
    {"save_method"},
    {"passes.*", "pass_runner", "check_rules", "check_types", "parallel_class"},
    {"executable", "testing", "bound_graph"},
    {"runtime", "testing_patterns", "initialize"},
    {"compiler", "load_weights", "checkpoint"},
    {"convert", "parallelizer", "verification"},
    {"api", "profile_fusions", "model_table", "hf_trainer"},
    {"cli"},
]
TORCH_FREE = ("errors", "config", "debug", "placements", "shard_slices", "rules", "views", "solver", "cost", "regions")
TORCH_FREE += ("hardware", "aten_rules")


def modules() -> dict[str, Path]:
    """'passes.canonicalize' -> its file, for every module of the package but the `__init__` files."""
    found = {}
    for folder, prefix in (("megafx", ""), ("passes", "passes."), ("patterns", "patterns.")):
        for file in (ROOT / folder).rglob("*.py"):
            name = prefix + ".".join(file.relative_to(ROOT / folder).with_suffix("").parts)
            found[name] = file
    return {name: file for name, file in found.items() if not name.endswith("__init__")}


MODULES = modules()


def imports(file: Path) -> set[str]:
    """Modules of this package that a file imports, at its top or in a function; imports for type checkers do not count."""
    found = set()
    folders = file.relative_to(ROOT).parent.parts
    parent = folders if folders[0] == "megafx" else ("megafx", *folders)
    stack: list[ast.AST] = [ast.parse(file.read_text())]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack += node.orelse
            continue
        stack += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("megafx.") for alias in node.names if alias.name.startswith("megafx.")}
        elif isinstance(node, ast.ImportFrom):
            above = [*parent][: len(parent) - node.level + 1] if node.level else []
            package = ".".join([*above, *(node.module or "").split(".")]).strip(".")
            if package == "megafx" or package.startswith("megafx."):
                package = package.removeprefix("megafx").lstrip(".")
                inside = {f"{package}.{alias.name}".lstrip(".") for alias in node.names}
                found |= (inside & set(MODULES)) or {package}
    return found - {""}


def layer(name: str) -> int:
    for number, names in enumerate(LAYERS):
        family = any(pattern.endswith("*") and name.startswith(pattern[:-1]) for pattern in names)
        if name in names or (family and not any(name in exact for exact in LAYERS)):
            return number
    pytest.fail(f"megafx.{name} is in no layer: put it into LAYERS of tests/test_layering.py")


def is_pass(name: str) -> bool:
    """Files of passes/ that say REQUIRES are passes; the others are parts of one."""
    return name.startswith("passes.") and "\nREQUIRES" in MODULES[name].read_text()


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_downward(name):
    for other in sorted(imports(MODULES[name])):
        family = re.split("[._]", name)[0] == re.split("[._]", other)[0]  # parts of one thing
        assert layer(other) < layer(name) or (family and layer(other) == layer(name)), f"{name} imports {other}"


def test_layers_name_modules_that_exist():
    named = {name for names in LAYERS for name in names if not name.endswith("*")}
    assert named <= {*MODULES, "hardware"}


def test_no_cycles():
    graph = {name: imports(file) & set(MODULES) for name, file in MODULES.items()}
    while leaves := [name for name, needs in graph.items() if not needs]:
        for leaf in leaves:
            del graph[leaf]
        for needs in graph.values():
            needs.difference_update(leaves)
    assert not graph, f"modules in or above an import cycle: {sorted(graph)}"


@pytest.mark.parametrize("name", sorted(filter(is_pass, MODULES)))
def test_passes_do_not_import_passes(name):
    """They meet in the pipeline's list; a pass may import its own parts."""
    assert not [other for other in imports(MODULES[name]) if other in MODULES and is_pass(other)]


def test_torch_free_modules_do_not_import_torch():
    code = (
        "import sys, types\n"
        "package = sys.modules['megafx'] = types.ModuleType('megafx')  # its __init__ imports everything\n"
        "package.__path__ = [sys.argv[1]]\n"
        "for name in sys.argv[2:]: __import__(f'megafx.{name}')\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, str(ROOT / "megafx"), *TORCH_FREE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr


def test_sources_are_ascii():
    for file in [*MODULES.values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        assert file.read_text().isascii(), f"{file} has characters that are not ASCII"
