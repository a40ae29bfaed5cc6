"""Bytes and times as text, and sizes that users write as bytes. No torch import."""

from __future__ import annotations

import re

from megafx.errors import UsageError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_FACTORS = UNITS | {unit.upper(): factor for unit, factor in UNITS.items()}


def parse_bytes(text: str) -> int | None:
    """'24GiB', '1.5 gb' -> bytes; None for a text without a unit, and for one that is no size: 'Gib' are bits."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*", text)
    unit = match[2] if match is not None else ""
    factor = _FACTORS.get(unit if unit in UNITS or unit.isupper() else unit.upper() if unit.islower() else "")
    return None if match is None or factor is None else int(float(match[1]) * factor)


def bytes_of(size: int | str, what: str) -> int:
    """'80GiB', '5GB', '200' or 200 -> bytes; what: the argument, for the UsageError where it is no size."""
    text = str(size).strip()
    found = int(text) if text.isdecimal() else parse_bytes(text)
    if not found:
        raise UsageError(f"{what}={size!r} is no size", fix="write 80GiB, 5GB, 200MiB or a number of bytes")
    return found


def device_memory(size: int | str) -> int:
    """The bytes of a device's memory. Raises UsageError for what is none, and for text without a unit that no device has."""
    if (found := bytes_of(size, "memory")) < 2**20 and isinstance(size, str) and size.strip().isdigit():
        fix = f"give a unit: {str(size).strip(' bB')}GiB"
        raise UsageError(f"memory={size!r} is {found} bytes, which is less than a device has", fix=fix)
    return found


def bytes_text(n: float) -> str:
    """In the unit that suits the number: '1.5 GiB', '196.0 MiB', '12 B'."""
    for unit in ("GiB", "MiB", "KiB"):
        if n >= UNITS[unit]:
            return f"{n / UNITS[unit]:.1f} {unit}"
    return f"{n} B"


def mib_text(n: float) -> str:
    """For numbers that are compared with one another: '24,576.0 MiB'."""
    return f"{n / UNITS['MiB']:,.1f} MiB"


def time_text(us: float) -> str:
    """Microseconds: '1.25 ms', '310.0 us'."""
    return f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.1f} us"
