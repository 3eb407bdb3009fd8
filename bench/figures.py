"""Small charts as SVG files that read well on light and dark pages alike. No library: a chart is some lines of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2f7bc4", "#d9822b", "#8a5cc2", "#2f9e6e")
_STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #5b6068; }
.title { font-size: 13px; font-weight: 600; fill: #24272c; }
.grid { stroke: #dcdedb; }
@media (prefers-color-scheme: dark) {
  text { fill: #9aa0a9; } .title { fill: #e8e9eb; } .grid { stroke: #353a41; }
}
</style>"""
_PANEL, _HEIGHT, _LEFT, _TOP, _BOTTOM = 380, 300, 44, 64, 34


@dataclass(frozen=True, slots=True)
class Series:
    """Named values over named places, as a line or as dots alone."""

    name: str
    points: Sequence[tuple[str, float]]
    dots: bool = False


def line_chart(title: str, panels: Sequence[tuple[str, Sequence[Series]]]) -> str:
    """Panels side by side with one scale; places are evenly spaced, in the order that they first come in."""
    width = _PANEL * len(panels) + 20
    top = max(value for _, series in panels for each in series for _, value in each.points)
    tick = _tick(top)
    top = math.ceil(top / tick) * tick
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT + 24}" role="img">',
        _STYLE,
        f'<text class="title" x="12" y="20">{escape(title)}</text>',
    ]
    for number, (name, series) in enumerate(panels):
        parts.append(_panel(name, series, number * _PANEL, top, tick))
    parts.append(_key(panels))
    return "\n".join([*parts, "</svg>\n"])


def _panel(name: str, series: Sequence[Series], left: float, top: float, tick: float) -> str:
    places = list(dict.fromkeys(place for each in series for place, _ in each.points))
    begin, end = left + _LEFT, left + _PANEL - 12
    high = _HEIGHT - _TOP - _BOTTOM

    def x(place: str) -> float:
        return begin + 24 + (end - begin - 48) * places.index(place) / max(1, len(places) - 1)

    def y(value: float) -> float:
        return _TOP + high * (1 - value / top)

    parts = [f'<text x="{begin}" y="{_TOP - 14}">{escape(name)}</text>']
    for step in range(round(top / tick) + 1):
        at = y(step * tick)
        parts.append(f'<line class="grid" x1="{begin}" x2="{end}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{begin - 6}" y="{at + 4:.1f}" text-anchor="end">{step * tick:g}x</text>')
    parts += [f'<text x="{x(p):.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{escape(p)}</text>' for p in places]
    for each, colour in zip(series, COLOURS, strict=False):
        at = [(x(place), y(value), value) for place, value in each.points]
        if not each.dots:
            line = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in at)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for px, py, value in at:
            dot = f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{5 if each.dots else 3.5}" fill="{colour}">'
            parts.append(f"{dot}<title>{escape(each.name)}: {value:g}x</title></circle>")
    return "\n".join(parts)


def _key(panels: Sequence[tuple[str, Sequence[Series]]]) -> str:
    parts, at = [], 12.0
    for each, colour in zip(panels[0][1], COLOURS, strict=False):
        parts.append(f'<circle cx="{at + 5}" cy="{_HEIGHT + 10}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{at + 15}" y="{_HEIGHT + 14}">{escape(each.name)}</text>')
        at += 40 + 6.6 * len(each.name)
    return "\n".join(parts)


def _tick(top: float) -> float:
    power = 10.0 ** math.floor(math.log10(top / 4))
    return next(size * power for size in (1, 2, 5, 10) if top / (size * power) <= 6)
