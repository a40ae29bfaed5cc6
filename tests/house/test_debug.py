"""Covers: debugging.py."""

import re
import sys

import pytest

from megafx.debugging import FLAGS, Debug, current, debug, from_environment, is_reporting_rank
from megafx.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in FLAGS:
        monkeypatch.delenv(name, raising=False)


def test_environment(monkeypatch):
    assert current() == Debug()
    for name, value in {"DEBUG": "2", "DUMP": "graphs", "CHECK": "1", "SKIP": "a, b", "STOP_AFTER": "c"}.items():
        monkeypatch.setenv(f"MEGAFX_{name}", value)
    assert current() == Debug(level=2, dump="graphs", check=1, skip=("a", "b"), stop_after="c")


def test_innermost_override_wins_and_ends(monkeypatch):
    monkeypatch.setenv("MEGAFX_DEBUG", "1")
    with debug(check=2) as outer:
        assert outer == current() == Debug(level=1, check=2)
        with debug(level=3, skip=["a"]):
            assert current() == Debug(level=3, check=2, skip=("a",))
        assert current() == outer
    assert current() == Debug(level=1)


@pytest.mark.parametrize("text", ["5", "-1", "two"])
def test_bad_values_are_named(text):
    with pytest.raises(ConfigError) as error:
        from_environment({"MEGAFX_DEBUG": text})
    assert str(error.value) == f"MEGAFX_DEBUG={text} is out of range\n  fix: MEGAFX_DEBUG takes 0 to 4"


def test_bad_override():
    with pytest.raises(ConfigError, match="debug check = 3 is out of range"), debug(check=3):
        pass
    assert current() == Debug()


def test_unknown_flag_is_an_error():
    with pytest.raises(ConfigError, match="MEGAFX_DEBGU is no megafx flag"):
        from_environment({"MEGAFX_DEBGU": "1", "OTHER": "x"})


def test_only_rank_0_reports(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert not is_reporting_rank()
    monkeypatch.setenv("RANK", "0")
    assert is_reporting_rank()


def test_every_flag_is_documented():
    doc = sys.modules["megafx.debugging"].__doc__
    assert set(re.findall(r"MEGAFX_[A-Z_]+", doc)) == set(FLAGS)
