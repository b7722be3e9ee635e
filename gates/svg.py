"""Small pictures as SVG text: lines over a number, and bars. Nothing but strings, so that a page can hold them as they are."""

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#2458a6", "#d9822b", "#3a8f5c", "#8a4fa3", "#777777")
_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 18, 46, 50
_FONT = 'font-family="sans-serif"'


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    mark: float | None = None,
    mark_label: str = "",
) -> str:
    """Named curves; ``mark`` draws a dashed line at that height."""
    points = [point for curve in series.values() for point in curve]
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_high = 1.08 * max([y for _, y in points] + ([mark] if mark is not None else []))
    plot = _Frame(x_low, x_high, y_high)
    parts = [*plot.frame(title, x_label, y_label)]
    if mark is not None:
        y = plot.y(mark)
        parts.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#555" stroke-dasharray="5 4"/>'
        )
        parts.append(_text(_WIDTH - _RIGHT - 4, y - 5, mark_label, anchor="end", size=11))
    for index, (name, curve) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(
            f"{'L' if i else 'M'}{plot.x(x):.1f} {plot.y(y):.1f}" for i, (x, y) in enumerate(curve)
        )
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{plot.x(x):.1f}" cy="{plot.y(y):.1f}" r="3" fill="{colour}"/>' for x, y in curve
        ]
        left = _LEFT + 8 + index * 170
        parts.append(f'<rect x="{left}" y="28" width="12" height="10" fill="{colour}"/>')
        parts.append(_text(left + 17, 37, name, size=12))
    return _picture(parts)


def bars(
    values: Mapping[str, float], *, title: str, x_label: str, y_label: str, mark: float | None = None
) -> str:
    """One bar a name, in order; ``mark`` draws a dashed line at that height."""
    plot = _Frame(0, max(1, len(values)), 1.08 * max([*values.values(), mark or 0.0, 1e-9]))
    parts = [*plot.frame(title, x_label, y_label, x_ticks=False)]
    crowded = max(map(len, values), default=0) * 7 * len(values) > _WIDTH - _LEFT - _RIGHT
    for index, (name, value) in enumerate(values.items()):
        left, right = plot.x(index + 0.15), plot.x(index + 0.85)
        top = plot.y(value)
        height = _HEIGHT - _BOTTOM - top
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{height:.1f}" fill="{COLOURS[0]}"/>'
        )
        middle, bottom = (left + right) / 2, _HEIGHT - _BOTTOM
        if crowded:
            label = _text(middle, bottom + 12, name, anchor="end", size=10)
            parts.append(f'<g transform="rotate(-24 {middle:.1f} {bottom + 12})">{label}</g>')
        else:
            parts.append(_text(middle, bottom + 16, name, anchor="middle", size=11))
    if mark is not None:
        y = plot.y(mark)
        parts.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#555" stroke-dasharray="5 4"/>'
        )
    return _picture(parts)


class _Frame:
    """From values to places in the picture; heights begin at 0."""

    def __init__(self, x_low: float, x_high: float, y_high: float) -> None:
        self._x_low, self._x_span, self._y_high = x_low, max(x_high - x_low, 1e-9), max(y_high, 1e-9)

    def x(self, value: float) -> float:
        return _LEFT + (value - self._x_low) / self._x_span * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self._y_high * (_HEIGHT - _TOP - _BOTTOM)

    def frame(self, title: str, x_label: str, y_label: str, *, x_ticks: bool = True) -> list[str]:
        parts = [_text(_LEFT, 18, title, size=14, weight="bold")]
        for tick in _ticks(self._y_high):
            y = self.y(tick)
            parts.append(
                f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ddd"/>'
            )
            parts.append(_text(_LEFT - 6, y + 4, f"{tick:g}", anchor="end", size=11))
        if x_ticks:
            parts += [
                _text(self.x(at), _HEIGHT - _BOTTOM + 16, f"{at:g}", anchor="middle", size=11)
                for at in (self._x_low + tick for tick in _ticks(self._x_span))
            ]
        bottom = _HEIGHT - _BOTTOM
        parts.append(f'<line x1="{_LEFT}" y1="{bottom}" x2="{_WIDTH - _RIGHT}" y2="{bottom}" stroke="#333"/>')
        parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, x_label, anchor="middle", size=12))
        middle = (_TOP + bottom) / 2
        parts.append(
            f'<text x="16" y="{middle:.1f}" {_FONT} font-size="12" text-anchor="middle" fill="#333" '
            f'transform="rotate(-90 16 {middle:.1f})">{escape(y_label)}</text>'
        )
        return parts


def _ticks(span: float) -> list[float]:
    """At most seven round numbers from 0."""
    step = 10.0**-3
    while span / step > 6.5:
        for factor in (2, 2.5, 2):
            step *= factor
            if span / step <= 6.5:
                break
    return [round(step * i, 6) for i in range(int(span / step + 1e-9) + 1)]


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, weight: str = "") -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" {_FONT} font-size="{size}" text-anchor="{anchor}" fill="#333"{bold}>{escape(words)}</text>'


def _picture(parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>{"".join(parts)}</svg>\n'
    )
