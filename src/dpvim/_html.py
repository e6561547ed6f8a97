"""Small pieces of HTML for notebooks, which show objects by ``_repr_html_``.

Every text is escaped. Colours are the reader's own (``currentColor``), so that light and dark
notebooks can both be read; what matters is said in words as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

# Of Okabe and Ito: told apart by everybody, and readable on white and on black.
_GOOD, _BAD = "#0072B2", "#D55E00"
_CELL = "padding:.15em .8em .15em 0;text-align:left;vertical-align:top"
_MOST_ROWS = 20


def card(title: str, *parts: str, is_bad: bool = False) -> str:
    """A title with parts below it.

    >>> card("a < b")
    '<div style="border-left:.25em solid #0072B2;padding-left:.8em"><strong>a &lt; b</strong></div>'

    Args:
        title: A text.
        parts: HTML that was made by functions of this module.
        is_bad: Whether the edge has the colour of warnings.
    """
    edge = f"border-left:.25em solid {_BAD if is_bad else _GOOD};padding-left:.8em"
    return f'<div style="{edge}"><strong>{escape(title)}</strong>{"".join(parts)}</div>'


def facts(rows: Mapping[str, object]) -> str:
    """A line for each fact."""
    lines = (
        f'<tr><th style="{_CELL};font-weight:normal;opacity:.7">{escape(name)}</th>'
        f'<td style="{_CELL}">{escape(str(value))}</td></tr>'
        for name, value in rows.items()
    )
    return f'<table style="border:0;background:none"><tbody>{"".join(lines)}</tbody></table>'


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of the first rows, and how many more there are."""
    every = list(rows)
    edge = "border-bottom:1px solid currentColor"
    head = "".join(f'<th style="{_CELL};{edge}">{escape(name)}</th>' for name in columns)
    body = "".join(
        f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in every[:_MOST_ROWS]
    )
    more = len(every) - _MOST_ROWS
    rest = paragraph(f"and {more:,} more") if more > 0 else ""
    return (
        f'<table style="border-collapse:collapse;background:none"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>{rest}"
    )


def _cell(value: object) -> str:
    return f'<td style="{_CELL}">{escape(str(value))}</td>'


def paragraph(text: str, *, is_bad: bool = False) -> str:
    """A sentence."""
    style = f"color:{_BAD};font-weight:bold" if is_bad else "opacity:.7"
    return f'<p style="margin:.3em 0;{style}">{escape(text)}</p>'


def details(summary: str, lines: Iterable[str]) -> str:
    """A list that opens when it is asked for."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<details><summary>{escape(summary)}</summary><ul>{items}</ul></details>"


def meter(share: float, label: str) -> str:
    """A bar that is filled by a share."""
    width = 100 * min(max(share, 0.0), 1.0)
    return (
        f'<div role="img" aria-label="{escape(label)}" title="{escape(label)}" '
        'style="border:1px solid currentColor;height:.8em;max-width:24em">'
        f'<div style="width:{width:.1f}%;height:100%;background:{_GOOD}"></div></div>'
    )
