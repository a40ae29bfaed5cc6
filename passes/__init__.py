"""Installed as megafx.passes (see package-dir in pyproject.toml). Exports nothing: import the submodules."""

if __name__ != "megafx.passes":
    raise ImportError("run 'pip install -e .' and import megafx.passes: this folder is not importable by its own name")
