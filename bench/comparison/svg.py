"""A few lines of SVG: rectangles, lines and text on a white card, the same bytes each time."""

from __future__ import annotations

from html import escape
from pathlib import Path

INK, MUTED, LINE = "#1f2933", "#52606d", "#9aa5b1"
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"


class Picture:
    """A picture of ``width`` x ``height`` with a title and a description for screen readers."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self.width, self.height = width, height
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-labelledby="title description" font-family="{FONT}">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(description)}</desc>',
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{MUTED}"/></marker>'
            '<pattern id="stripes" width="6" height="6" patternTransform="rotate(45)" patternUnits="userSpaceOnUse">'
            '<rect width="3" height="6" fill="white" fill-opacity="0.65"/></pattern></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="white"/>',
        ]

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none", radius: float = 3
    ) -> None:
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:g}" '
            f'fill="{fill}" stroke="{stroke}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 13,
        fill: str = INK,
        anchor: str = "start",
        bold: bool = False,
        turned: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"{weight}{turn}>'
            f"{escape(words)}</text>"
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, stroke: str = LINE, dashed: bool = False, arrow: bool = False
    ) -> None:
        more = ' stroke-dasharray="5 4"' * dashed + ' marker-end="url(#arrow)"' * arrow
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" '
            f'stroke-width="1.5"{more}/>'
        )

    def path(self, points: list[tuple[float, float]], stroke: str, fill: str = "none") -> None:
        words = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{words}" fill="{fill}" stroke="{stroke}" stroke-width="2"/>')

    def circle(self, x: float, y: float, radius: float, fill: str) -> None:
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}"/>')

    def write(self, file: Path) -> Path:
        file.write_text("\n".join([*self._parts, "</svg>"]) + "\n", encoding="utf-8")
        return file
