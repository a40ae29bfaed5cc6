# make demo: train a byte-level GPT on 2 ranks, in an environment of its own.
# make test: lint, types and tests, in about 16 minutes; what CI runs.   make test-slow: the other tests.
# make test-models: the whole model matrix (tests/models), and its page docs/models.md.
# make docs: the documentation as a site, in build/site; a link that leads nowhere is an error.
PYTHON ?= python3
VENV ?= .venv
RANKS ?= 2
# megafx takes torch 2.15 too (pyproject.toml); up to here pip finds a CPU build where it is offered one (see below).
TORCH ?= torch>=2.11,<2.14
BIN := $(VENV)/bin

.PHONY: demo test test-slow test-models docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo-installed
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_gpt.py $(ARGS)

test: $(VENV)/.test-installed
	$(BIN)/python -m tests $(ARGS)

test-slow: $(VENV)/.test-installed
	$(BIN)/python -m tests --slow $(ARGS)

test-models: $(VENV)/.test-installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/models/table.py --jobs 2 --write docs/models.md $(ARGS)

docs: $(VENV)/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# torch comes first and alone: where an index or a folder of wheels offers a CPU build of it, pip takes that one, and
# nothing installed afterwards replaces it.
$(VENV)/.torch-installed: Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install "$(TORCH)"
	touch $@

$(VENV)/.demo-installed: $(VENV)/.torch-installed pyproject.toml
	$(BIN)/pip install -e .
	touch $@

$(VENV)/.test-installed: $(VENV)/.torch-installed pyproject.toml
	$(BIN)/pip install -e '.[test]'
	touch $@

$(VENV)/.docs-installed: $(VENV)/.demo-installed
	$(BIN)/pip install -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .mypy_cache *.egg-info
