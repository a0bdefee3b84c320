"""The timeline of an explanation as an SVG picture, readable on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from regrow.events import clean
from regrow.explain.explanation import Explanation
from regrow.explain.page import heading
from regrow.explain.words import seconds

_WIDTH, _MARGIN, _ROW, _TOP, _LABELS = 960, 16, 26, 64, 190
_LONGEST_TITLE = 120  # characters
_COLOURS = {
    "takeover": "#b07aa1",
    "silent": "#b07aa1",
    "deciding": "#e15759",
    "reaction": "#e15759",
    "detection": "#e15759",
    "notification": "#e15759",
    "ending": "#f28e2b",
    "stopping": "#f28e2b",
    "abort": "#f28e2b",
    "finalize": "#f28e2b",
    "health check": "#f28e2b",
    "pause": "#bab0ac",
    "rendezvous": "#76b7b2",
    "barrier": "#76b7b2",
    "processes": "#4e79a7",
    "startup": "#4e79a7",
    "call": "#4e79a7",
    "redoing": "#edc948",
}
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.t{font-size:15px;font-weight:600}"
    ".d{fill:#666}.l{stroke:#bbb}"
    "@media(prefers-color-scheme:dark){text{fill:#eee}.d{fill:#aaa}.l{stroke:#555}}"
)


def draw(explanation: Explanation) -> str:
    """Return the timeline as an SVG document: one row for each phase, with its length."""
    return "\n".join(_lines(explanation)) + "\n"


def _lines(each: Explanation) -> Iterator[str]:
    height = _TOP + _ROW * max(len(each.timeline), 1) + 40
    name = _shown(f"{heading(each)}: {each.title}")
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
        f' width="{_WIDTH}" height="{height}" role="img">'
    )
    yield f"<title>{name}</title>"
    yield f"<style>{_STYLE}</style>"
    yield f'<text class="t" x="{_MARGIN}" y="26">{name}</text>'
    yield f'<text class="d" x="{_MARGIN}" y="46">{_shown(each.outcome)}</text>'
    whole = each.timeline[-1].end_s if each.timeline else 0.0
    if not whole > 0:
        yield f'<text x="{_MARGIN}" y="{_TOP + 18}">The times are not known.</text></svg>'
        return
    left, room = _MARGIN + _LABELS, _WIDTH - 2 * _MARGIN - _LABELS - 90
    bottom = _TOP + _ROW * len(each.timeline)
    yield f'<line class="l" x1="{left}" y1="{_TOP - 6}" x2="{left}" y2="{bottom + 4}"/>'
    for row, phase in enumerate(each.timeline):
        y = _TOP + _ROW * row
        x = left + room * phase.start_s / whole
        size = max(room * phase.length_s / whole, 1.5)
        colour = _COLOURS.get(phase.name, "#9c755f")
        yield f"<g><title>{_shown(phase.meaning)}</title>"
        yield f'<text x="{_MARGIN}" y="{y + 15}">{_shown(phase.name)}</text>'
        yield (
            f'<rect x="{x:.1f}" y="{y + 2}" width="{size:.1f}" height="{_ROW - 8}" rx="2"'
            f' fill="{colour}"/>'
        )
        yield f'<text x="{x + size + 6:.1f}" y="{y + 15}">{seconds(phase.length_s)}</text></g>'
    yield f'<text class="d" x="{left}" y="{bottom + 24}">0</text>'
    yield (
        f'<text class="d" x="{left + room}" y="{bottom + 24}" text-anchor="end">'
        f"{seconds(whole)}</text>"
    )
    yield "</svg>"


def _shown(text: str) -> str:
    plain = clean(text)
    short = plain if len(plain) <= _LONGEST_TITLE else f"{plain[: _LONGEST_TITLE - 3]}..."
    return escape(short)
