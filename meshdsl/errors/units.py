"""Format seconds, bytes and counts with three digits and a unit."""

from __future__ import annotations


def seconds(t: float) -> str:
    """Format a time in seconds with three digits.

    >>> seconds(0.0412), seconds(2.5e-6), seconds(0.9998), seconds(0)
    ('41.2 ms', '2.50 us', '1.00 s', '0 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if abs(t) >= 0.9995 * scale:
            return f"{_digits(t / scale)} {unit}"
    return "0 s"


def number(n: float, unit: str = "") -> str:
    """Format a count with three digits and a decimal prefix.

    >>> number(3.2e12, "FLOP/s"), number(950), number(0, "FLOP")
    ('3.20 TFLOP/s', '950', '0 FLOP')
    """
    for prefix, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(n) >= 0.9995 * scale:
            return f"{_digits(n / scale)} {prefix}{unit}".rstrip()
    return f"{n:.0f} {unit}".rstrip()


def percent(part: float, whole: float) -> str:
    """Format `part / whole` in percent; a nonzero share never prints as 0.

    >>> percent(41, 100), percent(1, 1000), percent(1, 100_000), percent(0, 7)
    ('41 %', '0.1 %', '<0.1 %', '0 %')
    """
    share = 100 * part / whole if whole else 0.0
    if share == 0:
        return "0 %"
    if abs(share) < 0.05:
        return "<0.1 %"
    return f"{share:.0f} %" if abs(share) >= 9.95 else f"{share:.1f} %"


def _digits(x: float) -> str:
    return f"{x:.{2 if abs(x) < 9.995 else 1 if abs(x) < 99.95 else 0}f}"


def show_bytes(n: float) -> str:
    """Format a number of bytes, in powers of ten.

    >>> show_bytes(2_097_152)
    '2.10 MB'
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n) >= size:
            return f"{n / size:.3g} {unit}" if n / size >= 100 else f"{n / size:.2f} {unit}"
    return f"{n:.0f} B"
