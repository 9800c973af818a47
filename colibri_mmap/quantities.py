"""Large numbers as people read them: three digits and a unit. For every layer."""

from __future__ import annotations


def byte_size(size: float) -> str:
    """Bytes in decimal units."""
    return _scaled(size, ("bytes", "kB", "MB", "GB", "TB"))


def count(number: float) -> str:
    """A number of things."""
    return _scaled(number, ("", "thousand", "million", "billion", "trillion"))


def speed(tokens_per_second: float) -> str:
    """Tokens per second, whole from 10 on."""
    digits = 0 if tokens_per_second >= 10 else 1 if tokens_per_second >= 1 else 2
    return f"{tokens_per_second:,.{digits}f}"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    step = 0
    while value >= 999.5 and step < len(units) - 1:
        value /= 1000
        step += 1
    return f"{value:.3g} {units[step]}".rstrip()
