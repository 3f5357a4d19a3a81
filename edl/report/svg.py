# SPDX-License-Identifier: Apache-2.0
"""Pictures as SVG: alone in a file, or inside an HTML page that chooses the colours."""

from __future__ import annotations

import io
import re
from html import escape
from typing import TYPE_CHECKING

from edl.formatting import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ID = re.compile(r'(\bid="|url\(#|href="#)')
_OPENING = re.compile(r"<svg\b[^>]*>")
_BOX = re.compile(r'viewBox="([^"]*)"')
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)


def written(figure: Figure, kind: str) -> bytes:
    """Draw a figure as a file of this kind: svg or png."""
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()


def inline(figure: Figure, name: str, title: str, description: str, colours: dict[str, str]) -> str:
    """Draw a figure as an `<svg>` element for a page.

    Args:
        name: a prefix that makes its ids unique in the page.
        title, description: read by screen readers.
        colours: the colour codes in the picture, by the name of the CSS variable that replaces each.
    """
    text = written(figure, "svg").decode()
    opening = _OPENING.search(text)
    assert opening is not None
    box = _BOX.search(opening[0])
    assert box is not None
    body = _METADATA.sub("", text[opening.end() :])
    body = _ID.sub(lambda found: f"{found[1]}{name}-", body)
    for variable, colour in colours.items():
        body = body.replace(colour, f"var(--{variable})")
    return (
        f'<svg role="img" aria-labelledby="{name}-title {name}-text" viewBox="{box[1]}" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f'<title id="{name}-title">{escape(plain(title))}</title>'
        f'<desc id="{name}-text">{escape(plain(description))}</desc>{body}'
    )
