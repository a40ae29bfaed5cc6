"""Installed as megafx.patterns (see package-dir in pyproject.toml). Importing it registers every family below."""

if __name__ != "megafx.patterns":
    raise ImportError(
        "run 'pip install -e .' and import megafx.patterns: this folder is not importable by its own name"
    )

from megafx.patterns import (  # noqa: F401
    activation,
    attention,
    bias_dropout_add,
    cross_entropy,
    masked_softmax,
    norms,
    rope,
)
