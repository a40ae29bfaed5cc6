"""Installed as megafx.patterns (see package-dir in pyproject.toml). Exports nothing: import the submodules."""

if __name__ != "megafx.patterns":
    raise ImportError(
        "run 'pip install -e .' and import megafx.patterns: this folder is not importable by its own name"
    )
