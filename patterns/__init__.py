"""Installed as megafx.patterns (see package-dir in pyproject.toml). Importing it registers every family below."""

if __name__ != "megafx.patterns":
    raise ImportError(
        "run 'pip install -e .' and import megafx.patterns: this folder is not importable by its own name"
    )

from megafx.patterns import (  # noqa: F401
    attention,
    bias_activation,
    bias_dropout_add,
    cross_entropy,
    glu,
    masked_softmax,
    norms,
    rope,
)
