"""Covers: report/page.css: texts and outlines can be read, light and dark (WCAG 2.2 AA: 1.4.3 and 1.4.11)."""

import re
from pathlib import Path

import pytest

import megafx.report.page

CSS = (Path(megafx.report.page.__file__).parent / "page.css").read_text()
PAIR = r"light-dark\((#\w+), (#\w+)\)"
COLOURS = {name: (light, dark) for name, light, dark in re.findall(rf"--(\w+): {PAIR}", CSS)} | {
    "white": ("#fff", "#fff")
}
TEXTS = {  # colour of a text -> what it is written on
    "ink": "paper panel frame found S R I P pill send",
    "soft": "paper panel frame found",
    "link": "paper panel found",
    "white": "wait",
}
OUTLINES = {name: "paper panel frame" for name in ("line", "edge", "strong", "focus", "rim")}


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_texts_and_outlines_stand_out(theme):
    assert contrast("#000", "#ffffff") == pytest.approx(21)
    for least, pairs in ((4.5, TEXTS), (3.0, OUTLINES)):
        for name, grounds in pairs.items():
            for ground in grounds.split():
                found = contrast(COLOURS[name][theme], COLOURS[ground][theme])
                assert found >= least, f"{name} on {ground}: {found:.2f}, at least {least}"
    for ground, text in re.findall(
        rf"background: {PAIR}; color: {PAIR}".replace("(#\\w+), (#\\w+)", "(#\\w+, #\\w+)"), CSS
    ):
        assert contrast(ground.split(", ")[theme], text.split(", ")[theme]) >= 4.5, (ground, text)


def test_no_text_has_another_colour():
    """A colour that a rule gives to texts is one of those above."""
    named = set(re.findall(r"(?<![-\w])color: var\(--(\w+)\)", CSS)) | set(
        re.findall(r"svg [^{]*\{[^}]*fill: var\(--(\w+)\)", CSS)
    )
    assert named <= {*TEXTS}, named - {*TEXTS}
