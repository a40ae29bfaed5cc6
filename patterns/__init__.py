"""Installed as megafx.patterns (see package-dir in pyproject.toml). Importing it registers every family below."""

if __name__ != "megafx.patterns":
    raise ImportError(
        "run 'pip install -e .' and import megafx.patterns: this folder is not importable by its own name"
    )

from megafx.patterns import attention, bias_activation, cross_entropy, glu, masked_softmax, rope  # noqa: F401
