"""Covers: README.md and docs/**/*.md. Their Python runs as it stands; commands, files and links that they name exist."""

import ast
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import api_page
import pytest

import megafx
from megafx.cli import _parser
from megafx.config import FUSIONS, Config
from megafx.debugging import FLAGS

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*) ?(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # language, what else stands there, text
FOLDERS = "megafx|passes|patterns|tests|examples|benchmarks|docs"
# What the blocks of a page are given: names that stand for the reader's own.
GIVEN = {
    "checkpoints.md": """
import torch, megafx
def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    return model, torch.optim.AdamW(model.parameters())
plain, its_optimizer = made()
plain(torch.randn(2, 8)).sum().backward(), its_optimizer.step()
model, optimizer = made()
megafx.parallelize(model, example_inputs=torch.randn(2, 8))
model(torch.randn(2, 8)).sum().backward(), optimizer.step()
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
""",
    "weights.md": """
import torch, megafx
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 96}
LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder := "llama")
class Net(torch.nn.Linear):
    def __init__(self, n):
        super().__init__(n, n)
config, batch = 8, torch.randn(2, 8)
""",
}
# Verdicts of pages other than the first make one call, as in most tests (conftest.py): a fifth of the time of all.
RUNNER = """
import contextlib, io, json, sys, traceback
import megafx.equivalence as equivalence
done, whole = {}, equivalence.repeat
for name, code in json.load(open(sys.argv[1])).items():
    shown = io.StringIO()
    equivalence.repeat = whole if name == "README.md" else lambda call, trial: equivalence.Repeated()
    with contextlib.redirect_stdout(shown):
        try:
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
            error = ""
        except BaseException:
            error = traceback.format_exc()
    done[name] = (shown.getvalue(), error)
json.dump(done, open(sys.argv[2], "w"))
"""


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """(what else the fence says, text) of each fenced block of a language."""
    return [(more, text) for kind, more, text in FENCE.findall(page.read_text()) if kind == language]


def code_of(page: Path) -> str:
    """The Python of a page that is to run, its lines where they are in the page."""
    text, code = page.read_text(), ""
    for found in FENCE.finditer(text):
        if found[1] == "python" and not found[2]:
            code += "\n" * (text.count("\n", 0, found.start(3)) - code.count("\n")) + found[3]
    return code


RUN = [page for page in PAGES if code_of(page)]
named = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> dict[str, tuple[str, str]]:
    """name of a page -> (what its blocks print, how they failed or ''). One process runs all pages, one after the other."""
    folder = tmp_path_factory.mktemp("docs")
    code = {page.name: code_of(page) for page in RUN}
    for name, given in GIVEN.items():  # on the first line, so that those of the page stay where they are
        code[name] = f"exec({given!r})" + code[name]
    (folder / "pages.json").write_text(json.dumps(code))
    plain = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-c", RUNNER, "pages.json", "done.json"]
    subprocess.run(command, cwd=folder, env=plain, timeout=600, check=True)
    return json.loads((folder / "done.json").read_text())


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_blocks_run(page, done):
    assert not done[page.name][1], done[page.name][1]


def test_every_block_runs_or_says_why_not():
    for page in PAGES:
        for language, more, _ in FENCE.findall(page.read_text()):
            assert language in ("python", "sh", "text"), f"{page.name}: a block of '{language}'"
            assert language != "python" or not more or re.fullmatch(r"no-run: .{10,}", more), f"{page.name}: {more}"


def test_what_is_shown_as_printed_is_printed(done):
    for page in PAGES:
        for more, text in blocks(page, "text"):
            assert more != "printed" or text in done[page.name][0], f"{page.name} does not print: {text}"


# -- pages that follow the sources


def test_every_function_and_option_is_told():
    listed = [name for names in api_page.GROUPS.values() for name in names]
    assert sorted([*listed, "Config"]) == sorted(megafx.__all__), "api_page.GROUPS lists them"
    assert api_page.PAGE.read_text() == api_page.page(), "run `python tests/house/api_page.py`"


def test_options_beside_those_of_megatron():
    """Every field of Config stands in the page, and the page names no other."""
    text = (ROOT / "docs" / "megatron.md").read_text()
    pairs, own = text.partition("These have no option")[0], text.partition("options are megafx's own")[2]
    cells = re.findall(r"^\| .*? \| (`.*?) \|", pairs, re.MULTILINE) + re.findall(r"^\| (`.*?) \|", own, re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)(?:=[^`]*)?`", cell)]
    fields = {f.name for f in dataclasses.fields(Config)}
    assert set(named) - fields == set() and fields - {*named} - {"data_parallel"} == set()


# -- the site


def _build(folder: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_the_site_is_built_and_holds_every_page(tmp_path):
    done = _build(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    built = {path.relative_to(tmp_path).with_suffix("").as_posix() for path in tmp_path.rglob("*.html")}
    pages = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in PAGES if page != README}
    assert built >= {"index", "results", *(page.replace("README", "index") for page in pages)}


def test_a_link_that_leads_nowhere_stops_the_site(tmp_path):
    for name in (
        "docs",
        "examples",
        "benchmarks/RESULTS.md",
        "mkdocs.yml",
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    page = tmp_path / "docs" / "overlap.md"
    page.write_text(page.read_text() + "\n[nowhere](nowhere.md)\n")
    done = _build(tmp_path, tmp_path / "site")
    assert done.returncode != 0 and "nowhere.md" in done.stdout + done.stderr


# -- the README


def test_readme_is_short_and_shows_what_is_printed(done):
    assert len(README.read_text().splitlines()) <= 130
    (quick_start,) = [text for more, text in blocks(README, "python") if not more]
    assert len(quick_start.strip().splitlines()) <= 30
    words = lambda line: " ".join(re.sub(r"[\u2500-\u257f|]", " ", line).split())  # without the table's lines
    printed = [words(line) for line in done["README.md"][0].splitlines()]
    (shown,) = [text for more, text in blocks(README, "text") if more == "of the quick start"]
    assert len(shown.splitlines()) == 12
    for line in shown.splitlines():
        assert any(p.startswith(words(line)) for p in printed), f"the quick start does not print: {line}"


def test_readme_names_every_step_and_page():
    (diagram,) = [text for more, text in blocks(README, "text") if not more]
    folders = {path.name for path in (ROOT / "passes").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert set(re.findall(r"[|v]  (\w+)", diagram)) == {"capture", *folders}
    linked = {README}
    while new := {other for page in linked for other in _linked(page) if other in PAGES} - linked:
        linked |= new
    assert linked == set(PAGES), f"no way leads from the README to {set(PAGES) - linked}"


def test_cells_of_the_matrix_are_as_many_as_it_says():
    (exact,) = re.findall(r"^(\d+ of \d+ cells) are exact", (ROOT / "docs" / "models.md").read_text(), re.MULTILINE)
    assert f"[{exact}](docs/models.md)" in README.read_text()


# -- what pages name


def _prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))


def _linked(page: Path) -> list[Path]:
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[\w-]+)?\)", _prose(page))
    return [(page.parent / target).resolve() for target in targets]


@named
def test_links_and_paths_exist(page):
    text = page.read_text()
    assert all(target.exists() for target in _linked(page)), [t for t in _linked(page) if not t.exists()]
    for file, anchor in re.findall(r"\]\(([^)#:\s]*)#([\w-]+)\)", _prose(page)):
        heads = re.findall(r"^#+ (.*)$", ((page.parent / file) if file else page).read_text(), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads], (file, anchor)
    for path in re.findall(rf"`((?:{FOLDERS})/[\w./]*)`", text):
        assert (ROOT / path).exists() or path.endswith(("/x.py", "/test_x.py")), path


@named
def test_commands_exist(page):
    for line in [line for _, text in blocks(page, "sh") for line in text.replace("\\\n", "").splitlines()]:
        words = [w for w in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z_]+=\S+", w)]
        if words and words[:2] != ["python", "train.py"]:  # the reader's own script
            _check_command(line, *words)
    for command in re.findall(r"`megafx ([a-z-]+)[^`]*`", page.read_text()):  # in prose
        with pytest.raises(SystemExit) as stopped:
            _parser().parse_args([command, "--help"])
        assert stopped.value.code == 0, f"there is no command megafx {command}"


def _check_command(line: str, program: str, *words: str) -> None:
    if program == "megafx":
        _parser().parse_args(words)
    elif program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
    elif program in ("python", "torchrun"):
        if "megafx.cli" in words:
            _parser().parse_args(words[words.index("megafx.cli") + 1 :])
            return
        files = [word for word in words if "/" in word and word.endswith(".py")]
        assert files or words[:2] == ("-m", "tests"), line
        assert all((ROOT / file).is_file() for file in files), line
        options = [w for w in words[words.index(files[0]) :] if w.startswith("--")] if files else []
        assert all(f'"{option}"' in (ROOT / files[0]).read_text() for option in options), line
    elif program in ("srun", "docker"):  # what they run
        if "torchrun" in words:
            _check_command(line, *words[words.index("torchrun") :])
    else:
        assert program in ("pip", "export"), line


def test_the_picture_of_layers_is_that_of_the_layering_test():
    listed = re.search(
        r"^LAYERS = (\[.*?\])", (ROOT / "tests/house/test_layering.py").read_text(), re.MULTILINE | re.DOTALL
    )
    layers = [set(line.split()) for line in ast.literal_eval(listed[1])]
    (picture,) = [text for more, text in blocks(ROOT / "docs" / "architecture.md", "text") if more == "layers"]
    shown = [set(re.findall(r"\w+", line)) for line in picture.splitlines()[1:]]
    assert shown == [layer for layer in layers[::-1] if layer != {"__init__"}]


def test_tables_are_complete():
    named = set(re.findall(r"`(MEGAFX_[A-Z_]+)=", (ROOT / "docs" / "debugging.md").read_text().partition("When")[0]))
    assert named == set(FLAGS)
    assert set(re.findall(r"\| `(\w+)` \|$", (ROOT / "docs" / "fusion.md").read_text(), re.MULTILINE)) == set(FUSIONS)


def test_ci_runs_the_tests():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_tests_of_which_one_case_in_so_many_runs_exist():
    listed = re.findall(r'^    "([\w/]+\.py)::(\w+)": \d+,$', (ROOT / "tests/conftest.py").read_text(), re.MULTILINE)
    assert listed and [name for file, name in listed if f"def {name}(" not in (ROOT / "tests" / file).read_text()] == []


@pytest.mark.parametrize(
    "rule", ["lin: b s h, h -> b s h", pytest.param("nl[0]: b s! h, h -> b s! h", marks=pytest.mark.slow)]
)
def test_the_command_for_rules_of_ones_own(rule, tmp_path):
    """--import makes the package's ops and rules; a wrong rule is found, and the exit status says so."""
    page = ROOT / "docs" / "extending.md"
    (command,) = re.findall(r"^megafx (check-rules --import \S+ \S+)$", page.read_text(), re.MULTILINE)
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    op = blocks(page, "python")[0][1].split("class Mixer")[0]
    (package / "ops.py").write_text(f'{op}\nimport megafx\nmegafx.register_rule("my_ops.recur.default", "{rule}")')
    words = [sys.executable, "-m", "megafx.cli", *command.split()]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    status, says = (1, "S1 R -> S1") if rule.startswith("lin") else (0, "0 wrong, 0 missing")
    assert done.returncode == status and says in done.stdout, done.stdout + done.stderr
