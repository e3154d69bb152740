"""Small SVG helpers: elements, scales and axes. Colours are CSS classes; the page's style sets light and dark mode."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence

Scale = Callable[[float], float]
CHARACTER = 6.4  # pixels per character of a label: that of the widest common font, because text cannot be measured here


def element(tag: str, *content: str, tip: str = "", **attributes: object) -> str:
    """One element; `tip` is its tooltip; floats are rounded to hundredths of a pixel.

    >>> element("rect", tip="1 < 2", x=1.23456, width=7, cls="part-0")
    '<rect x="1.23" width="7" class="part-0"><title>1 &lt; 2</title></rect>'
    """
    named = {"class" if key == "cls" else key.replace("_", "-"): value for key, value in attributes.items()}
    attrs = "".join(f' {name}="{_value(value)}"' for name, value in named.items() if value != "")
    inner = (f"<title>{html.escape(tip)}</title>" if tip else "") + "".join(content)
    return f"<{tag}{attrs}>{inner}</{tag}>"


def _value(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else html.escape(str(value))


def text(x: float, y: float, words: str, *, anchor: str = "start", cls: str = "") -> str:
    """A label at its baseline."""
    return element("text", html.escape(words), x=float(x), y=float(y), text_anchor=anchor, cls=cls)


def spans(x: float, y: float, parts: Iterable[tuple[str, str]], *, anchor: str = "", cls: str = "") -> str:
    """A label whose parts (words, class) differ in class."""
    content = (element("tspan", html.escape(words), cls=each) for words, each in parts)
    return element("text", *content, x=float(x), y=float(y), text_anchor=anchor, cls=cls)


def picture(width: float, height: float, title: str, *content: str) -> str:
    """A complete drawing that scales to the width of its container."""
    return element("svg", *content, viewBox=f"0 0 {width:.0f} {height:.0f}", role="img", aria_label=title)


def label_width(labels: Iterable[str]) -> float:
    """Maximum width of these labels, in pixels."""
    return CHARACTER * max(map(len, labels), default=0)


def linear(low: float, high: float, start: float, end: float) -> Scale:
    """Map values from low..high to pixels from start..end."""
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    """The same on a logarithmic scale, for values above 0; values below `low` are drawn at `low`."""
    scale = linear(math.log(low), math.log(high), start, end)
    return lambda value: scale(math.log(max(value, low)))


def steps(high: float, about: int = 5) -> list[float]:
    """Round numbers from 0 up to `high`, about `about` of them.

    >>> steps(0.0023), steps(1)
    ([0.0, 0.0005, 0.001, 0.0015, 0.002], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    """
    if high <= 0:
        return [0.0]
    rough = high / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.999)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float, most: int = 7) -> list[float]:
    """Powers of ten from low to high, at most about `most` of them.

    >>> decades(0.5, 2000)
    [1.0, 10.0, 100.0, 1000.0]
    """
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / most))
    return [10.0**n for n in range(first, last + 1, every)]


def axis(
    side: str, scale: Scale, values: Sequence[float], show: Callable[[float], str], start: float, end: float
) -> str:
    """Grid lines from `start` to `end`, with labels at `start`: below the drawing ("bottom") or to its left."""
    elements: list[str] = []
    for value in values:
        position = scale(value)
        if side == "bottom":
            elements.append(element("line", x1=position, x2=position, y1=start, y2=end, cls="grid"))
            elements.append(text(position, start + 15, show(value), anchor="middle", cls="tick"))
        else:
            elements.append(element("line", x1=start, x2=end, y1=position, y2=position, cls="grid"))
            elements.append(text(start - 7, position + 4, show(value), anchor="end", cls="tick"))
    return "".join(elements)


def legend(entries: Sequence[tuple[str, str]], x: float, y: float, width: float) -> tuple[str, float]:
    """Swatches (class, name) in as many rows as needed; returns the drawing and its height."""
    elements: list[str] = []
    left, top = x, y
    for cls, name in entries:
        entry_width = 24 + label_width([name]) + 14
        if left > x and left + entry_width > x + width:
            left, top = x, top + 19
        wide_mark = 3 if cls == "bound" else 12
        elements.append(element("rect", x=left + 6 - wide_mark / 2, y=top, width=wide_mark, height=12, rx=1, cls=cls))
        elements.append(text(left + 18, top + 10.5, name, cls="label"))
        left += entry_width
    return "".join(elements), top - y + 19
