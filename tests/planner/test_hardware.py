"""Hardware profiles: what ships is complete, and mistakes in a user's own say what to do."""

from __future__ import annotations

import pytest

from megafx.errors import ConfigError
from megafx.planner.hardware import PROFILES, Hardware

GOOD = """\
name: mine
flops_per_second: {bfloat16: 1.0e+14}
memory_bytes_per_second: 1.0e+12
link_bytes_per_second: 1.0e+11
alpha_seconds: 1.0e-05
source: measured on my machine, today
"""


def test_profiles_that_come_with_megafx():
    assert Hardware.names() == ["a100-nvlink", "cpu-gloo", "h100-nvlink", "h200-nvlink", "pcie"]
    for name in Hardware.names():
        hardware = Hardware.load(name)
        assert hardware.name == name
        assert {"bfloat16", "float16", "float32", "float64"} <= set(hardware.flops_per_second)
        assert "measured" in hardware.source or "datasheet" in hardware.source
        # a link is slower than memory, memory slower than arithmetic: catches a slipped exponent
        assert hardware.link_bytes_per_second < hardware.memory_bytes_per_second < hardware.flops("bfloat16")
        assert 1e-6 < hardware.alpha_seconds < 1e-3


def test_load_by_path(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert Hardware.load(path) == Hardware.load(str(path))
    assert Hardware.load(path).flops("bfloat16") == 1e14
    assert Hardware.load(PROFILES / "pcie.yaml") == Hardware.load("pcie")


@pytest.mark.parametrize(
    "name, message",
    [
        ("h200-nvlnk", "no hardware profile 'h200-nvlnk'\n  fix: did you mean 'h200-nvlink'?"),
        ("tpu", "no hardware profile 'tpu'\n  fix: profiles: a100-nvlink, cpu-gloo"),
        ("absent/mine.yaml", "no such hardware profile: absent/mine.yaml"),
    ],
)
def test_unknown_profile(name, message):
    with pytest.raises(ConfigError) as error:
        Hardware.load(name)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("alpha_seconds: 1.0e-05", "alpha_seconds: -1", "alpha_seconds is -1"),
        ("alpha_seconds: 1.0e-05\n", "", "mine.yaml lacks alpha_seconds"),
        ("alpha_seconds", "alpha_us", "unknown field 'alpha_us'"),
        ("1.0e+12", "1e12", "memory_bytes_per_second is '1e12'"),  # YAML 1.1 reads 1e12 as a string
        ("{bfloat16: 1.0e+14}", "1.0e+14", "flops_per_second is 100000000000000.0"),
        ("1.0e+14", "fast", r"flops_per_second\[bfloat16\] is 'fast'"),
        ("measured on my machine, today", "''", "source is ''"),
        (GOOD, "- a list", "is no mapping of fields"),
        (GOOD, "{", "is not YAML"),
    ],
)
def test_bad_profile(tmp_path, old, new, message):
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        Hardware.load(path)
