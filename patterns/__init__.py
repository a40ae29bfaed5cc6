"""Installed as megafx.patterns (see package-dir in pyproject.toml). Importing it registers every family: each file here."""

if __name__ != "megafx.patterns":
    raise ImportError(
        "run 'pip install -e .' and import megafx.patterns: this folder is not importable by its own name"
    )

import importlib
import pkgutil

for family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{family.name}")
